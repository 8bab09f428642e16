"""Images are found even under strange names, and all mistakes in a data YAML are reported at once."""

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from flatout.errors import ConfigError, DataError
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.find import find_images, label_path, pair_up, read_list
from tests.yolo.model.mutated_configs import mutated_text

GOOD = "train: images/train\nval: images/val\nnc: 2\nnames: [bolt, nut]\n"

LETTERS = "abcdefghij"
BOMB = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise(LETTERS))

# Text of a data YAML -> part of the error; "" for a valid one.
YAMLS = {
    "plain": (GOOD, ""),
    "without nc": (GOOD.replace("nc: 2\n", ""), ""),
    "names by number": (GOOD.replace("[bolt, nut]", "{1: nut, 0: bolt}"), ""),
    "list of folders": (GOOD.replace("images/train", "[a, b.txt]"), ""),
    "test empty": (GOOD + "test:\n", ""),
    "path": (GOOD + "path: /data\n", ""),
    "download": (GOOD + "download: bash get.sh\n", ""),
    "from Roboflow": (GOOD + "roboflow:\n  project: bolts\n  version: 3\n  license: CC BY 4.0\n", ""),
    "norway": (GOOD.replace("[bolt, nut]", "[no, yes]"), ""),
    "octal and date names": (GOOD.replace("[bolt, nut]", "[0123, 2024-01-01]"), ""),
    "number names": (GOOD.replace("[bolt, nut]", "[1, 2.5]"), ""),
    "bool name": (GOOD.replace("[bolt, nut]", "[true, nut]"), ""),
    "bom": ("\ufeff" + GOOD, ""),
    "crlf": (GOOD.replace("\n", "\r\n"), ""),
    "empty": ("", "a data YAML has the keys"),
    "only a word": ("images", "a data YAML has the keys"),
    "a list": ("[1, 2]", "a data YAML has the keys"),
    "wrong nc": (GOOD.replace("nc: 2", "nc: 3"), "3 classes, but 2 names"),
    "nc is text": (GOOD.replace("nc: 2", "nc: two"), "nc: wrong value"),
    "nc is a bool": (GOOD.replace("nc: 2", "nc: true"), "nc: "),
    "nc is a fraction": (GOOD.replace("nc: 2", "nc: 1.5"), "nc: wrong value"),
    "nc is negative": (GOOD.replace("nc: 2", "nc: -2"), "-2 classes"),
    "no names": (GOOD.replace("names: [bolt, nut]", ""), "names: missing key"),
    "names empty": (GOOD.replace("[bolt, nut]", "[]").replace("nc: 2", "nc: 0"), "names: empty"),
    "names is text": (GOOD.replace("[bolt, nut]", "bolt"), "names: wrong value"),
    "names with null": (GOOD.replace("[bolt, nut]", "[bolt, null]"), "names.1: wrong value"),
    "names nested": (GOOD.replace("[bolt, nut]", "[bolt, [nut]]"), "names.1: wrong value"),
    "names with holes": (GOOD.replace("[bolt, nut]", "{0: bolt, 5: nut}"), r"\[0, 5\] are not 0, 1, 2"),
    "names by negative number": (GOOD.replace("[bolt, nut]", "{-1: bolt, 0: nut}"), r"\[-1, 0\] are not"),
    "no train": (GOOD.replace("train: images/train\n", ""), "train: no images given"),
    "no val": (GOOD.replace("val: images/val\n", ""), "val: no images given"),
    "train is a number": (GOOD.replace("images/train", "7"), "train: wrong value"),
    "train is a mapping": (GOOD.replace("images/train", "{a: b}"), "train: wrong value"),
    "unknown key": (GOOD + "nmaes: [a]\n", "nmaes: unknown key .* did you mean 'names'"),
    "duplicate key": (GOOD + "nc: 2\n", "key 'nc' appears twice"),
    "tab": (GOOD + "test:\n\t- a\n", "a tab cannot indent"),
    "python tag": (GOOD.replace("[bolt, nut]", "!!python/object/apply:os.system [ls]"), "is refused"),
    "merge": ("a: &a {nc: 2}\n<<: *a\n", "merge keys"),
    "bomb": (BOMB, "more than 50,000 values"),
    "deep": ("train: " + "[" * 5000, "nested deeper"),
    "binary": ("\0\1\2", "not allowed"),
    "unclosed": ("names: [bolt", "not valid YAML"),
    "two documents": (GOOD + "---\n" + GOOD, "not valid YAML"),
    "huge": ("x" * 1_000_001, "larger than"),
    "html": ("<!DOCTYPE html><html></html>", "a data YAML has the keys"),
    "all at once": ("names: [a]\nnc: two\nnmaes: [a]\n", "(?s)nc: wrong value.*nmaes: unknown key"),
}  # fmt: skip


@pytest.mark.parametrize("name", YAMLS)
def test_a_data_yaml_is_read_or_refused_with_a_reason(name, tmp_path):
    text, refusal = YAMLS[name]
    path = tmp_path / "data.yaml"
    path.write_bytes(text.encode())
    if not refusal:
        data = read_data_yaml(path)
        assert len(data.names) == 2
        assert all(isinstance(each, str) for each in data.names)
        return
    with pytest.raises(ConfigError, match=refusal) as error:
        read_data_yaml(path)
    assert str(path) in str(error.value)


def test_there_are_at_least_45_data_yamls():
    assert len(YAMLS) >= 45


def test_any_mutated_data_yaml_is_read_or_refused_with_its_name(tmp_path):
    rng, path = random.Random(0), tmp_path / "data.yaml"
    refusals = []
    texts = [text for text, refusal in YAMLS.values() if not refusal]
    for _ in range(1000):
        path.write_bytes(mutated_text(rng.choice(texts), rng).encode())
        try:
            read_data_yaml(path)
        except ConfigError as error:
            refusals.append(str(error))
    assert 50 < len(refusals) < 950, "they must be good and bad"
    assert all(str(path) in refusal for refusal in refusals)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(*paths: str) -> None:
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"")


def test_paths_start_from_the_working_directory_or_else_from_the_yaml(folder):
    put("here/images/train/a.jpg", "set/images/train/a.jpg", "set/images/val/a.jpg")
    (folder / "set/data.yaml").write_text(GOOD)
    os.chdir("here")
    data = read_data_yaml("../set/data.yaml")
    assert data.entries["train"] == ("images/train",)
    assert data.entries["val"] == ("../set/images/val",)


def test_labels_are_found_from_inside_the_data_set_too(folder):
    put("images/train/a.jpg", "images/val/a.jpg", "labels/train/a.txt")
    (folder / "data.yaml").write_text(GOOD)
    (pair,) = pair_up(find_images(read_data_yaml("data.yaml").entries["train"]).paths)
    assert pair.label == "./labels/train/a.txt"


def test_only_a_leading_dot_in_a_line_of_a_list_is_replaced(folder):
    put("lists/images.txt")
    Path("lists/images.txt").write_text("\n ./a/../b.jpg\n./c.jpg\n/abs/d.jpg\r\nrel/e.png\n\n")
    assert read_list("lists/images.txt") == ["lists/a/../b.jpg", "lists/c.jpg", "/abs/d.jpg", "rel/e.png"]


def test_links_that_form_a_cycle_are_followed_once(folder):
    put("images/a.jpg", "images/deep/b.jpg")
    (folder / "images/deep/loop").symlink_to("..")
    (folder / "images/self.jpg").symlink_to("self.jpg")
    found = find_images(["images"])
    assert found.paths == ["images/a.jpg", "images/deep/b.jpg", "images/self.jpg"]


def test_strange_names_are_found(folder):
    names = ["a b.jpg", "ü.jpg", "new\nline.jpg", "'.jpg", "x" * 240 + ".jpg", "UPPER.JPG", "two.dots.png"]
    put(*(f"images/{name}" for name in names))
    (folder / "images/folder.jpg").mkdir()
    os.close(os.open(b"images/\xff\xfe.jpg", os.O_CREAT))
    found = find_images(["images"]).paths
    assert sorted(os.fsencode(path) for path in found) == sorted(
        [*(f"images/{name}".encode() for name in names), b"images/\xff\xfe.jpg"]
    )


def test_missing_entries_and_empty_ones_are_distinguished(folder):
    put("empty/readme.md", "images/.hidden.jpg", "images/a.jpg", "images/notes.docx")
    found = find_images(["empty", "nowhere", "images"])
    assert (found.absent, found.empty) == (["nowhere"], ["empty"])
    assert (found.hidden, found.other) == (["images/.hidden.jpg"], ["empty/readme.md", "images/notes.docx"])


def test_a_folder_that_cannot_be_read_is_a_data_error(folder, monkeypatch):
    put("images/a.jpg")

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"images: the folder cannot be read: Permission denied"):
        find_images(["images"])


def test_a_folder_that_cannot_be_entered_is_a_data_error(folder, monkeypatch):
    put("images/locked/a.jpg")
    stat = os.stat

    def refuse(path, *args, **kwargs):
        if path == "images/locked":
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(DataError, match=r"images/locked: the folder cannot be read: Permission denied"):
        find_images(["images"])


def test_only_the_first_folder_images_is_replaced():
    assert label_path("/images/images/a.b.JPG") == "/labels/images/a.b.txt"
    assert label_path("images/a.jpg") == "images/a.txt"
