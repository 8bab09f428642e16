"""The two newest checkpoints of a training on disk, so that there is always one to continue from.

    new checkpoint --write, sync--> .last.pt.part --rename--> last.pt       durable, then visible,
    old last.pt --hard link--------------------------------> last.prev.pt  and only then is the oldest removed
    final weights --write, sync--> .last.final.pt --rename (once the run is marked as finished)--> last.pt

Once two checkpoints have been saved, a process killed between any two of these steps leaves at least two complete ones.
A file that cannot be read is skipped with a warning; if none can be read, that is an error: the training never silently
starts over.
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
from flatout.safefiles import ran_out_of_room, read_container, read_note, sync_folder, write_container, write_error

logger = logging.getLogger(__name__)

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Error numbers of file systems without hard links."""


_BEFORE = "before_e*_s*.pt"
"""Names of the files with the weights before a bad step."""


class Checkpoint(NamedTuple):
    """The content of a checkpoint file, its path, and why newer files were skipped."""

    path: Path
    sections: dict[str, Any]
    skipped: list[str]


class CheckpointStore:
    """Writes and reads `last.pt` and `last.prev.pt` in a folder; reading starts with the newest intact file.

    Used by one process at a time: the one that holds the lock of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.newest, self.previous = folder / "last.pt", folder / "last.prev.pt"
        self._aside, self._old = folder / "last.old.pt", folder / ".last.prev.pt.part"
        self._final, self._position = folder / ".last.final.pt", folder / ".last.position.json"
        self._newest_is_bad = False

    def save(self, sections: Mapping[str, object]) -> None:
        """Write a new checkpoint; blocks until it is on disk.

        ResourceError if it cannot be written even after making room and trying again. What was readable before still is
        then, except that on a full disk the older of two intact checkpoints may have been deleted.
        """
        self._remove_leftovers()
        self.write_with_retry(lambda: self._save(sections))
        self._newest_is_bad = False
        self._write_position(sections)

    def write_with_retry(self, write: Callable[[], None]) -> None:
        """Call `write`; if it fails with ResourceError, make room on the disk and call it once more."""
        try:
            write()
        except ResourceError as error:
            logger.warning("%s Trying again.", error)
            if ran_out_of_room(error):
                self._make_room()
            write()

    def write_final(self, sections: Mapping[str, object]) -> None:
        """Write the file that replaces the checkpoints once the run is marked as finished; blocks until it is on disk.

        Nothing is lost if the process ends before that: the checkpoints are untouched, and the run is unfinished.
        """
        self.write_with_retry(lambda: write_container(self._final, sections))

    def promote_final(self) -> None:
        """Replace the checkpoints of a run that is marked as finished by the file that `write_final` wrote.

        Does nothing if there is no such file, for example because that was done before.
        """
        try:
            self._final.replace(self.newest)
        except FileNotFoundError:
            return
        for leftover in (self.previous, self._position):
            leftover.unlink(missing_ok=True)
        sync_folder(self._folder)

    def has_pending_final(self) -> bool:
        """Whether the process that wrote the final file ended before it could promote it."""
        return self._final.exists()

    def restore_folder(self) -> bool:
        """Create the folder again if it was removed; returns whether it was."""
        if self._folder.is_dir():
            return False
        try:
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise write_error(error, self.newest, 0) from error
        return True

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that can be read; None only if none was ever saved here.

        CheckpointError if there are files and none of them can be read.
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
                lost = describe_loss(read_note(self._position), _position_in(checkpoint.sections))
                logger.warning("%s Continuing from %s: %s.", skipped[0], path, lost)
            return checkpoint
        if not any(map(os.path.lexists, (self.newest, self.previous))):
            return None
        raise CheckpointError(
            f"{self._folder}: no checkpoint can be read, so nothing was started. {' '.join(skipped)} "
            "Restore a good copy, or start over with --fresh."
        )

    def set_aside(self) -> None:
        """Start over without deleting the newest checkpoint: keep it as `last.old.pt`, which is not continued."""
        for path in (self.previous, self.newest):
            with suppress(FileNotFoundError):
                path.replace(self._aside)
        for leftover in (self._position, self._final, *self._folder.glob(_BEFORE)):
            leftover.unlink(missing_ok=True)

    def write_note(self, name: str, content: object) -> Path:
        """Write a JSON file for people beside the checkpoints; returns its path. Errors of the disk are ignored."""
        path = self._folder / name
        with suppress(OSError):
            path.write_text(json.dumps(content, indent=1))
        return path

    def keep_before(self, epoch: int, step: int, sections: Mapping[str, object]) -> None:
        """Keep the weights before a bad step, in place of those kept before another one; only a warning on errors."""
        path = self._path_before(epoch, step)
        try:
            write_container(path, sections)
        except ResourceError as error:
            logger.warning("%s The weights before epoch %d, step %d are not kept.", error, epoch, step)
            return
        for other in self._folder.glob(_BEFORE):
            if other != path:
                with suppress(OSError):
                    other.unlink()

    def kept_before(self, epoch: int, step: int) -> Path | None:
        """The file with the weights before a bad step; None if they were not kept."""
        path = self._path_before(epoch, step)
        return path if path.is_file() else None

    def _path_before(self, epoch: int, step: int) -> Path:
        return self._folder / f"before_e{epoch:03d}_s{step:04d}.pt"

    def _save(self, sections: Mapping[str, object]) -> None:
        keeps_old = not self._newest_is_bad and self.newest.exists()
        if keeps_old:
            self._link_old()
        write_container(self.newest, sections)
        # From here on a reader finds the new checkpoint; the oldest may be removed.
        if keeps_old:
            self._rotate()

    def _link_old(self) -> None:
        """Give the file that is about to be replaced a second name."""
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
            # The new checkpoint is in place, and so is the one before the last: still two.
            logger.warning("%s could not be replaced: %s.", self.previous, error.strerror)

    def _make_room(self) -> None:
        """Delete the older checkpoint if the newer one can be read."""
        with suppress(CheckpointError):
            read_container(self.newest)
            self.previous.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Remove incomplete files of a killed process."""
        for path in self._folder.glob(".last.*.part"):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            self._final.unlink(missing_ok=True)

    def _write_position(self, sections: Mapping[str, object]) -> None:
        """Write the position to a file of its own, so that it is known even if the checkpoint is damaged."""
        with suppress(OSError):
            self._position.write_text(json.dumps(_position_in(sections)))


def describe_loss(newest: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """The steps between two positions as text: '25 steps are lost (epoch 3 step 5 -> epoch 2 step 80)'."""
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
    """`CheckpointStore.load` on every rank; a collective call.

    The first rank reads and broadcasts: the other machines need not see the run folder, and all ranks get the same
    content even if the disk is failing.
    """
    saved = checkpoints.load() if checkpoints is not None and world.is_first else None
    return world.broadcast(saved)
