"""Training is refused before anything is built: no usable label, too many bad ones, too many in one image."""

import importlib
import json
import logging
import shlex
import sys
from dataclasses import replace

import numpy as np
import pytest

from flatout.__main__ import main
from flatout.errors import DataError
from flatout.yolo.data import open_set, scan
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.label_text import MAX_LABELS
from flatout.yolo.data.open_data import open_data_set, scan_entries
from flatout.yolo.data.open_set import SplitConfig, check_training_splits, open_split, open_training_splits
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.options import TrainOptions
from tests.yolo.data.drawn_set import SmallDataSet, jpeg

GOOD, IN_PIXELS = "0 0.5 0.5 0.4 0.4\n", "0 320 240 100 80\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Keep label caches and run folders of a test in its own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def made(tmp_path) -> SmallDataSet:
    return SmallDataSet(tmp_path / "set")


def opened(made: SmallDataSet, *, allow_bad_labels: bool = False, strict: bool = False):
    options = TrainOptions(strict_labels=strict, allow_bad_labels=allow_bad_labels)
    return open_training_splits(read_data_yaml(made.yaml()), options.split_config())


def relabel(made: SmallDataSet, split: str, text: str) -> None:
    for path in (made.folder / "labels" / split).iterdir():
        path.write_text(text)


def lines(made: SmallDataSet, *, good: int, bad: int) -> None:
    """Give train this many good labels, and this many bad ones in pixels."""
    relabel(made, "train", "")
    rows = [f"0 0.5 0.5 0.4 {0.001 * (number + 1):.3f}\n" for number in range(good)]
    made.put("train", "1", label="".join(rows) + IN_PIXELS * bad)


# --- no usable label


def test_a_missing_labels_folder_is_named_with_the_first_file_that_was_expected(made):
    (made.folder / "labels").rename(made.folder / "label")
    folder = made.folder / "labels/train"
    expected = (
        rf"data\.yaml: train: no usable label for 4 images: the folder {folder} does not exist or cannot be read; "
        rf"the labels of {made.folder}/images/train/0\.jpg are expected in {folder}/0\.txt\."
    )
    with pytest.raises(DataError, match=expected):
        opened(made, allow_bad_labels=True)


def test_a_missing_labels_folder_is_named_where_the_images_are_in_the_working_directory(made, monkeypatch):
    (made.folder / "labels").rename(made.folder / "label")
    monkeypatch.chdir(made.folder)
    made.folder.joinpath("data.yaml").write_text("train: images/train\nval: images/val\nnames: [a, b]\n")
    expected = r"no folder labels, and images/train contains no label files; .* are expected in labels/train/0\.txt\."
    with pytest.raises(DataError, match=expected):
        open_training_splits(read_data_yaml("data.yaml"), TrainOptions().split_config())


def test_label_files_with_other_names_are_counted(made):
    for path in (made.folder / "labels/train").iterdir():
        path.rename(path.with_name(f"label_{path.name}"))
    with pytest.raises(DataError, match=r"labels/train contains 4 label files with other names"):
        opened(made)


def test_a_train_split_with_only_empty_label_files_is_refused(made):
    relabel(made, "train", " \n")
    with pytest.raises(DataError, match=r"the label files are empty or missing, such as .*labels/train/0\.txt"):
        opened(made)


@pytest.mark.parametrize("allow", [False, True])
def test_labels_in_pixels_are_recognised_even_where_bad_labels_are_allowed(made, allow):
    relabel(made, "train", IN_PIXELS)
    expected = (
        r"4 of 4 labels cannot be used, the first at .*labels/train/0\.txt:1: .* one is 320, which looks like pixels"
    )
    with pytest.raises(DataError, match=expected):
        opened(made, allow_bad_labels=allow)


def test_a_val_split_without_labels_is_only_a_warning(made, caplog):
    relabel(made, "val", "")
    opened(made)
    assert "val: no usable label for 3 images" in caplog.text


# --- bad labels


@pytest.mark.parametrize(("good", "bad", "warns"), [(9, 1, False), (8, 1, True), (5, 5, True)])
def test_with_more_than_a_tenth_of_the_labels_dropped_there_is_a_warning_with_counts(made, caplog, good, bad, warns):
    lines(made, good=good, bad=bad)
    train, _ = opened(made)
    assert len(train.labels.class_box_T5) == good
    assert (f"{bad} of {good + bad} labels cannot be used, the first at" in caplog.text) == warns


def test_with_more_than_half_of_the_labels_dropped_training_is_refused_unless_that_is_allowed(made, caplog):
    lines(made, good=5, bad=6)
    with pytest.raises(
        DataError, match=r"6 of 11 labels cannot be used.*--allow-bad-labels.*flatout yolo check .*data"
    ):
        opened(made)
    train, _ = opened(made, allow_bad_labels=True)
    assert len(train.labels.class_box_T5) == 5
    assert "6 of 11 labels cannot be used" in caplog.text


def test_every_dropped_line_counts_even_if_its_problem_is_not_kept(made):
    lines(made, good=70, bad=71)
    with pytest.raises(DataError, match="71 of 141 labels"):
        opened(made)


def test_a_duplicate_of_a_label_does_not_count_as_lost(made):
    relabel(made, "train", GOOD * 5)
    train, _ = opened(made)
    assert len(train.labels.class_box_T5) == 4


def test_strict_rules_drop_all_labels_of_a_file(made):
    made.put("train", "0", label=GOOD + "1 0.2 0.2 0.1 0.1\n0 0.3 0.3 0.1 0.1\n" + IN_PIXELS)
    made.put("train", "1", label=GOOD + "0 0.3 0.3 0.1 0.1\n0 0.4 0.4 0.1 0.1\n1 0.4\n")
    with pytest.raises(DataError, match=r"8 of 12 labels cannot be used, the first in .*train/0\.txt: above one"):
        opened(made, strict=True)


def test_counts_of_dropped_labels_come_from_the_cache_as_well(made):
    lines(made, good=5, bad=6)
    for _ in range(2):
        with pytest.raises(DataError, match="6 of 11 labels"):
            opened(made)


# --- too many labels


def crowd(count: int) -> str:
    return "".join(f"0 0.5 0.5 0.4 {number / 250_000:.7f}\n" for number in range(1, count + 1))


def test_ten_thousand_labels_in_one_image_are_used_and_one_more_is_refused(made):
    made.put("train", "1", label=crowd(MAX_LABELS))
    train, _ = opened(made)
    assert len(train.labels.of(1)) == MAX_LABELS == 10_000
    made.put("train", "1", label=crowd(MAX_LABELS) + "\n \n" + GOOD)
    with pytest.raises(DataError, match=r"labels/train/1\.txt: more than 10,000 labels for one image"):
        opened(made, allow_bad_labels=True)


@pytest.mark.parametrize("strict", [False, True])
def test_two_hundred_thousand_lines_are_refused_unparsed_by_train_test_and_check(made, monkeypatch, capsys, strict):
    def unread(content: bytes) -> None:
        assert len(content) < 1000, "the long file was parsed"
        return read(content)

    read = scan.parse_labels_strictly if strict else scan.parse_labels
    monkeypatch.setattr(scan, read.__name__, unread)
    made.put("val", "1", label=crowd(200_000))
    yaml = str(made.yaml())
    expected = r"labels/val/1\.txt: more than 10,000 labels for one image"
    with pytest.raises(DataError, match=expected):
        opened(made, strict=strict)
    with pytest.raises(DataError, match=expected):  # as test.py opens its split
        open_split(read_data_yaml(yaml), "val", SplitConfig(scan=ScanConfig(strict=strict)))
    assert main(["yolo", "check", yaml, "--quick", "--no-cache", *["--strict-labels"] * strict]) == 3
    said = capsys.readouterr().out
    assert f"{made.folder}/labels/val/1.txt: more than 10,000 labels for one image" in said


def test_coco_and_voc_files_have_the_same_limit(tmp_path):
    folder = tmp_path / "coco"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(jpeg())
    annotation = {"image_id": 1, "category_id": 1, "bbox": [1, 1, 9, 9]}
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 64, "height": 48}],
        "categories": [{"id": 1, "name": "bolt"}],
        "annotations": [{"id": number, **annotation} for number in range(MAX_LABELS + 1)],
    }
    (folder / "set.json").write_text(json.dumps(content))
    voc = tmp_path / "voc"
    for name in ("JPEGImages", "Annotations"):
        (voc / name).mkdir(parents=True)
    (voc / "JPEGImages/a.jpg").write_bytes(jpeg())
    one = "<object><name>bolt</name><bndbox><xmin>2</xmin><ymin>2</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>"
    (voc / "Annotations/a.xml").write_text(f"<annotation>{one * (MAX_LABELS + 1)}</annotation>")
    for path, named in ((folder / "set.json", "a.jpg"), (voc, "a.xml")):
        with pytest.raises(DataError, match=rf"{named}: more than 10,000 labels for one image"):
            open_split(open_data_set(path), "train", SplitConfig())


def test_a_voc_object_of_a_class_without_a_name_stops_the_start(tmp_path):
    for name in ("JPEGImages", "Annotations"):
        (tmp_path / "voc" / name).mkdir(parents=True)
    (tmp_path / "voc/JPEGImages/a.jpg").write_bytes(jpeg())
    box = "<bndbox><xmin>2</xmin><ymin>2</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
    objects = [f"<object><name>{name}</name>{box}</object>" for name in ("bolt", "screw")]
    (tmp_path / "voc/Annotations/a.xml").write_text(f"<annotation>{''.join(objects)}</annotation>")
    (tmp_path / "data.yaml").write_text("train: voc\nval: voc\nnames: [bolt]\n")
    with pytest.raises(DataError, match="object 2: the name 'screw' is not among the class names of the data set"):
        open_split(read_data_yaml(tmp_path / "data.yaml"), "train", SplitConfig())


# --- the command


TRAIN = ("--cfg", "yolov7-tiny", "--weights", "", "--epochs", "1", "--img", "64", "--device", "cpu")


@pytest.fixture
def without_torch(monkeypatch) -> None:
    """Make imports of the training code fail: a command that exits normally has not reached them."""
    importlib.import_module("flatout.yolo.commands.train")  # needs flatout.yolo.train.choose_input
    monkeypatch.setitem(sys.modules, "flatout.yolo.train", None)
    monkeypatch.setitem(sys.modules, "flatout.yolo.train.whole", None)


def pixels(made: SmallDataSet) -> None:
    relabel(made, "train", IN_PIXELS)


def one_beyond(made: SmallDataSet) -> None:
    made.put("train", "0", label="5 0.5 0.5 0.4 0.4\n")


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (pixels, 3, "which looks like pixels"),
        (one_beyond, 3, "the label has class 5, but"),
        (lambda made: made.values.update(nc=3), 2, "nc: 3 classes, but 2 names - make them equal, or remove nc"),
        (lambda made: made.values.update(names=["bolt"]), 2, "nc: 2 classes, but 1 name - make them equal"),
        (lambda made: made.values.pop("val"), 2, "val: no images given"),
        (lambda made: made.values.update(val="no/such/folder"), 3, "no/such/folder does not exist"),
    ],
)
@pytest.mark.usefixtures("without_torch")
def test_train_checks_the_data_before_it_imports_torch_and_agrees_with_check(made, capsys, spoil, code, said, tmp_path):
    spoil(made)
    yaml = str(made.yaml())
    assert main(["yolo", "train", "--data", yaml, *TRAIN]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["yolo", "check", yaml, "--quick", "--no-cache"]) == 3
    assert said.partition(" does not")[0] in capsys.readouterr().out


@pytest.mark.usefixtures("without_torch")
def test_bad_labels_that_are_allowed_pass_the_early_check(made):
    lines(made, good=1, bad=6)
    arguments = ["yolo", "train", "--data", str(made.yaml()), *TRAIN]
    assert main(arguments) == 3
    assert main([*arguments, "--allow-bad-labels"]) not in (2, 3)


def test_the_on_done_command_runs_for_refused_data(made, tmp_path):
    pixels(made)
    arguments = ["yolo", "train", "--data", str(made.yaml()), *TRAIN]
    assert main([*arguments, "--on-done", "echo $FLATOUT_OUTCOME $FLATOUT_EXIT_CODE > outcome.txt"]) == 3
    assert (tmp_path / "outcome.txt").read_text() == "failed 3\n"


def test_findings_of_the_scan_are_counted_with_the_command_that_lists_them(made, caplog):
    caplog.set_level(logging.INFO)
    made.put("train", "0", label=GOOD * 2)
    opened(made)
    expected = f"train: 1 finding (1 label-duplicate). To list them, run: flatout yolo check {made.folder}/data.yaml"
    assert expected in caplog.messages


def test_the_command_that_lists_findings_can_be_pasted_if_paths_have_spaces(made, caplog):
    caplog.set_level(logging.INFO)
    made.put("train", "0", label=GOOD * 2)
    path = made.yaml().rename(made.folder / "my bolts.yaml")
    open_training_splits(read_data_yaml(path), TrainOptions().split_config())
    (line,) = [message for message in caplog.messages if "To list them" in message]
    assert shlex.split(line.partition("run: ")[2]) == ["flatout", "yolo", "check", str(path)]


# --- the early check


@pytest.fixture
def scans(monkeypatch) -> list[str]:
    """The entries of every scan."""
    found, real = [], scan_entries

    def noting(entries, *args, **more):
        found.extend(entries)
        return real(entries, *args, **more)

    monkeypatch.setattr(open_set, "scan_entries", noting)
    return found


def test_a_training_uses_the_scan_of_the_check_before_it_once(made, scans, caplog):
    caplog.set_level(logging.INFO)
    lines(made, good=3, bad=1)
    data, config = read_data_yaml(made.yaml()), TrainOptions().split_config()
    check_training_splits(data, config)
    assert len(scans) == 2 and not caplog.messages
    early = open_training_splits(read_data_yaml(made.yaml()), TrainOptions().split_config())
    assert len(scans) == 2
    messages = list(caplog.messages)
    caplog.clear()
    again = open_training_splits(data, config)
    assert len(scans) == 4
    assert messages == caplog.messages and messages
    for one, other in zip(early, again, strict=True):
        assert one.paths == other.paths
        np.testing.assert_array_equal(one.labels.class_box_T5, other.labels.class_box_T5)


@pytest.mark.parametrize("change", ["single class", "data", "time"])
def test_a_training_that_is_not_the_one_of_the_check_scans_itself(made, scans, change, tmp_path, monkeypatch):
    data, config = read_data_yaml(made.yaml()), TrainOptions().split_config()
    check_training_splits(data, config)
    if change == "single class":
        config = replace(config, single_class=True)
    elif change == "data":
        data = read_data_yaml(SmallDataSet(tmp_path / "other").yaml())
    else:
        monkeypatch.setattr(open_set, "KEEP_S", 0.0)
    scans.clear()
    open_training_splits(data, config)
    assert len(scans) == 2


def test_the_check_refuses_what_a_training_refuses(made):
    lines(made, good=0, bad=3)
    data, config = read_data_yaml(made.yaml()), TrainOptions().split_config()
    with pytest.raises(DataError) as early:
        check_training_splits(data, config)
    with pytest.raises(DataError) as later:
        open_training_splits(data, config)
    assert str(early.value) == str(later.value)
