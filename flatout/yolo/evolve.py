"""`--evolve`: a genetic search for hyper-parameters, one training per generation.

    hyp file -> child of the best generations -> train() -> scores -> evolve.txt, evolve.csv, hyp_evolved.yaml

evolve.txt is the state of a search: one line per generation with 7 scores and 31 hyper-parameters. Every later
generation is computed from its text, so an interrupted search continues as if it had not been interrupted.

Dimension key:  N generations   G genes
"""

import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.engine import Callback, Callbacks, RunStart, Scores, has_native_bf16
from flatout.errors import ConfigError, DivergedError
from flatout.ranks import StopSignals, choose_devices, read_world
from flatout.runs import RunFolder, RunRequest, Spending, choose_run, finished_run, reporting_end
from flatout.safefiles import csv_text, write_file
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.metrics import YOLOV7_RESULTS, fitness, zero_scores
from flatout.yolo.options import TrainOptions
from flatout.yolo.run_config import config_of_run, identity
from flatout.yolo.train.recipe import loggers_for, train

logger = logging.getLogger(__name__)

FIRST_SEED = 1
"""Seed of a search without --seed: the one of YOLOv7's trainings."""

# The search


@dataclass(frozen=True)
class EvolveResult:
    """The result of a search."""

    folder: Path
    generations: int
    """Complete generations."""
    best_fitness: float
    finished: bool
    """False if it was stopped early; the same command then continues."""
    why: str = ""
    """Why it was stopped early."""


def evolve(
    options: TrainOptions, callbacks: Iterable[Callback] = (), *, spending: Spending | None = None
) -> EvolveResult:
    """Search for hyper-parameters in `options.generations` trainings, each validated and saved only at its end.

    Callbacks are notified of generations as if each were an epoch of one step. The first generation is the unchanged
    hyp file. Raises Interrupted after a signal, once everything is saved: the same call then continues within that
    generation.
    """
    if read_world(options.local_rank).size > 1:
        raise ConfigError("--evolve trains on one device: start it without torchrun.")
    if options.resume:
        raise ConfigError("--resume has no use with --evolve: leave it out, the same command continues a search.")
    spending = spending or Spending(options.price, options.budget)
    hyp = load_hyp(find_file(options.hyp, flag="--hyp"))
    request = _run_request(options, hyp)
    if options.once and (over := finished_run(request)):
        log = EvolutionLog(over)
        return EvolveResult(over, len(log), float(log.fitness_N.max()), finished=True)
    all_callbacks = Callbacks([spending, *loggers_for(options), *callbacks])
    with StopSignals(), choose_run(request) as run, reporting_end(all_callbacks, run.folder) as ending:
        search = _Search(options, hyp, run, all_callbacks, spending)
        result = search.run()
        ending.why = result.why
        if result.finished:
            run.finish()
        return result


def _run_request(options: TrainOptions, hyp: Hyp) -> RunRequest:
    device = choose_devices(options.device)[0]
    meant = identity(options, hyp, cuda=device.type == "cuda", bf16=has_native_bf16(device))
    return RunRequest.of(options, replace(meant, config={**meant.config, "evolve": True}))


class _Search:
    """Trains generation after generation in a locked run folder."""

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
        self._log = EvolutionLog(run.folder)
        if not run.continues:
            self._log.restart()

    def run(self) -> EvolveResult:
        self._callbacks.start(self._run_start())
        while len(self._log) < self._options.generations:
            if why := self._generation(len(self._log)):
                return self._result(why)
        (self._folder / "hyp_next.yaml").unlink(missing_ok=True)
        if not self._log.fitness_N.any():
            logger.warning(
                "All generations have fitness 0, so none is better than the hyp file: train each longer (--epochs), "
                "or start from weights (--weights)."
            )
        logger.info("The best values are in %s.", self._folder / "hyp_evolved.yaml")
        logger.info("%s: %s.", self._folder, self._spending.line())
        return self._result()

    def _generation(self, number: int) -> str:
        """Train the next generation and save its line; returns why the search has to stop, or ""."""
        child = self._child(number)
        file = self._folder / "hyp_next.yaml"
        write_file(file, hyp_text(child, self._hyp, about=f"generation {number}, in training"))
        training = replace(
            self._options, evolve=False, hyp=str(file), project=str(self._folder), name=_name(number), exist_ok=True,
            fresh=False, once=False, nosave=True, notest=True, patience=0, log_to=("none",), entity=None, mirror="",
            no_preflight=self._options.no_preflight or number > 0,
        )  # fmt: skip
        logger.info("Generation %d, training %d of %d.", number, number + 1, self._options.generations)
        try:
            result = train(training, spending=self._spending)
        except DivergedError as error:
            # A result, too: these values cannot be trained with.
            logger.warning("Generation %d: %s Its fitness counts as 0.", number, error)
            scores = zero_scores()
        else:
            assert result is not None
            if not result.finished:
                return result.why
            assert result.outcome is not None
            scores = result.outcome.scores
        self._record(number, scores, child)
        return ""

    def _child(self, number: int) -> dict[str, float]:
        """The values of a generation: a function of the seed, its number and the generations so far."""
        if number == 0:
            return values_of(self._hyp)
        rng = np.random.default_rng((self._options.seed or FIRST_SEED, number))
        parent = self._log.hyp_of(choose_parent(self._log.fitness_N, rng))
        # A network that keeps its own anchors has no number of anchors to mutate.
        kept = {} if self._hyp.anchors is not None else {"anchors": parent.pop("anchors")}
        return mutated(parent, rng) | kept

    def _record(self, number: int, scores: Mapping[str, float], child: dict[str, float]) -> None:
        before = self._log.best if len(self._log) else None
        self._log.add(scores, child)
        best, fitness_N = self._log.best, self._log.fitness_N
        logger.info(
            "Generation %d: fitness %.5f%s; the best is %.5f of generation %d.",
            number, fitness_N[number], "" if number == best else ", its folder is removed", fitness_N[best], best,
        )  # fmt: skip
        # Only the folder of the best generation is kept.
        for each in {number, before} - {best, None}:
            shutil.rmtree(self._folder / _name(each), ignore_errors=True)
        about = f"generation {best} of {len(self._log)}: fitness {fitness_N[best]:.5f}"
        write_file(self._folder / "hyp_evolved.yaml", hyp_text(self._log.hyp_of(best), self._hyp, about=about))
        self._plot()
        scalars = {f"evolve/{name}": score for name, score in scores.items()}
        scalars["evolve/fitness"] = float(fitness_N[number])
        self._callbacks.validation(Scores(epoch=number, at=number, steps_done=number + 1, scalars=scalars))

    def _plot(self) -> None:
        try:
            from flatout.charts import plot_evolution

            plot_evolution(self._folder / "evolve.csv", KEYS, self._folder / "evolve.png")
        except (ImportError, OSError, ValueError) as error:
            logger.warning("evolve.png was not plotted: %s.", error)

    def _run_start(self) -> RunStart:
        return RunStart(
            job="yolo",
            folder=self._folder,
            config=config_of_run(self._options, self._hyp) | {"evolve": True},
            epoch=len(self._log),
            epochs=self._options.generations,
            continues=len(self._log) > 0,
            steps_done=len(self._log),
        )

    def _result(self, why: str = "") -> EvolveResult:
        done = len(self._log)
        best = float(self._log.fitness_N.max()) if done else 0.0
        return EvolveResult(self._folder, done, best, finished=not why, why=why)


def _name(generation: int | None) -> str:
    return f"generation_{generation:03d}"


# Mutation and selection: pure functions of numbers and a random generator
#
# YOLOv7's table, but matched by key: YOLOv7 matches the gains by position to a hyp file that has one key more.

PARENTS = 5
"""Number of best generations that may be parents."""
MUTATION_RATE = 0.8
"""Probability that a gene changes."""
SPREAD = 0.2
"""Scale of the random factors."""
FACTORS = (0.3, 3.0)
"""Limits of the factors."""
DECIMALS = 5


class Gene(NamedTuple):
    """How much a value may change, and within which limits. With gain 0 it keeps its value."""

    gain: float
    low: float
    high: float


GENES = {
    "lr0": Gene(1, 1e-5, 0.1),
    "lrf": Gene(1, 0.01, 1),
    "momentum": Gene(0.3, 0.6, 0.98),
    "weight_decay": Gene(1, 0, 0.001),
    "warmup_epochs": Gene(1, 0, 5),
    "warmup_momentum": Gene(1, 0, 0.95),
    "warmup_bias_lr": Gene(1, 0, 0.2),
    "box": Gene(1, 0.02, 0.2),
    "cls": Gene(1, 0.2, 4),
    "cls_pw": Gene(1, 0.5, 2),
    "obj": Gene(1, 0.2, 4),
    "obj_pw": Gene(1, 0.5, 2),
    "iou_t": Gene(0, 0.1, 0.7),
    "anchor_t": Gene(1, 2, 8),
    "fl_gamma": Gene(0, 0, 2),
    "hsv_h": Gene(1, 0, 0.1),
    "hsv_s": Gene(1, 0, 0.9),
    "hsv_v": Gene(1, 0, 0.9),
    "degrees": Gene(1, 0, 45),
    "translate": Gene(1, 0, 0.9),
    "scale": Gene(1, 0, 0.9),
    "shear": Gene(1, 0, 10),
    "perspective": Gene(0, 0, 0.001),
    "flipud": Gene(1, 0, 1),
    "fliplr": Gene(0, 0, 1),
    "mosaic": Gene(1, 0, 1),
    "mixup": Gene(1, 0, 1),
    "copy_paste": Gene(1, 0, 1),
    "paste_in": Gene(1, 0, 1),
    "anchors": Gene(2, 2, 10),
}


def mutated(values: Mapping[str, float], rng: np.random.Generator) -> dict[str, float]:
    """The values with all genes mutated within their limits; values that are no genes are kept."""
    names = [name for name in values if name in GENES]
    value_G, (gain_G, low_G, high_G) = np.array([values[name] for name in names]), np.array([GENES[n] for n in names]).T
    child_G = np.clip(value_G * _factors(gain_G, rng), low_G, high_G).round(DECIMALS)
    return {**values, **dict(zip(names, child_G.tolist(), strict=True))}


def choose_parent(fitness_N: np.ndarray, rng: np.random.Generator) -> int:
    """One of the best generations, drawn in proportion to its lead over the worst of them.

    That one is never drawn, unless all have the same fitness.
    """
    # Stable: of equal generations the earlier one counts as better, on every machine.
    best = np.argsort(-fitness_N, kind="stable")[:PARENTS]
    lead = fitness_N[best] - fitness_N[best].min()
    probability = lead / lead.sum() if lead.sum() > 0 else np.full(len(best), 1 / len(best))
    return int(rng.choice(best, p=probability))


def _factors(gain_G: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random factors of the values; never 1 for all of them, which would repeat the parent."""
    while True:
        mask_G = rng.random(len(gain_G)) < MUTATION_RATE
        factor_G = np.clip(1 + gain_G * mask_G * rng.standard_normal(len(gain_G)) * rng.random() * SPREAD, *FACTORS)
        if not np.all(factor_G == 1):
            return np.asarray(factor_G)


# evolve.txt, evolve.csv and hyp files

KEYS = tuple(field.name for field in fields(Hyp) if field.name in GENES or field.name == "loss_ota")
"""The 31 hyper-parameters of evolve.txt, in the order of a hyp file, `anchors` last."""
NO_ANCHORS = 3
"""Value in the column `anchors` if the hyp file names none and the network keeps its own."""


class EvolutionLog:
    """The lines of evolve.txt in a folder; an incomplete line is ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "evolve.txt"
        self.values: list[list[float]] = []
        if self.path.is_file():
            lines = self.path.read_text().splitlines(keepends=True)
            self.values = [numbers for line in lines if (numbers := _parse_line(line))]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def fitness_N(self) -> np.ndarray:
        scores = (dict(zip(YOLOV7_RESULTS, row, strict=False)) for row in self.values)
        return np.array([fitness(map50=each["mAP_0.5"], map50_95=each["mAP_0.5:0.95"]) for each in scores])

    @property
    def best(self) -> int:
        """The generation with the best fitness, the earliest of equals."""
        return int(self.fitness_N.argmax())

    def hyp_of(self, generation: int) -> dict[str, float]:
        return dict(zip(KEYS, self.values[generation][len(YOLOV7_RESULTS) :], strict=True))

    def restart(self) -> None:
        """Start with an empty log; an existing evolve.txt is kept as evolve.old.txt."""
        self.values = []
        if self.path.is_file():
            self.path.replace(self.path.with_name("evolve.old.txt"))

    def add(self, scores: Mapping[str, float], hyp: Mapping[str, float]) -> None:
        """Add the next generation; it is on the disk when this returns."""
        numbers = _parse_line(_format_line([*(scores[name] for name in YOLOV7_RESULTS), *(hyp[key] for key in KEYS)]))
        assert numbers is not None
        # Rounded as in the file, because that is all a continued search knows.
        self.values.append(numbers)
        write_file(self.path, "".join(map(_format_line, self.values)))
        self._write_table()

    def _write_table(self) -> None:
        scored = enumerate(zip(self.fitness_N, self.values, strict=True))
        rows = ([generation, round(float(score), 6), *row] for generation, (score, row) in scored)
        names = ["generation", "fitness", *YOLOV7_RESULTS, *KEYS]
        write_file(self._folder / "evolve.csv", csv_text([names, *rows]))


def values_of(hyp: Hyp) -> dict[str, float]:
    """The 31 values of a hyp file, in the order of `KEYS`."""
    return {key: NO_ANCHORS if (value := getattr(hyp, key)) is None else value for key in KEYS}


def hyp_text(values: Mapping[str, float], hyp: Hyp, *, about: str) -> str:
    """The text of a hyp file with these values; keys that do not evolve are as in `hyp`."""
    kept = {field.name: getattr(hyp, field.name) for field in fields(Hyp)}
    changed = {key: value for key, value in values.items() if key in GENES and kept[key] is not None}
    lines = [f"{key}: {_decimal(value)}" for key, value in (kept | changed).items() if value is not None]
    return "\n".join([f"# {about}", *lines, ""])


def _format_line(numbers: Sequence[float]) -> str:
    return "".join(f"{number:>13.7g}" for number in numbers) + "\n"


def _decimal(value: float) -> str:
    """A number without an exponent, which YAML would take for text: 1e-05 becomes 0.00001."""
    return str(value) if isinstance(value, int) else np.format_float_positional(value, trim="0")


def _parse_line(line: str) -> list[float] | None:
    words = line.split()
    if not line.endswith("\n") or len(words) != len(YOLOV7_RESULTS) + len(KEYS):
        return None
    try:
        return [float(word) for word in words]
    except ValueError:
        return None
