"""Plots are correct: boxes at their places, readable names, curves through their points."""

import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest

from flatout.charts.boxes import CAPTION_PX, GAP_PX, Tag, plot_batch, plot_boxes
from flatout.charts.canvas import (
    ACCENT,
    PIXELS,
    Axes,
    Canvas,
    Frame,
    colour_of,
    ink_on,
    plain,
    shortened,
    shortened_file,
    ticks,
    write_image,
)
from flatout.charts.evaluation import plot_label_statistics
from flatout.charts.results import PANELS, plot_results, read_results
from flatout.errors import DataError
from flatout.yolo.data.image_set import Labels
from flatout.yolo.metrics import YOLOV7_RESULTS
from flatout.yolo.train.validate import results_line

NAMES = ("bolt", "nut")


def read(path: Path) -> np.ndarray:
    return np.asarray(cv2.imread(str(path)))


def where(image: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Rows and columns of all pixels of exactly this colour, [n, 2]."""
    return np.argwhere((image == colour).all(2))


# --- boxes on images


def test_a_box_is_drawn_around_its_object():
    image = np.zeros((200, 200, 3), np.uint8)
    plot_boxes(image, np.array([[50.0, 80, 120, 160]]), np.array([1]), NAMES, letters_px=5)
    drawn = where(image, colour_of(1))
    assert drawn[:, 1].min() == pytest.approx(50, abs=2)
    assert drawn.max(0) == pytest.approx((160, 120), abs=2)
    assert not where(image, colour_of(0)).size


def test_names_in_a_crowd_do_not_cover_each_other(monkeypatch):
    tags: list[Tag] = []
    monkeypatch.setattr("flatout.charts.boxes._plot_tag", lambda image, tag, *more: tags.append(tag))
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 180, (60, 2))
    box = np.concatenate((low, low + rng.uniform(3, 60, (60, 2))), 1)
    score = rng.random(60)
    plot_boxes(np.zeros((200, 240, 3), np.uint8), box, rng.integers(0, 2, 60), NAMES, score_n=score)
    assert 3 < len(tags) < 60
    assert not any(one.overlaps(other) for one, other in itertools.combinations(tags, 2))
    for tag in tags:
        assert min(tag.left, tag.top) >= 0
        assert (tag.right, tag.bottom) <= (240, 200)


def test_names_do_not_hide_small_objects(monkeypatch):
    tags: list[Tag] = []
    monkeypatch.setattr("flatout.charts.boxes._plot_tag", lambda image, tag, *more: tags.append(tag))
    low = np.random.default_rng(1).uniform(20, [880, 580], (70, 2))
    box = np.concatenate((low, low + 12), 1)
    plot_boxes(np.zeros((600, 900, 3), np.uint8), box, np.zeros(70, int), NAMES, letters_px=9)
    assert len(tags) > 35, "most are named, all the same"
    hidden = [
        (min(tag.right, right) - max(tag.left, left)) * (min(tag.bottom, bottom) - max(tag.top, top)) > 12 * 12 / 2
        for tag in tags
        for left, top, right, bottom in box
        if tag.left < right and tag.right > left and tag.top < bottom and tag.bottom > top
    ]
    assert hidden and not any(hidden)


def test_a_batch_has_a_cell_per_image_up_to_16(tmp_path):
    images = np.zeros((20, 3, 240, 320), np.uint8)
    images[:, 0] = 200  # red
    targets = np.array([[0, 0, 0.5, 0.5, 0.25, 0.5], [15, 1, 0.5, 0.5, 0.5, 0.5], [19, 1, 0.1, 0.1, 0.1, 0.1]])
    path = plot_batch(images, targets, [f"{number}.jpg" for number in range(20)], NAMES, tmp_path / "x.png")
    sheet = read(path)
    assert sheet.shape == (4 * (240 + CAPTION_PX + GAP_PX) + GAP_PX, 4 * (320 + GAP_PX) + GAP_PX, 3)
    assert sheet[GAP_PX + 5, GAP_PX + 5].tolist() == [0, 0, 200], "BGR"
    _, left = where(sheet, colour_of(0)).min(0)
    assert left == pytest.approx(GAP_PX + 0.375 * 320, abs=2)
    bottom, right = where(sheet, colour_of(0)).max(0)
    assert (bottom, right) == pytest.approx((GAP_PX + 0.75 * 240, GAP_PX + 0.625 * 320), abs=2)
    assert where(sheet, colour_of(1)).min(0)[0] > 3 * (240 + CAPTION_PX), "the box of image 15 is in the last row"


@pytest.mark.parametrize("num_images", [1, 2, 5])
def test_few_and_small_images_can_be_plotted_too(tmp_path, num_images):
    path = plot_batch(np.zeros((num_images, 3, 32, 48), np.uint8), np.zeros((0, 6)), [], NAMES, tmp_path / "x.jpg")
    assert read(path).shape[1] >= 240


def test_colours_of_consecutive_classes_differ_clearly_and_text_on_them_is_readable():
    colours = np.array([colour_of(number) for number in range(80)], float)
    assert len({tuple(colour) for colour in colours.tolist()}) == 80
    assert np.abs(np.diff(colours, axis=0)).sum(1).min() > 150
    for colour in map(colour_of, range(80)):
        assert np.abs(np.subtract(ink_on(colour), colour)).sum() > 200


def test_letters_that_opencv_lacks_are_replaced():
    assert plain("caf\u00e9 \u732b") == "cafe ?"
    assert shortened("white blood cell", 10) == "white bl.."
    assert shortened_file("frame_000123.jpg", 12) == "..000123.jpg"


def test_an_image_is_written_completely_or_not_at_all(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        write_image(tmp_path / "absent/x.png", np.zeros((4, 4, 3), np.uint8))
    write_image(tmp_path / "x.png", np.full((4, 4, 3), 7, np.uint8))
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


# --- charts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0, 99, ["0", "20", "40", "60", "80"]),
        (0.021, 0.063, ["0.03", "0.04", "0.05", "0.06"]),
        (0, 45000, ["0", "10k", "20k", "30k", "40k"]),
        (1, 0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_are_round_numbers(low, high, expected):
    assert [text for _, text in ticks(low, high, most=5)] == expected


def test_epochs_are_whole_numbers():
    assert [text for _, text in ticks(0, 3, most=8, whole=True)] == ["0", "1", "2", "3"]


def test_a_curve_goes_through_its_points_and_leaves_gaps():
    sheet = Canvas(200, 100)
    axes = Axes(sheet, Frame(20, 10, 180, 90), x=(0, 4), y=(0, 1))
    axes.curve(np.arange(5.0), np.array([0.5, 0.5, np.nan, 0.5, 0.5]), ACCENT, 3)
    plot = sheet.render()
    columns = where(plot, ACCENT)[:, 1] / PIXELS
    assert columns.min() == pytest.approx(20, abs=2)
    assert columns.max() == pytest.approx(180, abs=2)
    assert not ((columns > 66) & (columns < 134)).any(), "there is no value between 1 and 3"
    assert where(plot, ACCENT)[:, 0].mean() / PIXELS == pytest.approx(50, abs=1)


def results(num_epochs: int, *, val_loss: float = 0.04) -> str:
    losses, numbers = (0.1, 0.05, 0.02, 0.17), (0.5, 0.4, 0.45, 0.3, val_loss, val_loss, val_loss)
    scores = dict(zip(YOLOV7_RESULTS, numbers, strict=True))
    lines = [
        results_line(epoch, num_epochs, memory_gb=1.5, mean_losses=losses, num_targets=31, width_px=320, scores=scores)
        for epoch in range(num_epochs)
    ]
    return "".join(f"{line}\n" for line in lines)


def test_results_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "results.txt"
    path.write_text(results(3) + "     3/299  broken\n")
    table = read_results(path)
    assert table.shape == (3, 15)
    assert table[:, 0].tolist() == [0, 1, 2]
    assert table[0, 1:6].tolist() == [1.5, 0.1, 0.05, 0.02, 0.17]
    assert [panel.column for panel in PANELS] == [2, 3, 4, 8, 9, 12, 13, 14, 10, 11]
    path.write_text("\n")
    with pytest.raises(DataError, match="no line with 15 columns"):
        plot_results(path)


def test_losses_of_zero_are_hidden(tmp_path):
    plots = []
    for val_loss in (0.0, 0.04):
        (tmp_path / "results.txt").write_text(results(5, val_loss=val_loss))
        plots.append(read(plot_results(tmp_path / "results.txt")))
    orange = [len(where(plot, (40, 112, 224))) for plot in plots]
    assert 0 < orange[0] < 0.7 * orange[1], "three of six losses are hidden"
    assert plots[0].shape == plots[1].shape


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_the_first_epochs_can_be_plotted(tmp_path, num_epochs):
    (tmp_path / "results.txt").write_text(results(num_epochs))
    assert plot_results(tmp_path / "results.txt", tmp_path / "y.png").stat().st_size > 5000


@pytest.mark.parametrize(("num_classes", "num_labels"), [(1, 0), (3, 50), (80, 400)])
def test_statistics_are_plotted_for_any_number_of_classes_and_labels(tmp_path: Path, num_classes, num_labels):
    rng = np.random.default_rng(0)
    boxes = np.concatenate((rng.integers(0, num_classes, (num_labels, 1)), rng.uniform(0, 1, (num_labels, 4))), 1)
    labels = Labels(boxes.astype(np.float32), np.array([0, num_labels]), np.zeros((0, 2)), np.zeros(num_labels + 1))
    path = plot_label_statistics(
        labels.class_box_T5, [f"kind {number}" for number in range(num_classes)], tmp_path / "labels.jpg"
    )
    assert read(path).shape[1] > 1000


def test_box_positions_are_plotted_with_y_pointing_down(tmp_path: Path):
    box = np.array([[0, 0.1, 0.2, 0.02, 0.02]] * 9, np.float32)  # left, near the top
    labels = Labels(box, np.array([0, 9]), np.zeros((0, 2)), np.zeros(10))
    sheet = read(plot_label_statistics(labels.class_box_T5, ["a"], tmp_path / "labels.png"))
    dark = where(sheet, (122, 54, 8))
    lower_left = dark[(dark[:, 1] < sheet.shape[1] / 2) & (dark[:, 0] > sheet.shape[0] / 2)]
    centre = lower_left.mean(0) / sheet.shape[:2]
    assert centre[0] < 0.75, "the label lies above the middle of its panel"
    assert centre[1] < 0.25
