"""evolve.txt, evolve.csv and hyp_evolved.yaml: what every generation scored, and the best values so far.

evolve.txt is the memory of a search: a line per generation, 7 scores and 31 hyper-parameters. Everything that follows
is computed from its text, so that a search goes on after an interruption as if there had been none.

Dimension key:  N generations
"""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from flatout.engine.checkpoint.atomic import replacing
from flatout.yolo.evolve.genes import GENES
from flatout.yolo.hyp import Hyp
from flatout.yolo.metrics import fitness

SCORES = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95", "val_box", "val_obj", "val_cls")
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
        return np.array([fitness(map50=row[2], map50_95=row[3]) for row in self.values])

    @property
    def best(self) -> int:
        """Generation with the best fitness, the earliest of several."""
        return int(self.fitness_N.argmax())

    def hyp_of(self, generation: int) -> dict[str, float]:
        return dict(zip(KEYS, self.values[generation][len(SCORES) :], strict=True))

    def forget(self) -> None:
        """Begin anew; what was there is kept as evolve.old.txt."""
        self.values = []
        if self.path.is_file():
            self.path.replace(self.path.with_name("evolve.old.txt"))

    def add(self, scores: Sequence[float], hyp: Mapping[str, float]) -> None:
        """The next generation, on the disk when this returns."""
        numbers = _numbers(_line([*scores, *(hyp[key] for key in KEYS)]))
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
        table.writerow(["generation", "fitness", *SCORES, *KEYS])
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
    if not line.endswith("\n") or len(words) != len(SCORES) + len(KEYS):
        return None
    try:
        return [float(word) for word in words]
    except ValueError:
        return None
