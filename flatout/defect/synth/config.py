"""Which defects are drawn, how many, how strong: the recipe of a training's samples."""

from dataclasses import dataclass
from typing import Literal

from flatout.errors import ConfigError

DefectMode = Literal["gaussian", "psf", "board"]
BoardShape = Literal["blob", "open", "short", "spur", "pinhole"]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class SynthConfig:
    """How samples are made of clean patches."""

    defect_share: float = 0.5
    """Of patches that are neither hard negatives nor get lines."""
    num_defects: tuple[int, int] = (3, 8)
    """Both ends included."""
    amplitudes: tuple[Range, ...] = ((60.0, 60.0), (80.0, 80.0))
    """Magnitudes: one of these ranges, each as likely, then uniform inside it; the sign is random."""
    margin: int = 5
    """Pixels between a centre and the patch's edge; for kernels larger than the standard ones, around their box."""
    min_target_only: int = 1
    """Fewest defects that are in target alone; 0 gives defect patches with an empty label."""

    partial_leak_prob: float = 0.0
    """Probability that a target-only defect shows weakly in one reference. The label stays."""
    partial_leak_scale: Range = (0.2, 0.7)

    hard_negative_ratio: float = 0.0
    """Share of samples that are crops of real images which must not fire."""
    line_ratio: float = 0.0
    """Share of samples with 1 to 3 lines that differ between the planes, and an empty label."""

    mode: DefectMode = "gaussian"
    """Spots; diffraction patterns; or larger shapes with full swing, as on circuit boards."""

    shift_px: float = 0.0
    """Largest shift of a reference against target, in x and in y: whole and sub-pixel misalignment."""
    noise: float = 0.0
    """Standard deviation of noise in each plane, in grey levels."""
    edge_noise: float = 0.0
    """Noise in proportion to the local step between neighbouring pixels: ragged edges."""
    gain: float = 0.0
    """Largest relative change of a plane's contrast."""
    offset: float = 0.0
    """Largest change of a plane's brightness, in grey levels."""
    steepness: float = 1.0
    """Contrast around the middle grey, applied after shift and noise: a scanner that tells black from white only has
    full steps at every edge, wherever it sees it."""
    one_reference: bool = False
    """There is one reference only: ref2 is ref1 again, and a difference to both says no more than to one."""

    def __post_init__(self) -> None:
        low, high = self.num_defects
        if not 2 <= low <= high <= 64:
            raise ConfigError(
                f"num_defects_range={low} {high}: the first must be 2 or more (one defect alone cannot be shared out "
                "among target and references), the second not smaller, and 64 at most."
            )
        for name in ("defect_share", "partial_leak_prob", "hard_negative_ratio", "line_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie in 0..1.")
        if self.hard_negative_ratio + self.line_ratio > 1:
            raise ConfigError("hard_negative_ratio and line_ratio together exceed 1.")
        if self.min_target_only not in (0, 1):
            raise ConfigError(f"min_target_only={self.min_target_only} must be 0 or 1.")
        for name in ("shift_px", "noise", "edge_noise", "gain", "offset", "steepness", "margin"):
            if not 0 <= getattr(self, name) < 256:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative, nor 256 or more.")
        for each in (*self.amplitudes, self.partial_leak_scale):
            if not 0 <= each[0] <= each[1]:
                raise ConfigError(f"{list(each)} is no range: write the smaller number first, neither below 0.")

    @property
    def disturbs(self) -> bool:
        """Whether planes are moved, scaled or made noisy before anything is painted."""
        return self.steepness != 1 or any((self.shift_px, self.noise, self.edge_noise, self.gain, self.offset))

    @property
    def reads_pixels(self) -> bool:
        """Whether a defect's sign and label follow from what is under it: full swing is visible one way only."""
        return self.mode == "board"
