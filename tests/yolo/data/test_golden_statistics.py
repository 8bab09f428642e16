"""Anchor fit, class weights and image weights agree with the goldens."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.yolo.data.anchors import boxes_at_size, fit_of, search_anchors
from flatout.yolo.data.image_set import Labels, class_counts, class_weights, epoch_class_weights, image_weights
from tests.golden_cases import golden_cases


def labels_of(path: Path) -> tuple[Labels, np.ndarray]:
    """The labels l0, l1, ... of anchors.npz, and the sizes of their images."""
    if not path.exists():
        pytest.skip(f"{path.name} is not in the golden folder")
    with np.load(path) as arrays:
        size_wh = arrays["shapes"].astype(np.float64)
        rows = [arrays[f"l{number}"] for number in range(len(size_wh))]
    first = np.cumsum([0, *map(len, rows)])
    boxes = np.concatenate(rows)
    return Labels(boxes, first, np.zeros((0, 2), np.float32), np.zeros(len(boxes) + 1, np.int64)), size_wh


def boxes_of(path: Path, img_size: int) -> np.ndarray:
    labels, size_wh = labels_of(path)
    size_of_label = np.repeat(size_wh, np.diff(labels.first_N), 0)
    return boxes_at_size(size_of_label, labels.class_box_T5[:, 3:].astype(np.float64), img_size)


def anchor_cases(path: Path) -> Iterable[tuple[str, Any]]:
    with np.load(path) as arrays:
        meta = json.loads(str(arrays["meta"]))
    for number, record in enumerate(meta.get("metrics", [])):
        yield f"metrics {number}", (path, "metrics", {**record, "anchors": meta["anchor_sets"][record["anchors"]]})
    if "kmeans_example" in meta:
        yield "kmeans_example", (path, "search", meta["kmeans_example"])


@pytest.mark.parametrize("case", golden_cases("yolov7-data/anchors.npz", anchor_cases))
def test_the_fit_of_anchors_is_the_golden_one(case):
    path, kind, record = case
    boxes = boxes_of(path, record["imgsz"])
    if kind == "search":
        check_search(record, boxes)
        return
    assert set(record) <= {"imgsz", "anchors", "thr", "bpr", "aat", "fitness", "n_all", "n_ge2", "n_lt3"}
    found = fit_of(np.array(record["anchors"], float).reshape(-1, 2), boxes, threshold=record["thr"])
    assert len(boxes) == record["n_all"]
    assert found.num_boxes == record["n_ge2"]
    assert found.num_tiny == record["n_lt3"]
    measured = (found.best_recall, found.above_threshold, found.fitness)
    assert measured == pytest.approx((record["bpr"], record["aat"], record["fitness"]), abs=1e-5)


def check_search(record, boxes):
    """The stored fitness is right, and searched anchors are at most 0.01 worse than the stored ones."""
    stored = np.array(record["anchors"], float)
    assert fit_of(stored, boxes, threshold=record["thr"]).fitness == pytest.approx(record["fitness"], abs=1e-5)
    found = search_anchors(
        boxes, len(stored), np.random.default_rng(0), threshold=record["thr"], generations=record["gen"]
    )
    assert fit_of(found, boxes, threshold=record["thr"]).fitness >= record["fitness"] - 0.01
    assert (np.diff(found.prod(1)) >= 0).all()


def weight_cases(path: Path) -> Iterable[tuple[str, Any]]:
    with np.load(path) as arrays:
        meta = json.loads(str(arrays["meta"]))
        stored = {name: arrays[name] for name in arrays.files if name != "meta"}
    return [("weights", (path, meta, stored))]


EPOCH_KEYS = {"maps", "epoch_class_weights", "image_weights"}
"""Arrays that belong to an epoch: the mAP of each class, and the weights that depend on it."""


@pytest.mark.parametrize(
    "case", golden_cases("yolov7-data/weights.npz", weight_cases, also=("yolov7-data/anchors.npz",))
)
def test_weights_are_the_golden_ones(case):
    path, meta, stored = case
    labels, _ = labels_of(path.with_name("anchors.npz"))
    weights = class_weights(class_counts(labels, meta["nc"]))
    found = {"class_weights": weights, "model_class_weights": weights * meta["nc"]}
    assert set(stored) <= {*found, *EPOCH_KEYS}
    if "maps" in stored:
        of_epoch = epoch_class_weights(weights, stored["maps"])
        found |= {"epoch_class_weights": of_epoch, "image_weights": image_weights(labels, of_epoch)}
    for name in stored.keys() & found.keys():
        np.testing.assert_allclose(found[name], stored[name], atol=1e-6, err_msg=name)
