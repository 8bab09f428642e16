"""Tracking: objects keep their ids from frame to frame, through crossings, in results and in all files."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

import flatout.yolo
from flatout.__main__ import main
from flatout.errors import ConfigError
from flatout.yolo.predict.options import PredictOptions
from flatout.yolo.predict.result import Result
from tests.yolo.predict.small_sources import frames_in, make_image, write_video

NEEDED = "needs the extra `track`"
OPTIONS = {"img_size": 64, "conf_thres": 0.3}
PHOTOGRAPH = Path(flatout.__file__).parents[1] / "data/photographs/bus.jpg"


@pytest.fixture(scope="module")
def shapes():
    """The module of generated scenes, which needs SciPy, as the package `trackers` does."""
    pytest.importorskip("trackers", reason=NEEDED)
    from tests.yolo.predict import moving_shapes

    return moving_shapes


def follow(results: list[Result], *, conf_thres: float = 0.25, buffer: int = 30) -> list[Result]:
    from flatout.yolo.predict.tracks import Tracker

    tracker = Tracker(conf_thres=conf_thres, buffer=buffer)
    return [tracker(result) for result in results]


# Crossings


@pytest.mark.parametrize(("whole", "least"), [(True, 0.9), (False, 0.85)], ids=["whole boxes", "visible parts"])
def test_shapes_keep_their_ids_through_crossings(shapes, whole, least):
    scores, num_crossings = [], 0
    for seed in range(6):
        scene = shapes.make_scene(seed)
        followed = follow(shapes.detections(scene, seed, whole=whole))
        scores.append(shapes.idf1(shapes.true_by_id(scene), shapes.by_id(followed)))
        num_crossings += shapes.crossings(scene)
    assert num_crossings >= 20
    assert np.mean(scores) >= least, scores


def test_without_tracks_the_score_is_low(shapes):
    """The negative control: numbers in order of score are no tracks."""
    scene = shapes.make_scene(0)
    numbered = [replace(each, ids=np.arange(1, len(each) + 1)) for each in shapes.detections(scene, 0)]
    assert shapes.idf1(shapes.true_by_id(scene), shapes.by_id(numbered)) < 0.5


def test_idf1_is_that_of_its_definition(shapes):
    here, there = np.array([0.0, 0, 10, 10]), np.array([50.0, 0, 60, 10])
    truth = [{1: here, 2: there}] * 4
    assert shapes.idf1(truth, [{7: here, 8: there}] * 4) == 1.0
    # Exchanged after two of four frames: each true track keeps half of its 4 boxes, so 2 * 4 / (8 + 8).
    assert shapes.idf1(truth, [{7: here, 8: there}] * 2 + [{8: here, 7: there}] * 2) == 0.5
    # One of two is never found: 2 * 4 / (8 + 4).
    assert shapes.idf1(truth, [{7: here}] * 4) == pytest.approx(2 / 3)
    assert shapes.idf1(truth, [{7: here + 6, 8: there + 6}] * 4) == 0.0  # an IoU of 16 / 184


# Rules


def moving(shapes, score_F, *, start: int = 0, path: str = "a.mp4") -> list[Result]:
    """One disc that moves to the right, found with these scores; None: not found."""
    (still,) = shapes.detections(shapes.make_scene(0, shapes=1, frames=1), 0)
    results = []
    for number, score in enumerate(score_F, start=start):
        found = replace(
            still,
            boxes=np.array([[20 + 3 * number, 20, 60 + 3 * number, 60]], np.float32),
            scores=np.array([score or 0], np.float32),
            classes=np.zeros(1, np.int64),
            origin=still.origin._replace(path=path, frame=number + 1),
        )
        none = np.zeros(0, np.int64)
        empty = replace(found, boxes=np.zeros((0, 4), np.float32), scores=none.astype(np.float32), classes=none)
        results.append(found if score else empty)
    return results


def test_a_weak_detection_continues_a_track_but_begins_none(shapes):
    weak_first = follow(moving(shapes, [0.2, 0.2, 0.2]))
    assert [len(each) for each in weak_first] == [0, 0, 0]
    continued = follow(moving(shapes, [0.9, 0.9, 0.2, 0.2, 0.9]))
    assert [each.ids.tolist() for each in continued] == [[-1], [1], [1], [1], [1]]


@pytest.mark.parametrize(("gap", "last"), [(4, 1), (12, 2)])
def test_the_buffer_is_how_long_a_lost_object_keeps_its_id(shapes, gap, last):
    followed = follow(moving(shapes, [0.9] * 5 + [None] * gap + [0.9] * 3), buffer=8)
    assert followed[-1].ids.tolist() == [last]


def test_every_video_counts_from_one_and_starts_anew(shapes):
    both = [*moving(shapes, [0.9] * 3), *moving(shapes, [0.9] * 3, path="b.mp4"), *moving(shapes, [0.9] * 3)]
    assert [each.ids.tolist() for each in follow(both)] == 3 * [[-1], [1], [1]]


def test_without_the_package_an_error_says_what_to_install(monkeypatch, place):
    monkeypatch.setitem(sys.modules, "trackers", None)
    with pytest.raises(ConfigError, match=r"needs the package trackers .* extra `track`: pip install \"trackers>=2.1"):
        flatout.yolo.load(place / "a.pt", device="cpu").track([], **OPTIONS)
    with pytest.raises(ConfigError, match="--track-buffer 0 must be 1 or more"):
        PredictOptions(track_buffer=0)


# In Python and on the command line


def test_python_gives_ids_also_frame_by_frame(place):
    pytest.importorskip("trackers", reason=NEEDED)
    model = flatout.yolo.load(place / "a.pt", device="cpu")
    image = make_image(1, (96, 96))
    at_once = model.track([image] * 3, **OPTIONS)
    assert all((each.ids > 0).all() for each in at_once[1:]) and len(at_once[1])
    np.testing.assert_array_equal(at_once[1].ids, at_once[2].ids)
    assert (at_once[0].ids == -1).all()
    one_by_one = [model.track(image, persist=number > 0, **OPTIONS)[0] for number in range(3)]
    streamed = list(model.stream([image] * 3, track=True, **OPTIONS))
    for some in (one_by_one, streamed):
        assert [each.ids.tolist() for each in some] == [each.ids.tolist() for each in at_once]
    assert (model.track(image, **OPTIONS)[0].ids == -1).all(), "without persist, everything is new"
    assert model.predict(image, **OPTIONS)[0].ids is None


def test_ids_are_in_label_files_json_and_videos(place, tmp_path):
    pytest.importorskip("trackers", reason=NEEDED)
    writer = cv2.VideoWriter(str(tmp_path / "still.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 12.0, (96, 96))
    for _ in range(4):
        writer.write(make_image(1, (96, 96)))
    writer.release()
    words = ["--weights", place / "a.pt", "--source", "still.mp4", "--img", 64, "--conf", 0.3, "--device", "cpu"]
    words += ["--save-txt", "--save-conf", "--save-json"]
    assert main(["yolo", "detect", *map(str, words), "--track", "--name", "with"]) == 0
    assert main(["yolo", "detect", *map(str, words), "--name", "without"]) == 0
    found, plain = Path("runs/detect/with"), Path("runs/detect/without")
    third = [line.split() for line in (found / "labels/still_3.txt").read_text().splitlines()]
    assert {len(row) for row in third} == {7} and {float(row[5]) > 0.3 or int(row[-1]) > 0 for row in third} == {True}
    numbers = [int(row[-1]) for row in third if int(row[-1]) != -1]
    assert len(numbers) == len(set(numbers)) > len(third) / 2 and min(numbers) >= 1
    assert {len(line.split()) for line in (plain / "labels/still_3.txt").read_text().splitlines()} == {6}
    records = [each for each in json.loads((found / "a_predictions.json").read_text()) if each["image_id"] == "still_3"]
    assert sorted(each["track_id"] for each in records) == sorted(int(row[-1]) for row in third)
    assert not any("track_id" in each for each in json.loads((plain / "a_predictions.json").read_text()))
    with_ids, without = (frames_in(folder / "still.mp4")[2] for folder in (found, plain))
    assert (with_ids != without).any()


def test_a_video_with_crossings_has_the_same_good_ids_in_label_files_json_video_and_results(
    shapes, place, tmp_path, monkeypatch
):
    """The whole command on a video of a scene; only the boxes come from the scene instead of the network."""
    scene = shapes.make_scene(1)
    width, height = shapes.SIZE_WH
    writer = cv2.VideoWriter(str(tmp_path / "scene.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 25.0, (width, height))
    for image in scene.images:
        writer.write(image)
    writer.release()
    found = shapes.detections(scene, 1)

    def results_of_scene(frames, *args, **options):
        for read, result in zip(frames, found, strict=True):
            frame = read()
            yield replace(result, image=frame.image, origin=frame.origin)

    monkeypatch.setattr("flatout.yolo.predict.detect.results_of", results_of_scene)
    monkeypatch.setattr("flatout.yolo.predict.results.results_of", results_of_scene)
    words = ["--weights", place / "a.pt", "--source", "scene.mp4", "--device", "cpu", "--name", "scene"]
    assert main(["yolo", "detect", *map(str, words), "--track", "--save-txt", "--save-json"]) == 0
    results = flatout.yolo.load(place / "a.pt", device="cpu").track("scene.mp4")

    in_text, in_json = [], [{} for _ in results]
    for number in range(1, len(results) + 1):
        rows = np.loadtxt(f"runs/detect/scene/labels/scene_{number}.txt", ndmin=2)
        centre_n2, half_n2 = rows[:, 1:3] * shapes.SIZE_WH, rows[:, 3:5] * shapes.SIZE_WH / 2
        boxes = np.concatenate((centre_n2 - half_n2, centre_n2 + half_n2), 1)
        in_text.append({int(own): box for own, box in zip(rows[:, 5], boxes, strict=True) if own > 0})
    for record in json.loads(Path("runs/detect/scene/a_predictions.json").read_text()):
        x, y, w, h = record["bbox"]
        if record["track_id"] > 0:
            in_json[int(record["image_id"].rpartition("_")[2]) - 1][record["track_id"]] = np.array([x, y, x + w, y + h])
    in_results = shapes.by_id(results)
    for boxes, others, same in zip(in_results, in_text, in_json, strict=True):
        assert boxes.keys() == others.keys() == same.keys()
    for each in (in_results, in_text, in_json):
        assert shapes.idf1(shapes.true_by_id(scene), each) >= 0.9

    for frame, result in list(zip(frames_in(Path("runs/detect/scene/scene.mp4")), results, strict=True))[10::20]:
        right, wrong = (
            np.abs(frame.astype(float) - replace(result, ids=ids).plot()).mean() for ids in (result.ids, result.ids + 3)
        )
        assert right < 0.5 * wrong, "the ids that are drawn are those of the results"


def test_the_objects_of_a_photograph_keep_their_ids_while_the_camera_pans():
    """With the weights that come with flatout: a window moves over a photograph of a bus and people."""
    pytest.importorskip("trackers", reason=NEEDED)
    image = cv2.imread(str(PHOTOGRAPH))
    image = cv2.resize(image, None, fx=400 / image.shape[1], fy=400 / image.shape[1])
    frames = [np.ascontiguousarray(image[:, 6 * number : 6 * number + 320]) for number in range(8)]
    results = flatout.yolo.load("yolov7-tiny", device="cpu").track(frames, imgsz=320, classes="bus")
    ids = [each.ids[:1].tolist() for each in results]
    assert ids == [[-1], *[[1]] * 7]


def test_a_video_without_objects_can_be_tracked(place, tmp_path):
    pytest.importorskip("trackers", reason=NEEDED)
    model = flatout.yolo.load(place / "a.pt", device="cpu")
    results = model.track(write_video(tmp_path / "clip.mp4"), img_size=64, conf_thres=1.0)
    assert len(results) == 6 and {len(each.ids) for each in results} == {0}
