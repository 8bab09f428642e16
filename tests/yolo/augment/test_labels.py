"""Labels through mosaics and warps: shortcuts change nothing, and no label gets the polygon of another."""

import numpy as np
import pytest

from flatout.yolo.augment.draw import AugmentConfig, Color, colors, draw_training
from flatout.yolo.augment.labels import (
    boxes_by_numpy,
    boxes_of_corners,
    gather_labels,
    warp_labels,
    warped_boxes,
)
from flatout.yolo.augment.layout import lay_out, resized_wh
from flatout.yolo.augment.paint import Classic, Fast, paste_copies, visible_region, warp
from flatout.yolo.augment.paste import choose_copies
from flatout.yolo.data.image_set import ranges
from tests.yolo.augment.scenes import UNWARPED, busy_set, labels_of, one_draw, renderer_of
from tests.yolo.pattern import pattern

SIZE = 64


def box_of_all_points(polygon_P2: np.ndarray, matrix_33: np.ndarray, out_wh: tuple[int, int]) -> np.ndarray:
    """The definition: 1000 points along the closed polygon, warped, without those outside."""
    closed = np.concatenate((polygon_P2, polygon_P2[:1])).astype(np.float64)
    along = np.linspace(0, len(closed) - 1, 1000)
    points = np.stack(
        [np.interp(along, np.arange(len(closed)), closed[:, axis]) for axis in range(2)] + [along * 0 + 1]
    )
    x, y, w = matrix_33 @ points
    x, y = x / w, y / w
    inside = (x >= 0) & (y >= 0) & (x <= out_wh[0]) & (y <= out_wh[1])
    x, y = x[inside], y[inside]
    return np.array([x.min(), y.min(), x.max(), y.max()]) if x.any() else np.zeros(4)


@pytest.mark.parametrize("perspective", [False, True])
@pytest.mark.parametrize("most_points", [3, 12, 1500])
def test_boxes_of_polygons_are_those_of_all_their_points(most_points, perspective):
    rng = np.random.default_rng(most_points)
    counts = rng.integers(1 if most_points > 3 else 3, most_points + 1, 60)
    polygons = [rng.uniform(-20, 150) + rng.uniform(-60, 60, (count, 2)) for count in counts]
    matrices = np.tile(np.eye(3), (60, 1, 1)) + rng.normal(0, 0.3, (60, 3, 3)) * [[1, 1, 40], [1, 1, 40], [0, 0, 0]]
    if perspective:
        matrices[:, 2, :2] = rng.normal(0, 0.001, (60, 2))
    found = boxes_by_numpy(np.concatenate(polygons), counts, matrices, (100, 80), perspective=perspective)
    expected = [box_of_all_points(*pair, (100, 80)) for pair in zip(polygons, matrices, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    assert (found.any(1) & (found != np.round(found)).any(1)).sum() > 10


def test_a_label_without_polygon_keeps_its_own_box_beside_labels_that_have_one():
    """YOLOv7 pairs labels and polygons wrongly in a mosaic of files with polygons and files with boxes."""
    square = np.array([[0.3, 0.3], [0.7, 0.3], [0.7, 0.7], [0.3, 0.7]], np.float32)
    with_box = np.array([[0, 0.5, 0.5, 0.4, 0.4]], np.float32)
    with_polygon = np.array([[1, 0.5, 0.5, 0.4, 0.4]], np.float32)
    labels = labels_of([with_box, with_polygon], [[], [square]])
    draws = one_draw([{"tiles": [0, 1, 0, 1], "centre": (SIZE, SIZE), "warp": UNWARPED}])
    canvases = lay_out(draws, np.full((2, 2), SIZE), size=SIZE, out_wh=(SIZE, SIZE))
    warped = warp_labels(gather_labels(labels, canvases), canvases, out_wh=(SIZE, SIZE), perspective=False)
    assert warped.class_T.tolist() == [0, 1, 0, 1]
    # Tiles meet in the middle of the canvas, and so of the output: a quarter of each is visible.
    low, high = 0.2 * SIZE, 0.3 * SIZE
    expected = [[0, 0, low, low], [high + 0.5 * SIZE, 0, SIZE, low]]
    np.testing.assert_allclose(warped.box_T4[:2], expected, atol=0.15)
    np.testing.assert_allclose(warped.box_T4[0, :2], 0, atol=0.15)


def test_copies_mirror_the_label_and_the_pixels():
    canvas = np.full((100, 100, 3), 10, np.uint8)
    canvas[20:41, 10:31] = 200
    square = np.array([[0.1, 0.2], [0.3, 0.2], [0.3, 0.4], [0.1, 0.4]], np.float32)
    labels = labels_of([np.array([[5, 0.2, 0.3, 0.2, 0.2]], np.float32)], [[square]])
    draws = one_draw([{"tiles": [0, 0, 0, 0], "centre": (100, 100)}])
    canvases = lay_out(draws, np.full((1, 2), 100), size=100, out_wh=(100, 100))
    gathered = gather_labels(labels, canvases)
    extended, (copied,) = choose_copies(
        gathered, canvases.canvas_wh_Q2, np.zeros(1), 0.25, lambda key, n, count: np.array([0])
    )
    assert copied == [0] and len(extended.canvas_T) == 5
    np.testing.assert_allclose(extended.box_T4[-1], [170, 20, 190, 40], atol=1e-4)
    paste_copies(canvas, [square * 100])
    assert (canvas[20:41, 69:90] == 200).all() and (canvas[20:41, 31:69] == 10).all()


def test_a_warp_reads_nothing_outside_of_the_visible_region():
    """Pixels outside of it do not change the result."""
    rng = np.random.default_rng(0)
    for seed in range(40):
        angle, scale = rng.uniform(-0.6, 0.6), rng.uniform(0.4, 2)
        matrix = (
            np.array([[np.cos(angle), np.sin(angle), 0], [-np.sin(angle), np.cos(angle), 0], [0, 0, 1 / scale]]) * scale
        )
        matrix[:2, 2] = rng.uniform(-80, 60, 2)
        canvas = rng.integers(0, 256, (128, 96, 3)).astype(np.uint8)
        x1, y1, x2, y2 = visible_region(matrix, (96, 128), (64, 48))
        other = (255 - canvas).astype(np.uint8)
        other[y1:y2, x1:x2] = canvas[y1:y2, x1:x2]
        found, expected = (warp(each, matrix, (64, 48), perspective=False) for each in (other, canvas))
        np.testing.assert_array_equal(found, expected, err_msg=str(seed))


@pytest.mark.parametrize("gamma", [{}, {"gamma": np.exp(np.linspace(-1, 1, 152))}], ids=["scaled", "gamma"])
def test_scaled_colours_equal_looked_up_ones_for_any_gain(gamma):
    """The fast painter scales where that equals the table; every value of every channel is tried."""
    rng = np.random.default_rng(1)
    values = np.arange(256, dtype=np.uint8)
    image = np.stack(
        (np.tile(values, (64, 1)), np.repeat(values[::4, None], 256, 1), np.roll(np.tile(values, (64, 1)), 77, 1)), 2
    )
    gain_M3 = np.concatenate((np.ones((1, 3)), [[1.2, 3, 0]], 1 + rng.uniform(-1, 1, (150, 3)) * (0.015, 0.7, 0.4)))
    changes = colors({"hsv": gain_M3, **gamma})
    assert 0 < np.isnan(changes.offset_3[:, : 2 if gamma else 3]).mean() < 0.15, "most gains can be scaled, not all"
    fast, classic = Fast(), Classic()
    for one in zip(*changes, strict=True):
        np.testing.assert_array_equal(fast.recolor(image, Color(*one)), classic.recolor(image, Color(*one)))


def test_ranges_are_listed_one_after_the_other():
    positions, owners = ranges(np.array([5, 0, 9]), np.array([2, 0, 3]))
    assert positions.tolist() == [5, 6, 9, 10, 11]
    assert owners.tolist() == [0, 0, 2, 2, 2]


def test_samples_without_any_label_are_rendered():
    images = [pattern(50, 60, k) for k in range(4)]
    config = AugmentConfig(mixup=1, copy_paste=0.5, paste_in=1)
    renderer = renderer_of(images, labels_of([np.zeros((0, 5), np.float32)] * 4), config, size=SIZE)
    out = np.empty((1, 3, SIZE, SIZE), np.uint8)
    targets, counts, _ = renderer.render(one_draw([{"tiles": [0, 1, 2, 3], "centre": (60, 60)}], paste=True), out)
    assert targets.shape == (0, 6) and counts.tolist() == [0]


def test_labels_do_not_depend_on_the_other_samples_of_a_micro_batch():
    images, labels = busy_set(8, seed=9, polygons="some")
    wh = np.array([image.shape[1::-1] for image in images])
    one = [
        one_draw([{"tiles": rng, "centre": (60, 70), "warp": (0, 0, 9, 0.9, 2, 1, 0.5, 0.4)}])
        for rng in ([0, 1, 2, 3], [4, 5, 6, 7])
    ]
    together = {name: np.concatenate([draws[name] for draws in one]) for name in one[0]}
    boxes = []
    for draws in (*one, together):
        canvases = lay_out(draws, np.minimum(wh, SIZE), size=SIZE, out_wh=(SIZE, SIZE))
        boxes.append(warp_labels(gather_labels(labels, canvases), canvases, out_wh=(SIZE, SIZE), perspective=False))
    np.testing.assert_array_equal(np.concatenate((boxes[0].box_T4, boxes[1].box_T4)), boxes[2].box_T4)
    assert set(boxes[2].sample_T.tolist()) <= {0, 1}


@pytest.mark.parametrize("polygons", ["none", "some", "all"])
@pytest.mark.parametrize("change", [{"degrees": 25, "shear": 8}, {"mosaic": 0.0, "mixup": 0}, {"scale": 0.9}])
def test_leaving_out_invisible_labels_changes_nothing(polygons, change):
    images, labels = busy_set(12, seed=6, polygons=polygons)
    wh_N2 = resized_wh(np.array([image.shape[1::-1] for image in images]), SIZE)
    index = np.arange(60)
    config = AugmentConfig(**{"mixup": 0.5, "translate": 0.3, "paste_in": 0} | change)
    draws = draw_training(
        config, num_images=12, size=SIZE, seed=2, epoch=0, positions_M=index, indices_M=index % len(images)
    )
    canvases = lay_out(draws, wh_N2, size=SIZE, out_wh=(SIZE, SIZE))
    everything, visible = gather_labels(labels, canvases), gather_labels(labels, canvases, visible_in=(SIZE, SIZE))
    assert len(visible.canvas_T) < len(everything.canvas_T)
    results = [warp_labels(each, canvases, out_wh=(SIZE, SIZE), perspective=False) for each in (visible, everything)]
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert len(results[0].sample_T) > 20


def test_boxes_warped_by_their_sides_equal_those_of_their_corners():
    rng = np.random.default_rng(3)
    low = rng.uniform(-50, 150, (500, 2))
    box_T4 = np.concatenate((low, low + rng.uniform(0, 90, (500, 2))), axis=1).astype(np.float32)
    matrix_Q33 = np.tile(np.eye(3), (7, 1, 1))
    matrix_Q33[:, :2] += rng.normal(0, 0.5, (7, 2, 3)) * [1, 1, 30]
    canvas_T = np.sort(rng.integers(0, 7, 500))
    expected = boxes_of_corners(box_T4, matrix_Q33, canvas_T, (100, 80))
    np.testing.assert_array_equal(warped_boxes(box_T4, matrix_Q33, canvas_T).clip(0, (100, 80) * 2), expected)
