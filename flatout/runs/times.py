"""times.jsonl of a run folder: where the wall time of a run went, from the command to finished weights.

One line per process that trained the run, written at its end; `flatout profile --run FOLDER` shows them as a ledger. A
process that is killed leaves none.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flatout.clock import Part, Spans
from flatout.errors import ConfigError, counted

FILE_NAME = "times.jsonl"
STEPS = "steps"
REST = "not accounted for"

LABELS = {
    "imports": "starting Python, importing modules",
    "scan": "reading and checking the data set",
    "load": "loading the checkpoint",
    "network": "network and optimizer",
    "input": "opening the input: workers, stores",
    "validation input": "opening the input of validations",
    "kernels": "compiling or loading kernels",
    "compile": "torch.compile",
    "first step": "first step: first batch, libraries",
    "capture": "capturing CUDA graphs",
    STEPS: "all other steps",
    "validation": "validations",
    "plots": "plots",
    "save": "saving checkpoints and weights",
    "callbacks": "loggers and other callbacks",
    "epoch end": "rest of the ends of epochs",
    "last files": "final weights",
    "end": "closing workers and files",
}
"""Name of a part -> its label, in the order of a ledger."""


@dataclass(frozen=True)
class RunTimes:
    """Where the wall time of one process, or of several together, went."""

    wall_s: float
    parts: Sequence[Part]
    processes: int = 1

    @property
    def rest_s(self) -> float:
        """Time that is in no part."""
        return self.wall_s - sum(part.seconds for part in self.parts)

    @property
    def steps(self) -> int:
        """All steps that were trained."""
        return sum(part.times for part in self.parts if part.name in (STEPS, "first step"))


def record_times(folder: Path, spans: Spans, *, continues: bool) -> None:
    """Add the times of this process to the run folder, once everything is closed, if it trained a step.

    A full disk or a removed folder is ignored.
    """
    if all(part.name != STEPS for part in spans.parts()):
        return
    spans.name_the_last("end")
    parts = {part.name: {"seconds": round(part.seconds, 4), "times": part.times} for part in spans.parts()}
    line = json.dumps({"wall_s": round(spans.wall_s, 4), "parts": parts}) + "\n"
    with suppress(OSError), (folder / FILE_NAME).open("a" if continues else "w") as file:
        file.write(line)


def read_times(folder: Path) -> RunTimes:
    """The times of all processes of a run, added up. ConfigError if there are none that can be read."""
    path = folder / FILE_NAME
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        parts: dict[str, Part] = {}
        for name, part in ((name, part) for line in lines for name, part in line["parts"].items()):
            before = parts.get(name, Part(name, 0.0, 0))
            parts[name] = Part(name, before.seconds + part["seconds"], before.times + part["times"])
        wall_s = float(sum(line["wall_s"] for line in lines))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"{path} cannot be read ({reason}): give the folder of a run that has ended, such as runs/train/exp. "
            "A training writes this file at its end; one of an older version, or one that was killed, has none."
        ) from error
    if not lines:
        raise ConfigError(f"{path} is empty: no process of this run has ended yet.")
    return RunTimes(wall_s, sorted(parts.values(), key=_place), len(lines))


def ledger_lines(times: RunTimes) -> list[str]:
    """A table of all parts that adds up to the wall time."""
    head = f"{times.wall_s:.1f} s from the command to its end, {counted(times.steps, 'step')}"
    head += "" if times.processes == 1 else f", in {times.processes} processes"
    rows = [*times.parts, Part(REST, times.rest_s, 0)]
    return [
        head,
        f"{'':40}{'s':>9}{'share':>8}{'times':>8}{'ms each':>11}",
        *(_line(row, times.wall_s) for row in rows),
    ]


def fixed_costs(times: RunTimes) -> Mapping[str, float]:
    """Seconds by label of everything but the steps after the first."""
    costs = {label_of(part): part.seconds for part in times.parts if part.name != STEPS}
    return costs | {REST: times.rest_s}


def label_of(part: Part) -> str:
    return LABELS.get(part.name, part.name)


def _place(part: Part) -> int:
    return list(LABELS).index(part.name) if part.name in LABELS else len(LABELS)


def _line(part: Part, wall_s: float) -> str:
    text = f"  {label_of(part):<38}{part.seconds:9.2f}{part.seconds / max(wall_s, 1e-9):8.1%}"
    return text + (f"{part.times:8,}{1e3 * part.seconds / part.times:11,.1f}" if part.times > 1 else "")
