"""Confusion matrices in files: what is written can be read back, and other formats are read."""

import json
from pathlib import Path

import numpy as np
import pytest

from flatout.errors import ConfigError, DataError
from flatout.yolo.metrics.confusion_file import read_confusion, write_confusion

COUNTS = np.array([[41, 3, 2], [1, 9, 0], [4, 5, 0]])
"""Row = predicted, column = true: 46 cats and 17 dogs, of which 4 and 5 were missed."""


def test_a_written_matrix_reads_back_with_names_and_without_the_background(tmp_path: Path):
    found = read_confusion(write_confusion(COUNTS, ['cat, "fat"', "dög"], tmp_path / "matrix.csv"))
    assert found.names == ('cat, "fat"', "dög")
    assert found.count_CC.tolist() == [[41, 3], [1, 9]]
    assert found.num_objects_C.tolist() == [46, 17]
    assert found.fraction_CC[0, 1] == pytest.approx(3 / 17)


@pytest.mark.parametrize("form", ["commas.csv", "spaces.txt", "tabs.csv", "arrays.npz", "lists.json", "named.json"])
def test_other_formats_are_read(form: str, tmp_path: Path):
    path = tmp_path / form
    marks = {"commas.csv": ",", "spaces.txt": " ", "tabs.csv": "\t"}
    if form in marks:
        path.write_text("\n".join(marks[form].join(map(str, row)) for row in COUNTS.tolist()))
    elif form == "arrays.npz":
        np.savez(path, anything=COUNTS, names=np.array(["cat", "dog", "background"]))
    else:
        named = {"matrix": COUNTS.tolist(), "names": ["cat", "dog", "background"]}
        path.write_text(json.dumps(named if form == "named.json" else COUNTS.tolist()))
    found = read_confusion(path, num_classes=2)
    assert found.count_CC.tolist() == [[41, 3], [1, 9]]
    assert found.missed_C.tolist() == [4, 5]


def test_without_names_or_a_number_every_row_is_a_class(tmp_path: Path):
    (tmp_path / "matrix.csv").write_text("1,0\n0,1\n")
    assert len(read_confusion(tmp_path / "matrix.csv").count_CC) == 2


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("m.csv", "1,2\n3\n", "not a confusion matrix"),
        ("m.csv", "1,-2\n3,4\n", "not a confusion matrix"),
        ("m.csv", "", "not a confusion matrix"),
        ("m.csv", "x,a,b\na,1,nan\nb,2,3\n", "not a confusion matrix"),
        ("m.json", '{"matrix": [[1, 2], [3, 4]], "names": ["a"]}', "2 rows of counts, but 1 names"),
        ("m.json", "{", "not valid JSON"),
        (
            "m.npz",
            "no zip",
            r"m\.npz: not a readable \.npz file with a confusion matrix\. Write it again with ",
        ),
    ],
)
def test_a_file_that_is_not_a_matrix_is_refused(name: str, content: str, sentence: str, tmp_path: Path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=sentence):
        read_confusion(tmp_path / name)


@pytest.mark.parametrize("fault", ["no zip end", "bytes changed", "one array"])
def test_a_damaged_array_file_is_refused_without_numpys_advice_to_load_it_unsafely(fault: str, tmp_path: Path):
    path = tmp_path / "matrix.npz"
    np.savez_compressed(path, matrix=np.arange(10_000.0).reshape(100, 100))
    content = bytearray(path.read_bytes())
    if fault == "no zip end":
        path.write_bytes(content[: len(content) // 2])
    elif fault == "bytes changed":
        content[200:400] = bytes(200)
        path.write_bytes(content)
    else:
        with path.open("wb") as file:
            np.save(file, np.eye(3))
    with pytest.raises(DataError, match=r"matrix\.npz: not a readable \.npz file") as refused:
        read_confusion(path)
    assert "unsafe" not in str(refused.value)


def test_an_unknown_extension_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"must end in \.csv"):
        read_confusion(tmp_path / "matrix.png")
