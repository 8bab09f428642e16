"""Where a job of stages lives, and whether a command begins it, continues it or finds it done.

runs/stages/gradual_unfreeze/    run.json, results.*, weights/best.pt      of the job
    stage1/, stage2/ ...         what train.py leaves                      of each stage
"""

import shutil
from dataclasses import replace
from pathlib import Path

from flatout.errors import CheckpointError, ConfigError
from flatout.runs import Identity, RunFolder, RunLock, Wanted, choose_run, numbered, read_record

MOST_CHANGES = 4


def newest_job(project: Path, name: str) -> Path | None:
    """By number. Passed over are folders that are no run, and `tiny4` of a job that is called so itself."""
    for path in reversed(numbered(project, name).values()):
        record = read_record(path)
        if record and record["config"].get("name") == name:
            return path
    return None


def begin_job(project: Path, name: str, meant: Identity) -> RunFolder:
    """A new folder, locked."""
    return choose_run(Wanted(project=project, name=name, identity=meant, fresh=True))


def continue_job(folder: Path, meant: Identity, *, break_lock: bool) -> RunFolder:
    """The folder of a job that was begun before, locked.

    ConfigError if the plan is another one than that which it was begun with: stages that were trained belong to the
    plan they were trained by. A job that failed before its first step may get another one.
    """
    record = read_record(folder) or {"config": {}}
    changed = meant.compare(record["config"]).different
    wanted = Wanted(project=folder.parent, name=folder.name, identity=meant, break_lock=break_lock)
    if not changed:
        return choose_run(replace(wanted, resume=folder))
    first = stage_folder(folder, 1)
    if not (first / "weights").exists():
        with RunLock(folder, break_lock=break_lock):  # another process may be about to train in it
            shutil.rmtree(first, ignore_errors=True)
        return choose_run(replace(wanted, exist_ok=True, fresh=True))
    more = f" and {len(changed) - MOST_CHANGES} more" if len(changed) > MOST_CHANGES else ""
    raise ConfigError(
        f"{folder} was begun with other stages: {', '.join(changed[:MOST_CHANGES])}{more}. "
        "Put them back as they were, start over with --fresh, or choose another --name."
    )


def is_finished(folder: Path) -> bool:
    """Of a job or a stage: nothing in it is trained again."""
    record = read_record(folder)
    return bool(record and record.get("finished"))


def stage_folder(job: Path, number: int) -> Path:
    """Of a stage, numbered from 1."""
    return job / f"stage{number}"


def best_weights(stage: Path) -> Path:
    """best.pt of a finished stage; last.pt where no epoch was validated."""
    for name in ("best.pt", "last.pt"):
        if (stage / "weights" / name).is_file():
            return stage / "weights" / name
    raise CheckpointError(f"{stage}: a finished stage without weights. Put them back, or start over with --fresh.")
