"""How should the input run on this machine? From what an image and a step cost: where and how pictures are kept, who
augments them, how many workers.

    costs (measured) --choose--> choice, with reasons        every way is predicted by the model of the verdict

Pure, but for `Tunings`, which remembers choices beside what they depend on: machine, versions and data.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from flatout.profiler.verdict.whatif import KEPT_DECODED, Demands

Place = Literal["device", "ram", "off"]
Format = Literal["files", "decoded", "4:2:0"]
"""As they came, decoded each time; every pixel as it is; colours at half size, which is not quite the same picture."""
WITHIN = 1.02
"""Ways this close to the fastest are as good; the one that takes least of the machine is chosen among them."""

ROOM = 0.5
"""Share of free memory that kept pictures may take."""

HALF_BYTES = 0.5
"""What 4:2:0 leaves of a decoded picture."""
RENDER_4_2_0 = 1.38
"""How much longer augmenting takes from it (bench/results/augment_kornia_h200_202611.md)."""
TILES = 4
"""Pictures of a mosaic."""
PINNED_GB_S = 25.0
"""From pinned memory to the device: half of what an H200's link gives, as the generation before it had."""

SLOTS_AHEAD = 2
MOST = 1 << 16
"""Workers or slots that a file may speak of."""
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
    """Of the device's own memory; what does not fit there is read from pinned memory, beside the step."""
    picture_bytes: float = 0.0
    """Of one, decoded."""
    may_subsample: bool = False
    """Whether pictures may be kept as 4:2:0."""
    place: Place | None = None
    """Where pictures have to be kept; None: wherever it is best."""
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
    format: Format
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
    return min(good, key=lambda way: (way.format == "4:2:0", way.workers, way.keep != "off", way.step_ms))


def measuring_budget_s(run_s: float) -> float:
    """How long measuring may take, of a run of this estimated length."""
    return min(LONGEST_S, SHARE_OF_RUN * run_s)


def _ways(costs: Costs) -> Iterator[Choice]:
    for keep in _places(costs):
        for form in _formats(costs, keep):
            for workers in range(_most_workers(costs) + 1):
                yield _way(costs, keep, form, workers)


def _formats(costs: Costs, keep: Place) -> Iterator[Format]:
    yield "files" if keep == "off" else "decoded"
    if keep == "device" and costs.may_subsample:
        yield "4:2:0"


def _most_workers(costs: Costs) -> int:
    cores = int(costs.cores)
    return cores if costs.most_workers is None else min(cores, costs.most_workers)


def _places(costs: Costs) -> Iterator[Place]:
    if costs.place is not None:
        yield costs.place
        return
    yield "off"
    if costs.epochs < 2:
        return
    if costs.decoded_bytes <= ROOM * costs.ram_free_bytes:
        yield "ram"
    # Pictures that are kept on the device are no use to workers: the device has to augment them.
    on_device_bytes = costs.decoded_bytes * (HALF_BYTES if costs.may_subsample else 1)
    if costs.render_ms is not None and on_device_bytes <= ROOM * (costs.device_free_bytes + costs.ram_free_bytes):
        yield "device"


def _pinned_ms(costs: Costs, form: Format) -> float:
    """What a batch takes to come from pinned memory, as far as its pictures do not fit on the device."""
    share = HALF_BYTES if form == "4:2:0" else 1.0
    away = max(0.0, 1 - ROOM * costs.device_free_bytes / max(1.0, share * costs.decoded_bytes))
    return away * costs.images * TILES * share * costs.picture_bytes / PINNED_GB_S / 1e6


def _way(costs: Costs, keep: Place, form: Format, workers: int) -> Choice:
    augments = keep == "device"
    if augments:
        image_ms, render_ms = costs.draw_ms, (costs.render_ms or 0.0) * (RENDER_4_2_0 if form == "4:2:0" else 1)
        pinned_ms = _pinned_ms(costs, form)
    else:
        image_ms = costs.decode_ms * (1.0 if keep == "off" else KEPT_DECODED) + costs.augment_ms
        render_ms = pinned_ms = 0.0
    input_ms = costs.images * image_ms
    demands = Demands(
        consumer_ms=costs.step_ms + render_ms,
        input_ms=input_ms,
        cpu_ms=costs.main_cpu_ms + input_ms,
        workers=workers,
        cores=costs.cores,
    )
    step_ms = max(demands.step_ms, pinned_ms)
    where = {"off": "decoded each time", "ram": "kept decoded in RAM", "device": "kept on the device"}[keep]
    where += " as 4:2:0" if form == "4:2:0" else ""
    who = "augmented there" if augments else f"augmented by {workers or 'no'} worker{'' if workers == 1 else 's'}"
    return Choice(
        keep=keep,
        format=form,
        augment_on_device=augments,
        workers=workers,
        slots=workers + SLOTS_AHEAD if workers else SLOTS_AHEAD,
        step_ms=step_ms,
        reason=f"pictures {where}, {who}: {1e3 * costs.images / step_ms:,.0f} img/s expected",
    )


class Tunings:
    """Choices of earlier runs, in one file. What cannot be read counts as nothing remembered."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def recall(self, facts: Mapping[str, str]) -> Choice | None:
        """What was chosen under the same facts, if anything."""
        found = self._read().get(fingerprint(facts))
        try:
            return _checked(found["choice"]) if found else None
        except (TypeError, KeyError, ValueError):
            return None

    def remember(self, facts: Mapping[str, str], choice: Choice) -> None:
        """Readers see the file before or after, never half of it."""
        content = self._read() | {fingerprint(facts): {"facts": dict(facts), "choice": asdict(choice)}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: where several machines or containers share a home, their processes have the same numbers.
        handle, name = tempfile.mkstemp(prefix=f"{self._file.name}.", dir=self._file.parent)
        try:
            with open(handle, "w") as file:
                file.write(json.dumps(content, indent=1))
            os.replace(name, self._file)
        except BaseException:
            os.unlink(name)
            raise

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._file.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def _checked(choice: Mapping[str, Any]) -> Choice:
    """A choice as it was written down; TypeError or ValueError for anything that `choose` would not have said."""
    known = Choice(**choice)
    is_choice = (
        known.keep in get_args(Place)
        and known.format in get_args(Format)
        and isinstance(known.augment_on_device, bool)
        and known.augment_on_device == (known.keep == "device")
        and all(type(number) is int and 0 <= number <= MOST for number in (known.workers, known.slots))
    )
    if not is_choice:
        raise ValueError(choice)
    return replace(known, step_ms=float(known.step_ms), reason=str(known.reason))


def fingerprint(facts: Mapping[str, str]) -> str:
    """Of machine, versions and data: one that differs makes a choice unknown."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:16]
