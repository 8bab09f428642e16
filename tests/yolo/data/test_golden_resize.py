"""Resizing and letterboxing give the golden geometry, and with OpenCV the golden pixels."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.yolo.data.letterbox import Fit, fit, fit_tightly, letterbox, resize_long_side, resized_hw
from tests.golden_cases import golden_cases
from tests.reference.boxes_of_yolov7 import fit_stretched
from tests.yolo.pattern import near_opencv, pattern


def image_cases(path: Path) -> Iterable[tuple[str, Any]]:
    """Each case of a file, with its array if the file has it."""
    with np.load(path) as arrays:
        cases = json.loads(str(arrays["meta"]))["cases"]
        return [(str(number), (case, _variants(arrays, f"out{number}"))) for number, case in enumerate(cases)]


def _variants(arrays: Any, name: str) -> dict[str, np.ndarray]:
    return {key: arrays[key] for key in (name, f"{name}@cv4", f"{name}@cv5") if key in arrays.files}


def recipe_cases(path: Path) -> Iterable[tuple[str, Any]]:
    with np.load(path) as arrays:
        cases = json.loads(str(arrays["meta"]))["cases"]
        return [(str(n), (case, arrays[f"img{n}"])) for n, case in enumerate(cases) if f"img{n}" in arrays.files]


@pytest.mark.parametrize("case", golden_cases("yolov7-data/images.npz", recipe_cases))
def test_the_pattern_of_the_test_images_is_the_golden_one(case):
    arguments, expected = case
    np.testing.assert_array_equal(pattern(*arguments), expected)


@pytest.mark.parametrize("case", golden_cases("yolov7-data/load_image.npz", image_cases))
def test_an_image_is_resized_to_the_golden_pixels(case):
    record, variants = case
    assert set(record) <= {"h", "w", "k", "img_size", "augment", "hw0", "hw"}
    found = resize_long_side(
        pattern(record["h"], record["w"], record["k"]), record["img_size"], augment=record["augment"]
    )
    assert list(found.native_hw) == record["hw0"]
    assert list(found.hw) == record["hw"]
    assert list(resized_hw(found.native_hw, record["img_size"])) == record["hw"]
    near_opencv(found.image, variants)


def golden_fit(record: dict[str, Any]) -> Fit:
    shape = record["new_shape"]
    native, target = (record["h"], record["w"]), (shape, shape) if isinstance(shape, int) else tuple(shape)
    if record["auto"]:
        return fit_tightly(native, target, stride=record["stride"], enlarge=record["scaleup"])
    return fit_stretched(native, target) if record["scaleFill"] else fit(native, target, enlarge=record["scaleup"])


@pytest.mark.parametrize("case", golden_cases("yolov7-data/letterbox.npz", image_cases))
def test_an_image_is_letterboxed_to_the_golden_pixels(case):
    record, variants = case
    known = {"h", "w", "k", "new_shape", "auto", "scaleFill", "scaleup", "stride", "ratio", "pad", "out_hw"}
    assert set(record) <= known
    fitted = golden_fit(record)
    assert list(fitted.ratio_wh) == record["ratio"]
    assert list(fitted.pad_wh) == record["pad"]
    assert list(fitted.size_hw) == record["out_hw"]
    near_opencv(letterbox(pattern(record["h"], record["w"], record["k"]), fitted), variants)
