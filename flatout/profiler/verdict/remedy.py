"""The words of a verdict: bottlenecks, remedies with a predicted speed, and trials that make predictions sharper."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

NOTHING = "nothing"
"""The cause of a verdict that sees nothing worth changing."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The changed part alone, measured: what a stage of the step would take with a remedy applied."""

    what: str
    """The remedy in words: "batched assignment"."""

    change: str
    """The flag or code line that applies it."""

    stage: str
    """The host stage that it replaces; several parted by "+", as in "forward+backward"."""

    then_ms: float
    """Time of the stage per step, with the remedy."""

    is_share: bool = False
    """`then_ms` is not milliseconds but a share of what the stage takes now: what a trial elsewhere can tell."""

    device_share: float | None = None
    """What is left of the time that kernels run per step, relative to now; None: they save what the stage saves."""

    uncertainty: float = 0.07
    """Relative, of the predicted step."""

    images: float | None = None
    """Images per step with the remedy, where that changes; all other stages then grow with them."""

    switch: Mapping[str, Any] = field(default_factory=dict)
    """Options of a flatout training that apply it."""

    in_workers: bool = False
    """The stage runs in the workers; `then_ms` is then time of one core per step, all workers together."""


@dataclass(frozen=True, kw_only=True)
class EndToEndTrial:
    """A remedy that changes network and input at once, each measured by itself with all of it switched on."""

    what: str
    change: str
    """The flag that applies it."""

    compute_ms: float
    """The network's part of a step, on one batch that lies ready."""

    input_ms: float
    """A batch of the changed input, with nothing done to it."""

    device_ms: float = 0.0
    """Kernels of the network's part; 0: no device."""

    beside_ms: float = 0.0
    """Kernels of the input (pictures augmented on the device), which the same device runs beside the step."""

    covers: Sequence[str] = ()
    """Remedies of the verdict, by name, that are part of it: what was tried stands in the place of their estimate."""

    uncertainty: float = 0.1
    """Relative, of the predicted step."""

    images: float | None = None
    """Images per step with the remedy, where that changes."""

    switch: Mapping[str, Any] = field(default_factory=dict)
    """Options of a flatout training that apply it."""

    def step_ms(self, *, between_ms: float = 0.0) -> float:
        """The slowest of main thread, device and input sets the step; what lies between steps stays."""
        return max(self.compute_ms, self.device_ms + self.beside_ms, self.input_ms) + between_ms


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Something to change, and the speed it should give."""

    what: str
    change: str
    """The flag or code line to change."""

    step_ms: float
    """Predicted."""

    uncertainty: float
    """Relative: the step is expected between step_ms x (1 - u) and step_ms x (1 + u)."""

    now_ms: float
    images: float
    """Per step, with the remedy."""

    now_images: float | None = None
    """Per step now, where that differs."""

    switch: Mapping[str, Any] = field(default_factory=dict)
    """Options of a flatout training that apply it; empty: a person has to."""

    @property
    def gain(self) -> float:
        """How many times as fast."""
        return self.images_per_s / self.now_images_per_s

    @property
    def images_per_s(self) -> float:
        # A step of no time is no prediction.
        return 1e3 * self.images / self.step_ms if self.step_ms > 0 else 0.0

    @property
    def now_images_per_s(self) -> float:
        return 1e3 * (self.now_images or self.images) / self.now_ms

    def line(self) -> str:
        """'workers 1 -> 2: 120 -> 215 +- 20 img/s (1.8x). Change: --workers 2'."""
        low, high = (self.images_per_s / (1 + sign * self.uncertainty) for sign in (1, -1))
        return (
            f"{self.what}: {number(self.now_images_per_s)} -> {number(self.images_per_s)} img/s "
            f"(between {number(low)} and {number(high)}; {self.gain:.2f}x). Change: {self.change}"
        )


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """One thing that costs time."""

    cause: str
    """A short name: "assigner", "decode", "too few workers", ..."""

    sentence: str
    evidence: Sequence[str]
    remedies: Sequence[Remedy]
    cost_ms: float
    """What it costs per step, about."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The cause that costs most, why we think so, and what to do about it, best first."""

    cause: str
    sentence: str
    evidence: Sequence[str]
    remedies: Sequence[Remedy]
    others: Sequence[Bottleneck] = ()
    """Lesser bottlenecks."""

    @property
    def best(self) -> Remedy | None:
        return self.remedies[0] if self.remedies else None

    @property
    def is_worth_changing(self) -> bool:
        return self.cause != NOTHING


def respelled(remedy: Remedy, own_flags: Mapping[str, str]) -> Remedy:
    """The remedy under the flags of a job that spells them in its own way: regular expressions of what is advised ->
    what to advise instead. What fits none of them is left as it is."""
    for pattern, own in own_flags.items():
        if re.search(pattern, remedy.change):
            return replace(remedy, change=re.sub(pattern, own, remedy.change))
    return remedy


def number(value: float) -> str:
    """Three digits that count: 0.53, 5.31, 53.1, 531, 5,310."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
