"""Where a run lives, and whether a command begins a new one or continues one.

    runs/train/exp, exp2, exp3 ...      run.json: the config a run was started with, and whether it is finished

The same command continues the newest unfinished run of its name that is the same training (`runs.resume`). Anything
else begins the next number: nothing that was trained is overwritten unless a flag says so. With `--once` a finished run
of that training is the end of it (`finished_run`).
"""

import json
import logging
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flatout.engine import Generations
from flatout.errors import ConfigError, FlatoutError, ResourceError
from flatout.runs.lock import Locked, RunLock
from flatout.runs.options import RECORD_NAME, Comparison, Identity, refused, run_of
from flatout.safefiles import remove_stale_parts, replacing

logger = logging.getLogger(__name__)


class RunFolder:
    """A locked run folder. `continues`: load the newest generation in it; else begin at the beginning.

    As a context: a run that fails before it has made anything, such as one with a mistyped flag, leaves no new folder.
    """

    def __init__(self, folder: Path, lock: RunLock, *, continues: bool, is_new: bool = False) -> None:
        self.folder = folder
        self.lock = lock
        self.continues = continues
        self._is_new = is_new
        self._at_first: set[Path] = set()
        self._record = read_record(folder)

    def finish(self) -> None:
        """Note that training is complete, and all its files are on the disk: the same command then begins a new run."""
        record = read_record(self.folder) or {}
        _write_record(self.folder, record | {"finished": True})

    def close(self) -> None:
        """Give the lock back; may be called twice."""
        self.lock.close()

    def __enter__(self) -> Self:
        self._at_first = set(self.folder.iterdir())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None:
                self._leave_after(error)
        finally:
            self.close()

    def _leave_after(self, error: BaseException) -> None:
        if not self.folder.is_dir():
            if isinstance(error, FlatoutError) or not isinstance(error, Exception):
                return
            raise ResourceError(
                f"{self.folder} was removed or moved while the training was running, and its saved states with it. "
                "Put it back if you can: the same command then continues; otherwise it begins again."
            ) from error
        if self._is_new and set(self.folder.iterdir()) <= self._at_first:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif self._record is not None and not (self.folder / RECORD_NAME).exists():
            # Somebody removed the folder, and what could be saved was saved in a new one.
            _write_record(self.folder, self._record)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a command says about the run it means."""

    project: Path
    name: str
    identity: Identity = field(default_factory=lambda: Identity({}))
    exist_ok: bool = False
    """Exactly project/name, whatever is there."""
    fresh: bool = False
    resume: Path | None = None
    """A checkpoint in a run folder, or the folder."""
    break_lock: bool = False

    @property
    def folders(self) -> list[Path]:
        """Those that may hold it, the newest first, by number: clocks jump."""
        if self.resume is not None:
            return [run_of(self.resume)]
        if self.exist_ok:
            return [self.project / self.name]
        return [*reversed(numbered(self.project, self.name).values())]

    def compare(self, record: Mapping[str, Any]) -> Comparison:
        return self.identity.compare(record["config"], is_named=self.resume is not None)


def choose_run(wanted: Wanted) -> RunFolder:
    """The run that a command is about, locked.

    ConfigError if the run is in use, or if `exist_ok` or `resume` meet an unfinished run of another config; it lists
    what changed. ResourceError if nothing can be written there.
    """
    if wanted.resume is not None:
        return _resume(run_of(wanted.resume), wanted)
    if wanted.exist_ok:
        return _in_this_folder(wanted.project / wanted.name, wanted)
    if not wanted.fresh and (run := _unfinished(wanted)):
        return run
    _settle_finished(wanted.project, wanted.name)
    folder = new_run_folder(wanted.project, wanted.name, exist_ok=False)
    return _begin(folder, RunLock(folder), wanted, is_new=True)


def finished_run(wanted: Wanted) -> Path | None:
    """For `--once`: the complete run that a command is about, which then has nothing to do; None if there is none.

    `fresh` begins a new one in any case. Of several runs of this training the newest counts. Locked if that one is
    being trained by another process.
    """
    if wanted.fresh:
        return None
    for folder in wanted.folders:
        record = read_record(folder)
        if record is None:
            continue
        comparison = wanted.compare(record)
        if wanted.resume is None and not comparison.is_same_training:
            continue
        if record.get("finished"):
            if wanted.resume is None and comparison.extends:
                continue  # more epochs than it was trained for
            _settle(folder)
            logger.info("%s: this training is complete; nothing to do (--once).", folder)
            return folder
        RunLock(folder, break_lock=wanted.break_lock).close()
        return None
    return None


def new_run_folder(project: Path, name: str, exist_ok: bool) -> Path:
    """Make project/name, or with the next number behind it (`exp`, `exp2`, `exp3`) unless the old one is fine."""
    while True:
        taken = numbered(project, name)
        folder = project / (f"{name}{max(taken) + 1}" if taken and not exist_ok else name)
        try:
            folder.mkdir(parents=True, exist_ok=exist_ok)
        except FileExistsError:
            # Somebody was faster, or a file is in the way.
            if not folder.is_dir():
                raise ConfigError(f"{folder} is a file. Choose another folder with --name.") from None
        except OSError as error:
            raise ResourceError(
                f"{folder}: cannot be made: {error.strerror}. Choose another place with --project."
            ) from error
        else:
            return folder


def numbered(project: Path, name: str) -> dict[int, Path]:
    """The existing folders of a name by number, rising; plain `exp` counts as 1, and `exp0` is another name."""
    matches = (
        (re.fullmatch(rf"{re.escape(name)}([2-9]|[1-9]\d+)?", path.name), path)
        for path in (project.iterdir() if project.is_dir() else ())
    )
    return dict(sorted((int(match[1] or 1), path) for match, path in matches if match))


def read_record(folder: Path) -> dict[str, Any] | None:
    """What run.json says: `config` and `finished`; None if there is none, or none that can be read."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("config"), dict) else None


def _unfinished(wanted: Wanted) -> RunFolder | None:
    """The newest run that this command may continue."""
    others: list[tuple[Path, Comparison]] = []
    for folder in wanted.folders:
        record = read_record(folder)
        if not record or record.get("finished"):
            continue
        comparison = wanted.compare(record)
        if not comparison.is_same_training:
            others.append((folder, comparison))
            continue
        try:
            lock = RunLock(folder, break_lock=wanted.break_lock)
        except Locked as error:
            logger.info("%s", error)
            continue
        return _continue(folder, lock, wanted)
    if others:
        folder, comparison = others[0]
        more = f" ({len(others) - 1} older unfinished of this name)" if len(others) > 1 else ""
        logger.info(
            "%s is unfinished, but its config differs: %s. To continue it: --resume %s%s",
            folder, ", ".join(comparison.different), folder, more,
        )  # fmt: skip
    return None


def _settle_finished(project: Path, name: str) -> None:
    for folder in numbered(project, name).values():
        if (record := read_record(folder)) and record.get("finished"):
            _settle(folder)


def _settle(folder: Path) -> None:
    """Give the final files of a finished run their names, if it was killed before it could do that itself."""
    for weights in {path.parent for path in folder.glob("*/last.pt")}:
        generations = Generations(weights)
        if generations.is_unsettled():
            with suppress(Locked, OSError), RunLock(folder):
                generations.settle()


def _in_this_folder(folder: Path, wanted: Wanted) -> RunFolder:
    new_run_folder(folder.parent, folder.name, exist_ok=True)
    lock = RunLock(folder, break_lock=wanted.break_lock)
    try:
        record = read_record(folder)
        if wanted.fresh or not record or record.get("finished"):
            return _begin(folder, lock, wanted)
        if not (comparison := wanted.compare(record)).is_same_training:
            raise ConfigError(refused(folder, comparison))
        return _continue(folder, lock, wanted)
    except BaseException:
        lock.close()
        raise


def _resume(folder: Path, wanted: Wanted) -> RunFolder:
    record = read_record(folder)
    if record and not (comparison := wanted.compare(record)).is_same_training:
        raise ConfigError(
            f"--resume {folder}: {', '.join(comparison.different)} would make another training of it. Leave these "
            "options out to continue it as it was, or begin a new run without --resume."
        )
    return _continue(folder, RunLock(folder, break_lock=wanted.break_lock), wanted)


def _begin(folder: Path, lock: RunLock, wanted: Wanted, *, is_new: bool = False) -> RunFolder:
    _write_record(folder, {"config": dict(wanted.identity.config), "finished": False})
    return RunFolder(folder, lock, continues=False, is_new=is_new)


def _continue(folder: Path, lock: RunLock, wanted: Wanted) -> RunFolder:
    remove_stale_parts(folder)
    record = read_record(folder)
    if record:
        comparison = wanted.compare(record)
        if comparison.extends:
            logger.info(
                "%s: %s. From here on the schedule is the one of the new length.", folder, ", ".join(comparison.extends)
            )
        if comparison.rounding:
            logger.info(
                "%s: %s. Sums round differently from here on; samples and schedule stay the same.",
                folder, ", ".join(comparison.rounding),
            )  # fmt: skip
        if comparison.extends or comparison.rounding:
            _write_record(folder, record | {"config": dict(wanted.identity.config)})
    return RunFolder(folder, lock, continues=True)


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    content = json.dumps(record, indent=1).encode()
    with replacing(folder / RECORD_NAME, needed_bytes=len(content)) as sink:
        sink.write(content)
