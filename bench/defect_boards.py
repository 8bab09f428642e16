"""How well does a network find real defects on circuit boards if it was trained on painted ones only?

Answer: bench/results/defect_boards_<machine>_<yyyymm>.md (rewrite it with --write). Data: $FLATOUT_DATA/deeppcb_mini.

The network is trained on the templates of the train pairs with painted full-swing shapes. The threshold is the one with
the best F1 on the train pairs; IoU and average precision are measured on the val pairs, which show other boards. The
baseline is a plain difference above 100 grey levels after a 3 x 3 opening. Both are measured on the pairs as they are,
and with the template moved by whole pixels to where it fits best, because a few pairs are two or three pixels off. One
inspected image of the val pairs contains its annotation (frames and words in grey, where all others are black and
white): results are given with and without it.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import cv2
import numpy as np
import torch

from bench.measure import arguments, report
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.items import read_canonical
from flatout.defect.data.pairs import list_pair_images, read_planes, read_template_planes
from flatout.defect.evaluate.evaluate import evaluate_images
from flatout.defect.evaluate.maps import HeatMapper, HostMapMaker, MakeMap
from flatout.defect.evaluate.scores import DefectEvaluation
from flatout.defect.options import TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.synth.pool import SHAPES
from flatout.defect.train import train
from flatout.defect.weights import load_network
from flatout.ranks.world import choose_device

FLOOR_ABOVE = 100
KINDS = {"as they come": 0, "aligned": 4}
"""Kind of pairs -> pixels by which a template may be moved to where it fits best."""
MAX_GREY_SHARE = 0.002
"""Share of grey pixels above which an image is taken to contain an annotation."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--base_width", type=int, default=32)
    parser.add_argument("--gpu_id", type=int, default=None)
    parser.add_argument("--num_images", type=int, default=None, help="train on this many templates only")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["blob"], help="shapes to paint")
    parser.add_argument("--weights", type=Path, default=None, help="evaluate these weights instead of training")
    parser.add_argument("--keep", type=Path, default=None, help="file to copy the trained weights to")
    options = parser.parse_args()
    data = Path(os.environ.get("FLATOUT_DATA", "../shared/data")) / "deeppcb_mini"
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        weights, description = options.weights, "weights of an earlier run of this recipe"
        if weights is None:
            weights, description = _trained(data, root, options)
        if options.keep is not None:
            shutil.copy(weights, options.keep)
        network, about = load_network(weights)
        device = choose_device("" if options.gpu_id is None else "cpu" if options.gpu_id < 0 else str(options.gpu_id))
        mapper = HeatMapper(network.to(device), partial(Grid.over, patch=128), device)
        ways: dict[str, MakeMap] = {"plain difference, 3 x 3": _floor, "network": CachedMaps(mapper)}
        lines = [f"{description}; base width {about.base}"]
        pairs = {kind: Pairs(data, root / kind, align_px, quick=options.quick) for kind, align_px in KINDS.items()}
        # Evaluation takes about a hundred passes over each map on the CPU, so evaluations run in parallel.
        with ThreadPoolExecutor() as threads:
            both = {(kind, way): threads.submit(_compare, ways[way], pairs[kind]) for kind in KINDS for way in ways}
        for kind in KINDS:
            lines.append(f"pairs {kind}")
            for way in ways:
                on_train, on_val = both[kind, way].result()
                for which, outcome in on_val.items():
                    numbers[f"{way}, {kind}, {which}"] = {"train": on_train.scores(), "val": outcome.scores()}
                    lines.append(f"  {_line(way, which, on_train, outcome)}")
    report("defect_boards", "\n".join(lines), numbers, options)


class Pairs:
    """Train and val pairs, written to files as images of three planes."""

    def __init__(self, data: Path, out: Path, align_px: int, *, quick: bool) -> None:
        self.train = _write_pairs(data / "train", out / "train", align_px)[:: 12 if quick else 1]
        val = _write_pairs(data / "val", out / "val", align_px)[:: 10 if quick else 1]
        clean = [image for image in val if not _has_annotation(image.path)]
        self.val = {f"all {len(val)}": val, f"{len(clean)} not drawn on": clean}


def _compare(make_map: MakeMap, pairs: Pairs) -> tuple[DefectEvaluation, dict[str, DefectEvaluation]]:
    """Evaluation of the train pairs, and with their best threshold of each selection of val pairs."""
    on_train = _evaluate(make_map, pairs.train, None)
    return on_train, {which: _evaluate(make_map, images, on_train.threshold) for which, images in pairs.val.items()}


def _trained(data: Path, root: Path, options: argparse.Namespace) -> tuple[Path, str]:
    """Train with the recipe for boards; returns the weights and a description of the training."""
    _write_templates(data / "train", root / "set/train/good", options.num_images or (4 if options.quick else None))
    epochs = 1 if options.quick else options.epochs
    result = train(
        TrainOptions(
            training_dataset_path=str(root / "set"),
            checkpoint_path=str(root / "runs"),
            img_format="png_jpg",
            base_width=8 if options.quick else options.base_width,
            epochs=epochs,
            gpu_id=options.gpu_id,
            defect_mode="board",
            board_shapes=tuple(options.shapes),
            psf_pool_size=500,
            num_defects_range=(3, 10),
            defect_share=0.8,
            shift_px=1.5,
            noise=6.0,
            edge_noise=0.4,
            steepness=4.0,
            one_reference=True,
        )
    )
    description = f"trained for {epochs} epochs on {', '.join(options.shapes)}, last loss {result.last_loss:.5f}"
    return result.folder / "weights/best.pt", description


def _evaluate(make_map: MakeMap, images: list[EvaluationImage], threshold: float | None) -> DefectEvaluation:
    with torch.inference_mode():
        return evaluate_images(HostMapMaker(make_map), images, threshold=threshold)


def _floor(planes_CHW: np.ndarray) -> np.ndarray:
    """The baseline: 1 where target differs from the template after an opening, else 0."""
    differs = (np.abs(planes_CHW[0] - planes_CHW[1]) > FLOOR_ABOVE).astype(np.uint8)
    return cv2.morphologyEx(differs, cv2.MORPH_OPEN, np.ones((3, 3), np.uint8)).astype(np.float32)


class CachedMaps:
    """Caches the maps of images. Thread-safe: maps are computed one at a time."""

    def __init__(self, make_map: MakeMap) -> None:
        self._make_map, self._known, self._lock = make_map, dict[bytes, np.ndarray](), Lock()

    def __call__(self, planes_CHW: np.ndarray) -> np.ndarray:
        key = hashlib.sha256(planes_CHW.tobytes()).digest()
        with self._lock:
            if key not in self._known:
                self._known[key] = self._make_map(planes_CHW)
            return self._known[key].copy()


def _has_annotation(path: Path) -> bool:
    """Whether the inspected image contains grey pixels, which black-and-white scans do not have."""
    target_HW = read_canonical(path)[0]
    return float(((target_HW > 110) & (target_HW < 190)).mean()) > MAX_GREY_SHARE


def _line(way: str, which: str, on_train: DefectEvaluation, on_val: DefectEvaluation) -> str:
    iou, best = on_val.scores()["pixel_IoU"], on_train.scores()["pixel_IoU"]
    found = on_val.scores()["recall@1FP"]
    return (
        f"{way:<24} val, {which:<15} IoU {iou:.3f}  AP {on_val.fitness:.3f}  "
        f"defects found at 1 false per image {found:.3f}  "
        f"(threshold {on_train.threshold:.3f}, with which train IoU is {best:.3f})"
    )


def _write_pairs(pairs: Path, out: Path, align_px: int) -> list[EvaluationImage]:
    out.mkdir(parents=True)
    images = []
    for pair in list_pair_images(pairs):
        target, reference, _ = read_planes(pair)
        if align_px:
            reference = moved(reference, best_shift(target, reference, align_px))
        path = out / f"{pair.path.stem}.png"
        _write_planes(path, np.stack((target, reference, reference)))
        images.append(EvaluationImage(path, pair.mask, is_good=False))
    return images


def _write_templates(pairs: Path, out: Path, most: int | None) -> None:
    out.mkdir(parents=True)
    for pair in list_pair_images(pairs)[:most]:
        _write_planes(out / f"{pair.path.stem}.png", read_template_planes(pair.references[0]))


def _write_planes(path: Path, planes_CHW: np.ndarray) -> None:
    cv2.imwrite(str(path), planes_CHW.transpose(1, 2, 0).astype(np.uint8))


def best_shift(target_HW: np.ndarray, reference_HW: np.ndarray, most_px: int) -> tuple[int, int]:
    """Shift (dy, dx) of the reference that makes it differ least from target; the smallest of equally good ones.

    Every whole shift is tried on the area that all of them cover; defects hardly change a sum over an image.
    """
    height, width = target_HW.shape
    inner = target_HW[most_px : height - most_px, most_px : width - most_px]
    side = range(-most_px, most_px + 1)
    shifts = sorted(((dy, dx) for dy in side for dx in side), key=lambda shift: abs(shift[0]) + abs(shift[1]))

    def difference(shift: tuple[int, int]) -> int:
        top, left = most_px - shift[0], most_px - shift[1]
        part = reference_HW[top : top + inner.shape[0], left : left + inner.shape[1]]
        return int(np.abs(inner - part).sum())

    return min(shifts, key=difference)


def moved(plane_HW: np.ndarray, shift_yx: tuple[int, int]) -> np.ndarray:
    """A plane moved by whole pixels down and to the right; its edge is repeated."""
    rows, columns = (
        np.clip(np.arange(length) - by, 0, length - 1) for length, by in zip(plane_HW.shape, shift_yx, strict=True)
    )
    return np.asarray(plane_HW[rows[:, None], columns])


if __name__ == "__main__":
    main()
