"""Images and labels are found, batched by aspect ratio and described by data YAMLs as the goldens record it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

from flatout.errors import ConfigError
from flatout.yolo.data.data_yaml import open_data_yaml, read_data_yaml
from flatout.yolo.data.find import find_images, label_path
from flatout.yolo.data.letterbox import rect_batches
from tests.golden_cases import golden_cases

LISTED = {
    "dir": lambda folders: 0,
    "list_txt": len,
    "list_of_dirs": lambda folders: 0,
    "list_mixed": lambda folders: len(folders) - 1,
}
"""Number of folders, counted from the end, whose images are given by a list."""


def parts(path: Path):
    content = json.loads(path.read_text())
    assert set(content) <= {"label_path", "scan", "rect"}, "unknown part of dataset.json"
    for image, label in content.get("label_path", {}).items():
        yield f"label_path {image}", ("label_path", image, label)
    for name, record in content.get("scan", {}).items():
        yield f"scan {name}", ("scan", name, record)
    for number, record in enumerate(content.get("rect", [])):
        yield f"rect {number}", ("rect", number, record)


@pytest.mark.parametrize("case", golden_cases("yolov7-data/dataset.json", parts))
def test_the_data_set_is_found_as_in_the_golden(case, tmp_path, monkeypatch):
    part, name, expected = case
    if part == "label_path":
        assert label_path(name) == expected
    elif part == "rect":
        check_rect(expected)
    else:
        monkeypatch.chdir(tmp_path)
        check_scan(name, expected)


def check_rect(record):
    size_wh = np.array(record["wh"], np.int32)
    found = rect_batches(
        size_wh,
        batch_size=record["batch_size"],
        img_size=record["img_size"],
        stride=record["stride"],
        pad=record["pad"],
    )
    aspect = size_wh[:, 1] / size_wh[:, 0]
    # Images of equal aspect ratio may come in any order.
    np.testing.assert_array_equal(aspect[found.order_N], aspect[record["order"]])
    if len(set(aspect)) == len(aspect):
        assert found.order_N.tolist() == record["order"]
    assert found.shape_hw_S2.tolist() == record["batch_shapes"]
    assert found.batch_N.tolist() == record["batch_index"]


def check_scan(name, expected):
    """Find the images of the golden scan in folders and a list, beside files that must not be found."""
    assert name in LISTED, f"unknown scan {name!r}"
    files = expected["files"]
    tops = dict.fromkeys(file.split("/")[0] for file in files)
    folders = [os.path.commonpath([os.path.dirname(file) for file in files if is_below(file, top)]) for top in tops]
    for file in [*files, *(f"{folder}/{odd}" for folder in folders for odd in (".hidden.png", "notes.md", "noending"))]:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(b"")
    searched = folders[: len(folders) - LISTED[name](folders)]
    home = files[0].split("/")[0]
    listed = [file for file in files if not any(is_below(file, folder) for folder in searched)]
    lines = [f".{file.removeprefix(home)}" if is_below(file, home) else file for file in listed]
    Path(home, "list.txt").write_text("\n".join([*lines, f"{home}/readme.md"]) + "\n\n")
    assert find_images([*searched, *([f"{home}/list.txt"] if listed else [])]).paths == files


def is_below(file: str, folder: str) -> bool:
    return file.startswith(f"{folder}/")


def data_yamls(path: Path):
    content = json.loads(path.read_text())
    names = content.get("coco_names", [])
    return [(name, (record, names)) for name, record in content.get("data_yaml", {}).items()]


@pytest.mark.parametrize("case", golden_cases("yolov7-data/configs.json", data_yamls))
def test_every_data_yaml_of_yolov7_and_its_forks_is_read(case, tmp_path):
    record, coco_names = case
    if "names" not in record:  # assigns classes to heads, and is not a data set
        (tmp_path / "heads.yaml").write_text(yaml.safe_dump(record))
        with pytest.raises(ConfigError, match="names: missing key"):
            open_data_yaml(tmp_path / "heads.yaml")
        return
    names = coco_names if len(coco_names) == record["names"] else [f"class {n}" for n in range(record["names"])]
    file = tmp_path / "data.yaml"
    file.write_text(yaml.safe_dump({**record, "names": names}, sort_keys=False))
    data = open_data_yaml(file)
    assert list(data.names) == names
    assert data.written.download == record.get("download")
    for split in ("train", "val", "test"):
        assert list(data.entries[split]) == ([record[split]] if split in record else [])
    if {"train", "val"} <= set(record):
        assert read_data_yaml(file) == data
