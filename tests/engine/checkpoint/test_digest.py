"""The digest covers every byte of a container file: no flipped bit and no missing byte goes unnoticed."""

import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.errors import CheckpointError
from flatout.safefiles.container import read_container, write_container

OFFSETS = 64
CONTENT: dict[str, Any] = {
    "state": {"w": torch.arange(300.0).view(10, 30), "n": 7, "text": "x" * 200, "half": torch.ones(33).half()}
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a.pt"
    write_container(path, CONTENT)
    return path.read_bytes()


def spread(size: int) -> list[int]:
    """Offsets over the whole file, the first and the last byte among them."""
    return sorted({0, size - 1, *random.Random(1).sample(range(size), OFFSETS - 2)})


def test_a_flipped_bit_anywhere_is_found(good: bytes, tmp_path: Path):
    for offset in spread(len(good)):
        assert not is_read(good, offset, tmp_path / "a.pt"), offset


def test_a_file_that_ends_early_anywhere_is_found(good: bytes, tmp_path: Path):
    for size in spread(len(good)):
        (tmp_path / "a.pt").write_bytes(good[:size])
        with pytest.raises(CheckpointError):
            read_container(tmp_path / "a.pt")


def test_without_the_digest_some_flipped_bits_would_pass(tmp_path: Path):
    """Negative control: the checksums of a zip leave gaps, which is why there is a digest."""
    torch.save({"flatout": {"schema": 1}, **CONTENT}, tmp_path / "plain.pt")
    plain = (tmp_path / "plain.pt").read_bytes()
    assert any(is_read(plain, offset, tmp_path / "a.pt") for offset in spread(len(plain)))


def is_read(content: bytes, flipped_offset: int, path: Path) -> bool:
    damaged = bytearray(content)
    damaged[flipped_offset] ^= 1
    path.write_bytes(damaged)
    try:
        read_container(path)
    except CheckpointError:
        return False
    return True


def test_a_file_whose_digest_is_cut_off_is_refused(good: bytes, tmp_path: Path):
    whole_zip = bytearray(good[: good.rindex(b"flatout sha256")])
    whole_zip[-2:] = b"\0\0"
    (tmp_path / "a.pt").write_bytes(whole_zip)
    assert zipfile.is_zipfile(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt: is damaged: the digest at its end is missing"):
        read_container(tmp_path / "a.pt")


def test_a_file_from_before_there_were_digests_is_read(tmp_path: Path):
    torch.save({"flatout": {"schema": 1, "versions": {}}, "step": 3}, tmp_path / "a.pt")
    assert read_container(tmp_path / "a.pt") == {"step": 3}


def test_torch_and_zip_read_a_file_with_a_digest(good: bytes, tmp_path: Path):
    (tmp_path / "a.pt").write_bytes(good)
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(loaded["state"]["w"], CONTENT["state"]["w"])
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None
