"""The file of a store returns exactly the arrays that were written, and never anything else."""

import mmap
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from flatout.errors import DataError
from flatout.feed.store.file import (
    DTYPES,
    ENTRY,
    HEAD,
    PAGE,
    NoRoomError,
    StoreFile,
    StoreFileError,
    StoreWriter,
    data_offset,
    decode_item,
    describe,
)

SHAPES = [(), (0,), (7,), (3, 5), (2, 0, 4), (4, 3, 2), (2, 1, 2, 1, 2, 2)]


class Given:
    """An item that is already decoded."""

    parameters = ""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return 1

    def path(self, index: int) -> str:
        return "given"

    where = path

    def decode(self, index: int) -> np.ndarray:
        return self.array


def all_dtypes_and_shapes() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 200, shape).astype(dtype) for dtype in DTYPES for shape in SHAPES]


def write(path: Path, arrays: list[np.ndarray], limit_bytes: int = 1 << 20) -> StoreWriter:
    with path.open("w+b") as file:
        writer = StoreWriter(file.fileno(), num_items=len(arrays), limit_bytes=limit_bytes)
        for index, array in enumerate(arrays):
            if not writer.add(index, describe(array, source_crc=index), array.reshape(-1).view(np.uint8)):
                break
        writer.finish(state="abc", budget_bytes=limit_bytes)
    return writer


def read(path: Path) -> StoreFile:
    return StoreFile(os.open(path, os.O_RDONLY))


def test_every_dtype_and_shape_is_returned_equal_and_read_only(tmp_path):
    arrays = all_dtypes_and_shapes()
    write(tmp_path / "a.store", arrays)
    file = read(tmp_path / "a.store")
    assert len(file) == len(arrays)
    for index, array in enumerate(arrays):
        stored = file.view(index)
        assert stored.dtype == array.dtype
        assert stored.shape == array.shape
        assert stored.tobytes() == array.tobytes()
        assert not stored.flags.writeable
        assert file.is_intact(index)
        assert file.index["source_crc"][index] == index


def test_views_outlive_the_file(tmp_path):
    write(tmp_path / "a.store", [np.arange(1000, dtype=np.uint16)])
    file = read(tmp_path / "a.store")
    view = file.view(0)
    file.close()
    file.close()
    del file
    (tmp_path / "a.store").unlink()
    assert view.sum() == 499500


def test_data_is_aligned_to_cache_lines_and_begins_on_a_page(tmp_path):
    arrays = all_dtypes_and_shapes()
    writer = write(tmp_path / "a.store", arrays)
    assert data_offset(len(arrays)) % PAGE == 0
    assert (writer.index["offset"] % 64 == 0).all()
    assert (writer.index["offset"] >= data_offset(len(arrays))).all()


def test_a_full_store_keeps_the_items_written_before(tmp_path):
    arrays = [np.full(1000, number, np.uint8) for number in range(10)]
    writer = write(tmp_path / "a.store", arrays, limit_bytes=data_offset(10) + 3500)
    assert writer.stopped_by == "budget"
    file = read(tmp_path / "a.store")
    assert [file.holds(index) for index in range(10)] == [True] * 3 + [False] * 7
    assert file.header.nbytes == (tmp_path / "a.store").stat().st_size <= data_offset(10) + 3500


def test_an_item_larger_than_the_whole_budget_does_not_stop_the_others(tmp_path):
    arrays = [np.zeros(size, np.uint8) for size in (100, 10_000, 200)]
    writer = write(tmp_path / "a.store", arrays, limit_bytes=data_offset(3) + 5000)
    assert writer.stopped_by == ""
    file = read(tmp_path / "a.store")
    assert [file.holds(index) for index in range(3)] == [True, False, True]


def test_a_budget_smaller_than_the_index_is_an_error(tmp_path):
    with pytest.raises(NoRoomError, match="index"):
        write(tmp_path / "a.store", [np.zeros(1, np.uint8)], limit_bytes=100)


def test_a_disk_that_runs_full_ends_the_writing_but_not_the_run(tmp_path):
    arrays = [np.full(1000, number, np.uint8) for number in range(10)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (data_offset(10) + 3500, hard))
    try:
        writer = write(tmp_path / "a.store", arrays)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert writer.stopped_by == "no room"
    file = read(tmp_path / "a.store")
    assert [file.holds(index) and file.is_intact(index) for index in range(10)] == [True] * 3 + [False] * 7


def test_random_damage_is_either_detected_or_harmless(tmp_path):
    arrays = all_dtypes_and_shapes()
    path = tmp_path / "a.store"
    write(path, arrays)
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    # Half of the flips are in the header, half anywhere.
    places = [*rng.integers(0, HEAD.size + 200, 64), *rng.integers(0, len(whole), 64)]
    noticed = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        noticed += not survives(path, bytes(damaged), arrays)
    assert noticed >= 32
    for length in [0, 1, HEAD.size, PAGE - 1, PAGE, *rng.integers(0, len(whole), 64).tolist()]:
        assert not survives(path, whole[:length], arrays)
    for extra in (b"\0", whole):
        assert not survives(path, whole + extra, arrays)


def survives(path: Path, data: bytes, arrays: list[np.ndarray]) -> bool:
    """Whether a file opens and has only intact items; if it opens, items must be equal or known to be damaged."""
    path.write_bytes(data)
    try:
        file = read(path)
    except StoreFileError:
        return False
    intact = [file.is_intact(index) for index in range(len(arrays))]
    for index, array in enumerate(arrays):
        assert not intact[index] or file.view(index).tobytes() == array.tobytes()
    return all(intact)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has only 0 bytes"),
        (b"\x89PNG\r\n".ljust(5000, b"\0"), "it is not a store file"),
        (HEAD.pack(b"FLATOUTS", 99, 0, bytes(32)).ljust(5000, b"\0"), "it has format version 99, but this version"),
        (HEAD.pack(b"FLATOUTS", 1, 2**32 - 1, bytes(32)).ljust(5000, b"\0"), "its header is damaged"),
        (HEAD.pack(b"FLATOUTS", 1, 2, bytes(32)).ljust(5000, b"["), "its header is damaged"),
    ],
)
def test_files_that_are_not_stores_are_refused(tmp_path, data, reason):
    (tmp_path / "a.store").write_bytes(data)
    with pytest.raises(StoreFileError, match=reason):
        read(tmp_path / "a.store")


def test_shapes_that_do_not_match_their_bytes_are_refused(tmp_path):
    with (tmp_path / "a.store").open("w+b") as file:
        writer = StoreWriter(file.fileno(), num_items=1, limit_bytes=1 << 20)
        entry = describe(np.zeros((4, 4), np.uint8), 0)
        entry["shape"][0] = 5
        writer.add(0, entry, np.zeros(16, np.uint8))
        writer.finish(state="", budget_bytes=0)
    with pytest.raises(StoreFileError, match="shapes that do not match"):
        read(tmp_path / "a.store")


def test_a_decoder_that_returns_nothing_is_told_to_raise():
    with pytest.raises(DataError, match=r"^given: decode\(\) returned None\. Raise flatout\.DecodeError"):
        decode_item(Given(None), 0)


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros(3, bool), np.zeros((1,) * 7, np.uint8), np.array(["a"])])
def test_arrays_that_a_store_cannot_keep_are_refused_with_their_file(array):
    with pytest.raises(DataError, match=r"given: decode\(\) returned .* a store only keeps uint8, uint16 or float32"):
        decode_item(Given(array), 0)


def test_the_entry_is_laid_out_as_documented():
    assert ENTRY.itemsize == 80
    assert mmap.PAGESIZE % PAGE == 0
