"""Fetch a mirrored run: its newest intact checkpoint becomes a run folder again."""

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flatout.errors import CheckpointError, ConfigError, ResourceError
from flatout.runs.folder import RunRequest, new_run_folder, read_record
from flatout.runs.mirror import snapshot as manifests
from flatout.runs.mirror.remote_folder import RemoteError, RemoteFolder
from flatout.runs.mirror.snapshot import InvalidManifest, Manifest, position_note, read_position, steps_of
from flatout.runs.options import RECORD_NAME
from flatout.safefiles import check_room, write_error

logger = logging.getLogger(__name__)

STATE_NAME = "last.pt"


class Fetched(NamedTuple):
    """The run folder that was fetched from a mirror or matches it."""

    folder: Path
    finished: bool
    """Whether the training is finished, so that there is nothing left to do."""


def fetch(remote: RemoteFolder, request: RunRequest) -> Fetched | None:
    """Update the run folder of this command from the mirror; None if the mirror has nothing newer.

    Folders are those of `choose_run`: with `exist_ok` there is only one, project/name. For a run that the command names
    to resume nothing is fetched. ConfigError if the mirror holds a run with other settings, ResourceError if it cannot
    be reached, and CheckpointError if all its checkpoints are damaged: a training never silently starts over.
    """
    try:
        found = manifests.numbers(remote)
        newest = _newest(remote, found)
    except RemoteError as error:
        raise ResourceError(f"{error} Nothing was started. Fix that, or leave out --mirror.") from error
    if newest is None:
        return None
    _check_config(remote, newest, request)
    if request.resume is not None:
        return None
    if request.exist_ok and _holds_another(request.folders[0], request):
        return None  # opening the folder reports what differs
    local = _local_run(request, finished=newest.finished)
    known = -1 if local is None else _steps_in(local)
    if local is not None and (newest.finished or known >= newest.steps):
        return Fetched(local, finished=True) if newest.finished else None
    scratch = request.project / f".{request.name}.fetching"
    numbers = [number for number in found if number <= newest.number]
    if (manifest := _download_newest(remote, numbers, scratch, newer_than=known)) is None:
        return None
    folder = _move(scratch, local or new_run_folder(request.project, request.name, exist_ok=request.exist_ok))
    _write_position(folder, manifest)
    logger.info("%s: fetched checkpoint %d (%s) from %s.", folder, manifest.number, manifest.where(), remote.url)
    return Fetched(folder, manifest.finished)


def _newest(remote: RemoteFolder, found: Sequence[int]) -> Manifest | None:
    """The newest valid manifest: a machine may have been lost while it wrote the last one.

    None if there are no manifests; CheckpointError if all are invalid.
    """
    problems = []
    for number in reversed(found):
        try:
            return manifests.read(remote, number)
        except InvalidManifest as error:
            problems.append(str(error))
            logger.warning("%s Using the checkpoint before it.", error)
    if problems:
        raise _nothing_usable(remote, problems)
    return None


def _nothing_usable(remote: RemoteFolder, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{remote.url}: no checkpoint can be used, so nothing was started. {' '.join(problems)}")


def _check_config(remote: RemoteFolder, manifest: Manifest, request: RunRequest) -> None:
    comparison = request.compare({"config": manifest.config})
    if comparison.different or (manifest.finished and comparison.extends):
        state = "a finished" if manifest.finished else "an unfinished"
        raise ConfigError(
            f"{remote.url} holds {state} run with other settings: "
            f"{', '.join(comparison.different + comparison.extends)}. Use another --name or --mirror, or --fresh to "
            "start over and replace it."
        )


def _holds_another(folder: Path, request: RunRequest) -> bool:
    """Whether the folder holds an unfinished run of another training."""
    record = read_record(folder)
    return record is not None and not record.get("finished") and not request.compare(record).is_same_training


def _local_run(request: RunRequest, *, finished: bool) -> Path | None:
    """The folder on this machine that holds an earlier checkpoint of the run or, if `finished`, the finished run."""
    for folder in request.folders:
        record = read_record(folder)
        if record and bool(record.get("finished")) == finished and request.compare(record).is_same_training:
            return folder
    return None


def _steps_in(folder: Path) -> int:
    found = [steps_of(read_position(state)) for state in folder.glob(f"*/{STATE_NAME}")]
    return max(found, default=-1)


def _download_newest(remote: RemoteFolder, found: Sequence[int], scratch: Path, *, newer_than: int) -> Manifest | None:
    """Download the newest intact checkpoint to `scratch`; None if it is not newer than the one on this machine."""
    problems: list[str] = []
    for number in reversed(found):
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            manifest = manifests.read(remote, number)
            if problems and manifest.steps <= newer_than:
                logger.warning("%s The checkpoint on this machine is newer than the one before it.", problems[-1])
                return None
            _download(remote, manifest, scratch)
        except RemoteError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("%s Using the checkpoint before it.", problem)
        return manifest
    shutil.rmtree(scratch, ignore_errors=True)
    raise _nothing_usable(remote, problems)


def _download(remote: RemoteFolder, manifest: Manifest, scratch: Path) -> None:
    """Download all files and check their digests; ResourceError if the disk is too full for them."""
    try:
        scratch.mkdir(parents=True)
        check_room(scratch / STATE_NAME, manifest.nbytes)
    except OSError as error:
        raise write_error(error, scratch, manifest.nbytes) from error
    logger.info("Fetching %.1f MB (%s) from %s.", manifest.nbytes / 1e6, manifest.where(), remote.url)
    for name, file in manifest.files.items():
        target = scratch / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if remote.download(file.key, target) != file.sha256:
            raise RemoteError(f"{remote.url}/{file.key} is damaged: its sha256 differs from the manifest's.")


def _move(scratch: Path, folder: Path) -> Path:
    """Move all files to the run folder; run.json last, because a folder without it does not count as a run."""
    names = sorted(path.relative_to(scratch) for path in scratch.rglob("*") if path.is_file())
    for part in sorted(names, key=lambda path: path.name == RECORD_NAME):
        (folder / part).parent.mkdir(exist_ok=True)
        (scratch / part).replace(folder / part)
    shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_position(folder: Path, manifest: Manifest) -> None:
    """Write the position as a save does, so that the next start does not fetch the checkpoint again."""
    for state in folder.glob(f"*/{STATE_NAME}"):
        with suppress(OSError):
            position_note(state).write_text(json.dumps(manifest.position))
