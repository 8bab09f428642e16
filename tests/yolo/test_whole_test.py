"""test.py from weights to files: what it prints, what it writes, and which mistakes it refuses."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
import torch
import yaml

from flatout.errors import CheckpointError, ConfigError, DataError, ResourceError
from flatout.ranks.world import choose_device, choose_devices
from flatout.yolo.evaluate import Speed, TestResult, evaluate
from flatout.yolo.evaluate.evaluate import header, row, speed_line
from flatout.yolo.evaluate.run import EvaluationPlots
from flatout.yolo.metrics.coco import COCO_CATEGORY_IDS
from flatout.yolo.model.network import Network
from flatout.yolo.options import TestOptions
from flatout.yolo.weights import save_weights
from tests.yolo.model.test_network import narrow
from tests.yolo.small_sets import files_of, label_files_of
from tests.yolo.test_load import weights_of

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ["bolt", "nut"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with data.yaml, its images in images/val and two weights files."""
    folder = tmp_path_factory.mktemp("test")
    image_set = files_of(folder / "images/val")
    label_files_of(image_set, folder / "labels/val")
    (folder / "data.yaml").write_text(yaml.safe_dump({"val": str(folder / "images/val"), "names": NAMES}))
    for name, seed in (("a", 0), ("b", 1)):
        network = confident_network(2, seed)
        network.names = NAMES
        save_weights(folder / f"{name}.pt", weights_of(network))
    return folder


def confident_network(nc: int, seed: int = 0) -> Network:
    """An untrained network that finds objects everywhere on its coarsest level."""
    network = narrow("yolov7-tiny", nc=nc, seed=seed).eval()
    coarsest: Any = network.head.m[2]
    with torch.no_grad():
        coarsest.weight *= 20
        coarsest.bias.view(3, 5 + nc)[:, 4:7] += 5
    return network


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """No file of a test may end up in the checkout or in the user's caches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(place: Path, *, plots: bool = False, **changed) -> TestResult:
    settings: dict[str, Any] = {
        "weights": (str(place / "a.pt"),),
        "data": str(place / "data.yaml"),
        "batch_size": 4,
        "img_size": 64,
        "device": "cpu",
        "workers": 0,
    }
    options = TestOptions(**settings | changed)
    if plots:
        return evaluate.test(options)
    with mock.patch.object(EvaluationPlots, "on_batch"), mock.patch.object(EvaluationPlots, "finish"):
        return evaluate.test(options)


# Printed


def test_the_table_has_the_columns_of_yolov7_and_then_ours():
    columns = "               Class      Images      Labels           P           R      mAP@.5  mAP@.5:.95"
    assert header() == f"{columns}          F1   AR@.5:.95"
    assert row("all", 5000, 36335, 0.7213, 0.63412, 0.68, 1e-5) == (
        "                 all        5000       36335       0.721       0.634        0.68       1e-05"
    )
    assert speed_line(Speed(2.84, 1.06), size=640, batch_size=32) == (
        "Speed: 2.8/1.1/3.9 ms inference/NMS/total per 640x640 image at batch-size 32"
    )


def test_a_test_prints_header_all_classes_each_class_and_speed(place):
    result = run(place, save_hybrid=True)
    lines = str(result).splitlines()
    found = result.outcome.evaluation
    names = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95", "F1", "AR_0.5:0.95")
    means = [found.scores[name] for name in names]
    assert lines[0] == header()
    assert lines[1] == row("all", 11, found.num_labels, *means)
    assert [line.split()[0] for line in lines[2:4]] == NAMES
    assert sum(int(line.split()[2]) for line in lines[2:4]) == found.num_labels
    of_classes = np.array([[float(word) for word in line.split()[3:]] for line in lines[2:4]])
    np.testing.assert_allclose(of_classes.mean(0), means, atol=1e-3)
    assert re.fullmatch(r"Speed: [\d.]+/[\d.]+/[\d.]+ ms inference/NMS/total per 64x64 image at batch-size 4", lines[4])
    assert found.map50 > 0.9, "the labels were given to NMS"
    assert lines[-1] == "Results saved to runs/test/exp"


def test_results_go_to_the_next_free_folder(place):
    assert [run(place).folder.as_posix() for _ in range(2)] == ["runs/test/exp", "runs/test/exp2"]
    assert run(place, exist_ok=True, plots=True).folder.as_posix() == "runs/test/exp"
    expected = {f"test_batch{number}_{what}.jpg" for number in range(3) for what in ("labels", "pred")}
    assert expected | {"confusion_matrix.png"} <= {path.name for path in Path("runs/test/exp").iterdir()}


def test_a_size_that_does_not_fit_is_rounded_up(place, caplog):
    result = run(place, img_size=50)
    assert "per 64x64 image" in result.text
    assert "--img-size 50 is not a multiple of the largest stride, 32: using 64." in caplog.text


# Written


def test_label_files_hold_what_the_json_holds(place):
    result = run(place, save_txt=True, save_conf=True, save_json=True, conf_thres=0.01)
    records = json.loads((result.folder / "a_predictions.json").read_text())
    assert len(records) > 20
    sizes = {path.stem: cv2.imread(str(path)).shape[1::-1] for path in (place / "images/val").iterdir()}
    by_image = {}
    for record in records:
        assert list(record) == ["image_id", "category_id", "bbox", "score"]
        assert isinstance(record["image_id"], int), "all digits, so a number"
        assert record["bbox"] == [round(value, 3) for value in record["bbox"]]
        assert record["score"] == round(record["score"], 5)
        by_image.setdefault(f"{record['image_id']:03}", []).append(record)
    files = sorted((result.folder / "labels").iterdir())
    assert [path.stem for path in files] == sorted(by_image)
    for path in files:
        rows = [line.split(" ") for line in path.read_text().splitlines()]
        own = by_image[path.stem]
        assert [row[0] for row in rows] == [str(record["category_id"]) for record in own]
        assert all(word == f"{float(word):g}" for row in rows for word in row)
        wide, high = sizes[path.stem]
        for (_, *numbers, score), record in zip(rows, own, strict=True):
            x, y, w, h = record["bbox"]
            expected = [(x + w / 2) / wide, (y + h / 2) / high, w / wide, h / high]
            np.testing.assert_allclose([float(number) for number in numbers], expected, atol=2e-5)
            assert float(score) == pytest.approx(record["score"], abs=1e-5)
        scores = [float(row[-1]) for row in rows]
        assert scores == sorted(scores, reverse=True)


def test_label_files_without_scores_are_labels(place):
    run(place, save_txt=True, conf_thres=0.01)
    files = list(Path("runs/test/exp/labels").iterdir())
    assert files
    assert {len(line.split()) for path in files for line in path.read_text().splitlines()} == {5}


def test_hybrid_files_hold_the_labels_first(place):
    result = run(place, save_hybrid=True, save_conf=True)
    label = next(path for path in sorted((place / "labels/val").iterdir()) if path.read_text().strip())
    wanted = [list(map(float, line.split())) for line in label.read_text().splitlines()]
    written = [line.split() for line in (result.folder / "labels" / label.name).read_text().splitlines()]
    certain = [list(map(float, row[:5])) for row in written if row[5] == "1"]
    for truth in wanted:
        distance = [max(abs(a - b) for a, b in zip(truth, found, strict=True)) for found in certain]
        assert min(distance) < 0.03, "a label was lost"


def test_ap_of_every_class_as_a_file(place):
    result = run(place, save_per_class_ap="ap.json", save_hybrid=True)
    written = json.loads(Path("ap.json").read_text())
    assert written == result.outcome.evaluation.per_class_ap(NAMES)
    assert "AP of every class saved to ap.json" in result.text


# COCO


@pytest.fixture
def coco(tmp_path) -> Path:
    """A data set in the form of COCO: 80 classes, numbered images, annotations beside them, coco.yaml."""
    folder = tmp_path / "coco"
    image_set = files_of(folder / "images/val2017")
    label_files_of(image_set, folder / "labels/val2017")
    names = [f"class {number}" for number in range(80)]
    (folder / "coco.yaml").write_text(yaml.safe_dump({"val": str(folder / "images/val2017"), "names": names}))
    annotations = {
        "images": [
            {"id": number, "file_name": f"{number:03}.png", "width": int(w), "height": int(h)}
            for number, (w, h) in enumerate(image_set.size_wh_N2)
        ],
        "categories": [{"id": number, "name": name} for number, name in zip(COCO_CATEGORY_IDS, names, strict=True)],
        "annotations": [],
    }
    for number in range(len(image_set)):
        for kind, *box in np.unique(image_set.labels.of(number), axis=0).tolist():
            w0, h0 = image_set.size_wh_N2[number].tolist()
            x, y, w, h = ((box[0] - box[2] / 2) * w0, (box[1] - box[3] / 2) * h0, box[2] * w0, box[3] * h0)
            annotations["annotations"].append(
                {
                    "id": len(annotations["annotations"]) + 1,
                    "image_id": number,
                    "category_id": COCO_CATEGORY_IDS[int(kind)],
                    "bbox": [x, y, w, h],
                    "area": w * h,
                    "iscrowd": 0,
                }
            )
    (folder / "annotations").mkdir()
    (folder / "annotations/instances_val2017.json").write_text(json.dumps(annotations))
    save_weights(folder / "a.pt", weights_of(confident_network(80)))
    return folder


def test_a_data_file_called_coco_gives_json_with_91_numbers_and_cocos_own_ap(coco):
    pytest.importorskip("hotcoco", reason="no COCO evaluator is installed")
    result = run(coco, data=str(coco / "coco.yaml"), save_hybrid=True)
    records = json.loads((result.folder / "a_predictions.json").read_text())
    assert {record["category_id"] for record in records} <= set(COCO_CATEGORY_IDS)
    assert len(records) > 20
    assert result.coco is not None
    assert result.coco.ap50 > 0.9
    assert result.outcome.evaluation.map50 == result.coco.ap50
    last = " Average Recall     (AR) @[ IoU=0.50:0.95 | area= large | maxDets=100 ] = "
    assert any(line.startswith(last) for line in result.text.splitlines())
    first = f" Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=100 ] = {result.coco.ap:0.3f}"
    assert first in result.text.splitlines()


def test_coco_ap_is_the_same_under_any_name_of_the_yaml(coco):
    pytest.importorskip("hotcoco", reason="no COCO evaluator is installed")
    named = run(coco, data=str(coco / "coco.yaml"), save_hybrid=True)
    (coco / "coco.yaml").rename(coco / "coco320.yaml")
    other = run(coco, data=str(coco / "coco320.yaml"), save_hybrid=True, save_json=True)
    assert other.coco == named.coco
    assert other.outcome.evaluation.map50_95 == named.coco.ap > 0.5


@pytest.mark.parametrize("entry", ["annotations/instances_val2017.json", "images/val2017"])
def test_a_split_that_is_a_coco_file_gives_the_ap_of_that_file_without_any_key_or_flag(coco, entry):
    pytest.importorskip("hotcoco", reason="no COCO evaluator is installed")
    named = run(coco, data=str(coco / "coco.yaml"), save_hybrid=True)
    values = yaml.safe_load((coco / "coco.yaml").read_text())
    (coco / "bolts.yaml").write_text(yaml.safe_dump(values | {"val": str(coco / entry)}))
    if entry == "images/val2017":  # as Roboflow exports it
        shutil.rmtree(coco / "labels")
        (coco / "annotations/instances_val2017.json").rename(coco / entry / "_annotations.coco.json")
    other = run(coco, data=str(coco / "bolts.yaml"), save_hybrid=True)
    assert other.coco is not None
    # Hybrid labels are detections, so they score by their rounding: float32 from pixels, or from text.
    assert other.coco.ap50 == pytest.approx(named.coco.ap50, abs=0.02)
    records = json.loads((other.folder / "a_predictions.json").read_text())
    assert {record["category_id"] for record in records} <= set(COCO_CATEGORY_IDS)


def test_annotations_of_other_classes_leave_the_result_as_it_was(coco):
    file = coco / "annotations/instances_val2017.json"
    file.write_text(file.read_text().replace('"class ', '"another '))
    result = run(coco, data=str(coco / "coco.yaml"), save_hybrid=True)
    assert result.coco is None
    assert result.outcome.evaluation.map50 > 0.9, "our own mAP stays"
    assert "COCO AP was not computed: " in result.text
    assert "it has no category for 80 of 80 classes, such as 'class 0'" in result.text
    assert "Average Precision" not in result.text


def test_a_missing_coco_ap_is_reported_and_affects_nothing_else(coco):
    (coco / "annotations/instances_val2017.json").unlink()
    result = run(coco, data=str(coco / "coco.yaml"))
    assert result.coco is None
    assert "COCO AP was not computed: " in result.text
    assert (result.folder / "a_predictions.json").exists()


# Several networks, views and sizes


def test_an_ensemble_finds_what_its_members_find(place, monkeypatch):
    both = tuple(str(place / name) for name in ("a.pt", "b.pt"))
    counts = {}
    for weights in ((both[0],), (both[1],), both):
        result = run(place, weights=weights, save_json=True, conf_thres=0.01, iou_thres=1.0)
        name = "+".join(Path(path).stem for path in weights)
        counts[name] = len(json.loads((result.folder / f"{Path(weights[0]).stem}_predictions.json").read_text()))
    assert 0 < counts["a"] < 300 * 11
    assert counts["a"] + counts["b"] == counts["a+b"]


def test_augmented_views_add_boxes(place):
    plain, augmented = (
        json.loads((run(place, augment=views, save_json=True, iou_thres=1.0).folder / "a_predictions.json").read_text())
        for views in (False, True)
    )
    assert len(augmented) >= len(plain) > 0
    assert augmented != plain


def test_speed_evaluates_each_file_with_the_thresholds_of_detection(place, monkeypatch):
    seen = []
    monkeypatch.setattr(evaluate.EvaluationRun, "evaluate", spy(evaluate.EvaluationRun.evaluate, seen))
    result = run(place, weights=(str(place / "a.pt"), str(place / "b.pt")), task="speed", save_json=True)
    assert [(call["conf_thres"], call["iou_thres"]) for call in seen] == [(0.25, 0.45)] * 2
    assert len(result.outcomes) == 2
    assert result.text.count("Speed: ") == 2
    assert result.folder is None
    assert not Path("runs").exists()


def spy(function, seen: list):
    def call(self, *args, **kwargs):
        seen.append(kwargs)
        return function(self, *args, **kwargs)

    return call


def test_a_study_writes_a_line_per_size(place, monkeypatch):
    assert (evaluate.STUDY_SIZES[0], evaluate.STUDY_SIZES[-1], len(evaluate.STUDY_SIZES)) == (256, 1536, 11)
    monkeypatch.setattr(evaluate, "STUDY_SIZES", (64, 80))
    result = run(place, task="study")
    lines = Path("study_data_a.txt").read_text().splitlines()
    assert [line in result.text for line in lines] == [True, True]
    table = np.loadtxt("study_data_a.txt")
    assert table.shape == (2, 13)
    assert table[:, 10:].tolist() == [[64, 64, 4], [80, 80, 4]]


def test_with_a_single_class_the_names_do_not_matter(place):
    lines = run(place, single_cls=True, save_hybrid=True).text.splitlines()
    assert lines[1].split()[0] == "all"
    assert lines[2].startswith("Speed: "), "one class needs no rows of classes"
    assert float(lines[1].split()[5]) > 0.9


# Refused


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"weights": ("none.pt",)}, CheckpointError, "--weights none.pt: no such file"),
        ({"task": "test"}, ConfigError, "test: no images given"),
        ({"save_per_class_ap": "no/where/ap.json"}, ConfigError, "its folder does not exist"),
        ({"device": "7"}, ResourceError, "there is no GPU 7"),
        ({"device": "gpu"}, ConfigError, "use cpu, the number of a GPU"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(place, changed, error, text):
    with pytest.raises(error, match=re.escape(text)):
        run(place, **changed)
    assert not Path("runs").exists()


def test_weights_of_other_classes_are_refused(place, tmp_path):
    """Before a run folder is made."""
    (tmp_path / "three.yaml").write_text(
        yaml.safe_dump({"val": str(place / "images/val"), "names": ["bolt", "nut", "washer"]})
    )
    with pytest.raises(ConfigError, match=r"trained for 2 classes, but .*three.yaml names 3"):
        run(place, data="three.yaml")
    assert not Path("runs").exists()


def test_a_folder_without_images_is_refused(place, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.yaml").write_text(yaml.safe_dump({"val": str(tmp_path / "empty"), "names": NAMES}))
    with pytest.raises(DataError, match="no images"):
        run(place, data="empty.yaml")


def test_devices_are_named_as_in_yolov7(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = {
        text: [str(device) for device in choose_devices(text)] for text in ("", "cpu", "1", "1,0", "cuda:0", "cuda")
    }
    assert names == {
        "": ["cuda:0", "cuda:1"],
        "cpu": ["cpu"],
        "1": ["cuda:1"],
        "1,0": ["cuda:1", "cuda:0"],
        "cuda:0": ["cuda:0"],
        "cuda": ["cuda:0"],
    }
    assert str(choose_device("1,0")) == "cuda:1"
    with pytest.raises(ResourceError, match="torch sees 2 GPUs, numbered from 0"):
        choose_devices("2")
    with pytest.raises(ConfigError, match="listed twice"):
        choose_devices("1,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [str(device) for device in choose_devices("")] == ["cpu"]
