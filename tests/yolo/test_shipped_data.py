"""The data, hyp and head files that come with flatout have the values of those of YOLOv7 and its fork."""

import json
import tomllib
from pathlib import Path

import pytest

from flatout.errors import ConfigError
from flatout.yaml_strict import load_yaml
from flatout.yolo.data.data_yaml import open_data_yaml, read_data_yaml
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.hyp import load_hyp
from flatout.yolo.stages import read_plan
from tests.golden_cases import golden_cases

DATA = shipped_folder("data")
NO_HYP = ("hyp.head_params.yaml",)
OTHER_COCO = "coco.yaml uses lists of images, as upstream does; the one of the fork uses folders"
DIFFERENT_ON_PURPOSE = {"download", "generated_by"}
"""Keys that name programs of other projects."""


def hyp_files(path: Path):
    return [(name, (name, record["values"])) for name, record in json.loads(path.read_text()).get("hyp", {}).items()]


def data_files(path: Path):
    content = json.loads(path.read_text())
    names = content.get("coco_names")
    return [(name, (name, record, names)) for name, record in content.get("data_yaml", {}).items()]


@pytest.mark.parametrize("case", golden_cases("yolov7-data/configs.json", hyp_files))
def test_hyp_files_have_the_golden_values(case):
    name, values = case
    assert load_yaml(DATA / name) == values
    if name not in NO_HYP:
        hyp = load_hyp(DATA / name)
        assert {key: getattr(hyp, key) for key in values} == values


@pytest.mark.parametrize("case", golden_cases("yolov7-data/configs.json", data_files))
def test_data_files_have_the_golden_values(case):
    where, record, names = case
    repository, _, name = where.partition(":")
    values = load_yaml(DATA / name)
    assert isinstance(values, dict)
    if name == "coco.yaml" and values["train"] != record.get("train"):
        assert "fork" in OTHER_COCO and repository != "WongKinYiu/yolov7"
        assert (values["nc"], len(values["names"])) == (record["nc"], record["names"])
        pytest.skip(OTHER_COCO)
    compared = {key: value for key, value in record.items() if key not in DIFFERENT_ON_PURPOSE | {"names"}}
    assert {key: value for key, value in values.items() if key not in DIFFERENT_ON_PURPOSE | {"names"}} == compared
    assert ("names" in values) == ("names" in record)
    if "names" in record and names is not None:
        assert len(values["names"]) == record["names"]
        assert values["names"] == names


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*.yaml")))
def test_every_shipped_file_is_valid_for_its_use(name):
    if name.startswith("hyp.") and name not in NO_HYP:
        load_hyp(DATA / name)
    elif name in NO_HYP:
        assert isinstance(load_yaml(DATA / name), dict)
    elif name.startswith("stages."):
        assert read_plan(DATA / name).num_epochs > 1
    elif "geometry" in name:
        with pytest.raises(ConfigError, match="names: missing key"):
            open_data_yaml(DATA / name)
    else:
        assert len(read_data_yaml(DATA / name).names) == 80


@pytest.mark.parametrize("kind", ["standard", "geometry", "anticonfusion"])
def test_every_class_is_assigned_to_exactly_one_head(kind):
    values = load_yaml(DATA / f"coco_320_1b4h_{kind}.yaml")
    classes = [number for head in values["head_assignments"].values() for number in head["classes"]]
    assert sorted(classes) == list(range(80))


def test_a_wheel_contains_these_files_where_they_are_expected():
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {
        "cfg": "flatout/cfg",
        "data": "flatout/data",
        "weights": "flatout/weights",
    }
