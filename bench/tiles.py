"""Does detection by tiles find as much as SAHI's slicing, how much faster is it, and does training on tiles pay?

On generated scenes of 4,000 x 4,000 px with objects of 16 to 160 px:

sahi    The same weights, tiles, overlap and thresholds: AP on whole images and images per second, from files, of
        `Detector.predict(tiles=...)` and of SAHI's `get_sliced_prediction`, with its default merging (GREEDYNMM) and
        with its NMS. In turns: image by image on a CPU, all images at once on a GPU. Only SAHI's public interface is
        used. In a folder of its own, because it would replace our OpenCV:

            .venv/bin/python -m pip install --no-deps --target /tmp/sahi sahi==0.12.8 shapely
            PYTHONPATH=.:/tmp/sahi OMP_NUM_THREADS=1 .venv/bin/python -m bench.tiles --part sahi --val 6 --write

        Without --weights, a network is trained on tiles first.
memory  The peak memory of a process that detects in one image of 20,000 x 20,000 px: BMP, JPEG, PNG and TIFF (LZW).

Answers: bench/results/tiles_<machine>_<yyyymm>.md, tiles_memory_ of the part memory alone (rewrite them with --write).

--training is a question of its own: a training on tiles against one on images shrunk to the same input size, with the
same network, batch and number of samples and steps; two seeds. Both are scored on whole images, shrunk and in tiles.
Answer: bench/results/tiles_training_<machine>_<yyyymm>.md. `OMP_NUM_THREADS=1` keeps it on one core. With --data it is
asked of a real set instead of scenes, such as that of bench/aerial_cars.py: tiles_training_<set>_<machine>_<yyyymm>.md.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from bench import noise
from bench.measure import arguments, facts_line, report
from flatout.errors import counted
from flatout.images import read_image
from flatout.ranks import World
from flatout.yolo import resize
from flatout.yolo.boxes import Letterbox
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.find import find_images, label_path
from flatout.yolo.demo_data.files import label_rows, label_text
from flatout.yolo.demo_data.scene import SHAPES, generate_scene
from flatout.yolo.detector import Detector
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import load_hyp
from flatout.yolo.metrics import Evaluation, Evaluator
from flatout.yolo.nms import Detections, NmsConfig
from flatout.yolo.options import TrainOptions
from flatout.yolo.predict.files import Frame, Origin
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.results import Predictor
from flatout.yolo.train.input import TileRules, open_images
from flatout.yolo.train.step import YoloSchedule

WAITING = "OMP_WAIT_POLICY"
PARTS = ("sahi", "memory")
CONF, IOU = 0.1, 0.45
"""Thresholds of both sides. With a lower confidence SAHI would replace its default merging by NMS."""
OVERLAP = 0.2
SEED = 12
"""Seed of the scenes. Those of seed 11 were used to choose a constant of flatout/yolo/nms/merge_tiles.py."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Size of the measurement."""

    side: int = 4000
    cell: int = 500
    """A scene is made of generated scenes of this side."""
    train: int = 6
    val: int = 3
    tile: int = 320
    batch: int = 8
    epochs: int = 3
    """Epochs of a training on tiles; a training on shrunk images has as many samples and steps."""
    large: int = 20_000
    """Side of the image whose memory is measured."""
    large_tile: int = 1280
    """Side of its tiles; the network sees them at 640 px."""


CPU = Setting()
GPU = Setting(train=60, val=20, tile=640, batch=64, epochs=5, large_tile=640)
REAL = Setting(epochs=2)
"""For --data on a CPU."""
QUICK = Setting(side=400, cell=200, train=1, val=1, tile=96, batch=4, epochs=1, large=600)


# Scenes


def large_scene(side: int, cell: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """An image of generated scenes side by side, and its labels relative to it, float64 [n, 5]."""
    image = np.zeros((side, side, 3), np.uint8)
    labels = []
    for top in range(0, side, cell):
        for left in range(0, side, cell):
            scene = generate_scene(cell, cell, rng)
            image[top : top + cell, left : left + cell] = scene.image
            rows_n5 = label_rows(scene)
            rows_n5[:, 1:] *= cell / side
            rows_n5[:, 1:3] += np.array([left, top]) / side
            labels.append(rows_n5)
    return image, np.concatenate(labels)


def write_set(folder: Path, setting: Setting) -> Path:
    """Images, labels and a data YAML, unless they are there."""
    yaml = folder / "scenes.yaml"
    if yaml.is_file():
        return yaml
    with ProcessPoolExecutor() as pool:
        for split, (name, count) in enumerate((("train", setting.train), ("val", setting.val))):
            for kind in ("images", "labels"):
                (folder / kind / name).mkdir(parents=True, exist_ok=True)
            list(pool.map(partial(write_scene, folder, name, split, setting), range(count)))
    paths = {name: (folder / "images" / name).resolve() for name in ("train", "val")}
    yaml.write_text(f"train: {paths['train']}\nval: {paths['val']}\nnames: [{', '.join(SHAPES)}]\n")
    return yaml


def write_scene(folder: Path, name: str, split: int, setting: Setting, number: int) -> None:
    rng = np.random.default_rng([SEED, split, number])
    image, rows_n5 = large_scene(setting.side, setting.cell, rng)
    cv2.imwrite(str(folder / f"images/{name}/{number:03}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 92])
    (folder / f"labels/{name}/{number:03}.txt").write_text(label_text(rows_n5))


def labels_of(image: Path) -> np.ndarray:
    text = (image.parents[2] / "labels" / image.parent.name / f"{image.stem}.txt").read_text()
    return np.array([line.split() for line in text.splitlines()], np.float64).reshape(-1, 5)


# AP on whole images

Rows = np.ndarray
"""Detections of an image, float32 [n, 6]: left, top, right, bottom, score, class."""


def score(found: Sequence[Rows], images: Sequence[Path], side: int) -> Evaluation:
    evaluator = Evaluator(len(SHAPES))
    for rows, image in zip(found, images, strict=True):
        label_n5 = labels_of(image)
        targets = torch.from_numpy(np.concatenate((np.zeros((len(label_n5), 1)), label_n5), 1)).float()
        letterbox = Letterbox(torch.tensor([[side, side]]).float(), torch.ones(1), torch.zeros(1, 2))
        best = rows[np.argsort(-rows[:, 4], kind="stable")]
        detections = Detections(torch.from_numpy(best.copy()), torch.zeros(len(best), dtype=torch.int64), 1)
        evaluator.update(detections, targets, letterbox, (side, side))
    return evaluator.result()


# Both sides

Detect = Callable[[Sequence[Path]], list[Rows]]


def rows_of(result: Result) -> Rows:
    return np.concatenate((result.boxes, result.scores[:, None], result.classes[:, None]), 1).astype(np.float32)


def by_flatout(detector: Detector, tile: int) -> Detect:
    def detect(paths: Sequence[Path]) -> list[Rows]:
        results = detector.stream(
            paths, img_size=tile, tiles=tile, tile_overlap=OVERLAP, conf_thres=CONF, iou_thres=IOU
        )
        return [rows_of(result) for result in results]

    return detect


def by_sahi(detector: Detector, tile: int, merging: dict[str, Any], *, batch: int) -> Detect:
    """SAHI around our network: it cuts, calls and merges; the network, its precision and its NMS are ours."""
    from sahi.models.base import DetectionModel
    from sahi.predict import get_sliced_prediction
    from sahi.prediction import ObjectPrediction

    device, model = detector._networks()
    predictor = Predictor(model, size=tile, device=device, nms=NmsConfig(conf_thres=CONF, iou_thres=IOU))

    class Ours(DetectionModel):
        def load_model(self) -> None:
            self.model = predictor

        def perform_inference(self, image: np.ndarray) -> None:
            self._original_predictions = self._detect([image])

        def perform_batch_inference(self, images: list[np.ndarray]) -> None:
            self._original_predictions = self._detect(images)

        def _detect(self, images: Sequence[np.ndarray]) -> list[Result]:
            frames = [Frame(np.ascontiguousarray(each[..., ::-1]), Origin("tile", "array", 0, 1)) for each in images]
            return predictor([predictor.prepare(frame) for frame in frames])

        def _create_object_prediction_list_from_original_predictions(
            self, shift_amount_list: Any = None, full_shape_list: Any = None
        ) -> None:
            shifts = shift_amount_list if isinstance(shift_amount_list[0], list | tuple) else [shift_amount_list]
            shapes = full_shape_list if isinstance(full_shape_list[0], list | tuple) else [full_shape_list]
            self._object_prediction_list_per_image = [
                [
                    ObjectPrediction(
                        bbox=box, category_id=int(kind), category_name=names[kind], score=float(certainty),
                        shift_amount=shift, full_shape=shape,
                    )
                    for box, certainty, kind in zip(
                        result.boxes.tolist(), result.scores.tolist(), result.classes.tolist(), strict=True
                    )
                    if box[0] < box[2] and box[1] < box[3]
                ]
                for result, shift, shape in zip(self._original_predictions, shifts, shapes, strict=True)
            ]  # fmt: skip

    names = model.names
    wrapped = Ours(confidence_threshold=CONF, category_mapping={str(n): name for n, name in enumerate(names)})

    def detect(path: Path) -> Rows:
        found = get_sliced_prediction(
            str(path),
            wrapped,
            slice_height=tile,
            slice_width=tile,
            overlap_height_ratio=OVERLAP,
            overlap_width_ratio=OVERLAP,
            perform_standard_pred=False,
            verbose=0,
            batch_size=batch,
            **merging,
        )
        rows = [[*each.bbox.to_xyxy(), each.score.value, each.category.id] for each in found.object_prediction_list]
        return np.array(rows, np.float32).reshape(-1, 6)

    return lambda paths: [detect(path) for path in paths]


SAHI_MERGING = {
    "SAHI, its default": {},
    "SAHI, NMS": {
        "postprocess_type": "NMS",
        "postprocess_match_metric": "IOU",
        "postprocess_match_threshold": IOU,
        "force_postprocess_type": True,
    },
}


def compare_with_sahi(weights: str, images: list[Path], setting: Setting, device: str) -> Iterator[tuple[str, Any]]:
    """Lines and numbers of the part `sahi`."""
    detector = Detector(weights, device=device)
    batch = 1 if device == "cpu" else 32
    sides: dict[str, Detect] = {"flatout": by_flatout(detector, setting.tile)}
    sides |= {name: by_sahi(detector, setting.tile, how, batch=batch) for name, how in SAHI_MERGING.items()}
    found: dict[str, list[Rows]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in sides}
    small = images[0].parents[2] / "warm_up.jpg"
    cv2.imwrite(str(small), read_image(str(images[0]))[: 2 * setting.tile, : 2 * setting.tile])
    for detect in sides.values():
        detect([small])
    for group in [images] if device != "cpu" else [[path] for path in images]:
        for name, detect in sides.items():
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            found[name] += detect(group)
            seconds[name].append((time.perf_counter() - begin_s) / len(group))
            cpu_seconds[name].append((time.process_time() - begin_cpu_s) / len(group))
    numbers: dict[str, Any] = {}
    for name in sides:
        evaluation = score(found[name], images, setting.side)
        rate = 1 / float(np.mean(seconds[name]))
        numbers[name] = {
            "map50": evaluation.map50, "map": evaluation.map50_95, "img_per_s": rate, "seconds": seconds[name],
            "cpu_seconds": cpu_seconds[name],
            "detections": sum(map(len, found[name])),
        }  # fmt: skip
        yield (
            f"{name:18} mAP@.5 {100 * evaluation.map50:6.2f}  mAP@.5:.95 {100 * evaluation.map50_95:6.2f}  "
            f"{rate:7.3f} img/s ({min(seconds[name]):.2f} to {max(seconds[name]):.2f} s per image, "
            f"{np.mean(cpu_seconds[name]):.2f} s of CPU time)",
            None,
        )
    ours = numbers["flatout"]
    for name in SAHI_MERGING:
        other = numbers[name]
        yield (
            f"flatout against {name}: mAP@.5 {100 * (ours['map50'] - other['map50']):+.2f}, mAP@.5:.95 "
            f"{100 * (ours['map'] - other['map']):+.2f} points, {ours['img_per_s'] / other['img_per_s']:.2f} x img/s, "
            f"{np.mean(ours['cpu_seconds']) / np.mean(other['cpu_seconds']):.2f} x the CPU time",
            None,
        )
    yield "", numbers


# Training: tiles against shrunk images

HYP = "hyp.finetune.yaml"
SEEDS = (1, 2)


def train(
    name: str, data: Path, folder: Path, setting: Setting, device: str, *, seed: int = 1, **more: Any
) -> tuple[str, float]:
    """Fine-tune yolov7-tiny from the weights that come with flatout; returns the weights and the seconds it took."""
    begin_s = time.perf_counter()
    result = Detector("yolov7-tiny", device=device).train(
        data, epochs=setting.epochs, img_size=setting.tile, batch_size=setting.batch, hyp=HYP, adam=True, amp="bf16",
        channels_last=True, seed=seed, noautoanchor=True, project=str(folder), name=name, exist_ok=True, notest=True,
        nosave=True, fast_dataloader=True, no_preflight=True, fresh=True, workers=0 if device == "cpu" else 8, **more,
    )  # fmt: skip
    return str(result.folder / "weights" / "last.pt"), time.perf_counter() - begin_s


def evaluate(weights: str, data: Path, folder: Path, setting: Setting, device: str, **more: Any) -> Evaluation:
    detector = Detector(weights, device=device)
    outcome = detector.evaluate(
        data, img_size=setting.tile, batch_size=8, workers=0 if device == "cpu" else 4, project=str(folder),
        name="test", exist_ok=True, **more,
    ).outcome  # fmt: skip
    return outcome.evaluation


def write_shrunk(data: Path, folder: Path, setting: Setting, samples: int) -> Path:
    """The training images shrunk to the network's input, each listed so often that an epoch has `samples` of them.

    Validation images stay as they are: they are shrunk by the evaluation.
    """
    shrunk = resize(data, folder / "shrunk", size=setting.tile, quality=100).data
    repeated = folder / "repeated"
    found = find_images(read_data_yaml(shrunk).entries["train"]).paths
    for kind in ("images", "labels"):
        (repeated / kind / "train").mkdir(parents=True)
    for number in range(samples):
        image = found[number % len(found)]
        for kind, path in (("images", Path(image)), ("labels", Path(label_path(image)))):
            if path.is_file():  # an image without objects may have no label file
                os.link(path, repeated / kind / "train" / f"{number:06}{path.suffix}")
    yaml = folder / "shrunk.yaml"
    source = read_data_yaml(data)
    val = [os.path.abspath(path) for path in source.entries["val"]]
    train = str((repeated / "images/train").resolve())
    yaml.write_text(json.dumps({"train": train, "val": val, "names": list(source.names)}))
    return yaml


def about_scenes(setting: Setting) -> str:
    return f"scenes of {setting.side} x {setting.side} px, {setting.train} to train and {setting.val} to validate"


def about_set(data: Path) -> str:
    """A line about a real set: its images, and how large its objects are."""
    opened = open_images(read_data_yaml(data), TrainOptions(data=str(data)).split_config(silent=True), World())
    texts = []
    for name, images in (("to train", opened.train), ("to validate", opened.val)):
        wh_n2 = np.concatenate(
            [images.labels.of(each)[:, 3:5] * images.size_wh_N2[each] for each in range(len(images))]
        )  # fmt: skip
        low, middle, high = np.percentile(np.sqrt(wh_n2.prod(1)), (10, 50, 90))
        texts.append(
            f"{counted(len(images), 'image')} {name} ({images.size_wh_N2.max(1).min()} to {images.size_wh_N2.max()} px "
            f"long, {len(wh_n2):,} objects of {low:.0f}, {middle:.0f}, {high:.0f} px: 10th, 50th, 90th percentile)"
        )
    return f"{data.stem}: " + ", ".join(texts)


def num_tiles(data: Path, setting: Setting) -> int:
    """Samples of an epoch on tiles."""
    options = TrainOptions(data=str(data), tiles=setting.tile, tile_overlap=OVERLAP)
    rules = TileRules(tile=setting.tile, overlap=OVERLAP, min_visible=options.tile_min_visible)
    return len(open_images(read_data_yaml(data), options.split_config(silent=True), World(), rules).train)


def compare_trainings(data: Path, folder: Path, setting: Setting, device: str) -> Iterator[tuple[str, Any]]:
    """Lines and numbers of `--training`."""
    tiles = {"tiles": setting.tile, "tile_overlap": OVERLAP}
    samples = num_tiles(data, setting)
    sets = {"tiles": (data, tiles), "shrunk": (write_shrunk(data, folder, setting, samples), {})}
    per_epoch = -(-samples // setting.batch)
    hyp = load_hyp(find_file(HYP))
    schedule = YoloSchedule(
        hyp, epochs=setting.epochs, steps_per_epoch=per_epoch, total_batch=setting.batch, adam=True
    )  # fmt: skip
    iterations = [(epoch, step) for epoch in range(setting.epochs) for step in range(per_epoch)]
    steps = sum(schedule(epoch, step).step_optimizer for epoch, step in iterations)
    yield (
        f"both trainings: {counted(setting.epochs, 'epoch')} of {samples:,} samples at {setting.tile} px, batch "
        f"{setting.batch}: {len(iterations):,} iterations, {steps:,} optimizer steps; from the weights yolov7-tiny, "
        f"{HYP}, Adam, its anchors, bf16, channels-last; scores on whole images",
        None,
    )
    numbers: dict[str, Any] = {"samples": samples, "iterations": len(iterations), "steps": steps, "runs": []}
    ways = {"in tiles": tiles, "shrunk": {}}
    for seed in SEEDS[: 1 if setting.side == QUICK.side else None]:
        for name, (own, more) in sets.items():
            weights, taken_s = train(f"{name}-{seed}", own, folder, setting, device, seed=seed, **more)
            for way, how in ways.items():
                found = evaluate(weights, data, folder, setting, device, **how)
                scores = {"map50": found.map50, "map": found.map50_95, "recall": found.recall}
                numbers["runs"].append({"trained": name, "seed": seed, "seconds": taken_s, "detected": way, **scores})
                yield (
                    f"seed {seed}, trained on {name:6} ({taken_s:4.0f} s), detected {way:8}: mAP@.5 "
                    f"{100 * found.map50:6.2f}  mAP@.5:.95 {100 * found.map50_95:6.2f}",
                    None,
                )
    for name in sets:
        for way in ways:
            runs = [run for run in numbers["runs"] if (run["trained"], run["detected"]) == (name, way)]
            map50, whole = (float(np.mean([run[key] for run in runs])) for key in ("map50", "map"))
            yield (
                f"mean of {len(runs)}: trained on {name:6}, detected {way:8}: mAP@.5 {100 * map50:6.2f}  mAP@.5:.95 "
                f"{100 * whole:6.2f}",
                None,
            )
    yield "", numbers


# Memory


KINDS = ("bmp", "jpg", "png", "tif")


def large_rows(side: int) -> Iterator[np.ndarray]:
    """Bands of a generated scene that is repeated, with noise, so that a PNG is not much smaller than the pixels."""
    rng = np.random.default_rng(3)
    scene = generate_scene(500, 500, rng).image
    repeated = np.tile(scene, (1, -(-side // 500), 1))[:, :side]
    for top in range(0, side, 500):
        noisy = repeated.astype(np.int16) + rng.integers(-3, 4, repeated.shape, np.int8)
        yield noisy.clip(0, 255).astype(np.uint8)[: side - top]


def write_large(path: Path, side: int) -> None:
    if path.suffix != ".bmp":
        cv2.imwrite(str(path), np.concatenate(list(large_rows(side))))
        return
    row_bytes = (3 * side + 3) // 4 * 4
    with path.open("wb") as file:
        file.write(b"BM" + struct.pack("<IHHI", 54 + row_bytes * side, 0, 0, 54))
        file.write(struct.pack("<IiiHHIIiiII", 40, side, -side, 1, 24, 0, row_bytes * side, 0, 0, 0, 0))
        for rows in large_rows(side):
            file.write(np.pad(rows.reshape(len(rows), -1), ((0, 0), (0, row_bytes - 3 * side))).tobytes())


def detect_large(path: str, weights: str, device: str, tile: int) -> None:
    """Run by `peak_memory` in a process of its own."""
    begin_s = time.perf_counter()
    detector = Detector(weights, device=device)
    (result,) = detector.predict(path, img_size=640, tiles=tile, tile_overlap=OVERLAP)
    # Not ru_maxrss: a new process inherits that of its parent.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    peak_gb = int(peak.split()[1]) * 1024 / 1e9
    print(f"PEAK {peak_gb:.3f} {time.perf_counter() - begin_s:.1f} {len(result)}", flush=True)


def peak_memory(weights: str, setting: Setting, device: str, folder: Path) -> Iterator[tuple[str, Any]]:
    numbers: dict[str, Any] = {}
    for kind in KINDS:
        path = folder / f"large.{kind}"
        write_large(path, setting.large)
        num_bytes = path.stat().st_size
        printed = _in_process(f"detect_large({str(path)!r}, {weights!r}, {device!r}, {setting.large_tile})")
        path.unlink()
        line = next(line for line in printed.splitlines() if line.startswith("PEAK"))
        peak_gb, seconds, detections = (float(word) for word in line.split()[1:])
        numbers[kind] = {"side": setting.large, "file_bytes": num_bytes, "peak_gb": peak_gb, "seconds": seconds}
        yield (
            f"{setting.large:,} x {setting.large:,} px, {kind.upper()} of {num_bytes / 1e9:.2f} GB, tiles of "
            f"{setting.large_tile} px: peak memory of the process {peak_gb:.2f} GB, {seconds:.0f} s, "
            f"{detections:.0f} detections",
            None,
        )
    yield "", numbers


def _in_process(call: str) -> str:
    """What a call of a function of this file prints in a process of its own."""
    code = f"from bench.tiles import detect_large; {call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or the number of a GPU (default: %(default)s)")
    parser.add_argument("--weights", default="", help="weights for sahi and memory; '' trains some on tiles first")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="questions to answer")
    parser.add_argument("--training", action="store_true", help="only compare trainings on tiles and on shrunk images")
    parser.add_argument("--data", type=Path, help="data YAML of a real set, for --training; default: generated scenes")
    parser.add_argument("--folder", default="", help="keep scenes and trainings in this folder")
    parser.add_argument("--val", type=int, metavar="N", help="number of scenes to score")
    parser.add_argument("--note", default="", help="a line for the report, such as where the weights come from")
    options = parser.parse_args()
    if options.data and not options.training:
        parser.error("--data is a set for --training: use both, or neither.")
    if WAITING not in os.environ:  # detect.py sets it, too; torch reads it when it is loaded
        words = [sys.executable, "-m", "bench.tiles", *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, WAITING: "PASSIVE"})
    with tempfile.TemporaryDirectory() as temporary:
        return run(options, Path(options.folder or temporary))


def run(options: argparse.Namespace, folder: Path) -> int:
    on_cpu = REAL if options.data else CPU
    setting = QUICK if options.quick else on_cpu if options.device == "cpu" else GPU
    setting = setting if options.val is None else replace(setting, val=options.val)
    print(facts_line(), flush=True)
    before = noise.listen().line()
    lines, numbers = [before], {"noise": before, "device": options.device, "setting": asdict(setting)}
    names = ["training"] if options.training else options.part
    if names != ["memory"]:
        about = about_set(options.data) if options.data else about_scenes(setting)
        lines.append(
            f"{about}; yolov7-tiny, tiles of {setting.tile} px, overlap {OVERLAP}; device {options.device}, "
            f"{counted(torch.get_num_threads(), 'thread')}"
        )
    lines += [options.note] if options.note else []
    data = options.data or (write_set(folder, setting) if names != ["memory"] else folder)
    weights = options.weights
    if not weights and "sahi" in names:
        weights, _ = train("tiles", data, folder, setting, options.device, tiles=setting.tile, tile_overlap=OVERLAP)
    parts = {
        "training": lambda: compare_trainings(data, folder, setting, options.device),
        "sahi": lambda: compare_with_sahi(
            weights, sorted((folder / "images/val").glob("*.jpg")), setting, options.device
        ),
        "memory": lambda: peak_memory(weights or "yolov7-tiny", setting, options.device, folder),
    }
    for name in names:
        for line, found in parts[name]():
            if line:
                print(line, flush=True)
                lines.append(line)
            numbers |= {name: found} if found is not None else {}
    if options.quick:
        lines.append("a quick run shows that the script works, its figures mean nothing")
    which = f"{names[0]}_{options.data.stem}" if options.data else names[0]
    report("tiles" if "sahi" in names else f"tiles_{which}", "\n".join(lines), numbers, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
