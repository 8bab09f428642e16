"""replay.jsonl of a run folder: how the input was made, and a hash of what the network saw in every step.

    {"input": {...}}                                            the job's facts; again whenever they change
    {"epoch": 0, "step": 0, "hashes": [["5f..", "0a.."], ...]}  consecutive steps; hashes of images, targets of each
    {"epoch": 0, "step": 20, "hashes": [[...], [...]]}          with several ranks: those of all of them, in order

It is cut to the length that the checkpoint knows whenever a run continues from one, so repeated steps occur once. A
line that a killed process left behind is replaced in the same way.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.engine import HashedStep
from flatout.ranks import World
from flatout.runs.folder import Records

STEPS_NAME = "replay.jsonl"

InputFacts = Mapping[str, Any]
"""What a job needs to make the input of a step again, as JSON values."""


class StepRecord:
    """Appends to replay.jsonl. Called on all ranks, the first one writes."""

    def __init__(self, records: Records | None, world: World, facts: Callable[[], InputFacts | None]) -> None:
        """`facts` returns those of the steps since the last call, as `Recipe.input_facts`."""
        self._records, self._world, self._facts = records, world, facts
        self._written: InputFacts | None = None
        self._num_truncated = -1

    def __call__(self, steps: list[HashedStep]) -> None:
        """Record steps that were trained."""
        gathered = self._world.gather(steps)
        if self._records is None or gathered is None or not steps:
            return
        facts = dict(self._facts() or {})
        # What was written before may have been cut off since.
        if facts != self._written or self._records.num_truncated != self._num_truncated:
            self._records.event(STEPS_NAME, {"input": facts})
            self._written, self._num_truncated = facts, self._records.num_truncated
        for begin, end in pairwise([0, *_breaks(steps), len(steps)]):
            hashes = [[f"{each:016x}" for rank in gathered for each in rank[at].hashes] for at in range(begin, end)]
            first = steps[begin]
            self._records.event(STEPS_NAME, {"epoch": first.epoch, "step": first.step, "hashes": hashes})


def _breaks(steps: list[HashedStep]) -> list[int]:
    """Where a step does not follow the one before it."""
    follows = [(after.epoch, after.step) == (before.epoch, before.step + 1) for before, after in pairwise(steps)]
    return [number for number, is_next in enumerate(follows, 1) if not is_next]


# Reading


@dataclass
class RecordedSteps:
    """The content of replay.jsonl."""

    inputs: list[InputFacts] = field(default_factory=list)
    """All facts, in the order of the file."""
    steps: dict[tuple[int, int], tuple[tuple[str, ...], int]] = field(default_factory=dict)
    """(epoch, step) -> its hashes, and the number of its facts in `inputs`."""

    def facts_of(self, epoch: int, step: int) -> InputFacts | None:
        """The facts of a step; for one that is not recorded those of the last steps; None if there are none."""
        number = self.steps[epoch, step][1] if (epoch, step) in self.steps else -1
        return self.inputs[number] if self.inputs else None

    def hashes_of(self, epoch: int, step: int) -> tuple[str, ...] | None:
        """The hashes of a step: of images and targets, rank by rank; None if it is not recorded."""
        return self.steps[epoch, step][0] if (epoch, step) in self.steps else None


def read_steps(folder: Path) -> RecordedSteps:
    """What a run has recorded; empty for a run of an older version. A damaged line ends the file."""
    try:
        lines = (folder / STEPS_NAME).read_text(errors="replace").splitlines()
    except OSError:
        return RecordedSteps()
    found = RecordedSteps()
    for entry in _entries(lines):
        match entry:
            case {"input": dict(facts)}:
                found.inputs.append(facts)
            case {"epoch": int(epoch), "step": int(first), "hashes": list(hashes)} if found.inputs:
                for step, row in enumerate(hashes, first):
                    found.steps[epoch, step] = tuple(map(str, row)), len(found.inputs) - 1
    return found


def _entries(lines: Iterable[str]) -> Iterable[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            return  # written by a process that was killed; a run that continues replaces it
