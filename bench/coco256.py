"""How accurate does yolov7-tiny get on COCO at 256 px from scratch, and in how many minutes?

The images of COCO train2017, already resized to 256 px (`flatout yolo resize` makes them from the official files; the
copy used for the answer is stretched to squares), and YOLO label files of the same images, found by the number in their
names. Two sets are held out by a hash of that number: 5,000 images for tuning and for the choice of epochs, and 5,000
for which nothing is chosen. Scores are called coco256 AP, never COCO AP: crowds are boxes here, stretched images have
lost their proportions, and the images are not those of val2017.

    python -m bench.coco256 join --pictures IMAGES --labels LABELS --leave-out NAMES --out SET
    python -m bench.coco256 fingerprint --set SET --out FILE.json      counts of the set, and a digest per list
    python -m bench.coco256 pack --set SET --out PARTS         the set as files of at most --mib each
    python -m bench.coco256 unpack --parts PARTS --out SET     the reverse; parts may come one by one
    python -m bench.coco256 train --set SET --project RUNS --name NAME [--epochs 100] [-- MORE FLAGS OF train.py]
    python -m bench.coco256 evaluate --set SET --weights FILE --out FILE.json
    python -m bench.coco256 letterboxed --data DATA.yaml --weights FILE --out FILE.json     images in their own shape
    python -m bench.coco256 --machine h200 --write report --runs RUNS/NAME.json ... [--scores FILE.json ...]
                                   [--earlier REPORT.json: runs of an earlier report stay in this one]

Answer: bench/results/coco256_<machine>_<yyyymm>.md and .json.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.measure import arguments, facts, report

ROOT = Path(__file__).parents[1]
SIDE_PX = 256
NUM_HELD_OUT = 5_000
HELD_OUT_OF = "val2014"
"""Folder of labels from which the held-out images come."""
RECIPE = ROOT / "data" / "hyp.scratch.tiny.yaml"
CHANGED = {"aspect": 0.5, "paste_in": 0.0}
"""Random aspect ratios undo the stretching; there are no polygons to paste."""
SPLITS = {"train": "train", "val": "tune", "test": "record"}
"""Split of the data YAML -> list of images."""
BUSY_EVERY_S = 0.5
LETTERBOXED_PX = (256, 320, 480, 640)
CURVE_AT = (0, 1, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90)
"""Epochs of the curve in the report, besides the last; the .json file has all of them."""


class Label(NamedTuple):
    """A box of one image, relative to its sides."""

    category: int
    cx: float
    cy: float
    width: float
    height: float

    @property
    def is_empty(self) -> bool:
        return self.width <= 0 or self.height <= 0


class Joined(NamedTuple):
    """Counts of a join, for the report."""

    pictures: int
    with_labels: int
    lines: int
    duplicates: int
    empty: int
    train: int
    tune: int
    record: int
    left_out: int


def main() -> int:
    parser = arguments(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function, flags in (
        ("join", _join, ("--pictures", "--labels", "--leave-out", "--out")),
        ("pack", _pack, ("--set", "--out")),
        ("unpack", _unpack, ("--parts", "--out")),
        ("train", _train, ("--set", "--project")),
        ("evaluate", _evaluate, ("--set", "--weights", "--out")),
        ("fingerprint", _fingerprint, ("--set", "--out")),
        ("letterboxed", _letterboxed, ("--data", "--weights", "--out")),
    ):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        for flag in flags:
            command.add_argument(flag, type=Path, required=flag != "--leave-out")
    commands.choices["pack"].add_argument("--mib", type=float, default=56.0, help="largest part (default: %(default)s)")
    train = commands.choices["train"]
    train.add_argument("--name", required=True)
    train.add_argument("--epochs", type=int, default=100)
    train.add_argument("--seed", type=int, default=1)
    train.add_argument("--batch", type=int, default=128)
    train.add_argument("--loss", choices=("ota", "plain"), default="ota")
    train.add_argument("--cfg", default="yolov7-tiny-320", help="yolov7-tiny with anchors for small images")
    train.add_argument("more", nargs="*", help="more flags of train.py, behind --")
    reporting = commands.add_parser("report")
    reporting.set_defaults(function=_report)
    reporting.add_argument("--runs", type=Path, nargs="+", required=True)
    reporting.add_argument("--scores", type=Path, nargs="*", default=[], help="of evaluate, in the order of the runs")
    reporting.add_argument("--letterboxed", type=Path, help="scores of the first run's weights, of letterboxed")
    reporting.add_argument("--fingerprint", type=Path, help="of the set, of fingerprint")
    reporting.add_argument("--gpu", help="of runs whose file does not name it")
    reporting.add_argument("--commit", help="that the runs were made with")
    reporting.add_argument("--earlier", type=Path, help=".json of a report whose runs, scores and data are kept")
    options = parser.parse_args()
    options.function(options)
    return 0


# Joining


def number_of(name: str) -> int:
    """The number of a COCO image: the last digits in the name of its image or label file."""
    found = re.search(r"(\d+)$", Path(name).stem)
    if found is None:
        raise SystemExit(f"{name}: not an image of COCO, its name does not end with a number.")
    return int(found[1])


def held_out(numbers: Iterable[int]) -> tuple[list[int], list[int]]:
    """Tuning set and record set: always the same images, whatever their order."""
    shuffled = sorted(numbers, key=lambda number: hashlib.sha256(f"coco256 {number}".encode()).digest())
    return sorted(shuffled[:NUM_HELD_OUT]), sorted(shuffled[NUM_HELD_OUT : 2 * NUM_HELD_OUT])


def read_labels(text: str) -> tuple[list[Label], int]:
    """The distinct labels of a file in their order, and the number of its lines."""
    rows = [tuple(line.split()) for line in text.splitlines() if line.strip()]
    return [Label(int(row[0]), *map(float, row[1:])) for row in dict.fromkeys(rows)], len(rows)


def _join(options: argparse.Namespace) -> None:
    images = {number_of(path.name): path.resolve() for path in options.pictures.glob("*.jpg")}
    files = {number_of(path.name): path for path in options.labels.rglob("*.txt")}
    left_out = {number_of(path.name) for path in options.leave_out.rglob("*.jpg")} if options.leave_out else set()
    pool = (n for n, path in files.items() if path.parent.name == HELD_OUT_OF and n in images and n not in left_out)
    tune, record = held_out(pool)
    kept = sorted(images.keys() - set(tune) - set(record) - left_out)
    out: Path = options.out
    for folder in ("images", "labels", "annotations"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    lines = duplicates = empty = 0
    labels: dict[int, list[Label]] = {}
    for number, path in images.items():
        link = out / "images" / f"{number:012d}.jpg"
        if not link.exists():
            os.link(path, link)
        if number in files:
            found, count = read_labels(files[number].read_text())
            labels[number] = [label for label in found if not label.is_empty]
            lines, duplicates = lines + count, duplicates + count - len(found)
            empty += len(found) - len(labels[number])
            rows = "".join(f"{label.category} {' '.join(f'{v:.6f}' for v in label[1:])}\n" for label in labels[number])
            (out / "labels" / f"{number:012d}.txt").write_text(rows)
    for name, numbers in (("train", kept), ("tune", tune), ("record", record)):
        (out / f"{name}.txt").write_text("".join(f"./images/{number:012d}.jpg\n" for number in numbers))
    for name, numbers in (("tune", tune), ("record", record)):
        annotations = annotation_json({number: labels[number] for number in numbers})
        (out / "annotations" / f"instances_{name}.json").write_text(json.dumps(annotations))
    _write_yaml(out)
    counts = Joined(
        len(images), len(labels), lines, duplicates, empty, len(kept), len(tune), len(record),
        len(left_out & images.keys()),
    )  # fmt: skip
    (out / "joined.json").write_text(json.dumps(counts._asdict()) + "\n")
    print(counts)


def annotation_json(labels: dict[int, list[Label]], side_px: int = SIDE_PX) -> dict[str, Any]:
    """These labels in the format of COCO's instances_*.json, for square images; categories are class numbers."""
    boxes = [(number, label) for number, own in labels.items() for label in own]
    return {
        "images": [{"id": n, "file_name": f"{n:012d}.jpg", "width": side_px, "height": side_px} for n in labels],
        "categories": [{"id": category, "name": name} for category, name in enumerate(_names())],
        "annotations": [
            {
                "id": identity,
                "image_id": number,
                "category_id": label.category,
                "bbox": [
                    (label.cx - label.width / 2) * side_px,
                    (label.cy - label.height / 2) * side_px,
                    label.width * side_px,
                    label.height * side_px,
                ],
                "area": label.width * label.height * side_px**2,
                "iscrowd": 0,
            }
            for identity, (number, label) in enumerate(boxes, 1)
        ],
    }


def _names() -> list[str]:
    from flatout.yolo.data.data_yaml import open_data_yaml

    return list(open_data_yaml(ROOT / "data" / "coco.yaml").names)


def _write_yaml(out: Path) -> None:
    lists = "".join(f"{split}: ./{name}.txt\n" for split, name in SPLITS.items())
    (out / "data.yaml").write_text(f"{lists}nc: 80\nnames: {json.dumps(_names())}\n")


def _fingerprint(options: argparse.Namespace) -> None:
    """Counts of the join, and a digest of names, images and labels per list: equal digests mean equal data."""
    counts = json.loads((options.set / "joined.json").read_text())
    digests = {name: _digest(options.set, name) for name in SPLITS.values()}
    options.out.write_text(json.dumps({"joined": counts, "sha256": digests}, indent=1) + "\n")
    print(options.out.read_text(), end="")


def _digest(folder: Path, name: str) -> str:
    """SHA-256 over a line per image, in the order of the list: number, SHA-256 of image and of labels or '-'."""
    whole = hashlib.sha256()
    for line in (folder / f"{name}.txt").read_text().splitlines():
        number = Path(line).stem
        files = (folder / "images" / f"{number}.jpg", folder / "labels" / f"{number}.txt")
        parts = (hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "-" for file in files)
        whole.update(f"{number} {' '.join(parts)}\n".encode())
    return whole.hexdigest()


# Packing


def _pack(options: argparse.Namespace) -> None:
    """Write labels.tar.xz with all text files, then zip files of images in hashed order: each is a random sample."""
    options.out.mkdir(parents=True, exist_ok=True)
    texts = [*options.set.glob("*.*"), *(options.set / "annotations").iterdir(), *(options.set / "labels").iterdir()]
    with tarfile.open(options.out / "labels.tar.xz", "w:xz", preset=6) as archive:
        for path in sorted(texts):
            archive.add(path, str(path.relative_to(options.set)))
    images = sorted((options.set / "images").iterdir(), key=lambda p: hashlib.sha256(p.name.encode()).digest())
    parts: list[list[Path]] = [[]]
    part_bytes = 0.0
    for path in images:
        # A zip file has each name twice, both times with some fields.
        needed = path.stat().st_size + 2 * len(f"images/{path.name}") + 76
        if part_bytes + needed > options.mib * 2**20 - 22:
            parts.append([])
            part_bytes = 0.0
        parts[-1].append(path)
        part_bytes += needed
    for number, own in enumerate(parts):
        with zipfile.ZipFile(options.out / f"part{number:03d}.zip", "w", zipfile.ZIP_STORED) as pack:
            for path in own:
                pack.write(path, f"images/{path.name}")
    print(f"{len(parts)} parts with {len(images):,} images")


def _unpack(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(options.parts.iterdir()):
        shutil.unpack_archive(path, options.out, filter=None if path.suffix == ".zip" else "data")
        path.unlink()


# Training


def recipe_text(loss: str) -> str:
    """The hyp file of yolov7-tiny with the values that differ here."""
    changed = CHANGED | {"loss_ota": int(loss == "ota")}
    kept = [line for line in RECIPE.read_text().splitlines() if line.split(":")[0] not in changed]
    return "\n".join([*kept, *(f"{key}: {value}" for key, value in changed.items()), ""])


def _train(options: argparse.Namespace) -> None:
    """Run train.py, put the time before every line of its log, and save the results as <name>.json."""
    options.project.mkdir(parents=True, exist_ok=True)
    hyp = options.project / f"hyp.{options.loss}.yaml"
    hyp.write_text(recipe_text(options.loss))
    flags = ["--data", str(options.set / "data.yaml"), "--cfg", options.cfg, "--weights", "", "--hyp", str(hyp)]
    flags += ["--img", str(SIDE_PX), "--batch", str(options.batch), "--epochs", str(options.epochs), "--noautoanchor"]
    flags += ["--seed", str(options.seed), "--project", str(options.project), "--name", options.name, "--fast"]
    # Compiling would gain 5 % at best, and be one more difference between runs.
    flags += ["--compile", "off"]
    flags += options.more
    busy = _Busy()
    began = time.perf_counter()
    with (options.project / f"{options.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{time.perf_counter() - began:8.2f} {line}", end="", file=log, flush=True)
    code, wall_s = process.wait(), time.perf_counter() - began
    kept = {
        "name": options.name,
        "command": " ".join(["train.py", *(flag or "''" for flag in flags)]),
        "epochs": options.epochs,
        "seed": options.seed,
        "batch": options.batch,
        "loss": options.loss,
        "cfg": options.cfg,
        "exit_code": code,
        "wall_s": wall_s,
        "busy_percent": busy.stop(),
        "facts": facts() | busy.gpu,
        "curve": list(_curve(options.project / options.name)) if code == 0 else [],
    }
    (options.project / f"{options.name}.json").write_text(json.dumps(kept) + "\n")
    if code:
        raise SystemExit(f"train.py ended with exit code {code}: {options.project / options.name}.log")


def _curve(folder: Path) -> Iterator[dict[str, float]]:
    results = folder / "results.txt"
    for row in map(str.split, results.read_text().splitlines() if results.exists() else ()):
        yield {"precision": float(row[8]), "recall": float(row[9]), "map50": float(row[10]), "map": float(row[11])}


class _Busy:
    """Share of time in which the GPU ran any kernel, in per cent, sampled during a training."""

    def __init__(self) -> None:
        self.samples: list[list[float]] = []
        self.gpu: dict[str, str] = {}
        """The GPU's name, as a fact; empty if there is none."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> list[list[float]]:
        self._ended.set()
        self._thread.join()
        return self.samples

    def _sample(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError:
            return  # no GPU: nothing to sample
        self.gpu["GPU"] = pynvml.nvmlDeviceGetName(handle)
        began = time.perf_counter()
        while not self._ended.wait(BUSY_EVERY_S):
            busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            self.samples.append([round(time.perf_counter() - began, 1), busy])


# Scores


def _evaluate(options: argparse.Namespace) -> None:
    """coco256 AP of weights on both held-out sets, by hotcoco from the joined annotations."""
    from flatout.yolo.evaluate.evaluate import test
    from flatout.yolo.options import TestOptions

    scores = {}
    for split, name in (("val", "tune"), ("test", "record")):
        result = test(
            TestOptions(
                weights=(str(options.weights),), data=str(options.set / "data.yaml"), img_size=SIDE_PX, batch_size=256,
                task=split, save_json=True, project=str(options.out.parent), name=f"{options.out.stem}-{name}",
            )
        )  # fmt: skip
        print(result.text)
        if result.coco is None:
            raise SystemExit("hotcoco computed no AP; the reason is printed above.")
        scores[name] = result.coco._asdict()
    options.out.write_text(json.dumps(scores) + "\n")


def _letterboxed(options: argparse.Namespace) -> None:
    """AP by hotcoco on images of any shape, padded instead of stretched; their data YAML has annotations."""
    from flatout.yolo.evaluate.evaluate import test
    from flatout.yolo.options import TestOptions

    scores: dict[str, Any] = {}
    for size in LETTERBOXED_PX:
        result = test(
            TestOptions(
                weights=(str(options.weights),), data=str(options.data), img_size=size, save_json=True, device="cpu",
                project=str(options.out.parent), name=f"{options.out.stem}-{size}",
            )
        )  # fmt: skip
        print(result.text)
        if result.coco is None:
            raise SystemExit("hotcoco computed no AP; the reason is printed above.")
        scores[f"{size} px"] = {"pictures": result.outcome.evaluation.num_images, **result.coco._asdict()}
    options.out.write_text(json.dumps(scores, indent=1) + "\n")


# Report


class Part(NamedTuple):
    """A part of a run's wall time."""

    name: str
    begin_s: float
    end_s: float


def _report(options: argparse.Namespace) -> None:
    runs = [_read_run(path) | {"commit": options.commit} for path in options.runs]
    for run, path in zip(runs, options.scores, strict=False):
        run["scores"] = json.loads(path.read_text())
    earlier = json.loads(options.earlier.read_text()) if options.earlier else {"runs": []}
    earlier.pop("facts", None)
    runs = [*earlier["runs"], *runs]
    numbers: dict[str, Any] = {**earlier, "runs": runs}
    for name in ("fingerprint", "letterboxed"):
        if path := getattr(options, name):
            numbers[name] = json.loads(path.read_text())
    measured_on = {**runs[0]["facts"], **({"GPU": options.gpu} if options.gpu else {})}
    report("coco256", "\n".join(_text(numbers)), numbers, options, measured_on=measured_on)


def _read_run(path: Path) -> dict[str, Any]:
    """A run's JSON file, completed from the log and the run folder beside it."""
    run = json.loads(path.read_text())
    log = path.with_suffix(".log").read_text()
    parts = parts_of(log, run["wall_s"])
    busy, epochs = run.pop("busy_percent"), ends_of_epochs(log)
    images_per_s = speeds_of_epochs(log)
    curve = {name: [row[name] for row in run["curve"]] for name in ("map50", "map")}
    run |= {
        "command": without_paths(run["command"]),
        "parts_s": {part.name: round(part.end_s - part.begin_s, 2) for part in parts},
        "images_per_s": images_per_s,
        "busy_overall_percent": _mean_between(busy, 0, run["wall_s"]),
        "busy_of_epochs_percent": [_mean_between(busy, begin, end) for begin, end in pairwise(epochs)],
        "curve": curve,
    }
    return run


def parts_of(log: str, wall_s: float) -> list[Part]:
    """The parts of a run's wall time, from the times before the lines of its log."""
    marks = [
        ("start: Python, torch, the GPU", r""),
        ("data scanned", r"val: \d+ found"),
        ("network, images decoded", r"Training images:"),
        ("images to the GPU", r"\d+ of \d+ items on cuda"),
        ("first steps, to the first line", r"train +\d+/"),
        ("rest of epoch 0, with validation", r" +all "),
    ]
    found = [_times(log, pattern)[0] for _, pattern in marks] + [ends_of_epochs(log)[-1], wall_s]
    names = [*(name for name, _ in marks), "all other epochs, with validation", "plots, last files, end of the process"]
    return [Part(*part) for part in zip(names, [0.0, *found], found, strict=False)]


def ends_of_epochs(log: str) -> list[float]:
    """Seconds at which the score of an epoch was printed."""
    return _times(log, r" +all ")


def speeds_of_epochs(log: str) -> list[int]:
    """Images per second of every epoch, from its last line of progress."""
    return list(
        {int(epoch): int(speed) for epoch, speed in re.findall(r" epoch (\d+) .* speed (\d+) img/s", log)}.values()
    )


def _times(log: str, pattern: str) -> list[float]:
    """Times of the lines that begin with a pattern."""
    return [float(seconds) for seconds in re.findall(rf"^ *(\d+\.\d+) {pattern}", log, re.MULTILINE)]


def without_paths(command: str) -> str:
    """A command with its folders replaced by SET and RUNS."""
    command = re.sub(r"--data \S+/", "--data SET/", command)
    return re.sub(r"--hyp \S+/", "--hyp RUNS/", re.sub(r"--project \S+", "--project RUNS", command))


def _mean_between(samples: Sequence[Sequence[float]], begin_s: float, end_s: float) -> float | None:
    own = [share for seconds, share in samples if begin_s <= seconds < end_s]
    return round(sum(own) / len(own), 2) if own else None


def _text(numbers: dict[str, Any]) -> Iterator[str]:
    runs = numbers["runs"]
    yield from _table(runs)
    for run in runs:
        yield ""
        yield from _details(run)
    if letterboxed := numbers.get("letterboxed"):
        yield ""
        yield f"{runs[0]['name']}, letterboxed, on a CPU:"
        for size, scores in letterboxed.items():
            yield f"  {scores['pictures']} images at {size}: {_scores_line(scores)}"
    if fingerprint := numbers.get("fingerprint"):
        yield ""
        yield "Data: " + ", ".join(f"{name} {count:,}" for name, count in fingerprint["joined"].items())
        for name, digest in fingerprint["sha256"].items():
            yield f"  {name:8}{digest}"
    yield ""
    yield "Scores on tune and record are coco256 AP by hotcoco, not COCO AP: crowds are boxes, images are squares."
    if "letterboxed" in numbers:
        yield "There are too few letterboxed images to compare weights."
    if len(runs) == 1:
        yield "One run, one seed: the spread between seeds is unknown, and nothing was compared with it yet."


def _table(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    heads = ("loss", 7), ("epochs", 8), ("minutes", 9), ("img/s", 9), ("GPU busy", 10)
    scores = ("tune AP", 9), ("AP50", 7), ("record AP", 11), ("AP50", 7)
    yield f"{'run':22}" + "".join(f"{head:>{width}}" for head, width in (*heads, *scores))
    for run in runs:
        tune, record = (run.get("scores", {}).get(name, {}) for name in ("tune", "record"))
        columns = (tune.get("ap"), tune.get("ap50"), record.get("ap"), record.get("ap50"))
        shown = [f"{100 * value:.1f}" if value is not None else "-" for value in columns]
        busy = run["busy_overall_percent"]
        yield (
            f"{run['name']:22}{run['loss']:>7}{run['epochs']:>8}{run['wall_s'] / 60:>9.1f}"
            f"{median(run['images_per_s']):>9,.0f}{(f'{busy:.1f} %' if busy is not None else '-'):>10}"
            f"{shown[0]:>9}{shown[1]:>7}{shown[2]:>11}{shown[3]:>7}"
        )


def _details(run: dict[str, Any]) -> Iterator[str]:
    yield f"{run['name']}: {run['command']}"
    about = run["facts"]
    yield f"commit {run['commit']}, seed {run['seed']}, {about.get('GPU', 'GPU unknown')}, {about['date']}"
    yield ""
    yield f"{'part of the wall time':42}{'s':>9}{'share':>8}"
    for name, seconds in run["parts_s"].items():
        yield f"  {name:40}{seconds:>9.1f}{seconds / run['wall_s']:>8.1%}"
    yield f"  {'from the command to finished weights':40}{run['wall_s']:>9.1f}{1:>8.1%}"
    busy = [share for share in run["busy_of_epochs_percent"] if share is not None]
    if run["epochs"] > 1:
        others_s = run["parts_s"]["all other epochs, with validation"] / (run["epochs"] - 1)
        yield ""
        yield (
            f"Epochs after the first take {others_s:.1f} s on average, with validation and files; they train at "
            f"{median(run['images_per_s'][1:]):,.0f} img/s."
        )
    if busy:
        yield (
            f"The GPU runs kernels in {sum(busy) / len(busy):.1f} % of their time "
            f"({min(busy):.1f} to {max(busy):.1f} per epoch), and in {run['busy_overall_percent']:.1f} % of all time."
        )
    yield ""
    last = len(run["curve"]["map"]) - 1
    shown = [*(epoch for epoch in CURVE_AT if epoch < last), last]
    yield f"{'epoch':12}" + "".join(f"{epoch:>7}" for epoch in shown)
    for name, key in (("mAP@.5", "map50"), ("mAP@.5:.95", "map")):
        yield f"{name:12}" + "".join(f"{run['curve'][key][epoch]:>7.3f}" for epoch in shown)
    for name, scores in run.get("scores", {}).items():
        yield f"{name:8}{_scores_line(scores)}"


def _scores_line(scores: dict[str, float]) -> str:
    """All AP of a set, in per cent."""
    names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
    return ", ".join(f"{_words(name)} {100 * scores[name]:.1f}" for name in names)


def _words(name: str) -> str:
    return name.replace("ap", "AP").replace("_", " ")


if __name__ == "__main__":
    raise SystemExit(main())
