"""The parts of a verdict: bottlenecks, remedies with a predicted speed, and trials that make predictions accurate."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

NOTHING = "nothing"
"""The cause of a verdict that finds nothing worth changing."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Measured time of the part of a step that a remedy changes, by itself, with the remedy applied."""

    what: str
    """Name of the remedy, such as "batched assignment"."""

    change: str
    """The flag or code line that applies it."""

    stage: str
    """The host stage that it replaces, or several joined by "+", as in "forward+backward"."""

    then_ms: float
    """Time of the stage per step, with the remedy."""

    is_share: bool = False
    """`then_ms` is a fraction of the stage's present time instead of milliseconds, as from a trial elsewhere."""

    device_share: float | None = None
    """Kernel time per step with the remedy, relative to now; None: kernels save as much time as the stage does."""

    uncertainty: float = 0.07
    """Relative, of the predicted step."""

    images: float | None = None
    """Images per step with the remedy, if that changes; all other stages then scale with them."""

    switch: Mapping[str, Any] = field(default_factory=dict)
    """Options of a flatout training that apply it."""

    in_workers: bool = False
    """The stage runs in the workers; `then_ms` is then time of one core per step, summed over all workers."""


@dataclass(frozen=True, kw_only=True)
class EndToEndTrial:
    """Measurements of a remedy that changes network and input at once: each by itself, with the remedy applied."""

    what: str
    """Name of the remedy."""

    change: str
    """The flag that applies it."""

    compute_ms: float
    """The network's part of a step, on one batch that is ready."""

    input_ms: float
    """Time per batch of the changed input, without using the batches."""

    device_ms: float = 0.0
    """Kernel time of the network's part; 0: no device."""

    input_device_ms: float = 0.0
    """Kernel time of the input (augmentation on the device), which the device needs in addition to the step's."""

    covers: Sequence[str] = ()
    """Names of remedies that it includes: its measured prediction replaces their estimates."""

    uncertainty: float = 0.1
    """Relative, of the predicted step."""

    images: float | None = None
    """Images per step with the remedy, if that changes."""

    switch: Mapping[str, Any] = field(default_factory=dict)
    """Options of a flatout training that apply it."""

    def step_ms(self, *, between_ms: float = 0.0) -> float:
        """Predicted step: the slowest of main thread, device and input, plus the unchanged time between steps."""
        return max(self.compute_ms, self.device_ms + self.input_device_ms, self.input_ms) + between_ms


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change, and the speed it is predicted to give."""

    what: str
    """Name of the remedy."""

    change: str
    """The flag or code line to change."""

    step_ms: float
    """Predicted step time."""

    uncertainty: float
    """Relative: the step is expected between step_ms x (1 - u) and step_ms x (1 + u)."""

    now_ms: float
    """Present step time."""

    images: float
    """Images per step with the remedy."""

    now_images: float | None = None
    """Images per step now, if different."""

    switch: Mapping[str, Any] = field(default_factory=dict)
    """Options of a flatout training that apply it; empty: it must be applied by hand."""

    @property
    def gain(self) -> float:
        """Predicted speed relative to the present one."""
        return self.images_per_s / self.now_images_per_s

    @property
    def images_per_s(self) -> float:
        # A step that takes no time is not a prediction.
        return 1e3 * self.images / self.step_ms if self.step_ms > 0 else 0.0

    @property
    def now_images_per_s(self) -> float:
        return 1e3 * (self.now_images or self.images) / self.now_ms

    def line(self) -> str:
        """One line of text: 'workers 1 -> 2: 120 -> 215 img/s, 1.79x (between 199 and 234). Change: --workers 2'."""
        low, high = (self.images_per_s / (1 + sign * self.uncertainty) for sign in (1, -1))
        return (
            f"{self.what}: {number(self.now_images_per_s)} -> {number(self.images_per_s)} img/s, {self.gain:.2f}x "
            f"(between {number(low)} and {number(high)}). Change: {self.change}"
        )


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """One thing that slows a training down."""

    cause: str
    """Short name: "assigner", "decode", "too few workers", ..."""

    sentence: str
    evidence: Sequence[str]
    remedies: Sequence[Remedy] = field(default_factory=list)
    """The one that removes the cause first, then others that help."""

    cost_ms: float
    """Approximate cost per step."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The most expensive cause, the evidence for it, and the remedies, best first."""

    cause: str
    sentence: str
    evidence: Sequence[str]
    remedies: Sequence[Remedy] = field(default_factory=list)
    others: Sequence[Bottleneck] = ()
    """Smaller bottlenecks."""

    of_cause: Remedy | None = None
    """The remedy that removes the cause itself; `remedies` are those of all bottlenecks."""

    @property
    def best(self) -> Remedy | None:
        return self.remedies[0] if self.remedies else None

    @property
    def is_worth_changing(self) -> bool:
        return self.cause != NOTHING


def with_job_flags(remedy: Remedy, own_flags: Mapping[str, str]) -> Remedy:
    """The remedy with the flags of another job: `own_flags` maps regular expressions for the advice to replacements.
    The first that matches is applied; without a match the remedy stays as it is."""
    for pattern, own in own_flags.items():
        if re.search(pattern, remedy.change):
            return replace(remedy, change=re.sub(pattern, own, remedy.change))
    return remedy


def number(value: float) -> str:
    """A number with about three significant digits: 0.53, 5.31, 53.1, 531, 5,310."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
