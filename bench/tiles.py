"""Does detection by tiles find as much as SAHI's slicing, how much faster is it, and does training on tiles pay?

Three questions, on generated scenes of 4,000 x 4,000 px with objects of 16 to 160 px:

sahi    The same weights, tiles, overlap and thresholds: AP on whole images and images per second, from files, of
        `Detector.predict(tiles=...)` and of SAHI's `get_sliced_prediction`, with its default merging (GREEDYNMM) and
        with its NMS. In turns: image by image on a CPU, all images at once on a GPU. Needs `pip install sahi`; only its
        public interface is used.
shrunk  A training on tiles against one on images shrunk to the same input size, for the same time; both scored on whole
        images, each in the way it was trained for.
memory  The peak memory of a process that detects in one image of 20,000 x 20,000 px, uncompressed.

Answer: bench/results/tiles_<machine>_<yyyymm>.md (rewrite it with --write); tiles_small_ with --small.
"""

import argparse
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from bench import noise
from bench.measure import arguments, facts_line, report
from flatout.images import read_image
from flatout.yolo.boxes import Letterbox
from flatout.yolo.demo_data.files import label_rows, label_text
from flatout.yolo.demo_data.scene import SHAPES, generate_scene
from flatout.yolo.detector import Detector
from flatout.yolo.metrics import Evaluation, Evaluator
from flatout.yolo.nms import Detections, NmsConfig
from flatout.yolo.predict.files import Frame, Origin
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.results import Predictor

WAITING = "OMP_WAIT_POLICY"
PARTS = ("sahi", "shrunk", "memory")
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
    train: int = 2
    val: int = 2
    tile: int = 320
    batch: int = 8
    minutes: float = 5.0
    """Time of each of the two trainings."""
    large: int = 20_000
    """Side of the image whose memory is measured."""
    large_tile: int = 1280
    """Side of its tiles; the network sees them at 640 px."""


CPU = Setting()
GPU = Setting(train=60, val=20, tile=640, batch=64, minutes=4.0, large_tile=640)
SMALL = Setting(side=1000, cell=250, train=3, val=4, tile=160, minutes=2.5)
"""All sides a quarter: two trainings in minutes on a CPU."""
QUICK = Setting(side=400, cell=200, train=2, val=1, tile=96, batch=4, minutes=0.05, large=600)


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
    for split, (name, count) in enumerate((("train", setting.train), ("val", setting.val))):
        for number in range(count):
            rng = np.random.default_rng([SEED, split, number])
            image, rows_n5 = large_scene(setting.side, setting.cell, rng)
            for kind, suffix in (("images", "jpg"), ("labels", "txt")):
                (folder / kind / name).mkdir(parents=True, exist_ok=True)
                path = folder / kind / name / f"{number:03}.{suffix}"
                if kind == "images":
                    cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 92])
                else:
                    path.write_text(label_text(rows_n5))
    paths = {name: (folder / "images" / name).resolve() for name in ("train", "val")}
    yaml.write_text(f"train: {paths['train']}\nval: {paths['val']}\nnames: [{', '.join(SHAPES)}]\n")
    return yaml


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


def train_for(
    name: str, data: Path, folder: Path, setting: Setting, device: str, more: dict[str, Any]
) -> tuple[str, float, int]:
    """Train for about `setting.minutes`; returns weights, seconds and epochs. One epoch is timed first."""

    def train(run: str, epochs: int) -> tuple[Path, float]:
        begin_s = time.perf_counter()
        detector = Detector("yolov7-tiny", device=device)
        result = detector.train(
            data, epochs=epochs, img_size=setting.tile, batch_size=setting.batch, hyp="hyp.finetune.yaml",
            project=str(folder), name=run, exist_ok=True, notest=True, fast_dataloader=True, no_preflight=True,
            fresh=True, **more,
        )  # fmt: skip
        return result.folder / "weights" / "last.pt", time.perf_counter() - begin_s

    _, first_s = train(f"{name}_timing", 1)
    _, two_s = train(f"{name}_timing", 2)
    each_s = max(0.05, two_s - first_s)
    epochs = max(2, round((60 * setting.minutes - (first_s - each_s)) / each_s))
    weights, taken_s = train(name, epochs)
    return str(weights), taken_s, epochs


def evaluate(weights: str, data: Path, folder: Path, setting: Setting, device: str, **more: Any) -> Evaluation:
    detector = Detector(weights, device=device)
    outcome = detector.evaluate(
        data, img_size=setting.tile, batch_size=8, workers=2, project=str(folder), name="test", exist_ok=True, **more
    ).outcome  # fmt: skip
    return outcome.evaluation


def compare_trainings(data: Path, folder: Path, setting: Setting, device: str) -> Iterator[tuple[str, Any]]:
    tiles = {"tiles": setting.tile, "tile_overlap": OVERLAP}
    numbers: dict[str, Any] = {}
    for name, more in (("tiles", tiles), ("shrunk", {})):
        weights, taken_s, epochs = train_for(name, data, folder, setting, device, more)
        evaluation = evaluate(weights, data, folder, setting, device, **more)
        numbers[name] = {
            "map50": evaluation.map50, "map": evaluation.map50_95, "seconds": taken_s, "epochs": epochs,
            "weights": Path(weights).name,
        }  # fmt: skip
        yield (
            f"trained on {name:7} {taken_s:6.0f} s, {epochs:4} epochs: mAP@.5 {100 * evaluation.map50:6.2f}  "
            f"mAP@.5:.95 {100 * evaluation.map50_95:6.2f} on whole images",
            None,
        )
    yield "", numbers


# Memory


def write_bmp(path: Path, side: int) -> None:
    """An uncompressed image of one generated scene, repeated."""
    scene = generate_scene(500, 500, np.random.default_rng(3)).image
    row_bytes = (3 * side + 3) // 4 * 4
    rows_HB = np.zeros((500, row_bytes), np.uint8)
    repeated = np.tile(scene, (1, -(-side // 500), 1))[:, :side]
    rows_HB[:, : 3 * side] = repeated.reshape(500, -1)
    with path.open("wb") as file:
        file.write(b"BM" + struct.pack("<IHHI", 54 + row_bytes * side, 0, 0, 54))
        file.write(struct.pack("<IiiHHIIiiII", 40, side, -side, 1, 24, 0, row_bytes * side, 0, 0, 0, 0))
        for top in range(0, side, 500):
            file.write(rows_HB[: min(500, side - top)].tobytes())


def detect_large(path: str, weights: str, device: str, tile: int) -> None:
    """Run by `peak_memory` in a process of its own."""
    begin_s = time.perf_counter()
    detector = Detector(weights, device=device)
    (result,) = detector.predict(path, img_size=640, tiles=tile, tile_overlap=OVERLAP)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"PEAK {peak_gb:.3f} {time.perf_counter() - begin_s:.1f} {len(result)}", flush=True)


def peak_memory(weights: str, setting: Setting, device: str, folder: Path) -> Iterator[tuple[str, Any]]:
    path = folder / "large.bmp"
    write_bmp(path, setting.large)
    given = f"{str(path)!r}, {weights!r}, {device!r}, {setting.large_tile}"
    code = f"from bench.tiles import detect_large; detect_large({given})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    path.unlink()
    line = next((line for line in done.stdout.splitlines() if line.startswith("PEAK")), "")
    if not line:
        raise SystemExit(done.stderr)
    peak_gb, seconds, detections = (float(word) for word in line.split()[1:])
    side = setting.large
    yield (
        f"{side:,} x {side:,} px, BMP of {3 * side * side / 1e9:.2f} GB: peak memory of the process {peak_gb:.2f} GB, "
        f"{seconds:.0f} s, {detections:.0f} detections",
        {"side": side, "peak_gb": peak_gb, "seconds": seconds},
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or the number of a GPU (default: %(default)s)")
    parser.add_argument("--weights", default="", help="weights for sahi and memory; '' trains some on tiles first")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="questions to answer")
    parser.add_argument("--folder", default="", help="keep scenes and trainings in this folder")
    parser.add_argument("--minutes", type=float, help="time of each training")
    parser.add_argument("--small", action="store_true", help="scenes of 1,000 px and tiles of 160 px, for a CPU")
    parser.add_argument("--note", default="", help="a line for the report, such as where the weights come from")
    options = parser.parse_args()
    if WAITING not in os.environ:  # detect.py sets it, too; torch reads it when it is loaded
        words = [sys.executable, "-m", "bench.tiles", *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, WAITING: "PASSIVE"})
    with tempfile.TemporaryDirectory() as temporary:
        return run(options, Path(options.folder or temporary))


def run(options: argparse.Namespace, folder: Path) -> int:
    setting = QUICK if options.quick else SMALL if options.small else CPU if options.device == "cpu" else GPU
    if options.minutes:
        setting = Setting(**{**asdict(setting), "minutes": options.minutes})
    print(facts_line(), flush=True)
    before = noise.listen().line()
    lines, numbers = [before], {"noise": before, "device": options.device, "setting": asdict(setting)}
    lines.append(
        f"scenes of {setting.side} x {setting.side} px, {setting.train} to train and {setting.val} to validate; "
        f"yolov7-tiny, tiles of {setting.tile} px, overlap {OVERLAP}, confidence {CONF}, IoU {IOU}; "
        f"device {options.device}"
    )
    lines += [options.note] if options.note else []
    data = write_set(folder, setting)
    weights = options.weights
    if not weights and "shrunk" not in options.part:
        tiles = {"tiles": setting.tile, "tile_overlap": OVERLAP}
        weights, _, _ = train_for("tiles", data, folder, setting, options.device, tiles)
    parts = {
        "shrunk": lambda: compare_trainings(data, folder, setting, options.device),
        "sahi": lambda: compare_with_sahi(
            weights, sorted((folder / "images/val").glob("*.jpg")), setting, options.device
        ),
        "memory": lambda: peak_memory(weights, setting, options.device, folder),
    }
    for name, part in parts.items():
        if name not in options.part:
            continue
        for line, found in part():
            if line:
                print(line, flush=True)
                lines.append(line)
            numbers |= {name: found} if found is not None else {}
        if name == "shrunk" and not weights:
            weights = str(folder / "tiles" / "weights" / "last.pt")
    if options.quick:
        lines.append("a quick run shows that the script works, its figures mean nothing")
    report("tiles_small" if options.small else "tiles", "\n".join(lines), numbers, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
