"""The file of a flag: the path as given, or one match below the working directory, or one that comes with flatout."""

import logging
from pathlib import Path

import pytest

from flatout.errors import CheckpointError, ConfigError
from flatout.yolo.find_file import find_cfg, find_file, find_weights, shipped_folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x")
    return file


def test_a_file_that_exists_is_taken_as_given():
    write("other/data/coco320.yaml")
    assert find_file("data/coco320.yaml") != Path("data/coco320.yaml")
    assert find_file(str(write("data/coco320.yaml"))) == Path("data/coco320.yaml")


def test_otherwise_the_only_match_below_the_working_directory_is_used():
    mine = write("project/sets/bolts.yaml")
    assert find_file("bolts.yaml") == mine
    assert find_file("sets/bolts.yaml") == mine


def test_several_matches_are_listed_and_none_is_used():
    write("a/bolts.yaml")
    write("b/bolts.yaml")
    with pytest.raises(ConfigError, match=r"--hyp bolts.yaml: 2 files match: a/bolts.yaml, b/bolts.yaml\."):
        find_file("bolts.yaml", flag="--hyp")


def test_hidden_folders_and_wildcards_do_not_match():
    write(".venv/bolts.yaml")
    write("b/bolts.yaml")
    assert find_file("bolts.yaml") == Path("b/bolts.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        find_file("*.yaml")


@pytest.mark.parametrize("name", ["data/coco320.yaml", "coco320.yaml", "coco320"])
def test_otherwise_the_file_that_comes_with_flatout_is_used_from_any_folder(name, caplog):
    with caplog.at_level(logging.INFO, "flatout"):
        assert find_file(name) == shipped_folder("data") / "coco320.yaml"
    assert str(shipped_folder("data") / "coco320.yaml") in caplog.text


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cfg/training/yolov7-tiny.yaml", "training/yolov7-tiny.yaml"),
        ("yolov7-tiny.yaml", "training/yolov7-tiny.yaml"),
        ("yolov7-tiny", "training/yolov7-tiny.yaml"),
        ("cfg/deploy/yolov7.yaml", "deploy/yolov7.yaml"),
    ],
)
def test_networks_that_come_with_flatout_have_short_names(name, file):
    assert find_cfg(name, weights=None) == shipped_folder("cfg") / file


@pytest.mark.parametrize(
    "name", ["mine/coco.yaml", "/nowhere/data/coco.yaml", "../data/coco.yaml", "data/coco_320.yaml"]
)
def test_a_path_that_cannot_mean_a_shipped_file_is_an_error(name):
    with pytest.raises(ConfigError, match=r"no such file here or in a subfolder; did you mean coco"):
        find_file(name)


@pytest.mark.parametrize(("given", "meant"), [("dd.yaml", "d.yaml"), ("sets/boltz.yaml", "sets/bolts.yml")])
def test_a_file_of_the_user_is_suggested_before_a_shipped_one(given, meant):
    Path("sets").mkdir()
    for name in ("d.yaml", "sets/bolts.yml", "sets/coco.yaml"):
        Path(name).touch()
    with pytest.raises(ConfigError, match=rf"no such file here or in a subfolder; did you mean {meant}\?"):
        find_file(given)


def test_equal_endings_do_not_make_names_similar():
    with pytest.raises(ConfigError, match="these come with flatout: "):
        find_file("dd.yaml")


@pytest.mark.parametrize(("flag", "prefix"), [("--hyp", "hyp."), ("--data", "coco"), ("FILE", "stages.")])
def test_only_shipped_files_that_suit_the_flag_are_listed(flag, prefix):
    with pytest.raises(ConfigError, match="these come with flatout: ") as error:
        find_file("zzzz.yaml", flag=flag)
    named = str(error.value).partition("these come with flatout: ")[2].removesuffix(".").split(", ")
    assert named and all(name.startswith(prefix) for name in named)


def test_a_file_in_a_checkout_is_not_a_second_match_for_one_in_the_same_checkout(monkeypatch):
    monkeypatch.chdir(shipped_folder("data").parent)
    assert find_file("hyp.scratch.tiny.yaml", flag="--hyp") == shipped_folder("data") / "hyp.scratch.tiny.yaml"


# -- weights and networks ------------------------------------------------------------------------------------------


def test_the_default_weights_were_never_released_and_mean_training_from_scratch_with_a_warning(caplog):
    assert find_weights("yolo7.pt") is None
    assert caplog.messages == ["--weights was not given, and there is no yolo7.pt: training from scratch."]
    assert find_weights(str(write("yolo7.pt"))) == Path("yolo7.pt")


def test_empty_weights_cause_no_warning(caplog):
    assert find_weights("") is None
    assert caplog.messages == []


def test_weights_that_do_not_exist_are_an_error():
    with pytest.raises(CheckpointError, match=r"--weights best.pt: no such file. Check the path, or use"):
        find_weights("best.pt")


def test_without_a_config_the_one_in_the_weights_is_used_and_without_weights_yolov7(caplog):
    assert find_cfg("", weights=Path("best.pt")) is None
    assert caplog.messages == []
    assert find_cfg("", weights=None) == shipped_folder("cfg") / "training/yolov7.yaml"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["Neither --cfg nor --weights was given: using the network yolov7."]
