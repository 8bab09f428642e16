"""flatout.yolo.load: a detector in Python, with results as plain arrays."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml

import flatout.yolo
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.yolo import Detector, Result
from flatout.yolo.metrics.coco import COCO_CATEGORY_IDS, CocoExport
from flatout.yolo.model.configs import find_config
from flatout.yolo.model.network import build_network
from flatout.yolo.nms import Detections
from flatout.yolo.weights import save_weights
from tests.yolo.predict.small_sources import NAMES, frames_in, write_images
from tests.yolo.small_sets import files_of, label_files_of
from tests.yolo.test_load import narrow_config, weights_of

OPTIONS: dict[str, Any] = {"img_size": 64, "conf_thres": 0.3}


@pytest.fixture(scope="module")
def model(place) -> Detector:
    return flatout.yolo.load(place / "a.pt", device="cpu")


def same(one: Result, other: Result) -> bool:
    return np.array_equal(one.boxes, other.boxes) and np.array_equal(one.classes, other.classes)


# Sources


def test_paths_arrays_and_folders_give_the_same(model, place):
    paths = sorted((place / "images").iterdir())
    from_folder = model.predict(place / "images", **OPTIONS)
    assert [result.path for result in from_folder] == list(map(str, paths))
    for source in (paths, list(map(str, paths)), [cv2.imread(str(path)) for path in paths]):
        results = model.predict(source, **OPTIONS)
        assert len(results) == 10 and all(map(same, results, from_folder))
    (alone,) = model.predict(cv2.imread(str(paths[3])), **OPTIONS)
    assert same(alone, from_folder[3]) and alone.path == "array 0"


def test_a_video_gives_a_result_per_frame_in_a_list_or_one_by_one(model, place):
    listed = model.predict(place / "clip.mp4", **OPTIONS)
    stream = model.stream(str(place / "clip.mp4"), **OPTIONS)
    first = next(stream)
    stream.close()
    assert len(listed) == len(frames_in(place / "clip.mp4")) and same(first, listed[0])
    mixed = model.predict([place / "images/00.png", place / "clip.mp4"], **OPTIONS)
    assert [result.stem for result in mixed[:3]] == ["00", "clip_1", "clip_2"] and len(mixed) == 7


def test_nothing_given_gives_nothing(model):
    assert model.predict([], **OPTIONS) == []


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4)), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)]
)
def test_an_array_that_is_no_image_is_refused(model, image):
    with pytest.raises(ConfigError, match=r"array 0: .* is not an image. Give uint8 \[height, width, 3\] in BGR order"):
        model.predict(image)


def test_unreadable_images_are_reported_together_or_skipped(model, tmp_path):
    good, bad = write_images(tmp_path / "in", 2)
    bad.write_bytes(b"")
    with pytest.raises(DataError, match="2 sources cannot be read") as caught:
        model.predict([bad, good, "missing.png"], **OPTIONS)
    assert "01.png: an empty file" in str(caught.value) and "missing.png: No such file" in str(caught.value)
    (left,) = model.predict([bad, good, "missing.png"], on_error="skip", **OPTIONS)
    assert left.path == str(good)


def test_an_object_that_is_no_source_is_refused(model):
    for nothing in (None, 3.5):
        with pytest.raises(ConfigError, match=f"{nothing} is no source of images: give a path"):
            model.predict(nothing)
    with pytest.raises(ConfigError, match=r"on_error='ignore': use \"raise\" or \"skip\""):
        model.predict([], on_error="ignore")


def test_the_error_about_an_unknown_option_names_the_nearest(model):
    with pytest.raises(ConfigError, match=r"predict\(\): imgsize: unknown key .* did you mean 'img_size'"):
        model.predict([], imgsize=320)
    with pytest.raises(ConfigError, match=r"--conf-thres 3\.0 is outside 0 to 1"):
        model.predict([], conf_thres=3)


def test_options_are_those_of_the_command(model, place):
    folder = place / "images"
    both = model.predict(folder, **OPTIONS)
    assert {kind for result in model.predict(folder, classes=[1], **OPTIONS) for kind in result.classes} == {1}
    fewer = model.predict(folder, img_size=64, conf_thres=0.8)
    assert 0 < sum(map(len, fewer)) < sum(map(len, both))
    other = model.predict(folder, augment=True, **OPTIONS)
    assert not all(map(same, both, other))


def test_familiar_names_of_options_mean_the_same(model, place):
    folder = place / "images"
    ours = model.predict(folder, img_size=64, conf_thres=0.4, iou_thres=0.3, at_once=4)
    theirs = model(folder, imgsz=64, conf=0.4, iou=0.3, batch=4)
    assert all(map(same, ours, theirs)) and len(ours) == len(theirs)
    with pytest.raises(ConfigError, match=r"predict\(\): imgsz and img_size are the same option. Give one of them."):
        model.predict([], imgsz=64, img_size=64)
    with pytest.raises(ConfigError, match=r"train\(\): batch and batch_size are the same option"):
        model.train("data.yaml", batch=2, batch_size=2)


@pytest.mark.parametrize("classes", ["nut", ["nut"], 1, [1], (np.int64(1),), "1", "Nut"])
def test_classes_are_chosen_by_name_or_number(model, place, classes):
    results = model.predict(place / "images", classes=classes, **OPTIONS)
    assert {kind for result in results for kind in result.classes} == {1}


def test_the_error_about_an_unknown_class_names_the_nearest(model):
    with pytest.raises(ConfigError, match=r"--classes bold: no such class; did you mean 'bolt'\?"):
        model.predict([], classes="bold")
    with pytest.raises(ConfigError, match=r"--classes zebra: no such class; the network has bolt, nut\."):
        model.predict([], classes=["nut", "zebra"])
    with pytest.raises(ConfigError, match=r"--classes 7: no such class, the network has classes 0 to 1"):
        model.predict([], classes="7")


def test_info_describes_the_network_and_the_file(model, place):
    described = model.info()
    assert described.network.num_classes == len(NAMES) and "Model Summary" in str(described)
    assert f"{place / 'a.pt'}: " in str(described)
    assert "Model Summary" in str(flatout.yolo.load("yolov7-tiny.yaml").info())


# Loading


@pytest.mark.parametrize("name", ["yolov7-tiny.yaml", "yolov7"])
def test_a_config_has_no_weights_yet(name):
    model = flatout.yolo.load(name)
    assert model.config == find_config(name) and model.weights is None
    with pytest.raises(ConfigError, match="has no weights yet"):
        model.predict([])


def test_missing_weights_and_mistyped_configs_are_errors():
    with pytest.raises(CheckpointError, match=r"gone.pt: no such file. Check the path"):
        flatout.yolo.load("gone.pt")
    with pytest.raises(ConfigError, match="did you mean 'yolov7-tiny'"):
        flatout.yolo.load("yolov7-tinny")


def test_names_come_from_the_file(model):
    assert model.names == tuple(NAMES) and repr(model).startswith("Detector('")


def test_importing_costs_nothing():
    program = """
import sys
import flatout.yolo, flatout.defect, flatout.spike
assert not {"torch", "numpy", "cv2", "pydantic"} & set(sys.modules), "heavy"
assert callable(flatout.yolo.load) and callable(flatout.defect.load) and callable(flatout.spike.load)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


def test_load_is_a_function_whatever_was_imported_before():
    """No module may have its name: importing that module would replace the function."""
    assert not list(Path(flatout.yolo.__file__).parent.glob("load.py")) and callable(flatout.yolo.load)


@pytest.mark.parametrize("job", [flatout.yolo, flatout.defect, flatout.spike])
def test_every_public_name_is_there_and_nothing_else(job: ModuleType):
    for name in job.__all__:
        assert getattr(job, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = job.nothing


def test_a_network_with_several_heads_predicts_like_any_other(place, tmp_path):
    if not any(path.stem == "yolov7-tiny-1b4h" for path in find_config("yolov7-tiny").parent.iterdir()):
        pytest.skip("this checkout has no config of a network with several heads")
    config: Any = yaml.safe_load(find_config("yolov7-tiny-1b4h").read_text())
    torch.manual_seed(0)
    network = build_network(config | {"width_multiple": 0.125}).eval()
    save_weights(tmp_path / "heads.pt", weights_of(network))
    model = flatout.yolo.load(tmp_path / "heads.pt", device="cpu")
    alone, together = (model.predict(place / "images", img_size=64, conf_thres=1e-6, at_once=n) for n in (1, 4))
    assert len(model.names) == network.nc and all(len(result) for result in alone)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-6)


# Results


def test_coco_records_are_those_of_the_evaluation(model, place):
    results = model.predict(place / "images", **OPTIONS)
    export = CocoExport()
    for result in results:
        row_n6 = np.column_stack((result.boxes, result.scores, result.classes)).astype(np.float32)
        found = Detections(torch.from_numpy(row_n6), torch.zeros(len(result), dtype=torch.int64), 1)
        export.add(found, [result.path])
    assert [record for result in results for record in result.to_coco()] == export.records()


def test_coco_records_may_have_other_numbers(model, place):
    result = model.predict(place / "images/01.png", **OPTIONS)[0]
    records = result.to_coco(image_id="x", category_ids=COCO_CATEGORY_IDS)
    assert {record["image_id"] for record in records} == {"x"}
    assert [record["category_id"] for record in records] == [kind + 1 for kind in result.classes]


def test_supervision_gets_the_same_arrays_or_an_error_says_what_is_missing(model, place, monkeypatch):
    result = model.predict(place / "images/01.png", **OPTIONS)[0]
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(ConfigError, match="pip install supervision"):
        result.to_supervision()
    fake: Any = ModuleType("supervision")
    fake.Detections = lambda **fields: fields
    monkeypatch.setitem(sys.modules, "supervision", fake)
    fields: Any = result.to_supervision()
    assert set(fields) == {"xyxy", "confidence", "class_id", "data"}
    np.testing.assert_array_equal(fields["xyxy"], result.boxes)
    assert fields["data"]["class_name"].tolist() == [result.names[kind] for kind in result.classes]


def test_draw_does_not_change_the_image(model, place):
    result = model.predict(place / "images/01.png", **OPTIONS)[0]
    before = result.image.copy()
    plotted = result.draw()
    assert plotted.shape == before.shape and (plotted != before).any() and (result.image == before).all()


# Train and evaluate


def test_a_config_is_trained_then_evaluated_and_used_for_prediction(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    label_files_of(files_of(tmp_path / "images/val", 4), tmp_path / "labels/val")
    data = tmp_path / "data.yaml"
    data.write_text(yaml.safe_dump({"train": "images/val", "val": "images/val", "names": NAMES}))
    model = flatout.yolo.load(narrow_config(tmp_path, "yolov7-tiny"), device="cpu")
    result = model.train(data, epochs=1, img_size=64, batch_size=4, workers=0, noautoanchor=True)
    assert result.finished and model.weights == result.folder / "weights/best.pt" and model.config is None
    evaluated = model.evaluate(data, img_size=64, batch_size=4, workers=0)
    assert evaluated.outcome.evaluation.num_images == 4 and "mAP@.5" in str(evaluated)
    scores = model.val(data, imgsz=64, batch=4, workers=0, save_hybrid=True)  # labels are found: scores are not 0
    found = scores.outcome.evaluation
    assert (scores.map50, scores.map) == (found.map50, found.map50_95)
    assert (scores.precision, scores.recall) == (found.precision, found.recall)
    assert repr(scores) == f"mAP@.5 {scores.map50:.3f}, mAP@.5:.95 {scores.map:.3f}"
    assert [row.name for row in scores.per_class] == NAMES
    assert sum(row.labels for row in scores.per_class) == found.num_labels and scores.map50 > 0.9
    for name in ("map50", "map", "precision", "recall"):
        mean = np.mean([getattr(row, name) for row in scores.per_class])
        assert mean == pytest.approx(getattr(scores, name))
    exported = model.export(imgsz=64, format="torchscript", out=str(tmp_path / "small"))
    assert {path.name for path in tmp_path.glob("small*")} == {"small.torchscript.pt", "small.card.md"}
    assert "torchscript" in str(exported)
    assert model.names == tuple(NAMES) and len(model.predict(tmp_path / "images/val", img_size=64)) == 4
    with pytest.raises(ConfigError, match=r"train\(\): epoch: unknown key .* did you mean 'epochs'"):
        model.train(data, epoch=1)
