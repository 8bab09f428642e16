"""The two newest states of a training on disk, so that there is always one to continue from.

    new state --write, sync--> .last.pt.part --rename--> last.pt       durable, then visible,
    old last.pt --second name--------------------------> last.prev.pt  and only then the oldest goes
    result ----write, sync---> .last.final.pt --rename (the run is marked as finished)--> last.pt

Killed between any two of these steps, the folder holds at least two whole checkpoints once two were saved. A file that
cannot be read is skipped with a warning; where all are bad that is an error, never a silent new beginning.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from flatout.errors import CheckpointError, ResourceError
from flatout.ranks import World
from flatout.safefiles import ran_out_of_room, read_container, sync_folder, write_container, write_error

logger = logging.getLogger(__name__)

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""What file systems without hard links answer."""


class Checkpoint(NamedTuple):
    """A state that was read, from where, and why newer files were not."""

    path: Path
    sections: dict[str, Any]
    skipped: list[str]


class CheckpointStore:
    """`last.pt` and `last.prev.pt` in a folder: written durable -> visible -> prune; read newest sound first.

    Belongs to one process at a time: whoever holds the lock of the run.
    """

    def __init__(self, folder: Path, name: str = "last") -> None:
        self._folder = folder
        self.newest = folder / f"{name}.pt"
        self.previous = folder / f"{name}.prev.pt"
        self._set_aside = folder / f"{name}.old.pt"
        self._old = folder / f".{name}.prev.pt.part"
        self._final = folder / f".{name}.final.pt"
        self._position = folder / f".{name}.position.json"
        self._newest_is_bad = False

    def save(self, sections: Mapping[str, object]) -> None:
        """Write a new checkpoint; blocks until it is on the disk.

        ResourceError when the disk cannot take it, after making room and trying once more. What was readable before
        then still is, except that on a full disk the older of two sound checkpoints may have gone.
        """
        self._sweep()
        self.retrying(lambda: self._save(sections))
        self._newest_is_bad = False
        self._note_position(sections)

    def retrying(self, write: Callable[[], None]) -> None:
        """Write something beside the checkpoints; if the disk does not take it, make room and try once more."""
        try:
            write()
        except ResourceError as error:
            logger.warning("%s Trying once more.", error)
            if ran_out_of_room(error):
                self._make_room()
            write()

    def write_final(self, sections: Mapping[str, object]) -> None:
        """Write what is to replace the checkpoints once the run is marked as finished; blocks until it is on the disk.

        Nothing is lost if the process ends before that: the checkpoints are untouched, and the run is unfinished.
        """
        self.retrying(lambda: write_container(self._final, sections))

    def settle(self) -> None:
        """Finish a run that is marked as finished: put what `write_final` wrote in place of the checkpoints.

        Does nothing if that was done before, or if there is nothing to put there.
        """
        try:
            self._final.replace(self.newest)
        except FileNotFoundError:
            return
        for leftover in (self.previous, self._position):
            leftover.unlink(missing_ok=True)
        sync_folder(self._folder)

    def is_unsettled(self) -> bool:
        """Whether the process that wrote the final file ended before it could put it in its place."""
        return self._final.exists()

    def restore_folder(self) -> bool:
        """Make the folder again if somebody removed it; whether that was so."""
        if self._folder.is_dir():
            return False
        try:
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise write_error(error, self.newest, 0) from error
        return True

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that can be read; None only if none was ever saved here.

        CheckpointError when files exist and all of them are bad.
        """
        skipped: list[str] = []
        for path in (self.newest, self.previous):
            if not os.path.lexists(path):
                skipped += [f"{path}: no such file."] if path == self.newest else []
                continue
            try:
                checkpoint = Checkpoint(path, read_container(path), skipped)
            except CheckpointError as error:
                skipped.append(str(error))
                continue
            if skipped:
                self._newest_is_bad = True
                logger.warning("%s Continuing from %s: %s.", skipped[0], path, self._loss(checkpoint))
            return checkpoint
        if not any(map(os.path.lexists, (self.newest, self.previous))):
            return None
        raise CheckpointError(
            f"{self._folder}: no checkpoint can be read, and nothing was started over. {' '.join(skipped)} "
            "Put a good copy in its place, or start from the beginning with --fresh."
        )

    def forget(self) -> None:
        """Begin anew: what is there is neither continued nor lost, but kept as `last.old.pt`."""
        for path in (self.previous, self.newest):
            with suppress(FileNotFoundError):
                path.replace(self._set_aside)
        for leftover in (self._position, self._final):
            leftover.unlink(missing_ok=True)

    def leave_note(self, name: str, content: object) -> Path:
        """Write something for people beside the checkpoints, as JSON; returns where. A full disk keeps it empty."""
        path = self._folder / name
        with suppress(OSError):
            path.write_text(json.dumps(content, indent=1))
        return path

    def _save(self, sections: Mapping[str, object]) -> None:
        keeps_old = not self._newest_is_bad and self.newest.exists()
        if keeps_old:
            self._name_old()
        write_container(self.newest, sections)
        # From here on the new one is what a reader finds; the oldest may go.
        if keeps_old:
            self._rotate()

    def _name_old(self) -> None:
        """Give what is about to be replaced a second name."""
        try:
            self._old.unlink(missing_ok=True)
            try:
                os.link(self.newest, self._old)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                shutil.copyfile(self.newest, self._old)
        except OSError as error:
            raise write_error(error, self._old, self.newest.stat().st_size) from error

    def _rotate(self) -> None:
        try:
            self._old.replace(self.previous)
            sync_folder(self._folder)
        except OSError as error:
            # The new checkpoint stands, and so does the one before the last: still two.
            logger.warning("%s could not be replaced: %s.", self.previous, error.strerror)

    def _make_room(self) -> None:
        """Drop the older checkpoint, if the newer one is proven to be sound."""
        with suppress(CheckpointError):
            read_container(self.newest)
            self.previous.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what a killed process left behind unfinished."""
        for path in self._folder.glob(f".{self.newest.stem}.*.part"):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            self._final.unlink(missing_ok=True)

    def _note_position(self, sections: Mapping[str, object]) -> None:
        """Beside the file, so that a damaged one still tells how far it was."""
        with suppress(OSError):
            self._position.write_text(json.dumps(_position_in(sections)))

    def _loss(self, checkpoint: Checkpoint) -> str:
        try:
            newest = json.loads(self._position.read_text())
        except (OSError, ValueError):
            newest = {}
        return describe_loss(newest, _position_in(checkpoint.sections))


def describe_loss(newest: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """How far it is back from one position to another: '25 steps are lost (epoch 3 step 5 -> epoch 2 step 80)'."""
    if not {"epoch", "step", "steps_per_epoch"} <= newest.keys() & kept.keys():
        return "the steps since it was saved are lost"
    ahead, behind = (place["epoch"] * place["steps_per_epoch"] + place["step"] for place in (newest, kept))
    where = " -> ".join(f"epoch {place['epoch']} step {place['step']}" for place in (newest, kept))
    return f"{ahead - behind} steps are lost ({where})"


def _position_in(sections: Mapping[str, object]) -> dict[str, Any]:
    match sections:
        case {"training": {"position": dict(position)}}:
            return position
    return {}


def load_on_all_ranks(checkpoints: CheckpointStore | None, world: World) -> Checkpoint | None:
    """As `CheckpointStore.load`, on every rank; all ask at the same time.

    The first rank reads, the others get it from there: their machines need not see the run folder, and what one rank
    has read all have, even if the disk is about to fail.
    """
    saved = checkpoints.load() if checkpoints is not None and world.is_first else None
    told: Checkpoint | None = world.broadcast(saved)
    return told
