"""Model configs are found by name from a checkout and, like weights, from an installed wheel."""

import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flatout.errors import ConfigError
from flatout.yolo.model.configs import find_config, is_config_name, load_config, shipped_folder

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("yolov7-tiny", "training/yolov7-tiny.yaml"),
        ("yolov7-tiny.yaml", "training/yolov7-tiny.yaml"),
        ("training/yolov7-tiny", "training/yolov7-tiny.yaml"),
        ("deploy/yolov7-tiny", "deploy/yolov7-tiny.yaml"),
        ("cfg/deploy/yolov7.yaml", "deploy/yolov7.yaml"),
        ("yolov7-tiny-silu", "deploy/yolov7-tiny-silu.yaml"),
    ],
)
def test_a_shipped_config_is_found_by_name_from_anywhere(name, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == shipped_folder() / found


def test_a_shipped_config_that_is_used_for_a_missing_path_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO):
        found = find_config("no/such/folder/yolov7-tiny.yaml")
    assert found == shipped_folder() / "training/yolov7-tiny.yaml"
    assert f"no/such/folder/yolov7-tiny.yaml: using {found}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        find_config("yolov7-tiny")
    assert not caplog.text


def test_a_file_that_exists_wins_over_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("yolov7-tiny.yaml").write_text("nc: 7")
    assert load_config("yolov7-tiny.yaml") == {"nc": 7}


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"^yolov7-tyni: no such model config; did you mean 'yolov7-tiny'\?$"):
        find_config("yolov7-tyni")
    with pytest.raises(ConfigError, match="flatout ships yolov7, yolov7-320, "):
        find_config("resnet50")


def test_a_name_that_is_too_long_for_the_file_system_is_refused_and_shortened():
    with pytest.raises(ConfigError, match=r"^x{200}: no such model config"):
        is_config_name("x" * 5000)


@pytest.mark.parametrize(
    ("source", "is_config"),
    [("yolov7", True), ("my.yaml", True), ("x.pt", False), ("none.safetensors", False), ("w", False)],
)
def test_configs_and_weights_are_distinguished(source, is_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for existing in ("my.yaml", "x.pt", "w"):
        Path(existing).touch()
    assert is_config_name(source) is is_config


def test_a_wheel_contains_configs_weights_and_photographs(tmp_path):
    pytest.importorskip("hatchling", reason="builds a wheel, which needs hatchling")
    built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(built, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    program = """
from flatout.yolo.find_file import shipped_weights
from flatout.yolo.model.configs import load_config, shipped_folder
print(shipped_folder(), load_config("deploy/yolov7")["nc"], shipped_weights("yolov7-tiny"))
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    package = tmp_path / "site/flatout"
    assert ran.stdout == f"{package}/cfg 80 {package}/weights/yolov7-tiny.safetensors\n"
    shipped = {path.name for path in (package / "cfg").glob("*/*.yaml")}
    assert shipped == {path.name for path in (ROOT / "cfg").glob("*/*.yaml")}
    for folder in ("weights", "data/photographs"):
        packaged = {path.name for path in (package / folder).iterdir()}
        assert packaged == {path.name for path in (ROOT / folder).iterdir()}
