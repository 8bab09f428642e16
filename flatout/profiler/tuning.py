"""How should the input run on this machine? From what an image and a step cost: where pictures are kept, who augments
them, how many workers.

    costs (measured) --choose--> choice, with reasons        every way is predicted by the model of the verdict

Pure, but for `Tunings`, which remembers choices beside what they depend on: machine, versions and data.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flatout.profiler.verdict.whatif import KEPT_DECODED, Demands

Place = Literal["device", "ram", "off"]
WITHIN = 1.02
"""Ways this close to the fastest are as good; the one that takes least of the machine is chosen among them."""

ROOM = 0.5
"""Share of free memory that kept pictures may take."""

SLOTS_AHEAD = 2
LONGEST_S, SHARE_OF_RUN = 60.0, 0.05


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured. Times of one core in milliseconds."""

    images: int
    """Per step."""
    step_ms: float
    """The network's part of a step, with its batch ready."""
    main_cpu_ms: float
    """CPU time of it: all of `step_ms` and more on a CPU, a fraction of it on a GPU."""
    decode_ms: float
    augment_ms: float
    """Per image."""
    draw_ms: float
    """Per image: what workers still do when the device augments."""
    cores: float
    decoded_bytes: int
    """All pictures."""
    ram_free_bytes: int
    device_free_bytes: int = 0
    render_ms: float | None = None
    """A batch, on the device; None: it cannot."""
    most_workers: int | None = None
    """None: as many as cores."""
    epochs: int = 1
    """A store is built once and pays from the second epoch on."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the input should run."""

    keep: Place
    augment_on_device: bool
    workers: int
    slots: int
    step_ms: float
    """Predicted."""
    reason: str


def choose(costs: Costs) -> Choice:
    """The way that is fastest, and of those that are about as fast the one that takes least."""
    ways = list(_ways(costs))
    fastest_ms = min(way.step_ms for way in ways)
    good = [way for way in ways if way.step_ms <= WITHIN * fastest_ms]
    return min(good, key=lambda way: (way.workers, way.keep != "off", way.step_ms))


def measuring_budget_s(run_s: float) -> float:
    """How long measuring may take, of a run of this estimated length."""
    return min(LONGEST_S, SHARE_OF_RUN * run_s)


def _ways(costs: Costs) -> Iterator[Choice]:
    for keep in _places(costs):
        on_device = [False] + [True] * (keep == "device" and costs.render_ms is not None)
        for augments in on_device:
            # Pictures that are kept on the device are no use to workers.
            if keep == "device" and not augments:
                continue
            for workers in range(_most_workers(costs) + 1):
                yield _way(costs, keep, augments, workers)


def _most_workers(costs: Costs) -> int:
    cores = int(costs.cores)
    return cores if costs.most_workers is None else min(cores, costs.most_workers)


def _places(costs: Costs) -> Iterator[Place]:
    yield "off"
    if costs.epochs < 2:
        return
    if costs.decoded_bytes <= ROOM * costs.ram_free_bytes:
        yield "ram"
    if costs.decoded_bytes <= ROOM * costs.device_free_bytes:
        yield "device"


def _way(costs: Costs, keep: Place, augments: bool, workers: int) -> Choice:
    if augments:
        image_ms, render_ms = costs.draw_ms, costs.render_ms or 0.0
    else:
        image_ms = costs.decode_ms * (1.0 if keep == "off" else KEPT_DECODED) + costs.augment_ms
        render_ms = 0.0
    input_ms = costs.images * image_ms
    demands = Demands(
        consumer_ms=costs.step_ms + render_ms,
        input_ms=input_ms,
        cpu_ms=costs.main_cpu_ms + input_ms,
        workers=workers,
        cores=costs.cores,
    )
    where = {"off": "decoded each time", "ram": "kept decoded in RAM", "device": "kept on the device"}[keep]
    who = "augmented there" if augments else f"augmented by {workers or 'no'} worker{'' if workers == 1 else 's'}"
    return Choice(
        keep=keep,
        augment_on_device=augments,
        workers=workers,
        slots=workers + SLOTS_AHEAD if workers else SLOTS_AHEAD,
        step_ms=demands.step_ms,
        reason=f"pictures {where}, {who}: {1e3 * costs.images / demands.step_ms:,.0f} img/s expected",
    )


class Tunings:
    """Choices of earlier runs, in one file. What cannot be read counts as nothing remembered."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def recall(self, facts: Mapping[str, str]) -> Choice | None:
        """What was chosen under the same facts, if anything."""
        found = self._read().get(fingerprint(facts))
        try:
            return Choice(**found["choice"]) if found else None
        except (TypeError, KeyError):
            return None

    def remember(self, facts: Mapping[str, str], choice: Choice) -> None:
        """Readers see the file before or after, never half of it."""
        content = self._read() | {fingerprint(facts): {"facts": dict(facts), "choice": asdict(choice)}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(self._file)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def fingerprint(facts: Mapping[str, str]) -> str:
    """Of machine, versions and data: one that differs makes a choice unknown."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:16]
