"""A container file is complete or absent and holds plain data; files of other programs are refused."""

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.errors import CheckpointError, FlatoutError, ResourceError
from flatout.safefiles import atomic
from flatout.safefiles.atomic import replacing, write_error
from flatout.safefiles.container import read_container, read_plain, write_container

CONTENT: dict[str, Any] = {
    "training": {"step": 3, "loss": [0.5, float("inf")], "names": ("a", "b"), 7: None, "done": True},
    "tensors": {"w": torch.arange(6.0).view(2, 3), "nested": [{"n": torch.tensor(4)}]},
}


def expect(kind: type[FlatoutError], words: str) -> Any:
    return pytest.raises(kind, match=f"^[^\n]*{words}[^\n]*$")


def test_what_is_written_comes_back(tmp_path: Path):
    write_container(tmp_path / "a.pt", CONTENT)
    sections = read_container(tmp_path / "a.pt")
    assert sections["training"] == CONTENT["training"]
    tensors: Any = sections["tensors"]
    assert torch.equal(tensors["w"], CONTENT["tensors"]["w"])
    assert torch.equal(tensors["nested"][0]["n"], torch.tensor(4))


def test_torch_agrees_that_it_is_plain(tmp_path: Path):
    write_container(tmp_path / "a.pt", CONTENT)
    assert torch.load(tmp_path / "a.pt", weights_only=True)["training"] == CONTENT["training"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"lr": [np.float64(1)]}, r"state\.lr\[0\] is a numpy\.float64"),
        # Python 3.13 has the class in a module of its own.
        ({"path": Path("x")}, r"state\.path is a pathlib(\._local)?\.PosixPath"),
        ({(1, 2): 3}, r"^state has keys that are neither text nor whole numbers"),
    ],
)
def test_a_value_that_is_not_plain_is_a_type_error_that_names_it(value: object, words: str, tmp_path: Path):
    with pytest.raises(TypeError, match=words):
        write_container(tmp_path / "a.pt", {"state": value})
    assert list(tmp_path.iterdir()) == []


def test_parameters_on_any_device_are_written_as_plain_tensors(tmp_path: Path):
    write_container(tmp_path / "a.pt", {"w": torch.nn.Parameter(torch.ones(2))})
    stored = torch.load(tmp_path / "a.pt", weights_only=True)["w"]
    assert type(stored) is torch.Tensor
    assert not stored.requires_grad


def test_read_plain_reads_numpy_values_of_other_programs_as_plain_ones(tmp_path: Path):
    content: dict[str, Any] = {
        "best": np.float64(0.5), "epoch": np.int64(3), "done": np.bool_(True), "names": b"\xff\x00",
        "rates_GK": np.array([[0.1, 0.2], [0.3, 0.4]], np.float32), "input": torch.Size([3, 32, 32]),
    }  # fmt: skip
    for protocol in (2, 5):
        torch.save(content, tmp_path / "other.pt", pickle_protocol=protocol)
        read = read_plain(tmp_path / "other.pt")
        assert isinstance(read, dict)
        assert (read["best"], read["epoch"], read["done"]) == (0.5, 3, True)
        assert [type(read[name]) for name in ("best", "epoch", "done")] == [float, int, bool]
        assert np.array_equal(np.array(read["rates_GK"], np.float32), content["rates_GK"])
        assert list(read["input"]) == [3, 32, 32]


def test_read_plain_refuses_numpy_arrays_of_objects(tmp_path: Path):
    torch.save({"names": np.array(["a", None], object)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="a NumPy array of other things than numbers"):
        read_plain(tmp_path / "other.pt")


def test_read_plain_reads_parameters_of_other_programs_as_tensors(tmp_path: Path):
    torch.save({"w": torch.nn.Parameter(torch.ones(2))}, tmp_path / "other.pt")
    content = read_plain(tmp_path / "other.pt")
    assert isinstance(content, dict)
    read = content["w"]
    assert type(read) is torch.Tensor and not read.requires_grad and torch.equal(read, torch.ones(2))


@pytest.mark.parametrize("items", [{"a", "b"}, {1, 2}])
def test_plain_files_with_other_values_are_not_called_damaged(items: object, tmp_path: Path):
    torch.save({"seen": items}, tmp_path / "other.pt")
    with expect(CheckpointError, r"set.* If the file is yours, load it with torch and save only its tensors") as caught:
        read_plain(tmp_path / "other.pt")
    assert "damaged" not in str(caught.value)


def test_a_section_with_the_name_of_the_header_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be named 'flatout'"):
        write_container(tmp_path / "a.pt", {"flatout": {"a": 1}})


def test_a_foreign_file_is_not_a_container(tmp_path: Path):
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "other.pt")
    with expect(CheckpointError, r"other\.pt: was not written by flatout"):
        read_container(tmp_path / "other.pt")


def test_a_container_does_not_know_the_names_of_legacy_files(tmp_path: Path):
    torch.save({"flatout": {"schema": 1}, "model": torch.nn.Conv2d(1, 1, 1)}, tmp_path / "other.pt")
    with expect(CheckpointError, r"refers to torch\.nn\.modules\.conv\.Conv2d, which weights do not need"):
        read_container(tmp_path / "other.pt")


def test_the_old_file_survives_a_write_that_fails(tmp_path: Path):
    write_container(tmp_path / "last.pt", {"step": 1})

    def fail_in_the_middle() -> None:
        with replacing(tmp_path / "last.pt", needed_bytes=10) as sink:
            sink.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_the_middle()
    assert read_container(tmp_path / "last.pt") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_new_file_has_the_permissions_a_user_expects(tmp_path: Path):
    write_container(tmp_path / "last.pt", {"step": 1})
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "last.pt").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with expect(ResourceError, r"last\.pt: not enough disk space: [\d,]+ bytes needed, 1,000 free\. The existing file"):
        write_container(tmp_path / "last.pt", CONTENT)
    assert list(tmp_path.iterdir()) == []


REFUSALS = [
    (errno.ENOSPC, r"last\.pt: not enough disk space: [\d,]+ bytes needed"),
    (errno.EDQUOT, r"last\.pt: disk quota exceeded: [\d,]+ bytes needed"),
    (
        errno.EFBIG,
        r"last\.pt: the file would have about [\d,]+ bytes, but this process may write files of at most 1,000 bytes",
    ),
]


@pytest.mark.parametrize(("number", "message"), REFUSALS, ids=["full", "quota", "limit"])
@pytest.mark.parametrize("elements", [10, 3_000_000])
def test_a_write_that_the_system_refuses_in_the_middle_is_reported_with_the_true_reason(
    elements: int, number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A limit on file sizes makes the system refuse a write in the middle; the error number is then replaced."""
    write_container(tmp_path / "last.pt", {"step": 1})
    monkeypatch.setattr(atomic, "write_error", lambda error, *args: write_error(OSError(number, ""), *args))
    with limited_files(1000), expect(ResourceError, message):
        write_container(tmp_path / "last.pt", {"w": torch.ones(elements)})
    assert read_container(tmp_path / "last.pt") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


@contextmanager
def limited_files(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path):
    with expect(ResourceError, r"nowhere/last\.pt: cannot be written: No such file or directory\. Check the folder"):
        write_container(tmp_path / "nowhere/last.pt", {"step": 1})


def test_the_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """fsync of the file, then the rename, then fsync of the folder."""
    steps: list[str] = []
    sync, replace = os.fsync, Path.replace

    def noted_sync(fd: int) -> None:
        steps.append("folder" if Path(f"/proc/self/fd/{fd}").resolve().is_dir() else "file")
        sync(fd)

    def noted_replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_container(tmp_path / "last.pt", {"step": 1})
    assert steps == ["file", "rename", "folder"]
