"""Warps, mosaics, colours and mixtures give the golden pixels and labels."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.yolo.augment.draw import AugmentConfig, Color, colors
from flatout.yolo.augment.labels import CanvasLabels, gather_labels, warp_labels
from flatout.yolo.augment.layout import Canvases, lay_out, resized_wh, warp_matrices
from flatout.yolo.augment.paint import Classic, Fast, compose
from flatout.yolo.augment.paint import warp as warp_image
from flatout.yolo.augment.paint_compiled import fastest_painter
from flatout.yolo.data.image_set import offsets
from tests.golden_cases import golden_cases
from tests.yolo.augment.scenes import labels_of, one_draw, renderer_of
from tests.yolo.pattern import near_opencv, pattern

PAINTERS = [
    pytest.param(Classic, id="classic"),
    pytest.param(Fast, id="opencv"),
    pytest.param(fastest_painter, id="fast"),
]


def cases_of(path: Path) -> Iterable[tuple[str, Any]]:
    """Each case of a file's list with its number, the rest of the file's description and all arrays."""
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    meta = json.loads(str(arrays.pop("meta")))
    return [(str(number), (number, case, meta, arrays)) for number, case in enumerate(meta["cases"])]


def variants(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in arrays.items() if key.split("@")[0] == name}


def numbered(arrays: dict[str, np.ndarray], prefix: str) -> list[np.ndarray]:
    """prefix0, prefix1, ... as many as there are."""
    found: list[np.ndarray] = []
    while f"{prefix}{len(found)}" in arrays:
        found.append(arrays[f"{prefix}{len(found)}"])
    return found


def one_canvas(matrix_33: np.ndarray, scale: float) -> Canvases:
    nothing = np.zeros((1, 9, 2))
    return Canvases(
        np.zeros(1, np.int64),
        np.full(1, 4),
        np.full((1, 9), -1),
        *(nothing,) * 4,
        np.zeros((1, 2), np.int64),
        matrix_33[None],
        np.array([scale]),
    )


@pytest.mark.parametrize("case", golden_cases("yolov7-data/warp.npz", cases_of))
def test_a_warp_gives_the_golden_matrix_image_and_boxes(case):
    number, record, meta, arrays = case
    assert set(meta) <= {"cases", "draw_order"}
    known = {"h", "w", "k", "border", "draws", "perspective", "n_targets", "n_segments", "warped"}
    assert set(record) <= known
    height, width = record["h"], record["w"]
    out_wh = width + 2 * record["border"][1], height + 2 * record["border"][0]
    warp_18 = np.array([record["draws"]], np.float64)
    (matrix_33,) = warp_matrices(warp_18, np.ones(1), np.array([[width, height]]), np.array([out_wh]))
    if (expected := arrays.get(f"M{number}")) is not None:
        np.testing.assert_allclose(matrix_33, expected, rtol=0, atol=1e-9)
    image, perspective = pattern(height, width, record["k"]), record["perspective"] > 0
    is_warped = any(record["border"]) or not np.array_equal(matrix_33, np.eye(3))
    assert is_warped == record["warped"]
    found = warp_image(image, matrix_33, out_wh, perspective=perspective) if is_warped else image
    near_opencv(found, variants(arrays, f"out{number}"))

    if not {f"t{number}", f"tout{number}"} <= arrays.keys():
        return
    label_T5, polygons = arrays[f"t{number}"], numbered(arrays, f"s{number}_")
    labels = CanvasLabels(
        np.zeros(len(label_T5), np.int64),
        label_T5[:, 0],
        label_T5[:, 1:],
        np.concatenate([np.zeros((0, 2), np.float32), *polygons]),
        offsets(np.array([len(points) for points in polygons] or [0] * len(label_T5))),
    )
    warped = warp_labels(labels, one_canvas(matrix_33, warp_18[0, 3]), out_wh=out_wh, perspective=perspective)
    assert_labels(warped.class_T, warped.box_T4, arrays[f"tout{number}"])


def assert_labels(class_T: np.ndarray, box_T4: np.ndarray, expected_T5: np.ndarray, tolerance: float = 1e-3) -> None:
    """The same labels in the same order."""
    np.testing.assert_array_equal(class_T, expected_T5[:, 0])
    np.testing.assert_allclose(box_T4, expected_T5[:, 1:], rtol=0, atol=tolerance)


@pytest.mark.parametrize("painter", PAINTERS)
@pytest.mark.parametrize("case", golden_cases("yolov7-data/mosaic[49].npz", cases_of))
def test_a_mosaic_gives_the_golden_canvas_image_and_labels(case, painter):
    number, record, meta, arrays = case
    assert set(meta) <= {"img_size", "cases", "sets", "n_seg"}
    assert set(record) <= {"set", "indices", "yc", "xc", "warp_draws", "n_canvas_segments"}
    name, size = record["set"], meta["img_size"]
    images = [pattern(*arguments) for arguments in meta["sets"][name]]
    boxes = [arrays[f"{name}_labels{i}"] for i in range(len(images))]
    polygons = [numbered(arrays, f"{name}_seg{i}_") for i in range(len(images))]
    labels = labels_of(boxes, polygons)
    renderer = renderer_of(images, labels, AugmentConfig(), size=size, painter=painter())
    canvas_draws = {
        "tiles": record["indices"],
        "centre": (record["xc"], record["yc"]),
        "warp": record["warp_draws"],
    }
    draws = one_draw([canvas_draws])
    canvases = lay_out(draws, resized_wh(renderer.size_wh_N2, size), size=size, out_wh=(size, size))
    tiles = [renderer.images[i] for i in record["indices"]]
    canvas = compose(tiles, canvases.origin_Q92[0, : len(tiles)], (2 * size, 2 * size))
    if f"canvas{number}" in arrays:
        np.testing.assert_array_equal(canvas, arrays[f"canvas{number}"])
    on_canvas = gather_labels(labels, canvases)
    if f"canvas_t{number}" in arrays:
        assert_labels(on_canvas.class_T, on_canvas.box_T4, arrays[f"canvas_t{number}"], 1e-4)
    assert (on_canvas.num_points_T > 0).sum() == record["n_canvas_segments"]
    for label, expected in enumerate(numbered(arrays, f"canvas_s{number}_")):
        np.testing.assert_allclose(on_canvas.polygon(label), expected, rtol=0, atol=1e-4)

    out_1CHW = np.empty((1, 3, size, size), np.uint8)
    prepared = renderer._prepare(canvases, [], 0, (size, size))
    near_opencv(renderer.painter.paint(prepared)[..., :3], variants(arrays, f"out{number}"))
    targets_T6, *_ = renderer.render(draws, out_1CHW)
    warped = warp_labels(on_canvas, canvases, out_wh=(size, size), perspective=False)
    if f"tout{number}" in arrays:
        assert_labels(warped.class_T, warped.box_T4, arrays[f"tout{number}"])
        assert len(targets_T6) == len(arrays[f"tout{number}"])


def color_cube() -> np.ndarray:
    """16 levels of each channel, blue outermost, as an image of 64 x 64."""
    levels = np.arange(0, 256, 17, dtype=np.uint8)
    return np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(64, 64, 3)


@pytest.mark.parametrize("painter", PAINTERS)
@pytest.mark.parametrize("case", golden_cases("yolov7-data/hsv.npz", cases_of))
def test_colour_gains_give_the_golden_tables_and_pixels(case, painter):
    number, record, _, arrays = case
    assert set(record) <= {"draw", "hyp", "r", "pattern"}
    gain_3 = 1 + np.array(record["draw"]) * record["hyp"]
    np.testing.assert_allclose(gain_3, record["r"], rtol=1e-12)
    color = Color(*(part[0] for part in colors({"hsv": gain_3[None]})))
    if f"lut{number}" in arrays:
        np.testing.assert_array_equal(color.table_3V, arrays[f"lut{number}"])
    for name, image in (("cube", color_cube()), ("pat", pattern(*record["pattern"]))):
        for expected in variants(arrays, f"{name}{number}").values():
            difference = np.abs(painter().recolor(image, color).astype(int) - expected)
            assert difference.max() <= 1


@pytest.mark.parametrize("painter", PAINTERS)
@pytest.mark.parametrize("case", golden_cases("yolov7-data/mixup.npz", cases_of))
def test_two_images_are_mixed_to_the_golden_one(case, painter):
    number, record, _, arrays = case
    assert set(record) <= {"r", "a", "b"}
    mixed = painter().mix(pattern(*record["a"]), pattern(*record["b"]), record["r"])
    for expected in variants(arrays, f"out{number}").values():
        np.testing.assert_array_equal(mixed, expected)
