"""The audit of labels: planted errors rank first, fixes are written as copies, the page needs no network."""

import json
import re
import tracemalloc
from dataclasses import asdict, replace
from html import escape
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from bench import audit as bench
from flatout.errors import ConfigError, DataError, ResourceError
from flatout.yolo.commands.audit import main
from flatout.yolo.data.find import Pair
from flatout.yolo.data.label_text import label_line_numbers, parse_labels
from flatout.yolo.evaluate.run import InferenceModel
from flatout.yolo.evaluate.tiles import TileConfig
from flatout.yolo.label_audit.audit import doubt_about
from flatout.yolo.label_audit.fixes import Fix, fixed_text, places_below, read_fix_list, write_fixed
from flatout.yolo.label_audit.page import SHOWN, TWIN_BGR, crop, page
from flatout.yolo.label_audit.passes import PassConfig, passes_of
from flatout.yolo.label_audit.rank import KINDS, NONE, assign, gather_evidence, probability, rank
from flatout.yolo.label_audit.records import Record, as_csv, as_json, records_of
from flatout.yolo.label_audit.set_boxes import SetBoxes, boxes_by_image, fuse, labels_as_boxes, overlaps, pairwise_iou
from flatout.yolo.label_audit.statistics import (
    LabelStatistics,
    read_statistics,
    with_history,
    write_statistics,
)
from tests.yolo.tile_scenes import RectangleNetwork, random_boxes, tiled_set

NUM_IMAGES, PER_IMAGE, NUM_CLASSES = 60, 6, 3
NAMES = ("ant", "bee", "cat")


class Objects:
    """Objects on a grid, a few per image: their true boxes and classes."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        cell = np.stack(np.meshgrid(np.arange(3), np.arange(2), indexing="ij"), -1).reshape(-1, 2) / [3, 2]
        low = cell[None] + rng.uniform(0.04, 0.1, (NUM_IMAGES, PER_IMAGE, 2))
        size = rng.uniform(0.12, 0.18, (NUM_IMAGES, PER_IMAGE, 2))
        self.box = np.concatenate((low, low + size), -1)
        self.classes = rng.integers(0, NUM_CLASSES, (NUM_IMAGES, PER_IMAGE))
        self.rng = rng

    def labels(self) -> list[list[list[float]]]:
        """Per image: rows of x1, y1, x2, y2, 1, class."""
        return [
            [[*box, 1.0, float(number)] for box, number in zip(boxes, classes, strict=True)]
            for boxes, classes in zip(self.box.tolist(), self.classes.tolist(), strict=True)
        ]

    def detections(self) -> SetBoxes:
        """What a good network finds: every object, a little beside its place, and some false detections."""
        rows = self.labels()
        for image in rows:
            for row in image:
                row[:4] = (np.array(row[:4]) + self.rng.normal(0, 0.004, 4)).tolist()
                row[4] = float(self.rng.uniform(0.6, 0.95))
            x, y = self.rng.uniform(0, 0.8, 2)
            image.append([x, y, x + 0.1, y + 0.1, float(self.rng.uniform(0.02, 0.1)), 0.0])
        return boxes_of(rows)


def boxes_of(rows: list[list[list[float]]]) -> SetBoxes:
    image_D = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    return boxes_by_image(
        image_D, np.array([row for each in rows for row in each], np.float32).reshape(-1, 6), len(rows)
    )


def planted(kind: str) -> tuple[SetBoxes, SetBoxes, set[tuple[int, int]]]:
    """Labels with an error of one kind in every tenth image, detections, and {(image, label in it)} of the errors."""
    objects = Objects()
    found, rows, errors = objects.detections(), objects.labels(), set()
    for image in range(0, NUM_IMAGES, 10):
        own = rows[image]
        x1, y1, x2, y2, _, number = own[0]
        if kind == "missing":
            own.pop(0)
            errors.add((image, NONE))
            continue
        at = 0
        if kind == "wrong class":
            own[0][5] = (number + 1) % NUM_CLASSES
        elif kind == "moved box":
            own[0][:4] = [x1 + 0.3 * (x2 - x1), y1 + 0.2 * (y2 - y1), x2 + 0.3 * (x2 - x1), y2 + 0.2 * (y2 - y1)]
        elif kind == "spurious":
            at = len(own)
            own.append([0.3, 0.44, 0.36, 0.5, 1.0, number])
        else:
            at = len(own)
            own.append([x1 + 0.01, y1 + 0.005, x2 + 0.01, y2 + 0.005, 1.0, number])
        errors.add((image, at))
    return boxes_of(rows), found, errors


@pytest.mark.parametrize("kind", KINDS)
def test_planted_errors_of_every_kind_rank_above_all_clean_labels(kind: str):
    labels, found, errors = planted(kind)
    findings = rank(labels, found, gather_evidence(labels, found))
    first = findings[: len(errors)]
    assert {each.kind for each in first} == {kind}
    places = {
        (each.image, NONE if each.label == NONE else each.label - labels.rows(each.image).start) for each in first
    }
    if kind == "duplicate":  # either of the two labels may be called the second one
        places = {(image, max(errors)[1] if label in (0, PER_IMAGE) else label) for image, label in places}
    assert places == errors


def test_without_planted_errors_nothing_is_probable():
    objects = Objects()
    labels, found = boxes_of(objects.labels()), objects.detections()
    assert all(each.score < 0.5 for each in rank(labels, found, gather_evidence(labels, found)))


def test_a_network_that_finds_few_of_the_labels_is_doubted():
    objects = Objects()
    labels, found = boxes_of(objects.labels()), objects.detections()
    assert doubt_about(gather_evidence(labels, found)) == ""
    of_none = boxes_of([[] for _ in range(NUM_IMAGES)])
    assert f"near only 0 of {len(labels.class_D)} labels" in doubt_about(gather_evidence(labels, of_none))
    assert doubt_about(gather_evidence(of_none, found)) == "", "there is nothing to find"


def test_a_class_that_the_network_never_finds_is_not_called_spurious_where_no_other_place_is_free():
    """Large objects in full images: their boxes overlap labels in every other image, so nothing can be compared."""
    large = [[0.1, 0.1, 0.9, 0.9, 1.0, 0.0], [0.2, 0.2, 0.3, 0.3, 1.0, 1.0]]
    labels = boxes_of([large] * 30)
    found = boxes_of([[[0.2, 0.2, 0.3, 0.3, 0.9, 1.0]]] * 30)
    assert rank(labels, found, gather_evidence(labels, found)) == []


def test_images_without_labels_or_detections_are_audited_too():
    nothing = boxes_of([[], []])
    assert rank(nothing, nothing, gather_evidence(nothing, nothing)) == []
    labels = boxes_of([[[0.1, 0.1, 0.3, 0.3, 1, 0]], []])
    assert {each.kind for each in rank(labels, nothing, gather_evidence(labels, nothing))} <= {"spurious"}
    found = boxes_of([[], [[0.1, 0.1, 0.3, 0.3, 0.9, 0]]])
    (missing,) = rank(nothing, found, gather_evidence(nothing, found))
    assert (missing.kind, missing.image, missing.label) == ("missing", 1, NONE)


def test_equal_findings_keep_the_order_of_images_and_labels():
    labels, found, _ = planted("spurious")
    findings = rank(labels, found, gather_evidence(labels, found))
    assert findings == rank(labels, found, gather_evidence(labels, found))
    keys = [(-each.score, each.image, each.label, each.detection) for each in findings]
    assert keys == sorted(keys)


def test_where_a_network_often_confuses_two_classes_their_confusion_is_less_probable():
    labels, found, errors = planted("wrong class")
    rare = max(each.score for each in rank(labels, found, gather_evidence(labels, found)))
    rows = Objects().labels()
    for image in rows:
        for row in image:
            row[5] = {0.0: 1.0, 1.0: 0.0}.get(row[5], row[5])  # ants are called bees everywhere
    labels = boxes_of(rows)
    often = rank(labels, found, gather_evidence(labels, found))
    assert max((each.score for each in often if each.kind == "wrong class"), default=0) < rare / 2
    assert errors


def test_a_detection_is_assigned_to_one_label_only():
    def assigned(*weights: float) -> list[tuple[int, int]]:
        """IoU of labels 0 and 1 with detections 0 and 1, row by row."""
        label_P, found_P = np.divmod(np.arange(len(weights)), 2)
        chosen = assign(label_P, found_P, np.array(weights))
        return sorted(zip(label_P[chosen].tolist(), found_P[chosen].tolist(), strict=True))

    assert assigned(0.9, 0.2, 0.8, 0.0) == [(0, 0)]
    assert assigned(0.9, 0.2, 0.8, 0.7) == [(0, 0), (1, 1)]
    assert assigned(0.5, 0.5, 0.5, 0.5) == [(0, 0), (1, 1)]
    assert assigned() == []


@pytest.mark.parametrize("at_once", [(1, 1), (40, 3), (1 << 20, 256)])
def test_overlapping_pairs_are_those_of_all_pairs(at_once: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.yolo.label_audit.set_boxes.PAIRS_AT_ONCE", at_once[0])
    monkeypatch.setattr("flatout.yolo.label_audit.set_boxes.ROWS_AT_ONCE", at_once[1])
    rng = np.random.default_rng(0)
    for num, others in ((30, 50), (50, 1), (0, 5), (5, 0)):
        low, other_low = (rng.random((count, 2), np.float32) for count in (num, others))
        box, other = (np.concatenate((each, each + 0.2), 1) for each in (low, other_low))
        box[:1, 2:] = box[:1, :2]  # an empty box
        iou = pairwise_iou(box, other)
        found = overlaps(box, other)
        assert [each.tolist() for each in (found.n_P, found.m_P)] == [each.tolist() for each in np.nonzero(iou)]
        assert found.iou_P.tolist() == iou[np.nonzero(iou)].tolist()


def test_an_image_with_thousands_of_detections_takes_memory_by_those_that_overlap():
    """Large images, looked at in tiles."""
    rng = np.random.default_rng(0)
    low = rng.random((6000, 2))
    rows = np.concatenate((low, low + 0.004, rng.uniform(0.02, 1, (6000, 1)), np.zeros((6000, 1))), 1)
    found, labels = (boxes_of([rows[:count].tolist()]) for count in (6000, 3000))
    tracemalloc.start()
    fused = fuse([found, found])
    findings = rank(labels, fused, gather_evidence(labels, fused))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert findings and peak_bytes < 50e6  # all pairs would be 36 million of 4 bytes


def test_probability_rises_with_the_evidence_and_falls_with_the_number_of_labels_that_show_it():
    rng = np.random.default_rng(0)
    evidence, of_errors = rng.random(500), rng.random(300)
    share = probability(evidence, of_errors, num_errors=10)
    assert (np.diff(share[np.argsort(evidence)]) >= 0).all()
    assert share.min() >= 0 and share.max() <= 1
    # 10 errors are expected above 0.9, and 5 or 50 labels are there.
    few, many = (probability(np.full(number, 0.9), np.full(4, 0.9), num_errors=10) for number in (5, 50))
    assert few.tolist() == [1.0] * 5 and many.tolist() == [0.2] * 50


# Several passes


def test_fused_detections_count_every_pass():
    one = boxes_of([[[0.1, 0.1, 0.3, 0.3, 0.8, 0], [0.5, 0.5, 0.7, 0.7, 0.6, 1]]])
    two = boxes_of([[[0.12, 0.1, 0.32, 0.3, 0.4, 0], [0.5, 0.5, 0.7, 0.7, 0.6, 2]]])
    fused = fuse([one, two])
    assert fused.class_D.tolist() == [0, 1, 2]
    assert fused.score_D.tolist() == pytest.approx([0.6, 0.3, 0.3])
    assert fused.box_D4[0].tolist() == pytest.approx([0.1 + 0.02 / 3, 0.1, 0.3 + 0.02 / 3, 0.3])


def test_a_pass_fused_with_itself_is_unchanged():
    found = Objects().detections()
    fused = fuse([found, found])
    assert fused.first_N.tolist() == found.first_N.tolist()
    for image in range(found.num_images):
        rows = found.rows(image)
        order = np.argsort(-found.score_D[rows], kind="stable")
        assert fused.score_D[rows] == pytest.approx(found.score_D[rows][order])
        assert np.diag(pairwise_iou(fused.box_D4[rows], found.box_D4[rows][order])) == pytest.approx(1, abs=1e-3)


# Statistics of a training


def test_statistics_are_read_as_they_were_written(tmp_path: Path):
    statistics = after_epochs([[0.8, 0.2]])
    write_statistics(tmp_path / "statistics.npz", statistics)
    again = read_statistics(tmp_path / "statistics.npz")
    assert again is not None and again.fingerprint == "labels" and again.num_epochs == 1
    assert again.learned_T.tolist() == [1, 0] and again.confused_T.dtype == np.int32
    assert read_statistics(tmp_path / "absent.npz") is None
    written = (tmp_path / "statistics.npz").read_bytes()
    for damaged in (b"", b"no", written[: len(written) // 2], written[:200] + b"?" * 20 + written[220:]):
        (tmp_path / "bad.npz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"bad\.npz: is damaged or cannot be read\. Delete it"):
            read_statistics(tmp_path / "bad.npz")
    np.savez(tmp_path / "old.npz", num_passes=3)
    assert read_statistics(tmp_path / "old.npz") is None


def after_epochs(own_ET: list[list[float]]) -> LabelStatistics:
    """Statistics of epochs that confirm each label so much; a negative number: it was not shown."""
    statistics = LabelStatistics.empty(len(own_ET[0]), "labels")
    for own_T in own_ET:
        rows = [[1, own, own, 0, own, 1] if own >= 0 else [0] * 6 for own in own_T]
        sums = {"sum": np.array(rows, np.float32), "confused": np.zeros(len(rows), np.int32)}
        statistics = statistics.add(sums)
    return statistics


def test_a_label_that_was_learned_late_is_less_confirmed_than_the_last_weights_say():
    labels = boxes_of([[[0.1, 0.1, 0.3, 0.3, 1, 0], [0.6, 0.6, 0.8, 0.8, 1, 0]]])
    both = gather_evidence(labels, boxes_of([[[0.1, 0.1, 0.3, 0.3, 0.8, 0], [0.6, 0.6, 0.8, 0.8, 0.8, 0]]]))
    assert with_history(both, after_epochs([[0, 0]])).own_T.tolist() == pytest.approx([0.8, 0.8])
    # The squared mean was 0.16, and is 0.64 now: that epoch counts a quarter of a half, scaled to a mean of 0.8.
    assert with_history(both, after_epochs([[0.8, 0]])).own_T.tolist() == pytest.approx([0.825, 0.7])
    assert with_history(both, after_epochs([[0.4, 0.4]])).own_T.tolist() == pytest.approx([0.8, 0.8])
    # A label that was never shown keeps what the last weights say.
    assert with_history(both, after_epochs([[0.8, -1]])).own_T.tolist() == pytest.approx([0.8, 0.8])


# Files


def test_line_numbers_are_those_of_the_labels_that_are_used():
    content = b"0 0.5 0.5 0.1 0.1\n\n0 0.5 0.5 0.1 0.1\nnonsense\n1 0.2 0.2 0.1 0.1\n"
    assert label_line_numbers(content) == [1, 5]
    assert len(parse_labels(content).class_box_n5) == 2


def records(tmp_path: Path, kind: str) -> list[Record]:
    """The records of planted errors, with real label files and images."""
    labels, found, _ = planted(kind)
    pairs = []
    for image in range(labels.num_images):
        rows = labels.rows(image)
        box_n4 = labels.box_D4[rows]
        lines = [
            f"{number} " + " ".join(f"{v:.6f}" for v in (*(box[:2] + box[2:]) / 2, *(box[2:] - box[:2])))
            for number, box in zip(labels.class_D[rows].tolist(), box_n4, strict=True)
        ]
        file = tmp_path / "labels" / f"{image}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines) + "\n")
        path = tmp_path / "images" / f"{image}.jpg"
        path.parent.mkdir(exist_ok=True)
        if image % 10 == 0:
            cv2.imwrite(str(path), np.full((48, 64, 3), 90, np.uint8))
        pairs.append(Pair(str(path), str(file)))
    evidence = gather_evidence(labels, found)
    return records_of(rank(labels, found, evidence), labels, found, evidence, pairs, NAMES)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fix_of_a_finding_repairs_its_label_and_no_other(tmp_path: Path, kind: str):
    first = records(tmp_path, kind)[0]
    before = {file: file.read_text() for file in (tmp_path / "labels").iterdir()}
    assert first.kind == kind and first.fix is not None
    (copy,) = write_fixed([first.fix], tmp_path / "fixed")
    assert {file: file.read_text() for file in (tmp_path / "labels").iterdir()} == before, "originals are untouched"
    assert copy == tmp_path / "fixed" / "labels" / Path(first.label_file).name
    old, new = before[Path(first.label_file)].splitlines(), copy.read_text().splitlines()
    if kind == "missing":
        assert new[:-1] == old
    elif kind in ("spurious", "duplicate"):
        assert new == [line for number, line in enumerate(old, 1) if number != first.line]
    else:
        changed = [number for number, pair in enumerate(zip(old, new, strict=True), 1) if pair[0] != pair[1]]
        assert changed == [first.line]
    objects = Objects()
    image = int(Path(first.label_file).stem)
    fixed = sorted(tuple(map(float, line.split())) for line in new)
    true = sorted(
        (number, *(box[:2] + box[2:]) / 2, *(box[2:] - box[:2]))
        for number, box in zip(objects.classes[image].tolist(), objects.box[image], strict=True)
    )
    assert [row[0] for row in fixed] == [row[0] for row in true], "the classes are right again"
    assert np.abs(np.array(fixed) - np.array(true)).max() < 0.03, "the boxes are right again"


def test_nothing_is_overwritten_and_stale_lists_are_refused(tmp_path: Path):
    file = tmp_path / "labels" / "a.txt"
    file.parent.mkdir()
    file.write_text("0 0.5 0.5 0.1 0.1\n1 0.2 0.2 0.1 0.1\n")
    fix = Fix(action="delete", file=str(file), line=2, was="1 0.2 0.2 0.1 0.1", text="")
    write_fixed([fix], tmp_path / "out")
    with pytest.raises(ConfigError, match="already exists, and nothing is overwritten"):
        write_fixed([fix], tmp_path / "out")
    with pytest.raises(ConfigError, match="already exists"):
        write_fixed([fix], tmp_path)  # in place
    file.write_text("0 0.5 0.5 0.1 0.1\n1 0.3 0.2 0.1 0.1\n")
    with pytest.raises(DataError, match=r"a\.txt:2: this line has changed since the audit"):
        write_fixed([fix], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_copy_never_takes_the_place_of_a_label_file_or_leaves_its_folder(tmp_path: Path):
    new = Fix(action="add", file=str(tmp_path / "labels/new.txt"), line=0, was="", text="1 0.5 0.5 0.1 0.1")
    with pytest.raises(ConfigError, match=r"new\.txt: --out .* would put the corrected copy in its place"):
        write_fixed([new], tmp_path)  # the file does not exist, so nothing would be overwritten
    outside = Fix(action="add", file="labels/../../new.txt", line=0, was="", text="1 0.5 0.5 0.1 0.1")
    with pytest.raises(ConfigError, match="is not the path of a label file"):
        write_fixed([outside], tmp_path / "a/b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"file/labels cannot be created: Not a directory"):
        write_fixed([new], tmp_path / "file")


def test_a_label_is_not_added_to_a_file_that_has_changed_since(tmp_path: Path):
    first = records(tmp_path, "missing")[0]
    assert first.fix is not None and Path(first.fix.file).is_absolute()
    file = Path(first.label_file)
    num_lines = len(file.read_text().splitlines())
    with file.open("a") as opened:  # somebody has added it
        opened.write(first.fix.text + "\n")
    with pytest.raises(DataError, match=rf"it had {num_lines} lines and has {num_lines + 1}\. Make a new list"):
        write_fixed([first.fix], tmp_path / "out")
    file.unlink()
    with pytest.raises(DataError, match="does not exist any more"):
        write_fixed([first.fix], tmp_path / "out")


def test_an_image_without_a_label_file_gets_its_first_label(tmp_path: Path):
    fix = Fix(action="add", file=str(tmp_path / "none.txt"), line=0, was="", text="1 0.5 0.5 0.1 0.1")
    assert fixed_text(fix.file, [fix]) == "1 0.5 0.5 0.1 0.1\n"


@pytest.mark.parametrize(
    ("files", "places"),
    [
        (["/data/labels/train/a.txt", "/data/labels/val/a.txt"], ["labels/train/a.txt", "labels/val/a.txt"]),
        (["/data/a.txt"], ["a.txt"]),
        # Image folders of several places may have files of the same name.
        (["/data/one/labels/a.txt", "/data/two/labels/a.txt"], ["one/labels/a.txt", "two/labels/a.txt"]),
        (["/one/a.txt", "/two/x/a.txt", "/two/b.txt"], ["one/a.txt", "two/x/a.txt", "two/b.txt"]),
    ],
)
def test_copies_lie_as_data_sets_are_laid_out_and_files_of_the_same_name_apart(files: list[str], places: list[str]):
    found = places_below(files)
    assert [found[file].as_posix() for file in files] == places


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_copy_keeps_the_line_ends_of_its_file(tmp_path: Path, end: str):
    file = tmp_path / "a.txt"
    file.write_bytes(f"0 0.5 0.5 0.1 0.1{end}7 0.2 0.2 0.1 0.1{end}2 0.3 0.3 0.1 0.1".encode())
    fix = Fix(action="delete", file=str(file), line=2, was="7 0.2 0.2 0.1 0.1", text="")
    (copy,) = write_fixed([fix], tmp_path / "out")
    assert copy.read_bytes() == f"0 0.5 0.5 0.1 0.1{end}2 0.3 0.3 0.1 0.1{end}".encode()


def test_files_of_the_same_name_in_several_folders_are_all_corrected(tmp_path: Path):
    files = [tmp_path / folder / "labels/a.txt" for folder in ("one", "two")]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_text(f"{number} 0.5 0.5 0.1 0.1\n7 0.2 0.2 0.1 0.1\n")
    fixes = [Fix(action="delete", file=str(file), line=2, was="7 0.2 0.2 0.1 0.1", text="") for file in files]
    written = write_fixed(fixes, tmp_path / "out")
    assert [path.read_text() for path in written] == ["0 0.5 0.5 0.1 0.1\n", "1 0.5 0.5 0.1 0.1\n"]
    assert written == [tmp_path / "out" / folder / "labels/a.txt" for folder in ("one", "two")]


def test_the_command_applies_a_fix_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = records(tmp_path, "spurious")[0]
    assert first.fix is not None
    (tmp_path / "fix-list.json").write_text(json.dumps({"version": 1, "fixes": [asdict(first.fix)]}))
    with pytest.raises(ConfigError, match="--fix-list needs --out FOLDER"):
        main(["--fix-list", str(tmp_path / "fix-list.json")])
    assert main(["--fix-list", str(tmp_path / "fix-list.json"), "--out", str(tmp_path / "fixed")]) == 0
    assert "1 fix, 1 corrected label file in" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--fix-list applies a list that was saved and audits nothing"):
        main(["runs/train/exp", "--fix-list", str(tmp_path / "fix-list.json"), "--out", str(tmp_path / "other")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope", "is not JSON"),
        ("[]", 'has no list "fixes"'),
        ('{"fixes": []}', "has no fixes. Tick findings"),
        ('{"fixes": [1]}', r"fixes\[0\] is not an object"),
        ('{"fixes": [{"action": "delete", "file": "a", "line": "2", "was": "", "text": ""}]}', "line must be a whole"),
        ('{"fixes": [{"action": "burn", "file": "a", "line": 2, "was": "", "text": ""}]}', "must be one of delete"),
        ('{"fixes": [{"action": "add", "file": "a", "line": 2, "was": "", "text": ""}]}', "'' is not a label"),
        ('{"fixes": [{"action": "replace", "file": "a", "line": 2, "was": "", "text": "0 .5 2"}]}', "is not a label"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_fix_list_is_refused_with_its_place(tmp_path: Path, text: str, message: str):
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_fix_list(tmp_path / "list.json")


def test_the_page_needs_no_network_and_holds_the_fixes_of_what_it_shows(tmp_path: Path):
    found = [each for each in records(tmp_path, "moved box") if int(Path(each.image).stem) % 10 == 0]
    html = page("<Audit>", ["about & more"], found * (1 + SHOWN // len(found)))
    assert html.count('class="card"') == SHOWN == html.count("data:image/jpeg;base64,")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)|@import|url\(|https?:|fetch\(|XMLHttp""", html)
    assert "&lt;Audit&gt;" in html and "about &amp; more" in html
    held = re.search(r'id="fixes">(.*?)</script>', html)
    assert held is not None
    fixes = json.loads(held[1])
    assert fixes[str(found[0].rank)] == asdict(found[0].fix)  # type: ignore[arg-type]
    assert found[0].reason in html and f"{found[0].label_file}:{found[0].line}" in html


def test_a_page_without_fixes_asks_for_none(tmp_path: Path):
    found = [replace(each, fix=None) for each in records(tmp_path, "moved box")[:3]]
    html = page("Audit", [], found)
    assert "only labels in YOLO text files are corrected" in html
    assert "checkbox" not in html and "Save fix list" not in html


def test_the_page_of_a_run_names_the_command_that_shows_when_an_image_was_seen(tmp_path: Path):
    found = records(tmp_path, "moved box")[:3]
    assert "replay" not in page("Audit", [], found)
    html = page("Audit", [], found, replay="flatout yolo replay 'my run'")
    for record in found:
        command = f"flatout yolo replay 'my run' --file {record.image}"
        assert f"<code>{escape(command)}</code>" in html
    # Cards keep the order of the findings, although every image is decoded once.
    assert [int(number) for number in re.findall(r"<b>(\d+)\. ", html)] == [record.rank for record in found]


def test_the_other_label_of_a_duplicate_is_named_and_shown(tmp_path: Path):
    first = records(tmp_path, "duplicate")[0]
    lines = Path(first.label_file).read_text().splitlines()
    (number,) = re.findall(r"^covers the same object as the label in line (\d+) \(IoU 0\.\d\d\)$", first.reason)
    assert int(number) != first.line and first.twin_box is not None
    cx, cy, width, height = map(float, lines[int(number) - 1].split()[1:])
    corners = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
    assert first.twin_box == pytest.approx(corners, abs=1e-5)
    image = np.full((480, 640, 3), 90, np.uint8)
    with_twin, without = (crop(image, each) for each in (first, replace(first, twin_box=None)))
    is_blue, was_blue = ((each == TWIN_BGR).all(2).any() for each in (with_twin, without))
    assert is_blue and not was_blue


@pytest.mark.parametrize("mirrored", [False, True])
def test_large_images_are_looked_at_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrored: bool):
    rng = np.random.default_rng(2)
    sizes = [(200, 300), (130, 90)]
    scenes = [random_boxes(rng, *size, count=8, sides=(8, 30), gap=8) for size in sizes]
    images = tiled_set(tmp_path / "set", scenes, sizes)
    model = InferenceModel(RectangleNetwork(), 2, 32, images.names)
    monkeypatch.setattr("flatout.yolo.label_audit.passes.load_inference_model", lambda *_: model)
    config = PassConfig(
        size=64, batch_size=4, device=torch.device("cpu"), workers=0, mirrored=mirrored, tiles=TileConfig(tile=64)
    )
    passes = passes_of(["best.pt"], images, config, shown=False)
    assert len(passes) == 1 + mirrored
    labels = labels_as_boxes(images.labels)
    for found in passes:
        assert len(found.class_D) == len(labels.class_D)
        for image in range(len(images)):
            one, other = labels.rows(image), found.rows(image)
            iou = pairwise_iou(labels.box_D4[one], found.box_D4[other])
            assert (iou.max(1) > 0.99).all()
            assert (found.class_D[other][iou.argmax(1)] == labels.class_D[one]).all()


def test_csv_and_json_have_every_finding(tmp_path: Path):
    found = records(tmp_path, "missing")
    assert as_csv(found).count("\n") == 1 + len(found)
    content = json.loads(as_json(found, {"data": "d.yaml"}))
    assert len(content["findings"]) == len(found) and content["data"] == "d.yaml"
    assert content["findings"][0]["kind"] == "missing"


# The benchmark


def test_the_benchmark_plants_equal_shares_of_every_kind():
    rng = np.random.default_rng(3)
    before = {
        f"{image:03}": [
            [float(rng.integers(3)), *rng.uniform(0.2, 0.8, 2), *rng.uniform(0.05, 0.15, 2)] for _ in range(4)
        ]
        for image in range(200)
    }
    labels = {image: [list(row) for row in rows] for image, rows in before.items()}
    planted = bench.plant(labels, 3, seed=0)
    assert [sum(each.kind == kind for each in planted) for kind in bench.PLANTED] == [10] * 4  # 5 % of 800
    assert sum(map(len, labels.values())) == 800  # ten deleted, ten added
    for error in planted:
        own = [
            row for row in labels[error.image] if np.allclose(bench.corners(row), error.box) and row[0] == error.number
        ]
        was = [row for row in before[error.image] if np.allclose(bench.corners(row), error.box)]
        assert len(own) == (error.kind != "missing") and len(was) == (error.kind in ("missing", "wrong class"))
        if error.kind == "moved box":
            overlaps = [bench.overlap(bench.corners(row), np.array(error.box)) for row in before[error.image]]
            assert any(0.3 <= overlap <= 0.6 for overlap in overlaps)


def test_natural_findings_leave_both_counts():
    box, elsewhere = np.array([0.1, 0.1, 0.3, 0.3]), np.array([0.6, 0.6, 0.8, 0.8])
    errors = [bench.Planted("spurious", "a", 0, tuple(box))]
    found = [bench.Suspect(0.9, "a", "label", elsewhere, 0), bench.Suspect(0.8, "a", "label", box, 0)]
    assert bench.judged(found, errors, []) == [-1, 0]
    assert bench.judged(found, errors, found[:1]) == [0]
    figures = bench.figures([-1, 0], errors)
    assert (figures.precision_100, figures.recall_2n, figures.average_precision) == (0.5, 1.0, 0.5)
