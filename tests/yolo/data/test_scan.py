"""A scan gives the same result with any number of workers, and a cache is never used for files that have changed."""

import os
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from flatout.errors import DataError
from flatout.yolo.data import label_cache
from flatout.yolo.data import scan as scanning
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.find import Pair, find_images, pair_up
from flatout.yolo.data.label_cache import scan_cached
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.scan import ScanConfig, image_set, join, scan, scan_image, table_of, unpack
from tests.yolo.data.drawn_set import SmallDataSet, jpeg

CONFIG = ScanConfig(workers=0, progress=False)
POLYGON = "1 0.1 0.1 0.5 0.1 0.5 0.5\n"


@pytest.fixture
def made(tmp_path) -> SmallDataSet:
    return SmallDataSet(tmp_path / "set", num_train=9)


@pytest.fixture
def pairs(made) -> list[Pair]:
    """Images with boxes, polygons, both or none, and with a bad image or label."""
    made.put("train", "1", label=POLYGON)
    made.put("train", "2", label="0 0.5 0.5 0.2 0.2\n" + POLYGON)
    made.put("train", "3", label="oops\n")
    made.put("train", "4", image=b"oops")
    (made.folder / "labels/train/5.txt").unlink()
    return pair_up(find_images([str(made.folder / "images")]).paths)


def trust_recent_files(monkeypatch) -> None:
    """Treat all files as if they had been written long ago."""
    monkeypatch.setattr(label_cache, "RECENT_S", -1.0)


def same(left, right) -> bool:
    return left.pack() == right.pack()


def test_a_table_survives_packing_splitting_and_joining(pairs):
    table = scan(pairs, CONFIG)
    assert same(unpack(table.pack()), table)
    parts = [table.take(np.arange(begin, min(begin + 5, len(pairs)))) for begin in range(0, len(pairs), 5)]
    assert same(join(parts), table)
    order = np.random.default_rng(0).permutation(len(pairs))
    assert same(table.take(order).take(np.argsort(order)), table)


def test_bytes_that_are_not_a_table_are_refused():
    packed = table_of([scan_image("none", "none")]).pack()
    for cut in range(len(packed)):
        with pytest.raises(ValueError):  # noqa: PT011 - any message will do
            unpack(packed[:cut])


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_gives_the_same_table(pairs, workers, monkeypatch):
    alone = scan(pairs, CONFIG)
    monkeypatch.setattr(scanning, "MIN_FOR_WORKERS", 1)
    monkeypatch.setattr(scanning, "CHUNK", 3)
    assert same(scan(pairs, ScanConfig(workers=workers, progress=False)), alone)


def test_the_image_set_contains_what_can_be_used(pairs, made):
    table = scan(pairs, CONFIG)
    images = image_set(table, [pair.image for pair in pairs], ["bolt", "nut"])
    assert len(images) == len(pairs) - 1, "one file is not an image"
    names = [os.path.basename(path) for path in images.paths]
    assert "4.jpg" not in names[:9]
    assert [len(points) for points in images.labels.polygons_of(names.index("2.jpg"))] == [0, 3]
    assert len(images.labels.of(names.index("3.jpg"))) == 0
    assert (images.size_wh_N2 == (64, 48)).all()
    assert table.counts() == {"found": 10, "missing": 1, "empty": 0, "corrupt": 1, "total": 12}
    single = image_set(table, [pair.image for pair in pairs], ["thing"], single_class=True)
    assert (single.labels.class_box_T5[:, 0] == 0).all()
    assert (images.labels.class_box_T5[:, 0] > 0).any(), "the table itself does not change"


def test_a_second_start_reads_no_file(pairs, tmp_path, monkeypatch):
    trust_recent_files(monkeypatch)
    first = scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    monkeypatch.setattr(scanning, "scan_image", lambda *args, **kw: pytest.fail("an image was scanned again"))
    assert same(scan_cached(pairs, CONFIG, folder=tmp_path / "cache"), first)


CHANGES = {
    "label edited": lambda pair: Path(pair.label).write_text("1 0.5 0.5 0.1 0.1\n"),
    "label removed": lambda pair: Path(pair.label).unlink(),
    "image replaced": lambda pair: Path(pair.image).write_bytes(jpeg(32, 32, seed=77)),
    "same size, same mtime": lambda pair: same_size_same_mtime(Path(pair.label)),
    "replaced by another file": lambda pair: replace_by_rename(Path(pair.label)),
}


def same_size_same_mtime(path: Path) -> None:
    status, content = path.stat(), path.read_text()
    path.write_text(content.replace("0.5", "0.6"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


def replace_by_rename(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_text(path.read_text().replace("0.5", "0.7"))
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", CHANGES)
def test_only_a_changed_file_is_read_again(change, pairs, tmp_path, monkeypatch):
    trust_recent_files(monkeypatch)
    scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    time.sleep(0.02)  # longer than a tick of the file system's clock
    CHANGES[change](pairs[0])
    scanned: list[str] = []
    original = scanning.scan_image
    monkeypatch.setattr(scanning, "scan_image", lambda *args, **kw: scanned.append(args[0]) or original(*args, **kw))
    cached = scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    assert scanned == [pairs[0].image]
    assert same(cached, scan(pairs, CONFIG))


def test_a_new_image_does_not_cost_a_scan_of_the_others(made, pairs, tmp_path, monkeypatch):
    trust_recent_files(monkeypatch)
    scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    made.put("train", "00", jpeg(seed=50), POLYGON)
    more = pair_up(find_images([str(made.folder / "images")]).paths)
    scanned: list[str] = []
    original = scanning.scan_image
    monkeypatch.setattr(scanning, "scan_image", lambda *args, **kw: scanned.append(args[0]) or original(*args, **kw))
    cached = scan_cached(more, CONFIG, folder=tmp_path / "cache")
    assert [os.path.basename(path) for path in scanned] == ["00.jpg"]
    assert same(cached, scan(more, CONFIG))
    fewer = scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    assert same(fewer, scan(pairs, CONFIG)), "a removed image is removed from the cache too"


def test_another_order_or_an_image_named_twice_is_not_mixed_up(pairs, tmp_path, monkeypatch):
    trust_recent_files(monkeypatch)
    scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    for other in (pairs[::-1], [pairs[1]] * len(pairs), [*pairs, pairs[0]]):
        assert same(scan_cached(other, CONFIG, folder=tmp_path / "cache"), scan(other, CONFIG))


def test_files_that_changed_just_before_the_scan_are_not_cached(pairs, tmp_path, monkeypatch):
    scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    scanned: list[str] = []
    original = scanning.scan_image
    monkeypatch.setattr(scanning, "scan_image", lambda *args, **kw: scanned.append(args[0]) or original(*args, **kw))
    scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    assert len(scanned) == len(pairs)


def test_strict_and_lenient_scans_have_separate_caches(pairs, tmp_path, monkeypatch):
    trust_recent_files(monkeypatch)
    lenient = scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    strict = scan_cached(pairs, ScanConfig(workers=0, progress=False, strict=True), folder=tmp_path / "cache")
    assert not same(lenient, strict)
    assert same(scan_cached(pairs, CONFIG, folder=tmp_path / "cache"), lenient)


def test_a_damaged_cache_is_never_used(pairs, tmp_path, monkeypatch, caplog):
    trust_recent_files(monkeypatch)
    first = scan_cached(pairs, CONFIG, folder=tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged if rng.random() < 0.5 else whole[: rng.integers(len(whole))])
        assert label_cache.load(path) is None
    assert "cannot be used" in caplog.text
    assert same(scan_cached(pairs, CONFIG, folder=tmp_path / "cache"), first)


def test_a_cache_that_cannot_be_written_costs_only_time(pairs, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    table = scan_cached(pairs, CONFIG, folder=tmp_path / "file" / "cache")
    assert same(table, scan(pairs, CONFIG))
    assert "every start will scan" in caplog.text


def test_nothing_in_the_data_folder_is_touched(made, tmp_path):
    def state() -> dict[str, tuple[int, int, int]]:
        found = {}
        for path in sorted(made.folder.rglob("*")):
            status = path.lstat()
            found[str(path)] = (status.st_mtime_ns, status.st_size, stat.S_IMODE(status.st_mode))
        return found

    yaml = made.yaml()
    before = state()
    open_split(read_data_yaml(yaml), "train", SplitConfig(scan=CONFIG, cache_folder=tmp_path / "cache"))
    assert state() == before


def test_a_class_without_a_name_stops_the_start_and_names_the_line(made):
    made.put("train", "3", label="7 0.5 0.5 0.1 0.1\n")
    with pytest.raises(
        DataError, match=r"labels/train/3\.txt:1: the label has class 7, but .* names 2 classes \(0 to 1\)"
    ):
        open_split(read_data_yaml(made.yaml()), "train", SplitConfig(scan=CONFIG))


def test_images_that_cannot_be_used_are_left_out_until_none_is_left(made):
    for number in range(9):
        made.put("train", str(number), image=b"no image")
    with pytest.raises(DataError, match=r"train: none of the 9 images can be used\. To see why, run: flatout yolo ch"):
        open_split(read_data_yaml(made.yaml()), "train", SplitConfig(scan=CONFIG))


def test_a_missing_folder_says_that_downloads_are_not_run(made, monkeypatch):
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("ran a command"))
    made.values |= {"val": "/no/such/folder", "download": "rm -rf /"}
    with pytest.raises(
        DataError, match=r"/no/such/folder does not exist.*'rm -rf /'.*not run: download the data yourself"
    ):
        open_split(read_data_yaml(made.yaml()), "val", SplitConfig(scan=CONFIG))
