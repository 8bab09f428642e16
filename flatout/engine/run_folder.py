"""Where a run lives, and whether a command begins a new one or continues one.

    runs/train/exp, exp2, exp3 ...      run.json: the config a run was started with, and whether it is finished

The same command continues the newest unfinished run of its name whose config is equal. Anything else begins the next
number: nothing that was trained is overwritten unless a flag says so. With `--once` a finished run of that config is
the end of it (`finished_run`).
"""

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

from flatout.engine.checkpoint.atomic import remove_stale_parts, replacing
from flatout.engine.generations import Generations
from flatout.engine.lock import Locked, RunLock
from flatout.errors import CheckpointError, ConfigError, FlatoutError, ResourceError

logger = logging.getLogger(__name__)

RECORD_NAME = "run.json"
EXTENDABLE = "epochs"
"""The one setting that may grow when a run is continued."""


class Run:
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


class AboutRun(TypedDict):
    """What a command says about the run it means."""

    config: Mapping[str, Any]
    """What the result depends on, in values that JSON knows."""
    exist_ok: bool
    """Exactly project/name, whatever is there."""
    fresh: bool
    resume: Path | None
    """A checkpoint in a run folder, or the folder."""
    break_lock: bool


def choose_run(
    project: Path,
    name: str,
    *,
    config: Mapping[str, Any],
    exist_ok: bool,
    fresh: bool,
    resume: Path | None,
    break_lock: bool = False,
) -> Run:
    """The run that a command is about, locked. Arguments: see `AboutRun`.

    ConfigError if the run is in use, or if `exist_ok` meets an unfinished run of another config; it lists
    what changed. ResourceError if nothing can be written there.
    """
    if resume is not None:
        folder = run_of(resume)
        lock = RunLock(folder, break_lock=break_lock)
        remove_stale_parts(folder)
        return Run(folder, lock, continues=True)
    if exist_ok:
        return _in_this_folder(project / name, config, fresh=fresh, break_lock=break_lock)
    if not fresh and (run := _unfinished(project, name, config, break_lock=break_lock)):
        return run
    _settle_finished(project, name)
    folder = new_run_folder(project, name, exist_ok=False)
    return _begin(folder, RunLock(folder), config, is_new=True)


def finished_run(
    project: Path,
    name: str,
    *,
    config: Mapping[str, Any],
    exist_ok: bool,
    fresh: bool,
    resume: Path | None,
    break_lock: bool = False,
) -> Path | None:
    """For `--once`: the complete run that a command is about, which then has nothing to do; None if there is none.

    Arguments: see `AboutRun`; `fresh` begins a new one in any case. Of several runs of this config the newest counts.
    Locked if that one is being trained by another process.
    """
    if fresh:
        return None
    folders = [run_of(resume)] if resume else [project / name] if exist_ok else [*numbered(project, name).values()]
    for folder in reversed(folders):
        record = read_record(folder)
        if record is None or (resume is None and not only_extends(record["config"], config)):
            continue
        if record.get("finished"):
            if resume is None and changes(record["config"], config):
                continue  # more epochs than it was trained for
            _settle(folder)
            logger.info("%s: this training is complete; nothing to do (--once).", folder)
            return folder
        RunLock(folder, break_lock=break_lock).close()
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


def newest_last(root: Path) -> Path:
    """The most recently changed `last*.pt` below a folder: what `--resume` means without a value."""
    # The previous generation changes its name after the newest one has appeared, and would look newer.
    found = [path for path in root.glob("**/last*.pt") if not path.name.endswith((".prev.pt", ".old.pt"))]
    found += [newer for path in root.glob("**/last*.prev.pt") if not (newer := _newest_beside(path)).exists()]
    if not found:
        raise CheckpointError(f"{root.resolve()}: no last*.pt lies below this folder. Say which one: --resume FILE")
    return max(found, key=_changed)


def run_of(checkpoint: Path) -> Path:
    """The run folder of `runs/train/exp/weights/last.pt`, or of itself."""
    for folder in (checkpoint, checkpoint.parent, checkpoint.parent.parent):
        if (folder / RECORD_NAME).is_file():
            return folder
    raise CheckpointError(
        f"{checkpoint}: belongs to no run that can be continued: there is no {RECORD_NAME} beside or above it. "
        "To start from these weights, give them as --weights."
    )


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two configs, one text per key: 'batch_size 16 -> 32'."""
    return [
        f"{key} {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if _shown(old, key) != _shown(new, key)
    ]


def only_extends(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the new config is the old one, at most for more epochs."""
    same_else = not changes({**old, EXTENDABLE: None}, {**new, EXTENDABLE: None})
    longer = old.get(EXTENDABLE) == new.get(EXTENDABLE) or old.get(EXTENDABLE, 0) < new.get(EXTENDABLE, 0)
    return same_else and longer


def read_record(folder: Path) -> dict[str, Any] | None:
    """What run.json says: `config` and `finished`; None if there is none, or none that can be read."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("config"), dict) else None


def _unfinished(project: Path, name: str, config: Mapping[str, Any], *, break_lock: bool) -> Run | None:
    """The newest run that this command may continue, by number: clocks jump."""
    others: list[tuple[Path, dict[str, Any]]] = []
    for folder, record in _open_records(project, name):
        if not only_extends(record["config"], config):
            others.append((folder, record))
            continue
        try:
            lock = RunLock(folder, break_lock=break_lock)
        except Locked as error:
            logger.info("%s", error)
            continue
        return _continue(folder, lock, config)
    if others:
        folder, record = others[0]
        more = f" ({len(others) - 1} older unfinished of this name)" if len(others) > 1 else ""
        logger.info(
            "%s is unfinished, but its config differs: %s. To continue it: --resume %s%s",
            folder, ", ".join(changes(record["config"], config)), folder, more,
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


def _open_records(project: Path, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in reversed(numbered(project, name).values()):
        record = read_record(folder)
        if record and not record.get("finished"):
            yield folder, record


def _in_this_folder(folder: Path, config: Mapping[str, Any], *, fresh: bool, break_lock: bool) -> Run:
    new_run_folder(folder.parent, folder.name, exist_ok=True)
    lock = RunLock(folder, break_lock=break_lock)
    try:
        record = read_record(folder)
        if fresh or not record or record.get("finished"):
            return _begin(folder, lock, config)
        if not only_extends(record["config"], config):
            raise ConfigError(
                f"{folder} holds an unfinished run of another config: {', '.join(changes(record['config'], config))}. "
                f"Continue it as it was with --resume {folder}, start over with --fresh, or choose another --name."
            )
        return _continue(folder, lock, config)
    except BaseException:
        lock.close()
        raise


def _begin(folder: Path, lock: RunLock, config: Mapping[str, Any], *, is_new: bool = False) -> Run:
    _write_record(folder, {"config": dict(config), "finished": False})
    return Run(folder, lock, continues=False, is_new=is_new)


def _continue(folder: Path, lock: RunLock, config: Mapping[str, Any]) -> Run:
    remove_stale_parts(folder)
    record = read_record(folder)
    if record and (grown := changes(record["config"], config)):
        logger.info("%s: %s. From here on the schedule is the one of the new length.", folder, ", ".join(grown))
        _write_record(folder, record | {"config": dict(config)})
    return Run(folder, lock, continues=True)


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    content = json.dumps(record, indent=1).encode()
    with replacing(folder / RECORD_NAME, needed_bytes=len(content)) as sink:
        sink.write(content)


def _shown(config: Mapping[str, Any], key: str) -> str:
    """A value as JSON has it: what comes back from a file equals what went in."""
    return json.dumps(config[key], sort_keys=True) if key in config else "unset"


def _newest_beside(previous: Path) -> Path:
    return previous.with_name(previous.name.removesuffix(".prev.pt") + ".pt")


def _changed(path: Path) -> float:
    beside = path.with_name(path.name.removesuffix(".pt") + ".prev.pt")
    return max(each.stat().st_ctime for each in (path, beside) if each.exists())
