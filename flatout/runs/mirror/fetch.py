"""Bring a mirrored run back: the newest checkpoint whose files are whole becomes a run folder again."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flatout.errors import CheckpointError, ConfigError, ResourceError
from flatout.runs.folder import RunRequest, new_run_folder, read_record
from flatout.runs.mirror import snapshot as manifests
from flatout.runs.mirror.place import Place, PlaceError
from flatout.runs.mirror.snapshot import Manifest, Senseless, position_note, read_position, steps_of
from flatout.runs.options import RECORD_NAME
from flatout.safefiles import write_error

logger = logging.getLogger(__name__)

STATE_NAME = "last.pt"


class Fetched(NamedTuple):
    """What a mirror had to say about a command."""

    folder: Path
    finished: bool
    """The training has ended: there is nothing left to do."""


def fetch(place: Place, wanted: RunRequest) -> Fetched | None:
    """Make the run folder of this command what the mirror knows of it; None if that is nothing new.

    Folders are those of `choose_run`: with `exist_ok` there is only one, project/name.
    ConfigError if the mirror holds a run of another config; ResourceError if it cannot be reached, and CheckpointError
    if what it holds is damaged: never a silent new beginning.
    """
    try:
        found = manifests.numbers(place)
        newest = _newest(place, found)
    except PlaceError as error:
        raise ResourceError(f"{error} Nothing was started. Mend that, or leave --mirror out.") from error
    if newest is None:
        return None
    _check_config(place, newest, wanted)
    if wanted.exist_ok and _holds_another(wanted.folders[0], wanted):
        return None  # whoever opens it says what differs
    local = _local_run(wanted, finished=newest.finished)
    known = -1 if local is None else _steps_in(local)
    if local is not None and (newest.finished or known >= newest.steps):
        return Fetched(local, finished=True) if newest.finished else None
    scratch = wanted.project / f".{wanted.name}.fetching"
    numbers = [number for number in found if number <= newest.number]
    if (manifest := _download_newest(place, numbers, scratch, newer_than=known)) is None:
        return None
    folder = _move(scratch, local or new_run_folder(wanted.project, wanted.name, exist_ok=wanted.exist_ok))
    _note_position(folder, manifest)
    logger.info("%s: fetched checkpoint %d (%s) from %s.", folder, manifest.number, manifest.where(), place.url)
    return Fetched(folder, manifest.finished)


def _newest(place: Place, found: Sequence[int]) -> Manifest | None:
    """Of those that make sense: a machine may have gone while it wrote the last one."""
    problems = []
    for number in reversed(found):
        try:
            return manifests.read(place, number)
        except Senseless as error:
            problems.append(str(error))
            logger.warning("%s The checkpoint before it is taken.", error)
    if problems:
        raise _nothing_usable(place, problems)
    return None


def _nothing_usable(place: Place, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{place.url}: no checkpoint can be used, and nothing was started over. {' '.join(problems)}"
    )


def _check_config(place: Place, manifest: Manifest, wanted: RunRequest) -> None:
    comparison = wanted.identity.compare(manifest.config)
    if comparison.different or (manifest.finished and comparison.extends):
        state = "a finished" if manifest.finished else "an unfinished"
        raise ConfigError(
            f"{place.url} holds {state} run of another config: {', '.join(comparison.different + comparison.extends)}. "
            "Use another --name or --mirror; --fresh begins again, and replaces what is there."
        )


def _holds_another(folder: Path, wanted: RunRequest) -> bool:
    """Whether an unfinished run of another training is there."""
    record = read_record(folder)
    return record is not None and not record.get("finished") and not wanted.compare(record).is_same_training


def _local_run(wanted: RunRequest, *, finished: bool) -> Path | None:
    """The folder on this machine that holds an earlier moment of the run, or its end."""
    for folder in wanted.folders:
        record = read_record(folder)
        if record and bool(record.get("finished")) == finished and wanted.compare(record).is_same_training:
            return folder
    return None


def _steps_in(folder: Path) -> int:
    found = [steps_of(read_position(state)) for state in folder.glob(f"*/{STATE_NAME}")]
    return max(found, default=-1)


def _download_newest(place: Place, found: Sequence[int], scratch: Path, *, newer_than: int) -> Manifest | None:
    """The newest checkpoint that is whole, into `scratch`; None if this machine is as far as what is left of them."""
    problems: list[str] = []
    for number in reversed(found):
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            manifest = manifests.read(place, number)
            if problems and manifest.steps <= newer_than:
                logger.warning("%s The state on this machine is newer than the one before it.", problems[-1])
                return None
            _download(place, manifest, scratch)
        except PlaceError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("%s The checkpoint before it is taken.", problem)
        return manifest
    shutil.rmtree(scratch, ignore_errors=True)
    raise _nothing_usable(place, problems)


def _download(place: Place, manifest: Manifest, scratch: Path) -> None:
    """All files, each compared with its digest; ResourceError if there is no room for them here."""
    try:
        scratch.mkdir(parents=True)
        if manifest.nbytes > shutil.disk_usage(scratch).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise write_error(error, scratch, manifest.nbytes) from error
    logger.info("Fetching %.1f MB (%s) from %s.", manifest.nbytes / 1e6, manifest.where(), place.url)
    for name, file in manifest.files.items():
        target = scratch / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if place.download(file.key, target) != file.sha256:
            raise PlaceError(f"{place.url}/{file.key}: is damaged: its sha256 differs.")


def _move(scratch: Path, folder: Path) -> Path:
    """To its final place: run.json last, because a folder without one is no run."""
    names = sorted(path.relative_to(scratch) for path in scratch.rglob("*") if path.is_file())
    for part in sorted(names, key=lambda path: path.name == RECORD_NAME):
        (folder / part).parent.mkdir(exist_ok=True)
        (scratch / part).replace(folder / part)
    shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _note_position(folder: Path, manifest: Manifest) -> None:
    """As a save would: so that the next start finds it here, and does not fetch it again."""
    for state in folder.glob(f"*/{STATE_NAME}"):
        with suppress(OSError):
            position_note(state).write_text(json.dumps(manifest.position))
