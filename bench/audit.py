"""Does `flatout yolo audit` find wrong labels, and better than simple scores do?

Errors are planted into 5 % of the training labels, in equal shares: a label is deleted (missing), gets another class,
is moved to an IoU of 0.3 to 0.6 with its place, or is added where nothing is (spurious). yolov7-tiny is then fine-tuned
on these labels (hyp.finetune.yaml, --adam, --audit) and its run is audited. Two data sets: BCCD (give it with
--data), and a generated one (`flatout yolo demo-data`). With N planted errors: precision of the first 100 findings,
recall of the first 2N, overall and by kind, and average precision. Five ways: the audit of the run, the same without
mirrored images (--no-mirrored), the audit of its weights alone (--weights), and two baselines from the detections of
the final network: highest loss, and confident learning (self-confidence of labels, and detections above the mean
self-confidence of their class). Also printed: how long a training and a pass over its images take.
BCCD has natural errors: the unplanted set is trained on and audited too, and what is among the first 2N findings of
that audit leaves both counts, of all ways alike (--same-network: found by the network of the planted labels). Two other
rules stand beside it, because they change the picture: AP if each way leaves out its own first 2N findings on the
unplanted set, and AP with all findings counted. Flags of train.py go behind --: on two cores, use `-- --amp bf16
--channels-last`.
Answer: bench/results/audit_<machine>_<yyyymm>.md and .json, audit_generated_... if only that set is used (rewrite them
with --write).
What gathering inside the steps costs is measured by bench/audit_cost.py.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.errors import counted

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
SHARE = 0.05
PLANTED = ("missing", "wrong class", "moved box", "spurious")
RUN, PLAIN, WEIGHTS = "audit RUN", "audit RUN --no-mirrored", "audit --weights"
LOSS, CONFIDENT = "highest loss", "confident learning"
WAYS = (RUN, PLAIN, WEIGHTS, LOSS, CONFIDENT)
BCCD, GENERATED = "bccd", "generated"
SIZE_AND_EPOCHS = {BCCD: (224, 10), GENERATED: (192, 12)}
"""Of the trainings: what two cores can train six times."""
NAMES = {"train": "images/train", "val": "images/val"}


# Planting


@dataclass(frozen=True)
class Planted:
    """One planted error."""

    kind: str
    image: str
    """Name of the image without its ending."""
    number: int
    """Class of the label as written; that of the deleted one if it is missing."""
    box: tuple[float, ...]
    """Corners of the label as written; those of the deleted one if it is missing."""


def corners(row: Sequence[float]) -> np.ndarray:
    cx, cy, width, height = row[1:5]
    return np.array([cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2])


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    from flatout.yolo.label_audit.set_boxes import pairwise_iou

    return float(pairwise_iou(one[None], other[None])[0, 0])


def moved(row: Sequence[float], rng: np.random.Generator) -> list[float]:
    """The label with a box of IoU 0.3 to 0.6 with its own."""
    box = np.array(row[1:])
    while True:
        centre, size = box[:2] + rng.uniform(-0.6, 0.6, 2) * box[2:], box[2:] * np.exp(rng.uniform(-0.4, 0.4, 2))
        low, high = np.clip(centre - size / 2, 0, 1), np.clip(centre + size / 2, 0, 1)
        new = [row[0], *((low + high) / 2).tolist(), *(high - low).tolist()]
        if 0.3 <= overlap(corners(row), corners(new)) <= 0.6:
            return new


def plant(labels: dict[str, list[list[float]]], num_classes: int, seed: int) -> list[Planted]:
    """Change the labels (image -> rows class, cx, cy, w, h) in place; returns what was done."""
    rng = np.random.default_rng(seed)
    places = [(image, number) for image in sorted(labels) for number in range(len(labels[image]))]
    each = round(SHARE * len(places)) // len(PLANTED)
    chosen = [places[index] for index in rng.permutation(len(places))[: 3 * each]]
    shapes = [labels[image][number] for image, number in places]
    planted, deleted = [], []
    for count, (image, number) in enumerate(chosen):
        kind, row = PLANTED[count // each], labels[image][number]
        if kind == "missing":
            deleted.append((image, number))
        elif kind == "wrong class":
            row = [(row[0] + 1 + rng.integers(num_classes - 1)) % num_classes, *row[1:]]
        else:
            row = moved(row, rng)
        labels[image][number] = row
        planted.append(Planted(kind, image, int(row[0]), tuple(corners(row))))
    images = sorted(labels)
    while len(planted) < 4 * each:
        image, shape = images[rng.integers(len(images))], shapes[rng.integers(len(shapes))]
        size = np.array(shape[3:])
        row = [shape[0], *rng.uniform(size / 2, np.maximum(1 - size / 2, size / 2)).tolist(), *size.tolist()]
        if all(overlap(corners(row), corners(other)) <= 0.1 for other in labels[image]):
            labels[image].append(row)
            planted.append(Planted("spurious", image, int(row[0]), tuple(corners(row))))
    for image, number in sorted(deleted, reverse=True):
        del labels[image][number]
    return planted


def write_set(data: Path, out: Path, seed: int | None) -> list[Planted]:
    """A copy of a data set whose training labels have errors (`seed` None: have none); images are links."""
    content = yaml.safe_load(data.read_text())
    names = content["names"]
    root = data.parent.resolve()
    labels = {}
    for file in sorted((root / "labels/train").glob("*.txt")):
        lines = [line.split() for line in file.read_text().splitlines()]
        labels[file.stem] = [[float(word) for word in line] for line in lines if line]
    planted = [] if seed is None else plant(labels, len(names), seed)
    shutil.rmtree(out, ignore_errors=True)
    (out / "images").mkdir(parents=True)
    (out / "labels/train").mkdir(parents=True)
    for place in NAMES.values():
        (out / place).symlink_to(root / place)
    shutil.copytree(root / "labels/val", out / "labels/val")
    for image, rows in labels.items():
        text = "".join(f"{int(row[0])} {' '.join(f'{value:.6f}' for value in row[1:])}\n" for row in rows)
        (out / f"labels/train/{image}.txt").write_text(text)
    places = {split: f"./{place}" for split, place in NAMES.items()}
    (out / "data.yaml").write_text(yaml.safe_dump({**places, "nc": len(names), "names": list(names)}))
    return planted


# Training and ranking


def train(data: Path, project: Path, name: str, seed: int, options: Namespace) -> tuple[Path, float]:
    """Fine-tune; returns the run folder and the seconds it took."""
    command = [sys.executable, str(ROOT / "train.py"), "--data", str(data), "--weights", options.weights, "--cfg", ""]
    command += ["--hyp", "data/hyp.finetune.yaml", "--adam", "--img", str(options.img), "--batch", "16", "--notest"]
    command += ["--epochs", str(options.epochs), "--seed", str(seed), "--audit"]
    command += ["--fast-dataloader", "--once"]
    command += ["--project", str(project), "--name", name, *options.more]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    begin_s = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return project / name, time.monotonic() - begin_s


class Suspect(NamedTuple):
    """A finding of any way."""

    score: float
    image: str
    kind: str
    """"missing" for a detection; else the kind, or "label" where a way does not tell kinds apart."""
    box: np.ndarray
    number: int


def suspects_of(folder: Path, data: Path, options: Namespace) -> tuple[dict[str, list[Suspect]], float]:
    """The ranked lists of all ways for one run, from passes of its final weights; and the seconds of one pass."""
    from flatout.ranks import choose_device
    from flatout.yolo.data.open_data import open_data_set
    from flatout.yolo.data.open_set import SplitConfig, open_split
    from flatout.yolo.label_audit.passes import PassConfig, passes_of
    from flatout.yolo.label_audit.rank import gather_evidence, rank
    from flatout.yolo.label_audit.set_boxes import fuse, labels_as_boxes
    from flatout.yolo.label_audit.statistics import (
        FILE_NAME,
        LabelStatistics,
        fingerprint,
        read_statistics,
        with_history,
    )

    images = open_split(open_data_set(data), "train", SplitConfig(silent=True)).images
    config = PassConfig(size=options.img, batch_size=16, device=choose_device(options.device), workers=2)
    labels = labels_as_boxes(images.labels)
    weights = [str(folder / "weights/last.pt")]
    begin_s = time.monotonic()
    plain = fuse(passes_of(weights, images, config, shown=False))
    pass_s = time.monotonic() - begin_s
    found = fuse(passes_of(weights, images, replace(config, mirrored=True), shown=False))
    evidence = gather_evidence(labels, found)
    statistics = read_statistics(folder / FILE_NAME)
    if statistics is None or statistics.fingerprint != fingerprint(labels):
        # --same-network: other labels than in the training
        statistics = LabelStatistics.empty(len(labels.class_D), fingerprint(labels))
    names = [Path(path).stem for path in images.paths]
    lists = {}
    for way, seen, own in (
        (RUN, found, with_history(evidence, statistics)),
        (PLAIN, plain, with_history(gather_evidence(labels, plain), statistics)),
        (WEIGHTS, found, evidence),
    ):
        lists[way] = [
            Suspect(
                each.score,
                names[each.image],
                each.kind,
                seen.box_D4[each.detection] if each.kind == "missing" else labels.box_D4[each.label],
                int(seen.class_D[each.detection] if each.kind == "missing" else labels.class_D[each.label]),
            )
            for each in rank(labels, seen, own)
        ]
    return lists | baselines(labels, plain, names), pass_s


def baselines(labels: Any, found: Any, names: Sequence[str]) -> dict[str, list[Suspect]]:
    """Both baselines, from the detections of the final network."""
    from flatout.yolo.label_audit.set_boxes import pairwise_iou

    loss: list[Suspect] = []
    confidence: list[tuple[float, Suspect]] = []
    free: list[Suspect] = []
    for image, name in enumerate(names):
        own, of = labels.rows(image), found.rows(image)
        iou_nm = pairwise_iou(labels.box_D4[own], found.box_D4[of])
        same_nm = labels.class_D[own][:, None] == found.class_D[of][None]
        quality_nm = np.where(same_nm, iou_nm * found.score_D[of], 0.0)
        near_nm = np.where(same_nm & (iou_nm >= 0.5), found.score_D[of], 0.0)
        for row, (box, number) in enumerate(zip(labels.box_D4[own], labels.class_D[own].tolist(), strict=True)):
            score = float(near_nm[row].max(initial=0))
            best = float(np.where(same_nm[row], iou_nm[row], 0).max(initial=0))
            suspect = Suspect(-math.log(max(score, 1e-3)) + 1 - best, name, "label", box, number)
            loss.append(suspect)
            confidence.append((float(quality_nm[row].max(initial=0)), suspect))
        unmatched_m = iou_nm.max(0, initial=0) < 0.5
        for index in np.flatnonzero(unmatched_m).tolist():
            score, number = float(found.score_D[of][index]), int(found.class_D[of][index])
            box = found.box_D4[of][index]
            free.append(Suspect(score, name, "missing", box, number))
            loss.append(Suspect(-math.log(max(1 - score, 1e-3)), name, "missing", box, number))
    typical: dict[int, list[float]] = {}
    for value, suspect in confidence:
        typical.setdefault(suspect.number, []).append(value)
    mean_of = {number: mean(values) for number, values in typical.items()}
    confident = [suspect._replace(score=1 - value) for value, suspect in confidence]
    confident += [each for each in free if each.score >= mean_of.get(each.number, 1.0)]
    by_score = {LOSS: loss, CONFIDENT: confident}
    return {way: sorted(each, key=lambda suspect: -suspect.score) for way, each in by_score.items()}


# Figures


def is_same(suspect: Suspect, other: Suspect) -> bool:
    """Whether two findings are about the same label, or the same object without one."""
    if (suspect.kind == "missing") != (other.kind == "missing"):
        return False
    return overlap(suspect.box, other.box) >= (0.5 if suspect.kind == "missing" else 0.95)


def judged(suspects: Sequence[Suspect], planted: Sequence[Planted], natural: Sequence[Suspect]) -> list[int]:
    """For each finding the planted error that it hits, or -1; natural findings are left out."""
    by_image: dict[str, list[int]] = {}
    for number, error in enumerate(planted):
        by_image.setdefault(error.image, []).append(number)
    natural_of: dict[str, list[Suspect]] = {}
    for each in natural:
        natural_of.setdefault(each.image, []).append(each)
    taken: set[int] = set()
    results = []
    for suspect in suspects:
        hit = next((at for at in by_image.get(suspect.image, ()) if at not in taken and hits(suspect, planted[at])), -1)
        if hit >= 0:
            taken.add(hit)
        elif any(is_same(suspect, other) for other in natural_of.get(suspect.image, ())):
            continue
        results.append(hit)
    return results


def hits(suspect: Suspect, error: Planted) -> bool:
    if (suspect.kind == "missing") != (error.kind == "missing"):
        return False
    iou = overlap(suspect.box, np.array(error.box))
    return iou >= 0.5 if error.kind == "missing" else iou >= 0.95 and suspect.number == error.number


class Figures(NamedTuple):
    """The figures of one way, data set and seed."""

    precision_100: float
    recall_2n: float
    by_kind: dict[str, float]
    average_precision: float
    average_precision_own: float = 0.0
    """If each way leaves out its own first 2N findings on the unplanted set."""
    average_precision_of_all: float = 0.0
    """With natural errors counted as wrong findings."""


def figures(results: Sequence[int], planted: Sequence[Planted]) -> Figures:
    total = len(planted)
    top = [at for at in results[: 2 * total] if at >= 0]
    by_kind = {
        kind: sum(planted[at].kind == kind for at in top) / max(1, sum(each.kind == kind for each in planted))
        for kind in PLANTED
    }
    right = np.array(results) >= 0
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    return Figures(
        float(right[:100].mean()), len(top) / total, by_kind, float(precision[right].sum() / total)
    )  # fmt: skip


class Seconds(NamedTuple):
    """What a training took, and a pass over its images."""

    training: float
    one_pass: float


def audit_once(
    name: str, data: Path, seed: int, options: Namespace, folder: Path
) -> tuple[dict[str, Figures], Seconds]:
    """Plant, train, rank: the figures of all ways for one data set and seed."""
    place = folder / f"{name}-{seed}"
    planted = write_set(data, place / "planted", seed)
    run, training_s = train(place / "planted/data.yaml", place, "planted-run", seed, options)
    lists, pass_s = suspects_of(run, place / "planted/data.yaml", options)
    natural: dict[str, list[Suspect]] = {way: [] for way in WAYS}
    if name == BCCD:
        write_set(data, place / "clean", None)
    if name == BCCD and options.same_network:
        natural, _ = suspects_of(run, place / "clean/data.yaml", options)
    elif name == BCCD:
        clean, _ = train(place / "clean/data.yaml", place, "clean-run", seed, options)
        natural, _ = suspects_of(clean, place / "clean/data.yaml", options)
    total = len(planted)
    found = {}
    for way in WAYS:
        by_rule = [
            figures(judged(lists[way], planted, left_out), planted)
            for left_out in (natural[RUN][: 2 * total], natural[way][: 2 * total], [])
        ]
        found[way] = by_rule[0]._replace(
            average_precision_own=by_rule[1].average_precision, average_precision_of_all=by_rule[2].average_precision
        )
    print(f"{name}, seed {seed}: N = {total}, training {training_s:.0f} s, a pass {pass_s:.1f} s", flush=True)
    for way in WAYS:
        print(f"  {row(way, found[way])}", flush=True)
    return found, Seconds(training_s, pass_s)


def row(title: str, each: Figures) -> str:
    kinds = "".join(f"{each.by_kind[kind]:13.2f}" for kind in PLANTED)
    scores = f"{each.average_precision:8.3f}{each.average_precision_own:8.3f}{each.average_precision_of_all:8.3f}"
    return f"{title:24}{each.precision_100:8.2f}{each.recall_2n:8.2f}{scores}{kinds}"


HEAD = f"{'way':24}{'P@100':>8}{'R@2N':>8}{'AP':>8}{'AP own':>8}{'AP all':>8}" + "".join(
    f"{kind:>13}" for kind in PLANTED
)


def mean_of(runs: Sequence[Figures]) -> Figures:
    return Figures(
        mean(each.precision_100 for each in runs),
        mean(each.recall_2n for each in runs),
        {kind: mean(each.by_kind[kind] for each in runs) for kind in PLANTED},
        mean(each.average_precision for each in runs),
        mean(each.average_precision_own for each in runs),
        mean(each.average_precision_of_all for each in runs),
    )


def criteria_of(name: str, means: Mapping[str, Figures]) -> list[Criterion]:
    own, best = means[RUN], max(means[LOSS].average_precision, means[CONFIDENT].average_precision)
    values = {
        "precision@100": (own.precision_100, 0.8),
        "recall@2N": (own.recall_2n, 0.6),
        "recall@2N of the worst kind": (min(own.by_kind.values()), 0.4),
        "AP - better baseline": (own.average_precision - best, 0.05),
    }
    return [
        Criterion(promise=f"{name}: {promise}", value=value, limit=limit, unit="", at_most=False)
        for promise, (value, limit) in values.items()
    ]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="data.yaml of BCCD; without it only the generated set")
    parser.add_argument("--sets", nargs="+", choices=(BCCD, GENERATED), default=[BCCD, GENERATED])
    parser.add_argument("--weights", default="yolov7-tiny", help="default: %(default)s")
    parser.add_argument("--epochs", type=int, help="default: 10 for BCCD, 12 for the generated set")
    parser.add_argument(
        "--same-network",
        action="store_true",
        help="find natural errors with the network that was trained on planted ones: half the time",
    )
    parser.add_argument("--img", type=int, help="default: 224 for BCCD, 192 for the generated set")
    parser.add_argument("--images", type=int, default=1000, help="of the generated set (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--device", default="")
    parser.add_argument("--keep", type=Path, help="keep the trainings in this folder; finished ones are used again")
    parser.add_argument("more", nargs="*", help="more flags of train.py, behind --")
    options = parser.parse_args()
    print(facts_line(), flush=True)
    seeds = options.seeds[:1] if options.quick else options.seeds
    results: dict[str, list[dict[str, Figures]]] = {}
    seconds: dict[str, list[Seconds]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = options.keep or Path(name)
        sets, schedules = {}, list[str]()
        if BCCD in options.sets and options.data is not None:
            sets[BCCD] = options.data
        if GENERATED in options.sets:
            sets[GENERATED] = generated(folder, options.images)
        for each, data in sets.items():
            img, epochs = SIZE_AND_EPOCHS[each]
            own = Namespace(**{**vars(options), "img": options.img or img, "epochs": options.epochs or epochs})
            runs = [audit_once(each, data, seed, own, folder) for seed in seeds]
            schedules.append(f"{each}: size {own.img}, {own.epochs} epochs")
            results[each], seconds[each] = [found for found, _ in runs], [taken for _, taken in runs]
    return write(results, seconds, seeds, schedules, options)


def generated(folder: Path, num_images: int) -> Path:
    from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data

    return write_demo_data(folder / f"demo-{num_images}", DemoDataConfig(images=num_images, val=16))


def write(
    results: Mapping[str, Sequence[dict[str, Figures]]],
    seconds: Mapping[str, Sequence[Seconds]],
    seeds: Sequence[int],
    schedules: Sequence[str],
    options: Namespace,
) -> int:
    flags = "--same-network " * options.same_network + " ".join(options.more)
    lines = [
        f"{', '.join(schedules)}; seeds {' '.join(map(str, seeds))}; means over the seeds; "
        f"columns by kind: recall@2N; {flags}".rstrip("; ")
    ]
    criteria: list[Criterion] = []
    for name, runs in results.items():
        means = {way: mean_of([run[way] for run in runs]) for way in WAYS}
        lines += ["", name, HEAD, *(row(way, means[way]) for way in WAYS)]
        training_s, pass_s = (mean(each) for each in zip(*seconds[name], strict=True))
        threads = counted(torch.get_num_threads(), "thread")
        lines.append(f"a training took {training_s:.0f} s, a pass over its images {pass_s:.1f} s; {threads}")
        criteria += criteria_of(name, means)
    numbers = {
        "results": {
            name: [{way: run[way]._asdict() for way in WAYS} for run in runs] for name, runs in results.items()
        },
        "seconds": {name: [each._asdict() for each in taken] for name, taken in seconds.items()},
        "criteria": [{"promise": each.promise, "value": each.value, "passed": each.passed} for each in criteria],
        "options": {
            "schedules": schedules,
            "images": options.images,
            "more": options.more,
        },
    }
    name = "audit_generated" if list(results) == [GENERATED] else "audit"
    report(name, "\n".join([*lines, "", *map(str, criteria)]), json.loads(json.dumps(numbers)), options)
    return int(not all(each.passed for each in criteria))


if __name__ == "__main__":
    raise SystemExit(main())
