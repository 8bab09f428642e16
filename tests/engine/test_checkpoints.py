"""Two checkpoints: at any moment of a save there is a complete one to read, and a damaged one is never used."""

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engine.checkpoints import CheckpointStore, describe_loss
from flatout.errors import CheckpointError, ResourceError
from flatout.safefiles.container import read_container

pytestmark = pytest.mark.fault


def at(epoch: int, step: int) -> dict[str, int]:
    return {"epoch": epoch, "step": step, "steps_per_epoch": 50}


def state(step: int, epoch: int = 2) -> dict[str, Any]:
    return {"training": {"position": at(epoch, step)}, "w": torch.full((50,), float(step))}


def step_of(checkpoints: CheckpointStore) -> int | None:
    found: Any = checkpoints.load()
    return None if found is None else found.sections["training"]["position"]["step"]


@pytest.fixture
def three(tmp_path: Path) -> CheckpointStore:
    """A folder in which three checkpoints were saved, so that two are left."""
    checkpoints = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        checkpoints.save(state(step))
    return checkpoints


def damage(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path):
    assert CheckpointStore(tmp_path).load() is None


def test_the_newest_is_loaded_and_the_one_before_is_kept(three: CheckpointStore):
    assert step_of(three) == 30
    assert read_container(three.previous)["training"] == state(20)["training"]
    assert sorted(path.name for path in three.newest.parent.glob("*")) == [
        ".last.position.json",
        "last.prev.pt",
        "last.pt",
    ]


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_a_damaged_newest_one_is_skipped_wherever_the_damage_is(three: CheckpointStore, how: str, caplog):
    """F17: 64 offsets, two kinds of damage."""
    good = three.newest.read_bytes()
    for offset in random.Random(how).sample(range(len(good)), 64):
        three.newest.write_bytes(good if how == "flipped" else good[:offset])
        if how == "flipped":
            damage(three.newest, offset)
        caplog.clear()
        assert step_of(three) == 20
        (warning,) = caplog.messages
        assert "last.pt: " in warning
        assert warning.endswith("last.prev.pt: 10 steps are lost (epoch 2 step 30 -> epoch 2 step 20).")


def test_skipped_files_are_reported(three: CheckpointStore):
    damage(three.newest, 200)
    checkpoint = three.load()
    assert checkpoint is not None
    assert checkpoint.path == three.previous
    assert [sentence.split(": ")[0] for sentence in checkpoint.skipped] == [str(three.newest)]


def test_a_missing_newest_one_is_reported_too(three: CheckpointStore, caplog):
    three.newest.unlink()
    assert step_of(three) == 20
    assert "last.pt: no such file. Continuing from" in caplog.text


def test_if_all_are_damaged_the_training_does_not_start_over(three: CheckpointStore):
    """F18."""
    damage(three.newest, 300)
    three.previous.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read, so nothing was started.*--fresh"):
        three.load()


def test_a_damaged_newest_one_does_not_replace_the_good_one_before_it(three: CheckpointStore):
    damage(three.newest, 300)
    assert step_of(three) == 20
    three.save(state(21))
    assert step_of(three) == 21
    assert read_container(three.previous)["training"] == state(20)["training"]


def watch(patch: pytest.MonkeyPatch, die_at: int = -1) -> list[str]:
    """The names of all calls that change what is on disk, in the order in which a save makes them."""
    seen: list[str] = []
    for module, name in CHANGING:
        patch.setattr(module, name, counted(getattr(module, name), name, seen, die_at))
    return seen


CHANGING: tuple[tuple[Any, str], ...] = (
    (os, "link"), (os, "fsync"), (os, "replace"), (Path, "replace"), (Path, "unlink"), (Path, "write_text"),
)  # fmt: skip


class Killed(BaseException):
    """Simulates the end of the process; no code of ours catches it."""


def counted(call: Callable[..., Any], name: str, seen: list[str], die_at: int) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        if len(seen) - 1 == die_at:
            raise Killed
        if len(seen) - 1 > die_at >= 0:
            # A process that was killed does not clean up either.
            return None
        return call(*args, **kwargs)

    return wrapped


def test_wherever_a_save_is_killed_two_complete_checkpoints_are_left(three: CheckpointStore, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        seen = watch(patch)
        three.save(state(40))
    assert seen.count("fsync") >= 3
    for die_at in range(len(seen)):
        folder = tmp_path / f"killed_{die_at}"
        folder.mkdir()
        checkpoints = CheckpointStore(folder)
        for step in (10, 20, 30):
            checkpoints.save(state(step))
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, die_at)
            with pytest.raises(Killed):
                checkpoints.save(state(40))
        again = CheckpointStore(folder)
        assert step_of(again) in (30, 40)
        assert read_container(again.previous)["training"] in (state(20)["training"], state(30)["training"])
        again.save(state(50))
        assert step_of(again) == 50
        assert not list(folder.glob("*.part"))
        assert not list(folder.glob(".*.part"))


def test_a_save_that_writes_in_place_would_lose_everything(three: CheckpointStore):
    """Negative control: without the mechanism, killed in the middle."""
    good = three.newest.read_bytes()
    for path in (three.previous, three.newest):
        path.write_bytes(good[: len(good) // 2])
    with pytest.raises(CheckpointError):
        three.load()


def test_a_save_that_fails_leaves_everything_as_it_was(three: CheckpointStore, monkeypatch):
    """F23: fsync fails every time."""

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    before = {path.name: path.read_bytes() for path in three.newest.parent.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(ResourceError, match=r"last\.pt: cannot be written: Input/output error"):
            three.save(state(40))
    left = {path.name: path.read_bytes() for path in three.newest.parent.iterdir() if not path.name.endswith(".part")}
    assert left == before


def test_a_transient_error_costs_one_warning(three: CheckpointStore, monkeypatch, caplog):
    failures = [OSError(5, "Input/output error")]
    sync = os.fsync

    def fail_once(fd: int) -> None:
        if failures:
            raise failures.pop()
        sync(fd)

    monkeypatch.setattr(os, "fsync", fail_once)
    three.save(state(40))
    assert step_of(three) == 40
    assert "Input/output error" in caplog.text
    assert read_container(three.previous)["training"] == state(30)["training"]


def test_a_file_system_without_hard_links_keeps_two_checkpoints_as_well(three: CheckpointStore, monkeypatch):
    def refuse(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    three.save(state(40))
    assert step_of(three) == 40
    assert read_container(three.previous)["training"] == state(30)["training"]


def test_on_a_full_disk_the_older_checkpoint_makes_room(three: CheckpointStore, monkeypatch, caplog):
    """F15, the easy case: there is enough space once the older one is deleted."""
    usage = shutil.disk_usage(three.newest.parent)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: usage._replace(free=10 if three.previous.exists() else 1 << 30)
    )
    three.save(state(40))
    assert step_of(three) == 40
    assert "not enough disk space" in caplog.text


def test_on_a_full_disk_nothing_is_deleted_while_the_newest_one_is_damaged(three: CheckpointStore, monkeypatch):
    usage = shutil.disk_usage(three.newest.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10))
    damage(three.newest, 100)
    with pytest.raises(ResourceError, match=r"not enough disk space: [\d,]+ bytes needed, 10 free"):
        three.save(state(40))
    assert step_of(three) == 20


def test_a_fresh_start_keeps_the_old_checkpoint_under_another_name(three: CheckpointStore, caplog):
    three.set_aside()
    assert three.load() is None
    assert read_container(three.newest.with_name("last.old.pt"))["training"] == state(30)["training"]
    with caplog.at_level(logging.WARNING):
        three.save(state(1))
    assert step_of(three) == 1
    assert not three.previous.exists()


def test_the_loss_is_reported_in_steps():
    assert describe_loss(at(1, 9), at(1, 4)) == "5 steps are lost (epoch 1 step 9 -> epoch 1 step 4)"
    assert describe_loss(at(2, 0), at(0, 40)) == "60 steps are lost (epoch 2 step 0 -> epoch 0 step 40)"


def test_an_unknown_newest_position_is_handled():
    assert describe_loss({}, at(1, 4)) == "the steps since it was saved are lost"
