"""Strict label rules keep and drop the same images as YOLOv7."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from flatout.images import decode
from flatout.yolo.data.scan import scan_image
from tests.golden_cases import golden_cases

READ = {
    "name", "file", "image_b64", "text", "found_missing_empty_corrupt", "outcome", "reason", "labels", "wh", "segments",
    "decoded_hw",
}  # fmt: skip
SWAPPED_ONLY_BY_US = (5, 7)
"""Orientations for which YOLOv7 records the size without swapping it; flatout records that of the decoded image."""


def records(path: Path):
    return [(record["name"], record) for record in json.loads(path.read_text())["cases"]]


@pytest.mark.parametrize("case", golden_cases("yolov7-data/labels.json", records))
def test_an_image_is_kept_or_dropped_as_in_the_golden(case, tmp_path):
    assert set(case) <= READ
    image, label = tmp_path / case["file"], tmp_path / "label.txt"
    image.write_bytes(base64.b64decode(case["image_b64"]))
    if case["text"] is not None:
        label.write_bytes(case["text"].encode())
    scanned = scan_image(str(image), str(label), strict=True)
    assert ("dropped" if scanned.reason else "kept") == case["outcome"]
    assert scanned.reason == case.get("reason", "")
    state = scanned.label_file
    counts = [state in ("found", "empty"), state == "missing", state == "empty", bool(scanned.reason)]
    assert counts == [bool(count) for count in case["found_missing_empty_corrupt"]]
    if case["outcome"] == "kept":
        check_labels(case, scanned)
        check_sizes(case, scanned.header, image)


def check_labels(case, scanned):
    boxes = scanned.labels.class_box_n5
    assert boxes.dtype == np.float32
    np.testing.assert_array_equal(boxes, np.array(case["labels"], np.float32).reshape(-1, 5))
    assert len(scanned.labels.polygons) == len(case["segments"])
    for points, expected in zip(scanned.labels.polygons, case["segments"], strict=True):
        np.testing.assert_array_equal(points, np.array(expected, np.float32))


def check_sizes(case, header, image):
    decoded = decode(image.read_bytes()).image
    if "decoded_hw" in case:
        assert list(decoded.shape[:2]) == case["decoded_hw"]
    if "wh" in case and header.orientation not in SWAPPED_ONLY_BY_US:
        assert list(header.size_wh) == case["wh"]
    assert header.size_wh == decoded.shape[1::-1]
