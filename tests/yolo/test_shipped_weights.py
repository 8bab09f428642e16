"""The weights that come with flatout match their card, and every command and function finds them by name."""

import hashlib
import logging
import re
from pathlib import Path

import cv2
import pytest
import yaml

import flatout.yolo
from flatout.errors import CheckpointError
from flatout.yolo.convert import convert_weights
from flatout.yolo.data.data_yaml import open_data_yaml
from flatout.yolo.evaluate import test as evaluate
from flatout.yolo.export import ExportOptions, export, files
from flatout.yolo.find_file import find_cfg, find_weights, shipped_folder, shipped_weights, weights_file
from flatout.yolo.hyp import load_hyp
from flatout.yolo.options import TestOptions, TrainOptions
from flatout.yolo.predict.detect import detect
from flatout.yolo.predict.options import DetectOptions
from flatout.yolo.train.recipe import new_network
from flatout.yolo.weights import read_weights

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "yolov7-tiny"
WEIGHTS, PHOTOGRAPHS = shipped_folder("weights"), shipped_folder("data") / "photographs"
FILE = WEIGHTS / f"{NAME}.safetensors"
REDISTRIBUTABLE = ("CC BY 2.0", "no known copyright restrictions")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Run in a folder without weights, with separate caches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# -- the files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(WEIGHTS.glob("*.safetensors")), ids=lambda file: file.stem)
def test_the_card_has_the_digest_and_the_size_of_its_file(file):
    card = file.with_suffix(".md").read_text()
    assert re.findall(r"\b[0-9a-f]{64}\b", card)[0] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert f"{file.stat().st_size:,} bytes" in card


def test_the_file_contains_config_and_names_and_is_in_half_precision():
    weights = read_weights(FILE)
    assert weights.config is not None and weights.nc == 80
    assert weights.names == list(open_data_yaml(shipped_folder("data") / "coco.yaml").names)
    assert {str(tensor.dtype) for tensor in weights.state.values()} == {"torch.float16", "torch.int64"}


def test_every_photograph_may_be_redistributed_and_has_an_attribution():
    rows = [line.split(" | ") for line in (PHOTOGRAPHS / "ATTRIBUTION.md").read_text().splitlines() if ".jpg |" in line]
    assert sorted(row[0].removeprefix("| ") for row in rows) == sorted(path.name for path in PHOTOGRAPHS.glob("*.jpg"))
    for row in rows:
        assert any(f"[{licence}](https://" in row[2] for licence in REDISTRIBUTABLE)
        assert "flickr.com" in row[3] and "staticflickr.com" in row[4]


# -- finding the file by its name ----------------------------------------------------------------------------------


def test_a_bare_name_means_the_weights_and_this_is_logged(caplog):
    with caplog.at_level(logging.INFO, "flatout"):
        assert weights_file(NAME) == find_weights(NAME) == FILE
    assert f"--weights {NAME}: using the trained weights that come with flatout, {FILE}" in caplog.messages


def test_a_file_of_that_name_takes_precedence_and_a_folder_of_that_name_does_not():
    Path(NAME).mkdir()
    assert weights_file(NAME) == FILE
    Path(NAME).rmdir()
    Path(NAME).touch()
    assert weights_file(NAME) == Path(NAME)


@pytest.mark.parametrize("given", [f"{NAME}.pt", f"{NAME}.yaml", f"here/{NAME}", f"./{NAME}", "", "x" * 5000])
def test_with_an_ending_or_a_folder_it_is_a_path(given):
    assert shipped_weights(given) is None


def test_for_cfg_the_name_means_the_config():
    assert find_cfg(NAME, weights=None) == shipped_folder("cfg") / f"training/{NAME}.yaml"


def test_the_error_for_an_unknown_name_lists_the_known_ones():
    known = rf"Weights that come with flatout: {NAME}. `flatout weights list` shows downloaded ones\.$"
    with pytest.raises(CheckpointError, match=rf"--weights yolov7: no such file\. Check .* --weights '' .*\. {known}"):
        find_weights("yolov7")
    with pytest.raises(CheckpointError, match=rf"--weights yolov7-tinny: no such file\. Check the path\. {known}"):
        detect(DetectOptions(weights=("yolov7-tinny",), source=str(PHOTOGRAPHS)))


def test_the_error_for_a_missing_released_file_says_what_the_bare_name_means():
    expected = rf"Check the path\. Without the ending, {NAME} means the weights that .* curl -LO \S+/{NAME}\.pt$"
    with pytest.raises(CheckpointError, match=expected):
        weights_file(f"{NAME}.pt")


def test_the_error_for_another_released_file_names_the_weights_that_are_here():
    expected = rf"Check the path\. {NAME} means the weights that come with flatout\. To download .* \S+/yolov7\.pt$"
    with pytest.raises(CheckpointError, match=expected):
        weights_file("yolov7.pt")


# -- commands and functions ----------------------------------------------------------------------------------------


def test_train_starts_from_them():
    hyp = load_hyp(shipped_folder("data") / "hyp.finetune.yaml")
    start = new_network(TrainOptions(weights=NAME), hyp, ["bolt", "nut", "washer"])
    assert start.transfer is not None
    # All but weight, bias and implicit product of the three detection levels, which depend on the number of classes.
    assert (start.transfer.kept, start.transfer.total, len(start.transfer.mismatched)) == (335, 344, 9)


def test_evaluate_finds_them(tmp_path):
    names = list(open_data_yaml(shipped_folder("data") / "coco.yaml").names)
    (tmp_path / "photographs.yaml").write_text(yaml.safe_dump({"val": str(tmp_path / "images"), "names": names}))
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    (tmp_path / "images/bus.jpg").write_bytes((PHOTOGRAPHS / "bus.jpg").read_bytes())
    (tmp_path / "labels/bus.txt").write_text("5 0.542 0.495 0.706 0.478\n")
    result = evaluate(TestOptions(weights=(NAME,), data="photographs.yaml", img_size=320, workers=0, device="cpu"))
    assert result.outcome.evaluation.map50 > 0.9


def test_detect_finds_what_is_in_the_photographs():
    seen = {}
    options = DetectOptions(weights=(NAME,), source=str(PHOTOGRAPHS), img_size=320, device="cpu", update=True)
    done = detect(options, each=lambda result: seen.update({result.stem: result.summary()}))
    assert seen["bus"] == "1 bus" and seen["motorcycle"] == "1 person, 1 motorcycle"
    assert all(name in seen["desk"] for name in ("laptop", "mouse", "keyboard"))
    assert "is not changed: not in the format of flatout" in done.text  # --update never writes to shipped files


def test_export_writes_into_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_TURNS", 1)
    before = sorted(WEIGHTS.iterdir())
    outcome = export(NAME, ExportOptions(img_size=(64, 64), formats=("torchscript",), pictures=1))
    assert [file.path.resolve() for file in outcome.files] == [tmp_path / f"{NAME}.torchscript.pt"]
    assert sorted(WEIGHTS.iterdir()) == before


def test_convert_finds_them(tmp_path):
    assert convert_weights(NAME, tmp_path / "mine.pt").num_tensors == 344


def test_python_finds_them_and_the_ending_means_the_config():
    detector = flatout.yolo.load(NAME, device="cpu")
    assert detector.weights == FILE and detector.config is None
    (result,) = detector.predict(cv2.imread(str(PHOTOGRAPHS / "bus.jpg")), img_size=320)
    assert result.summary() == "1 bus" and result.scores[0] > 0.8
    assert flatout.yolo.load(f"{NAME}.yaml").weights is None
