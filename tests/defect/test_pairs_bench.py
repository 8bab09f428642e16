"""bench/defect_pairs.py --data: pairs of one's own are compared with any kind of label, and mistakes are explained."""

import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from bench import defect_pairs as bench
from tests.defect.boards import DEFECTS_XY, SIDE_PX, board_pair, write_boards


def boxes_file(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    half = SIDE_PX // 2
    path.write_text("".join(f"{x - half} {y - half} {x + half} {y + half} 1\n" for x, y in DEFECTS_XY))


def write_pair(folder: Path, name: str, seed: int, *, good: bool = False) -> None:
    for kind, image in zip(("temp", "test"), board_pair(seed, good=good), strict=False):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / kind / f"{name}.png"), image)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the benchmark; returns what it printed and its exit code."""

    def run(*args: object) -> tuple[str, int]:
        monkeypatch.setattr("sys.argv", ["defect_pairs", *map(str, args)])
        code = 0
        try:
            bench.main()
        except SystemExit as error:
            code = int(error.code or 0)
        return "".join(capsys.readouterr()), code

    return run


def test_boxes_masks_and_good_pairs_of_several_folders_are_one_comparison(run, tmp_path):
    """The names contain a comma and dots; only two of the three folders have masks."""
    write_pair(tmp_path / "boxes", "west, v1.2", 1)
    boxes_file(tmp_path / "boxes/boxes/west, v1.2.txt")
    write_pair(tmp_path / "good", "east v1.2", 2, good=True)
    masks = write_boards(tmp_path / "masks", 1, first_seed=3)
    text, code = run("--data", tmp_path / "boxes", tmp_path / "good", masks, "--group-letters", 3)
    assert code == 0
    assert text.startswith("3 pairs\n")
    num = 2 * len(DEFECTS_XY)
    (equal,) = [line for line in text.splitlines() if line.lstrip().startswith("classical")]
    assert f"at equal recall: {num} of {num} boxes, 0 false blobs" in equal
    assert "wes: threshold" in text and "3 of 3 boxes, 0.00 false blobs per picture, IoU n/a" in text
    assert "CPU time" not in text


def test_without_letters_every_folder_is_a_group(run, tmp_path):
    folders = [write_boards(tmp_path / name, 1, first_seed=seed) for seed, name in enumerate("ab")]
    text, code = run("--data", *folders, "--group-letters", 0)
    assert code == 0 and all(f"{folder}: threshold" in text for folder in folders)


def test_a_difference_counts_only_if_both_references_show_it():
    template, inspected, _ = board_pair()
    planes = np.stack((inspected, template, inspected)).astype("float32")
    assert bench.baseline_map(planes).any() and not bench._classical_map(planes).any()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["none"], "no inspected images"),
        (["unlabelled"], "1 image without a mask or boxes, such as"),
        (["boards"], "All images are of one group of boards, '0', so none can be left out"),
        (["boards", "--groups", "north"], "--groups: north is none of "),
        (["all_good", "good"], "No image has a labelled defect"),
        (["boards", "large", "--network"], "a training needs images of one size .* 224 x 224"),
        (["boards", "--write"], "--write and --speed are for the pairs of"),
    ],
)
def test_what_cannot_be_compared_is_explained_in_a_sentence(run, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path / "unlabelled", "a", 0)
    write_boards(tmp_path / "boards", 1)
    for name in ("all_good", "good"):
        write_boards(tmp_path / name, 1, good=True)
    for kind in ("temp", "test", "mask"):
        image = cv2.imread(str(tmp_path / f"boards/{kind}/00.png"), cv2.IMREAD_GRAYSCALE)
        (tmp_path / "large" / kind).mkdir(parents=True)
        cv2.imwrite(str(tmp_path / "large" / kind / "00.png"), cv2.copyMakeBorder(image, 0, 32, 0, 0, 4))
    letters = 1 if arguments == ["boards"] else 0
    if "--groups" in arguments:
        arguments = ["boards", "good", *arguments[1:]]
    text, code = run("--data", *arguments, "--group-letters", letters)
    assert code == 2
    assert re.search(complaint, text.replace("\n", " ")), text
    assert "Traceback" not in text
