"""Run folders: which run a command starts or continues, and the text files that a run appends to.

    runs/train/exp, exp2, exp3 ...      run.json: the config a run was started with, and whether it is finished
    results.txt, results.csv, log.jsonl  <--append--  Records  --lengths--> checkpoint --> truncated on resume

The same command continues the newest unfinished run of its name that is the same training (`options.Identity`). Any
other command starts a run with the next number: results are never overwritten unless a flag says so. With `--once`,
nothing is done if that training has a finished run (`finished_run`).

A checkpoint records the length of each text file. On resume, files are truncated to that length, so that no row appears
twice. A full disk costs rows but never the training: there is one warning, and a mark where rows are missing.
"""

import csv
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flatout.engine import CheckpointStore
from flatout.errors import ConfigError, FlatoutError, ResourceError
from flatout.runs.lock import Locked, RunLock
from flatout.runs.options import RECORD_NAME, Comparison, Identity, RunOptions, refused, run_of
from flatout.safefiles import csv_text, read_note, remove_stale_parts, write_file

logger = logging.getLogger(__name__)


# Choosing the run


class RunFolder:
    """A locked run folder. `continues`: load its newest checkpoint; otherwise start from the beginning.

    As a context manager, it removes a new folder again if the run fails before it has produced anything, for example
    because of a mistyped flag.
    """

    def __init__(self, folder: Path, lock: RunLock, *, continues: bool, is_new: bool = False) -> None:
        self.folder = folder
        self.lock = lock
        self.continues = continues
        self._is_new = is_new
        self._at_first: set[Path] = set()
        self._record = read_record(folder)

    def finish(self) -> None:
        """Mark the run as finished, once all files are on disk: the same command then starts a new run."""
        record = read_record(self.folder) or {}
        _write_record(self.folder, record | {"finished": True})

    def close(self) -> None:
        """Release the lock; may be called twice."""
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
                f"{self.folder} was removed or moved while the training was running, with its checkpoints. "
                "Restore it if you can, and run the same command again to continue; otherwise training starts over."
            ) from error
        if self._is_new and set(self.folder.iterdir()) <= self._at_first:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif self._record is not None and not (self.folder / RECORD_NAME).exists():
            # The folder was removed during the training, and the last checkpoint was saved in a new one.
            _write_record(self.folder, self._record)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The run that a command refers to."""

    project: Path
    name: str
    identity: Identity = field(default_factory=lambda: Identity({}))
    exist_ok: bool = False
    """Use exactly the folder project/name."""
    fresh: bool = False
    resume: Path | None = None
    """A checkpoint in a run folder, or the folder."""
    break_lock: bool = False

    @classmethod
    def of(cls, options: RunOptions, identity: Identity, *, resume: Path | None = None) -> Self:
        """The run that these options refer to."""
        return cls(
            project=Path(options.project), name=options.name, identity=identity, exist_ok=options.exist_ok,
            fresh=options.fresh, resume=resume, break_lock=options.break_lock,
        )  # fmt: skip

    @property
    def folders(self) -> list[Path]:
        """Folders that may hold the run, newest first; by number, since clocks may jump."""
        if self.resume is not None:
            return [run_of(self.resume)]
        if self.exist_ok:
            return [self.project / self.name]
        return [*reversed(numbered(self.project, self.name).values())]

    def compare(self, record: Mapping[str, Any]) -> Comparison:
        return self.identity.compare(record["config"], is_named=self.resume is not None)


def choose_run(request: RunRequest) -> RunFolder:
    """The locked folder of the run that a command starts or continues.

    ConfigError if the run is in use, or if the folder of `exist_ok` or `resume` holds an unfinished run with another
    config; it lists what differs. ResourceError if the folder cannot be written.
    """
    if request.resume is not None:
        return _resume(run_of(request.resume), request)
    if request.exist_ok:
        return _in_this_folder(request.project / request.name, request)
    if not request.fresh and (run := _unfinished(request)):
        return run
    for folder in request.folders:
        if (record := read_record(folder)) and record.get("finished"):
            _promote_final(folder)
    folder = new_run_folder(request.project, request.name, exist_ok=False)
    return _begin(folder, RunLock(folder), request, is_new=True)


def finished_run(request: RunRequest) -> Path | None:
    """For `--once`: the finished run of this training, so that the command has nothing to do; None if there is none.

    Of several runs of this training only the newest counts; `Locked` is raised if another process is training it.
    With `fresh`, always None.
    """
    if request.fresh:
        return None
    for folder in request.folders:
        record = read_record(folder)
        if record is None:
            continue
        comparison = request.compare(record)
        if request.resume is None and not comparison.is_same_training:
            continue
        if record.get("finished"):
            if request.resume is None and comparison.extends:
                continue  # the command requests more epochs
            _promote_final(folder)
            logger.info("%s: this training is finished; nothing to do (--once).", folder)
            return folder
        RunLock(folder, break_lock=request.break_lock).close()
        return None
    return None


def new_run_folder(project: Path, name: str, exist_ok: bool, *, flag: str = "--project") -> Path:
    """Create project/name; if it exists, append the next number (`exp`, `exp2`, `exp3`), or with `exist_ok` use it.

    `flag` chooses another folder, for the message if it cannot be created.
    """
    while True:
        taken = numbered(project, name)
        folder = project / (f"{name}{max(taken) + 1}" if taken and not exist_ok else name)
        try:
            folder.mkdir(parents=True, exist_ok=exist_ok)
        except FileExistsError:
            # Another process has just created it, or it is a file.
            if not folder.is_dir():
                raise ConfigError(f"{folder} is a file. Choose another name with --name.") from None
        except OSError as error:
            raise ResourceError(
                f"{folder}: cannot be created: {error.strerror}. Choose another folder with {flag}."
            ) from error
        else:
            return folder


def numbered(project: Path, name: str) -> dict[int, Path]:
    """The existing folders of a name by number, ascending; plain `exp` counts as 1, and `exp0` is another name."""
    matches = (
        (re.fullmatch(rf"{re.escape(name)}([2-9]|[1-9]\d+)?", path.name), path)
        for path in (project.iterdir() if project.is_dir() else ())
    )
    return dict(sorted((int(match[1] or 1), path) for match, path in matches if match))


def read_record(folder: Path) -> dict[str, Any] | None:
    """The content of run.json, with `config` and `finished`; None if it is missing or cannot be read."""
    record = read_note(folder / RECORD_NAME)
    return record if isinstance(record.get("config"), dict) else None


def _unfinished(request: RunRequest) -> RunFolder | None:
    """The newest unfinished run that this command may continue."""
    others: list[tuple[Path, Comparison]] = []
    for folder in request.folders:
        record = read_record(folder)
        if not record or record.get("finished"):
            continue
        comparison = request.compare(record)
        if not comparison.is_same_training:
            others.append((folder, comparison))
            continue
        try:
            lock = RunLock(folder, break_lock=request.break_lock)
        except Locked as error:
            logger.info("%s", error)
            continue
        return _continue(folder, lock, request)
    if others:
        folder, comparison = others[0]
        more = f" ({len(others) - 1} older unfinished runs of this name)" if len(others) > 1 else ""
        logger.info(
            "%s is unfinished, but its settings differ: %s. To continue it, use --resume %s%s",
            folder, ", ".join(comparison.different), folder, more,
        )  # fmt: skip
    return None


def _promote_final(folder: Path) -> None:
    """Rename the final weights of a finished run to last.pt, if it was killed before it could do so itself."""
    for weights in {path.parent for path in folder.glob("*/last.pt")}:
        checkpoints = CheckpointStore(weights)
        if checkpoints.has_pending_final():
            with suppress(Locked, OSError), RunLock(folder):
                checkpoints.promote_final()


def _in_this_folder(folder: Path, request: RunRequest) -> RunFolder:
    new_run_folder(folder.parent, folder.name, exist_ok=True)
    lock = RunLock(folder, break_lock=request.break_lock)
    try:
        record = read_record(folder)
        if request.fresh or not record or record.get("finished"):
            return _begin(folder, lock, request)
        if not (comparison := request.compare(record)).is_same_training:
            raise ConfigError(refused(folder, comparison))
        return _continue(folder, lock, request)
    except BaseException:  # whatever ends it, the lock must be released
        lock.close()
        raise


def _resume(folder: Path, request: RunRequest) -> RunFolder:
    record = read_record(folder)
    if record and not (comparison := request.compare(record)).is_same_training:
        raise ConfigError(
            f"--resume {folder}: {', '.join(comparison.different)} would make it a different training. Leave these "
            "options out to continue the run as it was, or start a new run without --resume."
        )
    return _continue(folder, RunLock(folder, break_lock=request.break_lock), request)


def _begin(folder: Path, lock: RunLock, request: RunRequest, *, is_new: bool = False) -> RunFolder:
    _write_record(folder, {"config": dict(request.identity.config), "finished": False})
    return RunFolder(folder, lock, continues=False, is_new=is_new)


def _continue(folder: Path, lock: RunLock, request: RunRequest) -> RunFolder:
    remove_stale_parts(folder)
    record = read_record(folder)
    if record and not record.get("finished"):  # a finished run is refused later, and must not change
        comparison = request.compare(record)
        if comparison.extends:
            logger.info(
                "%s: %s. From here on, the schedule is that of the new length.", folder, ", ".join(comparison.extends)
            )
        if comparison.rounding:
            logger.info(
                "%s: %s. Sums round differently from here on; samples and schedule stay the same.",
                folder, ", ".join(comparison.rounding),
            )  # fmt: skip
        if comparison.extends or comparison.rounding:
            _write_record(folder, record | {"config": dict(request.identity.config)})
    return RunFolder(folder, lock, continues=True)


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    write_file(folder / RECORD_NAME, json.dumps(record, indent=1).encode())


# Text files of a run

NAMES = ("results.txt", "results.csv", "log.jsonl")


class Records(AbstractContextManager["Records"]):
    """The text files of a run folder; a file is created when it is first written to.

    All names are given in advance, because a file that was created after the checkpoint must be truncated as well.
    """

    def __init__(self, folder: Path, names: Sequence[str] = NAMES) -> None:
        self._files = {name: _AppendedFile(folder / name) for name in names}
        self.num_truncated = 0
        """How often the files were set back to an earlier length."""

    def line(self, name: str, text: str) -> None:
        """Append a line, such as a row of results.txt."""
        self._files[name].append(f"{text}\n".encode())

    def row(self, name: str, values: Mapping[str, object]) -> None:
        """Append a row to a CSV table whose first line holds the names."""
        self.rows(name, [values])

    def rows(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Append several rows to a CSV table, all or none of them.

        A table keeps the columns that it was created with, perhaps by an older version: further values of a row are
        left out, and missing ones stay empty.
        """
        if not rows:
            return
        file = self._files[name]
        existing = file.columns()
        columns = existing or list(rows[0])
        head = [] if existing else [columns]
        file.append(csv_text([*head, *([row.get(column) for column in columns] for row in rows)]).encode())

    def event(self, name: str, values: Mapping[str, object]) -> None:
        """Append a JSON object on a line of its own. Numbers that are not finite become null, since JSON has no NaN."""
        self.line(name, json.dumps({key: _finite(value) for key, value in values.items()}))

    def state_dict(self) -> dict[str, Any]:
        """The length of each file in bytes, after syncing it to disk."""
        for file in self._files.values():
            file.sync()
        return {"bytes": {name: file.length for name, file in self._files.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Truncate all files to their recorded lengths."""
        self.num_truncated += 1
        for name, file in self._files.items():
            file.truncate(state["bytes"].get(name, 0))

    def clear(self) -> None:
        """Empty all files."""
        self.load_state_dict({"bytes": {}})

    def close(self) -> None:
        """May be called twice."""
        for file in self._files.values():
            file.close()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _AppendedFile:
    """A file that holds only complete entries. Errors cause one warning and are otherwise ignored."""

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
        """The names in the first line of a table, which a mark of missing rows may precede; empty if there is none."""
        if not self.length:
            return []
        with suppress(OSError), self._path.open(newline="") as file:
            return next(csv.reader(line for line in file if not line.startswith("#")), [])
        return []

    def truncate(self, length: int) -> None:
        if length == self.length:
            return
        if length > self.length:
            logger.warning("%s is shorter than when the checkpoint was saved: rows are missing.", self._path)
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
        written = 0
        try:
            while written < len(content):
                written += os.pwrite(fd, content[written:], self.length + written)
        except OSError:
            # Half a row is worse than none, and truncating a file needs no space.
            with suppress(OSError):
                os.ftruncate(fd, self.length)
            raise
        self.length += written

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: cannot be written: %s. Training goes on without it; a mark will show where rows are missing.",
                self._path, error.strerror,
            )  # fmt: skip


def gap_mark(name: str, num_missing: int) -> bytes:
    """The mark for missing rows: a comment, or an object in a file of JSON lines."""
    if num_missing == 0:
        return b""
    text = json.dumps({"missing": num_missing}) if name.endswith(".jsonl") else f"# {num_missing} missing"
    return f"{text}\n".encode()


def _finite(value: object) -> object:
    """None for NaN and infinities, which JSON does not have."""
    return None if isinstance(value, float) and value - value != 0 else value
