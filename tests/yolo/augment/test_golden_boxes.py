"""Boxes and polygons are transformed to the golden ones, and batches are collated to the golden ones."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.yolo.augment.labels import MIN_AREA, MIN_AREA_POLYGONS, are_trainable, box_inside
from flatout.yolo.augment.paste import covered_share
from flatout.yolo.augment.source import quad
from flatout.yolo.boxes import Letterbox, to_native
from flatout.yolo.data.label_text import polygon_box
from tests.golden_cases import golden_cases
from tests.reference.boxes_of_yolov7 import norm_to_input, resample
from tests.yolo.pattern import pattern

Arrays = Mapping[str, np.ndarray]


def scaled_back(arrays: Arrays, meta: Any, letterbox: Letterbox) -> np.ndarray:
    boxes = torch.from_numpy(arrays["sc_in"])
    return to_native(boxes, torch.zeros(len(boxes), dtype=torch.int64), letterbox).numpy()


def by_record(arrays: Arrays, meta: Any) -> np.ndarray:
    record = meta["scale_coords"]
    return scaled_back(arrays, meta, Letterbox.from_shapes([(tuple(record["img0"]), tuple(record["ratio_pad"]))]))


def by_size(arrays: Arrays, meta: Any) -> np.ndarray:
    record = meta["scale_coords"]
    return scaled_back(arrays, meta, Letterbox.centred(tuple(record["img1"]), [tuple(record["img0"])]))


def to_pixels(arrays: Arrays, meta: Any) -> np.ndarray:
    record = meta["xywhn2xyxy_args"]
    size, pad = (record["w"], record["h"]), (record["padw"], record["padh"])
    return norm_to_input(torch.from_numpy(arrays["xywhn"]), size_wh=size, pad_xy=pad).numpy()


def box_of_polygon(name: str, arrays: Arrays) -> np.ndarray:
    """`name` ends in the size of the image: seg_box_100x80."""
    width, height = map(int, name.rpartition("_")[2].split("x"))
    polygon = arrays["seg"].astype(np.float64)
    return box_inside(polygon, np.zeros(len(polygon), np.int64), 1, (width, height))[0]


def boxes_of_beginnings(arrays: Arrays, meta: Any) -> np.ndarray:
    """The last box is that of the polygon `seg` in smaller units; every other one is that of its first points."""
    expected = arrays["seg2boxes"]
    units = np.ptp(arrays["seg"][:, 1].astype(np.float64)) / expected[-1, 3]
    polygon = (arrays["seg"] / units).astype(np.float32)
    candidates = np.array([polygon_box(polygon[:count]) for count in range(1, len(polygon) + 1)])
    distance = np.abs(candidates[None] - expected[:, None]).max(2)
    nearest = distance.argmin(1)
    nearest[-1] = len(polygon) - 1
    return candidates[nearest]


RESULTS: dict[str, Callable[[Arrays, Any], np.ndarray]] = {
    "cand_010": lambda a, _: are_trainable(a["cand_box1"], a["cand_box2"], MIN_AREA),
    "cand_001": lambda a, _: are_trainable(a["cand_box1"], a["cand_box2"], MIN_AREA_POLYGONS),
    "ioa": lambda a, _: covered_share(a["ioa_box"], a["ioa_boxes"]),
    "xyxy": to_pixels,
    "seg_resampled": lambda a, _: resample(a["seg"])[::37],
    "sc_ratio_pad": by_record,
    "seg2boxes": boxes_of_beginnings,
    "sc_auto": by_size,
}
INPUTS = {"meta", "cand_box1", "cand_box2", "ioa_box", "ioa_boxes", "xywhn", "seg", "sc_in"}


def results_in(path: Path) -> Iterable[tuple[str, Any]]:
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    meta = json.loads(str(arrays["meta"]))
    return [(name, (name, arrays, meta)) for name in arrays if name not in INPUTS]


@pytest.mark.parametrize("case", golden_cases("yolov7-data/boxes.npz", results_in))
def test_boxes_are_transformed_to_the_golden_ones(case):
    name, arrays, meta = case
    found = box_of_polygon(name, arrays) if name.startswith("seg_box_") else RESULTS[name](arrays, meta)
    expected = arrays[name]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def batches_in(path: Path) -> Iterable[tuple[str, Any]]:
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    return [("", (json.loads(str(arrays["meta"])), arrays))]


@pytest.mark.parametrize("case", golden_cases("yolov7-data/collate.npz", batches_in))
def test_samples_are_collated_to_the_golden_batches(case):
    meta, arrays = case
    assert set(meta) <= {"n", "draws", "paths4", "images"}
    images = np.stack([pattern(*arguments)[..., ::-1].transpose(2, 0, 1) for arguments in meta["images"]])
    labels = [arrays[f"label{i}"].copy() for i in range(meta["n"])]
    for number, rows in enumerate(labels):
        rows[:, 0] = number
    targets = np.concatenate(labels)
    if "img" in arrays:
        np.testing.assert_array_equal(images, arrays["img"])
    if "lab" in arrays:
        np.testing.assert_array_equal(targets, arrays["lab"])
    found, found_targets, _ = quad(images, targets, np.array(meta["draws"]))
    assert len(found) == len(meta["paths4"])
    if "img4" in arrays:
        assert np.abs(found.astype(int) - arrays["img4"]).max() <= 1
    if "lab4" in arrays:
        np.testing.assert_array_equal(found_targets, arrays["lab4"])
