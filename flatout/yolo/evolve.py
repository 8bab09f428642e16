"""The whole of `--evolve`: options in; evolve.txt, evolve.csv, evolve.png and hyp_evolved.yaml in a run folder out.

evolve.txt, evolve.csv and hyp_evolved.yaml: what every generation scored, and the best values so far.

evolve.txt is the memory of a search: a line per generation, 7 scores and 31 hyper-parameters. Everything that follows
is computed from its text, so that a search goes on after an interruption as if there had been none.

Dimension key:  N generations
"""

import csv
import io
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.engine import Callback, Callbacks, RunStart, Scores, default_fast_amp
from flatout.errors import ConfigError, DivergedError
from flatout.ranks import StopSignals, choose_devices, read_world
from flatout.runs import RunFolder, RunRequest, Spending, choose_run, finished_run, reporting_end
from flatout.safefiles import replacing
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.metrics import YOLOV7_RESULTS, fitness, zero_scores
from flatout.yolo.options import TrainOptions
from flatout.yolo.run_config import config_of_run, identity
from flatout.yolo.train.recipe import loggers_for, train

# How hyper-parameters mutate, and which row is the parent of the next. Pure: numbers and a generator in, numbers out.
#
# YOLOv7's table, matched by key: there the gains are matched by position to a file that has one key more.
#
# Dimension key:  G genes   N rows

PARENTS = 5
"""The best so many rows may have children."""
SHARE = 0.8
"""Of genes that change, on average."""
SPREAD = 0.2
FACTORS = (0.3, 3.0)
DECIMALS = 5


class Gene(NamedTuple):
    """How much a value moves, and within what limits. Gain 0: it keeps its value."""

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
    """A child: those of the values that are genes, changed and within their limits; the others as they are."""
    names = [name for name in values if name in GENES]
    value_G, (gain_G, low_G, high_G) = np.array([values[name] for name in names]), np.array([GENES[n] for n in names]).T
    child_G = np.clip(value_G * _factors(gain_G, rng), low_G, high_G).round(DECIMALS)
    return {**values, **dict(zip(names, child_G.tolist(), strict=True))}


def choose_parent(fitness_N: np.ndarray, rng: np.random.Generator) -> int:
    """A row among the best, the fitter the likelier; the last of them never, unless all are alike."""
    # Stable: of rows that are alike the earlier one counts as better, on every machine.
    best = np.argsort(-fitness_N, kind="stable")[:PARENTS]
    weight = fitness_N[best] - fitness_N[best].min()
    share = weight / weight.sum() if weight.sum() > 0 else np.full(len(best), 1 / len(best))
    return int(rng.choice(best, p=share))


def _factors(gain_G: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """What values are multiplied by; never 1 for all of them: such a child would be its parent."""
    while True:
        mask_G = rng.random(len(gain_G)) < SHARE
        factor_G = np.clip(1 + gain_G * mask_G * rng.standard_normal(len(gain_G)) * rng.random() * SPREAD, *FACTORS)
        if not np.all(factor_G == 1):
            return np.asarray(factor_G)


KEYS = tuple(field.name for field in fields(Hyp) if field.name in GENES or field.name == "loss_ota")
"""Of the 31 hyper-parameters, in the order of a hyp file, `anchors` last."""
OWN_ANCHORS = 3
"""Stands in the column of `anchors` where the hyp file leaves the network its own."""


class Rows:
    """The lines of evolve.txt in a folder; a line that was not finished is forgotten."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "evolve.txt"
        self.values: list[list[float]] = []
        if self.path.is_file():
            lines = self.path.read_text().splitlines(keepends=True)
            self.values = [numbers for line in lines if (numbers := _numbers(line))]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def fitness_N(self) -> np.ndarray:
        scores = (dict(zip(YOLOV7_RESULTS, row, strict=False)) for row in self.values)
        return np.array([fitness(map50=each["mAP_0.5"], map50_95=each["mAP_0.5:0.95"]) for each in scores])

    @property
    def best(self) -> int:
        """Generation with the best fitness, the earliest of several."""
        return int(self.fitness_N.argmax())

    def hyp_of(self, generation: int) -> dict[str, float]:
        return dict(zip(KEYS, self.values[generation][len(YOLOV7_RESULTS) :], strict=True))

    def forget(self) -> None:
        """Begin anew; what was there is kept as evolve.old.txt."""
        self.values = []
        if self.path.is_file():
            self.path.replace(self.path.with_name("evolve.old.txt"))

    def add(self, scores: Mapping[str, float], hyp: Mapping[str, float]) -> None:
        """The next generation, on the disk when this returns."""
        numbers = _numbers(_line([*(scores[name] for name in YOLOV7_RESULTS), *(hyp[key] for key in KEYS)]))
        assert numbers is not None
        # As they are in the file: whoever continues the search later knows no other digits.
        self.values.append(numbers)
        text = "".join(map(_line, self.values))
        with replacing(self.path, needed_bytes=len(text)) as sink:
            sink.write(text.encode())
        self._write_table()

    def _write_table(self) -> None:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["generation", "fitness", *YOLOV7_RESULTS, *KEYS])
        for generation, (score, row) in enumerate(zip(self.fitness_N, self.values, strict=True)):
            table.writerow([generation, round(float(score), 6), *row])
        part = self._folder / ".evolve.csv.part"
        part.write_text(text.getvalue())
        os.replace(part, self._folder / "evolve.csv")


def values_of(hyp: Hyp) -> dict[str, float]:
    """The 31 values of a hyp file, in the order of `KEYS`."""
    return {key: OWN_ANCHORS if (value := getattr(hyp, key)) is None else value for key in KEYS}


def hyp_text(values: Mapping[str, float], hyp: Hyp, *, about: str) -> str:
    """A hyp file with these values; what is not evolved is as in `hyp`."""
    kept = {field.name: getattr(hyp, field.name) for field in fields(Hyp)}
    changed = {key: value for key, value in values.items() if key in GENES and kept[key] is not None}
    lines = [f"{key}: {_decimal(value)}" for key, value in (kept | changed).items() if value is not None]
    return "\n".join([f"# {about}", *lines, ""])


def _line(numbers: Sequence[float]) -> str:
    return "".join(f"{number:>13.7g}" for number in numbers) + "\n"


def _decimal(value: float) -> str:
    """Without an exponent, which YAML would take for text: 1e-05 becomes 0.00001."""
    return str(value) if isinstance(value, int) else np.format_float_positional(value, trim="0")


def _numbers(line: str) -> list[float] | None:
    words = line.split()
    if not line.endswith("\n") or len(words) != len(YOLOV7_RESULTS) + len(KEYS):
        return None
    try:
        return [float(word) for word in words]
    except ValueError:
        return None


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
    with StopSignals(), _open_run(options, hyp) as run, reporting_end(hearers, run.folder) as ending:
        search = _Search(options, hyp, run, hearers, spending)
        result = search.go()
        ending.why = result.why
        if result.finished:
            run.finish()
        return result


def _open_run(options: TrainOptions, hyp: Hyp) -> RunFolder:
    return choose_run(_wanted(options, hyp))


def _wanted(options: TrainOptions, hyp: Hyp) -> RunRequest:
    device = choose_devices(options.device)[0]
    meant = identity(options, hyp, cuda=device.type == "cuda", bf16=default_fast_amp(device) == "bf16")
    return RunRequest(
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
            from flatout.charts import plot_evolution

            plot_evolution(self._folder / "evolve.csv", KEYS, self._folder / "evolve.png")
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
