"""The whole of `--evolve`: options in; evolve.txt, evolve.csv, evolve.png and hyp_evolved.yaml in a run folder out."""

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flatout.engine import Callback, Callbacks, RunStart, Scores, default_fast_amp
from flatout.errors import ConfigError, DivergedError
from flatout.ranks import StopSignals, choose_devices, read_world
from flatout.runs import RunFolder, Spending, Wanted, choose_run, finished_run, telling_end
from flatout.safefiles import replacing
from flatout.yolo.evolve.rows import KEYS, Rows, choose_parent, hyp_text, mutated, values_of
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.metrics import zero_scores
from flatout.yolo.options import TrainOptions
from flatout.yolo.run_config import config_of_run, identity
from flatout.yolo.train.recipe import loggers_for, train

logger = logging.getLogger(__name__)

FIRST_SEED = 1
"""Of a search without --seed: that of YOLOv7's trainings."""


@dataclass(frozen=True)
class EvolveResult:
    """What a search left behind."""

    folder: Path
    generations: int
    """That are complete."""
    best_fitness: float
    finished: bool
    """False if it was asked to end early; the same command then continues."""
    why: str = ""


def evolve(
    options: TrainOptions, callbacks: Iterable[Callback] = (), *, spending: Spending | None = None
) -> EvolveResult:
    """Search as the options say: `options.generations` trainings, validated and saved only at their ends.

    Callbacks hear of generations as if they were epochs of one step. The first generation is the hyp file as it is.
    Raises Interrupted once a signal was obeyed and everything is saved: the same call then continues within that
    generation.
    """
    if read_world(options.local_rank).size > 1:
        raise ConfigError("--evolve trains on one device: start it without torchrun.")
    if options.resume:
        raise ConfigError("--evolve and --resume: leave --resume out, the same command continues a search.")
    spending = spending or Spending(options.price, options.budget)
    hyp = load_hyp(find_file(options.hyp, flag="--hyp"))
    if options.once and (over := finished_run(_wanted(options, hyp))):
        rows = Rows(over)
        return EvolveResult(over, len(rows), float(rows.fitness_N.max()), finished=True)
    hearers = Callbacks([spending, *loggers_for(options), *callbacks])
    with StopSignals(), _open_run(options, hyp) as run, telling_end(hearers, run.folder) as ending:
        search = _Search(options, hyp, run, hearers, spending)
        result = search.go()
        ending.why = result.why
        if result.finished:
            run.finish()
        return result


def _open_run(options: TrainOptions, hyp: Hyp) -> RunFolder:
    return choose_run(_wanted(options, hyp))


def _wanted(options: TrainOptions, hyp: Hyp) -> Wanted:
    device = choose_devices(options.device)[0]
    meant = identity(options, hyp, cuda=device.type == "cuda", bf16=default_fast_amp(device) == "bf16")
    return Wanted(
        project=Path(options.project),
        name=options.name,
        identity=replace(meant, config={**meant.config, "evolve": True}),
        exist_ok=options.exist_ok,
        fresh=options.fresh,
        break_lock=options.break_lock,
    )


class _Search:
    """Generation after generation, in a folder that is locked."""

    def __init__(
        self,
        options: TrainOptions,
        hyp: Hyp,
        run: RunFolder,
        callbacks: Callbacks,
        spending: Spending,
    ) -> None:
        self._options, self._hyp, self._folder = options, hyp, run.folder
        self._callbacks, self._spending = callbacks, spending
        self._rows = Rows(run.folder)
        if not run.continues:
            self._rows.forget()

    def go(self) -> EvolveResult:
        self._callbacks.start(self._started())
        while len(self._rows) < self._options.generations:
            if why := self._generation(len(self._rows)):
                return self._result(why)
        (self._folder / "hyp_next.yaml").unlink(missing_ok=True)
        if not self._rows.fitness_N.any():
            logger.warning(
                "No generation has found anything, so none is better than the hyp file: train each longer (--epochs), "
                "or from weights (--weights)."
            )
        logger.info("The best values are in %s.", self._folder / "hyp_evolved.yaml")
        logger.info("%s: %s.", self._folder, self._spending.line())
        return self._result()

    def _generation(self, number: int) -> str:
        """Train the next generation and write its row; why the search has to stop, or ""."""
        child = self._child(number)
        file = self._folder / "hyp_next.yaml"
        _write(file, hyp_text(child, self._hyp, about=f"generation {number}, in training"))
        training = replace(
            self._options, evolve=False, hyp=str(file), project=str(self._folder), name=_name(number), exist_ok=True,
            fresh=False, once=False, nosave=True, notest=True, patience=0, log_to=("none",), entity=None, mirror="",
            no_preflight=self._options.no_preflight or number > 0,
        )  # fmt: skip
        logger.info("Generation %d, training %d of %d.", number, number + 1, self._options.generations)
        try:
            result = train(training, spending=self._spending)
        except DivergedError as error:
            # Values that cannot be trained with are an answer too.
            logger.warning("Generation %d: %s It counts as 0.", number, error)
            scores = zero_scores()
        else:
            assert result is not None
            if not result.finished:
                return result.why
            assert result.outcome is not None
            scores = result.outcome.scores
        self._take(number, scores, child)
        return ""

    def _child(self, number: int) -> dict[str, float]:
        """Values of a generation; a function of the seed, the number and the rows so far."""
        if number == 0:
            return values_of(self._hyp)
        rng = np.random.default_rng((self._options.seed or FIRST_SEED, number))
        parent = self._rows.hyp_of(choose_parent(self._rows.fitness_N, rng))
        # A network that keeps its own anchors has no number of them to change.
        kept = {} if self._hyp.anchors is not None else {"anchors": parent.pop("anchors")}
        return mutated(parent, rng) | kept

    def _take(self, number: int, scores: Mapping[str, float], child: dict[str, float]) -> None:
        before = self._rows.best if len(self._rows) else None
        self._rows.add(scores, child)
        best, fitness_N = self._rows.best, self._rows.fitness_N
        logger.info(
            "Generation %d: fitness %.5f%s; the best is %.5f of generation %d.",
            number, fitness_N[number], "" if number == best else ", its folder is removed", fitness_N[best], best,
        )  # fmt: skip
        # Only the folder of the best generation stays.
        for each in {number, before} - {best, None}:
            shutil.rmtree(self._folder / _name(each), ignore_errors=True)
        about = f"generation {best} of {len(self._rows)}: fitness {fitness_N[best]:.5f}"
        _write(self._folder / "hyp_evolved.yaml", hyp_text(self._rows.hyp_of(best), self._hyp, about=about))
        self._draw()
        scalars = {f"evolve/{name}": score for name, score in scores.items()}
        scalars["evolve/fitness"] = float(fitness_N[number])
        self._callbacks.validation(Scores(epoch=number, at=number, steps_done=number + 1, scalars=scalars))

    def _draw(self) -> None:
        try:
            from flatout.charts import evolve_png

            evolve_png(self._folder / "evolve.csv", KEYS, self._folder / "evolve.png")
        except (ImportError, OSError, ValueError) as error:
            logger.warning("No picture of the search was drawn: %s.", error)

    def _started(self) -> RunStart:
        return RunStart(
            job="yolo",
            folder=self._folder,
            config=config_of_run(self._options, self._hyp) | {"evolve": True},
            epoch=len(self._rows),
            epochs=self._options.generations,
            continues=len(self._rows) > 0,
            steps_done=len(self._rows),
        )

    def _result(self, why: str = "") -> EvolveResult:
        done = len(self._rows)
        best = float(self._rows.fitness_N.max()) if done else 0.0
        return EvolveResult(self._folder, done, best, finished=not why, why=why)


def _name(generation: int | None) -> str:
    return f"generation_{generation:03d}"


def _write(path: Path, text: str) -> None:
    with replacing(path, needed_bytes=len(text)) as sink:
        sink.write(text.encode())
