"""Where a run lives, and whether a command begins a new one or continues one.

    runs/train/exp, exp2, exp3 ...      run.json: the config a run was started with, and whether it is finished

The same command continues the newest unfinished run of its name that is the same training (`runs.resume`). Anything
else begins the next number: nothing that was trained is overwritten unless a flag says so. With `--once` a finished run
of that training is the end of it (`finished_run`).

What a run writes down as it goes: lines at the end of text files, CSV tables and JSON lines.

    results.txt, results.csv, log.jsonl  <--append--  Records  --lengths--> saved state --> cut back on resume

A saved state remembers how long each file was. Continued from it, the files are cut back to that, so that no row is
there twice. A full disk costs rows and never the training: one warning, and a mark where rows are missing.
"""

import csv
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flatout.engine import CheckpointStore
from flatout.errors import ConfigError, FlatoutError, ResourceError
from flatout.runs.lock import Locked, RunLock
from flatout.runs.options import RECORD_NAME, Comparison, Identity, refused, run_of
from flatout.safefiles import remove_stale_parts, replacing

logger = logging.getLogger(__name__)


class RunFolder:
    """A locked run folder. `continues`: load the newest checkpoint in it; else begin at the beginning.

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
class RunRequest:
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


def choose_run(wanted: RunRequest) -> RunFolder:
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


def finished_run(wanted: RunRequest) -> Path | None:
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


def _unfinished(wanted: RunRequest) -> RunFolder | None:
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
        checkpoints = CheckpointStore(weights)
        if checkpoints.is_unsettled():
            with suppress(Locked, OSError), RunLock(folder):
                checkpoints.settle()


def _in_this_folder(folder: Path, wanted: RunRequest) -> RunFolder:
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


def _resume(folder: Path, wanted: RunRequest) -> RunFolder:
    record = read_record(folder)
    if record and not (comparison := wanted.compare(record)).is_same_training:
        raise ConfigError(
            f"--resume {folder}: {', '.join(comparison.different)} would make another training of it. Leave these "
            "options out to continue it as it was, or begin a new run without --resume."
        )
    return _continue(folder, RunLock(folder, break_lock=wanted.break_lock), wanted)


def _begin(folder: Path, lock: RunLock, wanted: RunRequest, *, is_new: bool = False) -> RunFolder:
    _write_record(folder, {"config": dict(wanted.identity.config), "finished": False})
    return RunFolder(folder, lock, continues=False, is_new=is_new)


def _continue(folder: Path, lock: RunLock, wanted: RunRequest) -> RunFolder:
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


NAMES = ("results.txt", "results.csv", "log.jsonl")


class Records:
    """The text files of a run folder, appended to by name; they are made when first written to.

    All names are given beforehand: a file that was begun after the state was saved must be cut back as well.
    """

    def __init__(self, folder: Path, names: Sequence[str] = NAMES) -> None:
        self._files = {name: _AppendedFile(folder / name) for name in names}

    def line(self, name: str, text: str) -> None:
        """One line as it is, such as a row of results.txt."""
        self._files[name].append(f"{text}\n".encode())

    def row(self, name: str, values: Mapping[str, object]) -> None:
        """A row of a CSV table whose first line holds the names."""
        self.rows(name, [values])

    def rows(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Several at once, all or none of them.

        A table keeps the columns that it was begun with, perhaps by an older version: of a row that has others only
        those are written that the table has, and what a row lacks stays empty.
        """
        if not rows:
            return
        file = self._files[name]
        begun = file.columns()
        columns = begun or list(rows[0])
        text = "".join(_csv_line(row.get(column) for column in columns) for row in rows)
        file.append((text if begun else _csv_line(columns) + text).encode())

    def event(self, name: str, values: Mapping[str, object]) -> None:
        """An object on a line of its own. Numbers that are not finite become null, which every reader understands."""
        self.line(name, json.dumps({key: _finite(value) for key, value in values.items()}))

    def state_dict(self) -> dict[str, Any]:
        """How long each file is, in bytes that are on the disk."""
        for file in self._files.values():
            file.sync()
        return {"bytes": {name: file.length for name, file in self._files.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut all files back to what they were."""
        for name, file in self._files.items():
            file.cut_back(state["bytes"].get(name, 0))

    def clear(self) -> None:
        """Begin anew: all files become empty."""
        self.load_state_dict({"bytes": {}})

    def close(self) -> None:
        """May be called twice."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _AppendedFile:
    """A file that only ever holds whole entries; trouble with it is told once and does not spread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._num_missing = 0
        self._has_warned = False
        self.length = path.stat().st_size if path.is_file() else 0

    def append(self, content: bytes) -> None:
        try:
            self._write(gap_mark(self._path.name, self._num_missing) + content)
        except OSError as error:
            self._num_missing += 1
            self._warn(error)
        else:
            self._num_missing = 0

    def columns(self) -> list[str]:
        """Names in the first line, if this is a table that was begun; a mark of missing rows may stand before it."""
        if not self.length:
            return []
        with suppress(OSError), self._path.open(newline="") as file:
            return next(csv.reader(line for line in file if not line.startswith("#")), [])
        return []

    def cut_back(self, length: int) -> None:
        if length == self.length:
            return
        if length > self.length:
            logger.warning("%s is shorter than it was when the state was saved: rows are missing.", self._path)
            return
        try:
            os.ftruncate(self._open(), length)
            self.length = length
        except OSError as error:
            self._warn(error)

    def sync(self) -> None:
        with suppress(OSError):
            if self._fd is not None:
                os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._fd

    def _write(self, content: bytes) -> None:
        fd = self._open()
        taken = 0
        try:
            while taken < len(content):
                taken += os.pwrite(fd, content[taken:], self.length + taken)
        except OSError:
            # Half a row is worse than none, and shortening a file needs no room.
            with suppress(OSError):
                os.ftruncate(fd, self.length)
            raise
        self.length += taken

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: cannot be written: %s. Training goes on without it; a mark will show where rows are missing.",
                self._path, error.strerror,
            )  # fmt: skip


def gap_mark(name: str, num_missing: int) -> bytes:
    """What stands in a file where rows are missing: a comment, or an object among JSON lines."""
    if num_missing == 0:
        return b""
    text = json.dumps({"missing": num_missing}) if name.endswith(".jsonl") else f"# {num_missing} missing"
    return f"{text}\n".encode()


def _csv_line(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _finite(value: object) -> object:
    """JSON knows no NaN."""
    return None if isinstance(value, float) and value - value != 0 else value
