"""detect.py from weights to files: what it finds, prints and writes, and how it ends."""

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from flatout.__main__ import main
from flatout.errors import CheckpointError, ConfigError, DataError, ResourceError
from flatout.yolo.nms import NmsConfig
from flatout.yolo.predict.detect import DetectResult, detect
from flatout.yolo.predict.files import Files, Origin, find_sources, frames_of
from flatout.yolo.predict.options import DetectOptions, PredictOptions
from flatout.yolo.predict.outputs import folder_name
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.results import load_networks, predictor_for
from flatout.yolo.predict.results import results_of as in_order
from flatout.yolo.predict.windows import open_windows
from flatout.yolo.weights import read_weights, save_weights
from tests.reference.plain_detect import plain_detect
from tests.yolo.predict.small_sources import NAMES, confident_network, frames_in, make_image, write_images, write_video
from tests.yolo.test_load import weights_of

CPU = torch.device("cpu")


def run(place: Path, **changed: Any) -> DetectResult:
    settings: dict[str, Any] = {
        "weights": (str(place / "a.pt"),),
        "source": str(place / "images"),
        "img_size": 64,
        "conf_thres": 0.3,
        "device": "cpu",
    }
    return detect(DetectOptions(**settings | changed))


def results_of(place: Path, **changed: Any) -> list[Result]:
    seen: list[Result] = []
    settings: dict[str, Any] = {"weights": (str(place / "a.pt"),), "img_size": 64, "conf_thres": 0.3, "device": "cpu"}
    source = str(place / "images")
    detect(DetectOptions(**settings | {"nosave": True, "source": source} | changed), each=seen.append)
    return seen


# Found


def test_results_come_in_the_order_of_the_files(place):
    seen = results_of(place)
    assert [Path(result.path).name for result in seen] == [f"{number:02}.png" for number in range(10)]
    assert sum(map(len, seen)) > 30 and {kind for result in seen for kind in result.classes} == {0, 1}


@pytest.mark.parametrize(("at_once", "threads"), [(1, 1), (3, 2), (16, 3)])
def test_every_batch_size_finds_what_the_plain_way_finds(place, at_once, threads):
    """In float64: kernels for other batch sizes round differently, which would swap near ties."""
    loaded = load_networks((str(place / "a.pt"),), CPU)
    network = loaded.network.double()
    predictor = predictor_for(loaded._replace(network=network), CPU, PredictOptions(img_size=64))
    files = find_sources(str(place / "images"))
    assert isinstance(files, Files)
    for path, found in zip(
        files.images, in_order(frames_of(files), predictor, threads=threads, at_once=at_once), strict=True
    ):
        plain_n6 = plain_detect(network, cv2.imread(path), size=64, stride=loaded.stride, config=NmsConfig())
        assert isinstance(found, Result) and found.path == path
        np.testing.assert_array_equal(found.classes, plain_n6[:, 5])
        np.testing.assert_allclose(found.boxes, plain_n6[:, :4], atol=1e-4)
        np.testing.assert_allclose(found.scores, plain_n6[:, 4], atol=1e-6)


def test_boxes_lie_in_the_image_in_descending_order_of_score(place):
    for result in results_of(place):
        height, width = result.image.shape[:2]
        assert (result.boxes >= 0).all() and (result.boxes <= [width, height, width, height]).all()
        assert (np.diff(result.scores) <= 0).all() and (result.scores > 0.3).all()
        assert result.boxes.dtype == result.scores.dtype == np.float32 and result.classes.dtype == np.int64


def test_classes_keeps_only_these_classes(place):
    both, one = results_of(place), results_of(place, classes=(1,))
    assert sum(map(len, results_of(place, classes=("nut",)))) == sum(map(len, one))
    assert {kind for result in both for kind in result.classes} == {0, 1}
    assert {kind for result in one for kind in result.classes} == {1}
    with pytest.raises(ConfigError, match="--classes 2: no such class, the network has classes 0 to 1"):
        run(place, classes=(0, 2))


def test_class_agnostic_nms_leaves_fewer_boxes(place):
    apart, together = (results_of(place, agnostic_nms=across, iou_thres=0.2) for across in (False, True))
    assert sum(map(len, together)) < sum(map(len, apart))


def test_an_ensemble_and_augmented_views_find_other_boxes(place):
    alone = results_of(place)
    pair = results_of(place, weights=(str(place / "a.pt"), str(place / "b.pt")))
    views = results_of(place, augment=True)
    for others in (pair, views):
        assert any(not np.array_equal(one.boxes, other.boxes) for one, other in zip(alone, others, strict=True))


def test_frames_of_a_video_give_the_results_of_the_same_images(place, tmp_path):
    frames = frames_in(place / "clip.mp4")
    for number, frame in enumerate(frames):
        cv2.imwrite(str(tmp_path / f"{number}.png"), frame)
    moving, still = results_of(place, source=str(place / "clip.mp4")), results_of(place, source=str(tmp_path))
    assert [result.origin.frame for result in moving] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(moving, still, strict=True):
        np.testing.assert_array_equal(one.boxes, other.boxes)


# Written


def test_every_image_is_written_under_its_name_with_boxes(place):
    result = run(place)
    assert result.folder == Path("runs/detect/exp")
    assert sorted(path.name for path in result.folder.iterdir()) == [f"{number:02}.png" for number in range(10)]
    for found in results_of(place):
        before, after = (
            cv2.imread(str(folder / Path(found.path).name)) for folder in (place / "images", result.folder)
        )
        assert before.shape == after.shape and (before != after).any() == (len(found) > 0)


def test_an_image_without_detections_is_written_unchanged(place):
    result = run(place, conf_thres=1.0)
    assert result.detections == 0
    for path in result.folder.iterdir():
        assert (cv2.imread(str(place / "images" / path.name)) == cv2.imread(str(path))).all()


def test_folders_are_numbered_and_a_name_may_be_used_again(place):
    assert [str(run(place, nosave=True).folder) for _ in range(2)] == ["runs/detect/exp", "runs/detect/exp2"]
    assert str(run(place, nosave=True, name="exp", exist_ok=True).folder) == "runs/detect/exp"
    assert str(run(place, nosave=True, project="out", name="mine").folder) == "out/mine"


def test_label_files_have_the_form_of_yolov7(place):
    result = run(place, save_txt=True, save_conf=True, nosave=True)
    seen = results_of(place)
    assert list(result.folder.iterdir()) == [result.folder / "labels"]
    for found in seen:
        path = result.folder / "labels" / f"{Path(found.path).stem}.txt"
        assert path.exists() == (len(found) > 0)
        if not len(found):
            continue
        lines = path.read_text().splitlines()
        rows = np.array([[float(word) for word in line.split()] for line in lines])
        assert (np.diff(rows[:, 5]) >= 0).all()  # lowest score first
        height, width = found.image.shape[:2]
        centre, size = rows[:, 1:3] * [width, height], rows[:, 3:5] * [width, height]
        corners = np.concatenate((centre - size / 2, centre + size / 2), 1)
        np.testing.assert_allclose(corners[::-1], found.pixel_boxes, atol=1e-3)  # of rounded boxes
        np.testing.assert_array_equal(rows[::-1, 0], found.classes)
        np.testing.assert_allclose(rows[::-1, 5], found.scores, rtol=1e-5)
        words = [word for line in lines for word in line.split()]
        assert words == [f"{float(word):g}" for word in words]


def test_label_files_without_scores_can_be_trained_on(place):
    """--save-txt gives labels in the format of data sets: class and four numbers from 0 to 1."""
    result = run(place, save_txt=True, nosave=True)
    for path in (result.folder / "labels").iterdir():
        rows = np.array([[float(word) for word in line.split()] for line in path.read_text().splitlines()])
        assert rows.shape[1] == 5 and (rows[:, 1:] >= 0).all() and (rows[:, 1:] <= 1).all()


def test_label_files_are_appended_to(place):
    for _ in range(2):
        result = run(place, save_txt=True, nosave=True, exist_ok=True)
    lines = (result.folder / "labels/01.txt").read_text().splitlines()
    half = len(lines) // 2
    assert lines[:half] == lines[half:] and half


def test_a_video_keeps_its_name_size_rate_and_number_of_frames(place):
    result = run(place, source=str(place / "clip.mp4"), save_txt=True)
    capture = cv2.VideoCapture(str(result.folder / "clip.mp4"))
    assert capture.get(cv2.CAP_PROP_FPS) == 12.0
    frames = frames_in(result.folder / "clip.mp4")
    assert len(frames) == 6 and frames[0].shape == (64, 96, 3)
    found = [result.stem for result in results_of(place, source=str(place / "clip.mp4")) if len(result)]
    assert found[0].startswith("clip_") and len(found) > 2
    assert sorted(path.stem for path in (result.folder / "labels").iterdir()) == sorted(found)


def test_crops_are_the_pixels_inside_the_boxes(place):
    result = run(place, save_crop=True, nosave=True)
    expected = {
        f"{NAMES[kind]}/{found.stem}_{number}.jpg": (bottom - top, right - left, 3)
        for found in results_of(place)
        for number, (kind, box) in enumerate(zip(found.classes, found.pixel_boxes, strict=True), start=1)
        for left, top, right, bottom in [box]
        if right > left and bottom > top
    }
    files = list((result.folder / "crops").glob("*/*"))
    assert {str(file.relative_to(result.folder / "crops")): cv2.imread(str(file)).shape for file in files} == expected
    assert f"{len(files)} crops saved to runs/detect/exp/crops" in str(result)


@pytest.mark.parametrize(("name", "folder"), [("bolt", "bolt"), ("../up", "_up"), ("a/b", "a_b"), ("..", "class")])
def test_a_class_name_cannot_lead_out_of_the_crops_folder(name, folder):
    assert folder_name(name) == folder


def test_json_holds_the_records_of_the_python_results(place):
    result = run(place, save_json=True, nosave=True)
    records = json.loads((result.folder / "a_predictions.json").read_text())
    assert records == [record for found in results_of(place) for record in found.to_coco()]
    assert {record["image_id"] for record in records} <= set(range(10)) and len(records) > 30
    empty = run(place, save_json=True, nosave=True, conf_thres=1.0, exist_ok=True)
    assert empty.folder == result.folder
    assert json.loads((empty.folder / "a_predictions.json").read_text()) == []


def test_files_of_one_name_from_several_folders_do_not_overwrite_each_other(place, tmp_path):
    for folder in ("in/x", "in/y"):
        write_images(tmp_path / folder, 2)
    result = run(place, source=f"{tmp_path}/in/*/*.png", save_txt=True)
    assert sorted(path.name for path in result.folder.glob("*.png")) == ["00.png", "00_2.png", "01.png", "01_2.png"]
    assert {path.stem for path in (result.folder / "labels").iterdir()} >= {"01", "01_2"}


def test_formats_that_cannot_be_written_become_jpeg(place, tmp_path):
    (made,) = write_images(tmp_path / "in", 1, "jpg")
    made.rename(tmp_path / "in/photo.mpo")
    assert [path.name for path in run(place, source=str(tmp_path / "in")).folder.iterdir()] == ["photo.jpg"]


# Printed


def test_a_line_per_image_counts_the_detections(place, caplog):
    caplog.set_level(logging.INFO, "flatout")
    run(place, nosave=True)
    lines = [record.message for record in caplog.records if record.message.startswith("image ")]
    assert len(lines) == 10
    head, size, *counts, taken = lines[2].replace(": ", ", ").split(", ")
    assert head == f"image 3/10 {place}/images/02.png" and size == "96x96" and taken.endswith(" ms")
    assert all(count.split()[1] in ("bolt", "bolts", "nut", "nuts") for count in counts)


def test_one_is_singular_and_none_is_nothing(place):
    result = results_of(place)[1]
    counts = {0: (result.classes == 0).sum(), 1: (result.classes == 1).sum()}
    expected = ", ".join(f"{n} {NAMES[kind]}{'s' if n != 1 else ''}" for kind, n in counts.items() if n)
    assert result.summary() == expected
    assert results_of(place, conf_thres=1.0)[0].summary() == "nothing"


PLURALS = {
    "cross": "crosses", "box": "boxes", "bus": "buses", "bench": "benches", "skis": "skis", "person": "persons",
    "leaf": "leaves", "table knife": "table knives", "sheep": "sheep", "giraffe": "giraffes", "German": "Germans",
}  # fmt: skip


@pytest.mark.parametrize("name", PLURALS)
@pytest.mark.parametrize("number", [1, 2])
def test_plurals_are_english(name, number):
    counted = f"{number} {name if number == 1 else PLURALS[name]}"
    result = Result(
        boxes=np.zeros((number, 4), np.float32),
        scores=np.ones(number, np.float32),
        classes=np.zeros(number, np.int64),
        names=(name,),
        image=np.zeros((4, 4, 3), np.uint8),
        origin=Origin("a.jpg", "image", 0, 1),
    )
    assert result.summary() == counted


def test_the_last_lines_say_how_many_and_where(place):
    result = run(place, save_txt=True)
    assert f"Done. 10 images, {result.detections} detections in" in str(result)
    num_files = len(list((result.folder / "labels").iterdir()))
    assert f"{num_files} label files saved to runs/detect/exp/labels" in str(result)
    assert str(result).endswith("Results saved to runs/detect/exp")


def test_unreadable_files_are_counted_listed_and_not_fatal(place, tmp_path, capsys):
    good, bad = write_images(tmp_path / "in", 2)
    bad.write_bytes(good.read_bytes()[:40])
    (tmp_path / "in/empty.jpg").write_bytes(b"")
    (tmp_path / "in/noise.mp4").write_bytes(b"?" * 64)
    words = ["--weights", str(place / "a.pt"), "--source", "in", "--img", "64", "--device", "cpu"]
    assert main(["yolo", "detect", *words]) == 0
    printed = capsys.readouterr().out
    assert "3 sources could not be read, or not to the end:" in printed
    assert (
        "in/empty.jpg: an empty file" in printed
        and "in/noise.mp4: cannot be decoded: damaged, cut off, or not a video" in printed
    )
    assert [path.name for path in Path("runs/detect/exp").iterdir()] == ["00.png"]


def test_images_of_odd_shapes_and_with_odd_names_are_processed(place, tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for size_wh, name in (((1, 1), "one"), ((900, 1), "row"), ((1, 900), "column"), ((3, 2), "a\nb"), ((9, 9), "ü ß")):
        cv2.imwrite(str(folder / "x.png"), np.full((size_wh[1], size_wh[0], 3), 99, np.uint8))
        (folder / "x.png").rename(folder / f"{name}.png")
    cv2.imwrite(str(folder / "deep.png"), np.full((20, 30), 40_000, np.uint16))
    cv2.imwrite(str(folder / "alpha.png"), np.full((20, 30, 4), 90, np.uint8))
    write_video(folder / "v.mp4", 1)
    os.rename(folder / "v.mp4", os.fsencode(folder) + b"/\xff.mp4")
    os.mkdir(folder / "folder.jpg")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
    words = ["--weights", str(place / "a.pt"), "--source", "in", "--img", "64", "--device", "cpu", "--save-txt"]
    assert main(["yolo", "detect", *words, "--save-json", "--save-crop"]) == 0
    assert "a\\nb.png" in capsys.readouterr().out
    written = {path.name for path in Path("runs/detect/exp").glob("*.png")}
    assert written == {"one.png", "row.png", "column.png", "a\nb.png", "ü ß.png", "deep.png", "alpha.png"}


def test_if_nothing_can_be_read_that_is_a_data_error(place, tmp_path, capsys):
    (tmp_path / "a.jpg").write_bytes(b"")
    assert main(["yolo", "detect", "--weights", str(place / "a.pt"), "--source", "a.jpg", "--device", "cpu"]) == 3
    printed = capsys.readouterr().err
    assert printed == ("flatout: --source a.jpg: nothing could be read: a.jpg: an empty file. Repair or replace it.\n")


def test_the_error_about_many_unreadable_files_names_the_first(place, tmp_path, capsys):
    for path in write_images(tmp_path / "in", 2):
        path.write_bytes(b"")
    assert main(["yolo", "detect", "--weights", str(place / "a.pt"), "--source", "in", "--device", "cpu"]) == 3
    assert capsys.readouterr().err == (
        "flatout: --source in: none of its 2 files could be read. The first: in/00.png: an empty file. "
        "Repair or replace them.\n"
    )


def test_mistakes_leave_no_folder_behind(place):
    with pytest.raises(CheckpointError, match=r"--weights none.pt: no such file"):
        run(place, weights=("none.pt",))
    with pytest.raises(ConfigError, match="--source nowhere"):
        run(place, source="nowhere")
    with pytest.raises(DataError, match="camera 94 cannot be opened"):
        run(place, source="94")
    assert not Path("runs").exists()


def test_a_missing_display_is_only_a_warning(place, caplog, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert run(place, view_img=True).frames == 10
    printed = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert printed == ["--view-img: this machine has no display, so nothing is shown."]


def test_an_opencv_without_windows_says_so(caplog, monkeypatch):
    def no_windows(*args: object) -> None:
        raise cv2.error("not implemented")

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(cv2, "imshow", no_windows)
    assert open_windows() is None
    assert "this OpenCV was built without windows" in caplog.text


def test_windows_show_every_result_in_order_until_q(place, monkeypatch):
    shown: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(cv2, "imshow", lambda name, image: shown.append(name))
    monkeypatch.setattr(cv2, "destroyAllWindows", lambda: None)
    monkeypatch.setattr(cv2, "waitKey", lambda wait_ms: ord("q") if len(shown) >= 4 else -1)
    result = run(place, view_img=True, workers=1)
    assert shown[:4] == ["flatout", "00.png", "01.png", "02.png"]
    assert result.frames < 10 and result.interrupted is None


# The end


def test_ctrl_c_ends_with_all_results_so_far(place, tmp_path):
    write_video(tmp_path / "long.mp4", 300)
    seen: list[Result] = []

    def press(result: Result) -> None:
        seen.append(result)
        if len(seen) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    options = DetectOptions(
        weights=(str(place / "a.pt"),), source="long.mp4", img_size=64, device="cpu", save_json=True, conf_thres=0.3
    )
    result = detect(options, each=press)
    assert result.interrupted == "SIGINT" and 5 <= result.frames == len(seen) < 300
    assert "SIGINT: stopped early; all results so far are saved." in str(result)
    assert len(frames_in(result.folder / "long.mp4")) == result.frames
    records = json.loads((result.folder / "a_predictions.json").read_text())
    assert len(records) == result.detections
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flatout-")]


def test_an_interrupted_command_has_exit_code_130(place, monkeypatch, capsys):
    monkeypatch.setattr(
        "flatout.ranks.signals.Interrupts.requested", property(lambda self: "SIGINT", lambda self, value: None),
        raising=False,
    )  # fmt: skip
    words = ["--weights", str(place / "a.pt"), "--source", str(place / "images"), "--device", "cpu"]
    assert main(["yolo", "detect", *words]) == 130


def test_a_full_disk_is_a_resource_error(place, monkeypatch):
    def full(path: Path, image: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flatout.yolo.predict.outputs.write_image", full)
    with pytest.raises(ResourceError, match=r"runs/detect/exp/\d\d.png: not enough disk space"):
        run(place)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flatout-")]


def test_update_strips_full_checkpoints_and_leaves_others(place, tmp_path):
    network = confident_network()
    save_weights(tmp_path / "full.pt", weights_of(network, kind="full", epoch=3, ema=network.state_dict()))
    result = run(place, weights=("full.pt",), nosave=True, update=True)
    assert "--update: removed the training state from full.pt" in str(result)
    after = read_weights("full.pt")
    assert after.kind == "stripped" and after.ema is None
    before = (place / "a.pt").read_bytes()
    assert "it contains only the network already" in str(run(place, nosave=True, update=True))
    assert (place / "a.pt").read_bytes() == before


def test_update_does_not_touch_an_unfinished_training(place, tmp_path):
    weights = tmp_path / "run/weights/last.pt"
    weights.parent.mkdir(parents=True)
    save_weights(weights, weights_of(confident_network(), kind="full"))
    (tmp_path / "run/run.json").write_text(json.dumps({"config": {}, "finished": False}))
    before = weights.read_bytes()
    assert "its training is not finished" in str(run(place, weights=(str(weights),), nosave=True, update=True))
    assert weights.read_bytes() == before


def test_letters_grow_with_the_image(place):
    small, large = (make_image(0, size) for size in ((120, 90), (1600, 1200)))
    widths = []
    for image in (small, large):
        box = np.array([[10, 20, image.shape[1] - 10, image.shape[0] - 10]], np.float32)
        result = Result(
            boxes=box, scores=np.ones(1, np.float32), classes=np.zeros(1, np.int64), names=tuple(NAMES),
            image=image, origin=results_of(place)[0].origin,
        )  # fmt: skip
        widths.append((result.draw() != image).any(2).mean(1).max())
        assert result.image is image
    assert widths[1] > 0.1
