"""NMS gives the golden boxes, scores and classes, in their order."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.yolo.nms import NmsConfig, non_max_suppression
from tests.golden_cases import golden_cases

INFORMATIVE = {"N", "nc", "dtype", "note"}
READ = {"name", "B", "args", "kept", "out_dtype", "pred_from", "recipe_seed"}
PLACES = np.array([(100, 100), (300, 120), (200, 400)], np.float32)


def cases_of(path: Path) -> Iterable[tuple[str, tuple[Path, dict[str, Any]]]]:
    return [(record["name"], (path, record)) for record in json.loads(path.read_text())]


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        pytest.skip(f"{path.name} is not in the golden folder")
    with np.load(path) as arrays:
        return {key: arrays[key] for key in arrays.files}


def drawn(seed: int) -> np.ndarray:
    """The input of a case that stores a seed: three crowds of 160 boxes, and one isolated box with a low score."""
    u = np.random.Generator(np.random.PCG64(seed)).random((480, 85), dtype=np.float32)
    centre = PLACES[np.arange(480) % 3] + (u[:, 0:2] - np.float32(0.5)) * 8
    rows = np.concatenate((centre, 90 + u[:, 2:4] * 8, 0.5 + 0.5 * u[:, 4:5], u[:, 5:]), axis=1)
    rows[-1, :5] = 600, 600, 50, 60, 0.02
    return rows[None]


def prediction_of(record: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> np.ndarray:
    if "recipe_seed" in record:
        prediction = drawn(record["recipe_seed"])
        if (check := stored.get(f"{record['name']}/check")) is not None:
            found = [prediction.sum(dtype=np.float64), prediction.flat[0], prediction.flat[-1]]
            np.testing.assert_allclose(found, check, rtol=1e-6)
        return prediction
    source = f"{record.get('pred_from', record['name'])}/pred"
    if source not in stored:
        pytest.skip(f"{source} is not in the golden arrays")
    return stored[source]


@pytest.mark.parametrize("case", golden_cases("yolov7-metrics/nms.json", cases_of, also=("yolov7-metrics/nms.npz",)))
def test_nms_gives_the_golden_rows(case):
    path, record = case
    assert set(record) <= READ | INFORMATIVE
    stored, name = arrays_of(path.with_suffix(".npz")), record["name"]
    prediction = prediction_of(record, stored)
    images = range(len(prediction))
    outputs = {image: stored[f"{name}/out_{image}"] for image in images if f"{name}/out_{image}" in stored}
    labels = {image: stored[f"{name}/labels_{image}"] for image in images if f"{name}/labels_{image}" in stored}
    num_own = sum(key.startswith(f"{name}/") and key.split("/")[1] not in ("pred", "check") for key in stored)
    assert num_own == len(outputs) + len(labels), "an array of this case is unknown"
    if not outputs and "kept" not in record:
        pytest.skip("the case stores no result")

    args = {key: tuple(value) if isinstance(value, list) else value for key, value in record.get("args", {}).items()}
    certain = [torch.from_numpy(labels.get(image, np.zeros((0, 5), np.float32))) for image in images]
    found = non_max_suppression(torch.from_numpy(prediction), NmsConfig(**args), labels=certain if labels else None)
    rows = found.per_image()
    assert [len(each) for each in rows] == record.get("kept", [len(each) for each in rows])
    assert [str(each.dtype) for each in rows] == record.get("out_dtype", ["torch.float32"] * len(rows))
    for image, expected in outputs.items():
        np.testing.assert_allclose(rows[image].numpy(), expected, rtol=1e-6, atol=0)
