"""What a result offers: boxes in several formats, names, a short text, plots, files, and other tools' formats."""

import copy
import json
import pickle
import sys
from types import ModuleType, SimpleNamespace

import cv2
import numpy as np
import pytest

from flatout.errors import ConfigError, ResourceError
from flatout.yolo import Result
from flatout.yolo.predict.files import Origin
from flatout.yolo.predict.result import Boxes, done_line

NAMES = ("apple", "leaf", "bus", "berry", "toy")
CORNERS = [[10, 20, 50, 40], [0, 0, 200, 100], [100.4, 10.6, 120, 30], [5, 5, 5.2, 9]]


@pytest.fixture
def result() -> Result:
    """Three apples and a leaf in an image of 200 x 100."""
    return Result(
        boxes=Boxes(np.array(CORNERS, np.float32), (100, 200)),
        scores=np.array([0.9, 0.8, 0.7, 0.4], np.float32),
        classes=np.array([0, 0, 1, 0]),
        names=NAMES,
        image=np.full((100, 200, 3), 90, np.uint8),
        origin=Origin("photos/a.jpg", "image", 0, 1),
        ms=12.4,
    )


# Text


def with_classes(result: Result, *classes: int) -> Result:
    number = len(classes)
    return Result(
        boxes=Boxes(np.zeros((number, 4), np.float32), (100, 200)),
        scores=np.zeros(number, np.float32),
        classes=np.array(classes, np.int64),
        names=NAMES,
        image=result.image,
        origin=result.origin,
    )


def test_the_short_text_counts_the_objects(result):
    assert repr(result) == "3 apples, 1 leaf; 12 ms"
    assert repr([with_classes(result)]) == "[nothing; 0 ms]"
    assert with_classes(result, 2, 2, 3, 3, 4, 4).summary() == "2 buses, 2 berries, 2 toys"


def test_every_detection_has_the_name_of_its_class(result):
    assert result.labels == ["apple", "apple", "leaf", "apple"] and result.names[result.classes[2]] == "leaf"


# Boxes


def test_boxes_know_four_formats(result):
    first = result.boxes[:1]
    np.testing.assert_array_equal(first.xyxy, [[10, 20, 50, 40]])
    np.testing.assert_array_equal(first.xywh, [[30, 30, 40, 20]])
    np.testing.assert_allclose(first.xyxyn, [[0.05, 0.2, 0.25, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(first.xywhn, [[0.15, 0.3, 0.2, 0.2]], rtol=1e-6)
    np.testing.assert_array_equal(result.boxes[0].xywh, [30, 30, 40, 20])
    np.testing.assert_allclose(result.boxes[result.scores > 0.85].xyxyn, first.xyxyn)
    for each in (result.boxes.xyxy, result.boxes.xywh, result.boxes.xyxyn, result.boxes.xywhn):
        assert type(each) is np.ndarray and each.dtype == np.float32 and each.shape == (4, 4)


def test_boxes_are_an_array_and_what_is_computed_from_them_is_a_plain_one(result):
    assert isinstance(result.boxes, np.ndarray) and result.boxes.shape == (4, 4)
    boxes = result.boxes
    for plain in (boxes * 2, boxes[:, 2:], boxes[:, 0], boxes[0][2:], boxes[..., 1], boxes[boxes > 60], boxes > 3):
        assert type(plain) is np.ndarray
    assert result.boxes.max() == 200 and isinstance(float(result.boxes[0, 0]), float)
    result.boxes.xyxy[:] = 0
    assert result.boxes[0, 0] == 10, "formats are copies"


def test_a_result_may_be_made_from_plain_arrays(result):
    other = Result(**{**vars(result), "boxes": np.array(CORNERS, np.float32)})
    np.testing.assert_array_equal(other.boxes.xywhn, result.boxes.xywhn)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda boxes: pickle.loads(pickle.dumps(boxes))])
def test_copies_of_boxes_still_know_their_image(result, copied):
    other = copied(result.boxes)
    assert isinstance(other, Boxes) and other.size_hw == (100, 200)
    np.testing.assert_array_equal(other, result.boxes)


# Pictures


def test_plot_leaves_the_image_alone(result):
    before = result.image.copy()
    plotted = result.plot()
    assert plotted.shape == before.shape and (plotted != before).any() and (result.image == before).all()
    assert (result.draw() == plotted).all()


def test_ids_are_part_of_the_plot(result):
    tracked = Result(**{**vars(result), "ids": np.array([7, -1, 3, 8])})
    other = Result(**{**vars(result), "ids": np.array([6, -1, 3, 8])})
    plots = [each.plot() for each in (result, tracked, other)]
    assert (plots[0] != plots[1]).any() and (plots[1] != plots[2]).any()


def test_save_writes_the_plot_to_a_file_or_into_a_folder(result, tmp_path):
    assert result.save("out/found.png") == tmp_path.joinpath("out/found.png").relative_to(tmp_path)
    assert (cv2.imread("out/found.png") == result.plot()).all()
    assert str(result.save(tmp_path)) == str(tmp_path / "a_found.jpg") and (tmp_path / "a_found.jpg").is_file()
    assert str(result.save()) == "a_found.jpg"
    assert str(result.save("new")) == "new/a_found.jpg"
    with pytest.raises(ConfigError, match=r"save\(\): a.xyz: images are written as .bmp, .jpeg, .jpg, .png"):
        result.save("a.xyz")


def test_show_says_what_to_do_without_a_display(result, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ResourceError, match=r'this machine has no display. Write a file instead: result.save\("found'):
        result.show()


def test_show_waits_at_a_window_or_shows_a_png_in_a_notebook(result, monkeypatch):
    shown = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(cv2, "imshow", lambda name, image: shown.append((name, image.shape)))
    monkeypatch.setattr(cv2, "waitKey", lambda ms: shown.append(ms))
    monkeypatch.setattr(cv2, "destroyAllWindows", lambda: None)
    result.show()
    assert shown[-2:] == [("a", (100, 200, 3)), 0]
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=1)
    display.Image, display.display = lambda png: png, shown.append
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    result.show()
    assert (cv2.imdecode(np.frombuffer(shown[-1], np.uint8), cv2.IMREAD_COLOR) == result.plot()).all()


def test_crops_are_pixels_and_files(result, tmp_path):
    crops = result.crop()
    assert [crop.shape for crop in crops] == [(20, 40, 3), (100, 200, 3), (19, 20, 3), (4, 0, 3)]
    crops[0][:] = 0
    assert (result.image == 90).all(), "crops are copies"
    result.crop(tmp_path / "crops")
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jpg"))
    assert names == ["crops/apple/a_1.jpg", "crops/apple/a_2.jpg", "crops/leaf/a_3.jpg"]


# Other formats


def test_json_has_the_image_and_every_detection(result):
    document = json.loads(result.to_json())
    assert {key: document[key] for key in ("path", "frame", "width", "height", "ms")} == {
        "path": "photos/a.jpg", "frame": None, "width": 200, "height": 100, "ms": 12.4,
    }  # fmt: skip
    assert document["detections"][2] == {"class": 1, "name": "leaf", "score": 0.7, "box": [100.4, 10.6, 120.0, 30.0]}
    tracked = Result(**{**vars(result), "ids": np.array([7, -1, 3, 8])})
    assert [each["id"] for each in json.loads(tracked.to_json())["detections"]] == [7, -1, 3, 8]
    assert [each["track_id"] for each in tracked.to_coco()] == [7, -1, 3, 8]
    assert json.loads(with_classes(result).to_json())["detections"] == []


def test_a_data_frame_has_a_row_per_detection(result):
    pandas = pytest.importorskip("pandas", reason="needs the extra `pandas`")
    frame = result.to_df()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["class", "name", "score", "left", "top", "right", "bottom"] and len(frame) == 4
    assert frame[frame.name == "leaf"].left.tolist() == [float(np.float32(100.4))]
    assert list(with_classes(result).to_df().columns) == list(frame.columns)
    tracked = Result(**{**vars(result), "ids": np.array([7, -1, 3, 8])})
    assert tracked.to_df().id.tolist() == [7, -1, 3, 8]


def test_without_pandas_an_error_says_what_to_install(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"to_df\(\) needs pandas .* Install the extra `pandas`: pip install pandas"):
        result.to_df()


def test_supervision_gets_boxes_names_and_ids(result):
    supervision = pytest.importorskip("supervision", reason="needs the extra `track`")
    tracked = Result(**{**vars(result), "ids": np.array([7, -1, 3, 8])})
    found = tracked.to_supervision()
    assert isinstance(found, supervision.Detections) and len(found) == 4
    np.testing.assert_array_equal(found.xyxy, result.boxes)
    assert found.data["class_name"].tolist() == result.labels and found.tracker_id.tolist() == [7, -1, 3, 8]
    assert result.to_supervision().tracker_id is None


@pytest.mark.parametrize(("frames", "seconds", "speed"), [(500, 2.5, "200.0"), (3, 2, "1.5"), (2, 97.8, "0.02")])
def test_the_speed_of_images_that_take_long_is_not_zero(frames, seconds, speed):
    line = done_line(frames, 0, seconds)
    assert line == f"Done. {frames} images, 0 detections in {seconds:.1f} s: {speed} img/s, with reading and writing"
