"""Running a job of stages: one training after another, continued where it was interrupted.

runs/stages/gradual_unfreeze/    run.json, results.*, weights/best.pt      of the job
    stage1/, stage2/ ...         the files of a run of train.py            of each stage
"""

import csv
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.engine import Callback, Scores
from flatout.errors import CheckpointError, ConfigError, FlatoutError
from flatout.ranks import StopSignals, read_world
from flatout.runs import Identity, RunFolder, RunLock, RunRequest, Spending, choose_run, numbered, read_record
from flatout.safefiles import csv_text, write_file
from flatout.yolo.find_file import find_weights
from flatout.yolo.stages.plan import StagePlan
from flatout.yolo.train import train
from flatout.yolo.weights import read_weights

logger = logging.getLogger(__name__)

# Job folders

MAX_CHANGES = 4
"""Changed options listed in an error, at most."""


def newest_job(project: Path, name: str) -> Path | None:
    """The folder of this name with the highest number; None if there is none.

    Skips folders without a run, and `tiny4` if that is the name of another job.
    """
    for path in reversed(numbered(project, name).values()):
        record = read_record(path)
        if record and record["config"].get("name") == name:
            return path
    return None


def continue_job(folder: Path, meant: Identity, *, break_lock: bool) -> RunFolder:
    """The folder of an existing job, locked.

    ConfigError if the plan is not the one that the job was started with: its trained stages belong to that plan. A job
    that failed before its first step may get another plan.
    """
    record = read_record(folder) or {"config": {}}
    changed = meant.compare(record["config"]).different
    wanted = RunRequest(project=folder.parent, name=folder.name, identity=meant, break_lock=break_lock)
    if not changed:
        return choose_run(replace(wanted, resume=folder))
    first = folder / "stage1"
    if not (first / "weights").exists():
        with RunLock(folder, break_lock=break_lock):  # another process may be about to train there
            shutil.rmtree(first, ignore_errors=True)
        return choose_run(replace(wanted, exist_ok=True, fresh=True))
    more = f" and {len(changed) - MAX_CHANGES} more" if len(changed) > MAX_CHANGES else ""
    raise ConfigError(
        f"{folder} was started with other stages: {', '.join(changed[:MAX_CHANGES])}{more}. "
        "Undo these changes, start over with --fresh, or choose another --name."
    )


def is_finished(folder: Path) -> bool:
    """Whether a job or a stage is finished, so that nothing in it is trained again."""
    record = read_record(folder)
    return bool(record and record.get("finished"))


def stage_folders(job: Path, plan: StagePlan) -> list[Path]:
    """The folder of each stage; they are numbered from 1."""
    return [job / f"stage{number}" for number in range(1, len(plan.stages) + 1)]


def best_weights(stage: Path) -> Path:
    """best.pt of a finished stage; last.pt if no epoch was validated. CheckpointError if neither is there."""
    for name in ("best.pt", "last.pt"):
        if (stage / "weights" / name).is_file():
            return stage / "weights" / name
    raise CheckpointError(
        f"{stage}: this stage is finished, but its weights are missing. Restore them, or start over with --fresh."
    )


# Combined results: a table whose epochs go on counting, and a plot with a line where a stage begins
#
#     stage1/results.*, stage2/results.* ...  ->  results.txt, results.csv, log.jsonl, results.png
#
# Always written from the stages' own files, so nothing here needs to be saved or truncated.


class JobTables(Callback):
    """Writes the combined tables of a job after every epoch of a stage."""

    def __init__(self, job: Path, plan: StagePlan) -> None:
        self._job, self._plan = job, plan

    def validation(self, scores: Scores) -> None:
        write_tables(self._job, self._plan)


def write_tables(job: Path, plan: StagePlan) -> list[int]:
    """Write results.txt, results.csv and log.jsonl of a job; returns the first epoch of each stage that has one."""
    stages = stage_folders(job, plan)
    begins, count = [], 0
    for stage in stages:
        if lines := _lines(stage / "results.txt"):
            begins.append(count)
            count += len(lines)
    write_file(job / "results.txt", "".join(_renumbered_text(stages, plan.num_epochs)))
    write_file(job / "results.csv", _renumbered_csv(stages))
    write_file(job / "log.jsonl", "".join(_renumbered_events(stages)))
    return begins


def _renumbered_text(stages: list[Path], num_epochs: int) -> Iterator[str]:
    """The 15 columns of YOLOv7; the first is epoch/last epoch."""
    lines = [line for stage in stages for line in _lines(stage / "results.txt")]
    for epoch, line in enumerate(lines):
        rest = line.lstrip().partition(" ")[2]
        yield f"{f'{epoch}/{num_epochs - 1}':>10} {rest}\n"


def _renumbered_csv(stages: list[Path]) -> str:
    rows: list[dict[str, object]] = []
    for number, stage in enumerate(stages, 1):
        for row in csv.DictReader(_lines(stage / "results.csv")):
            rows.append(row | {"stage": number, "epoch": len(rows)})
    names = dict.fromkeys(["stage", *(name for row in rows for name in row)])
    return csv_text([names, *([row.get(name, "") for name in names] for row in rows)]) if rows else ""


def _renumbered_events(stages: list[Path]) -> Iterator[str]:
    epoch = 0
    for number, stage in enumerate(stages, 1):
        for line in _lines(stage / "log.jsonl"):
            event = json.loads(line)
            if "epoch" in event:
                event |= {"stage": number, "epoch": epoch}
                epoch += 1
            yield json.dumps(event) + "\n"


def _lines(path: Path) -> list[str]:
    """The lines of a file, without the marks of rows that were lost to a full disk."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


# The job


@dataclass(frozen=True)
class StagesResult:
    """The result of a job of stages."""

    folder: Path
    fitness: tuple[float, ...]
    """Best fitness of each finished stage."""
    finished: bool
    """False if it was stopped early; the same command then continues."""

    @property
    def best_stage(self) -> int | None:
        """The stage with the best fitness, numbered from 1, the later one of equals. None before any has finished."""
        if not self.fitness:
            return None
        return max(range(len(self.fitness)), key=lambda place: (self.fitness[place], place)) + 1

    def __str__(self) -> str:
        lines = [f"stage {number}: best fitness {score:.4f}" for number, score in enumerate(self.fitness, 1)]
        if self.finished:
            best = self.folder / "weights/best.pt"
            lines.append(f"Results are in {self.folder}, the weights of stage {self.best_stage} in {best}.")
        return "\n".join(lines)


def run_stages(
    plan: StagePlan, callbacks: Iterable[Callback] = (), *, spending: Spending | None = None
) -> StagesResult:
    """Train every stage that is not finished; a finished job is not changed.

    Raises Interrupted after a signal, once everything is saved: the same call then continues.
    """
    first = plan.stages[0]
    if read_world(first.local_rank).size > 1:
        raise ConfigError(
            "stages run on one GPU. To use several, run each stage as a command of its own: torchrun ... train.py "
            "--transfer-weights --weights BEST_OF_THE_STAGE_BEFORE ..."
        )
    spending = spending or Spending(first.price, first.budget)
    with StopSignals(), _open(plan) as run:
        if is_finished(run.folder):
            logger.info("%s: all %d stages are finished. Start a new job with --fresh.", run.folder, len(plan.stages))
            return _result(plan, run.folder)
        spending.open(run.folder, continues=run.continues)
        return _StagesRun(plan, run, [*callbacks], spending).go()


def _open(plan: StagePlan) -> RunFolder:
    """The locked folder of a job: of the one that the plan continues, or a new one."""
    if not plan.fresh and (folder := newest_job(plan.project, plan.name)) is not None:
        return continue_job(folder, plan.identity(), break_lock=plan.stages[0].break_lock)
    # Checked before a folder is created: a mistyped path should not leave one.
    find_weights(plan.stages[0].weights)
    return choose_run(RunRequest(project=plan.project, name=plan.name, identity=plan.identity(), fresh=True))


class _StagesRun:
    """Runs the stages of a plan in its job folder."""

    def __init__(self, plan: StagePlan, run: RunFolder, callbacks: list[Callback], spending: Spending) -> None:
        self._plan, self._run, self._spending = plan, run, spending
        self._folders = stage_folders(run.folder, plan)
        self._callbacks = [*callbacks, JobTables(run.folder, plan)]

    def go(self) -> StagesResult:
        folder = self._run.folder
        try:
            for number, stage in enumerate(self._folders):
                if not is_finished(stage) and not self._train(number):
                    return _result(self._plan, folder)
        finally:
            self._write_results()
        result = _result(self._plan, folder)
        self._keep_weights(result)
        # Last: if the process is killed before this, the same command finds all stages finished and repeats the rest.
        self._run.finish()
        logger.info("%s: %s.", folder, self._spending.line())
        return replace(result, finished=True)

    def _train(self, number: int) -> bool:
        """Train one stage, numbered from 0, to its end; False if it was stopped early."""
        options = replace(
            self._plan.stages[number], project=str(self._run.folder), name=self._folders[number].name, exist_ok=True
        )
        if number:
            options = replace(options, weights=str(best_weights(self._folders[number - 1])))
        frozen = " ".join(map(str, options.freeze))
        logger.info(
            "Stage %d of %d: --epochs %d --freeze %s --hyp %s, from %s.",
            number + 1, len(self._folders), options.epochs, frozen, options.hyp, options.weights or "scratch",
        )  # fmt: skip
        result = train(options, self._callbacks, spending=self._spending)
        return result is not None and result.finished

    def _write_results(self) -> None:
        """Write the combined tables and the plot; only a warning if that is not possible."""
        job = self._run.folder
        try:
            if begins := write_tables(job, self._plan):
                from flatout.charts import plot_results

                # Half an epoch before the first of a stage: between the two points.
                marks = [begin - 0.5 for begin in begins[1:]]
                plot_results(job / "results.txt", job / "results.png", marks=marks)
        except (ImportError, OSError, FlatoutError) as error:
            logger.warning("The combined results of the stages cannot be written: %s", error)

    def _keep_weights(self, result: StagesResult) -> None:
        """Copy best.pt of the best stage and last.pt of the last stage into the weights folder of the job."""
        folder = self._run.folder
        assert result.best_stage is not None
        (folder / "weights").mkdir(exist_ok=True)
        best, last = self._folders[result.best_stage - 1], self._folders[-1]
        write_file(folder / "weights/best.pt", best_weights(best).read_bytes())
        write_file(folder / "weights/last.pt", (last / "weights/last.pt").read_bytes())


def _result(plan: StagePlan, folder: Path) -> StagesResult:
    finished = filter(is_finished, stage_folders(folder, plan))
    fitness = [read_weights(best_weights(stage)).best_fitness or 0.0 for stage in finished]
    return StagesResult(folder, tuple(fitness), is_finished(folder))
