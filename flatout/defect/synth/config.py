"""Settings of sample synthesis: which defects, how many, how strong."""

from dataclasses import dataclass
from typing import Literal

from flatout.errors import ConfigError

DefectMode = Literal["gaussian", "psf", "board"]
BoardShape = Literal["blob", "open", "short", "spur", "pinhole"]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class SynthConfig:
    """How samples are made from defect-free patches."""

    defect_share: float = 0.5
    """Share of samples with defects, among those that are neither hard negatives nor samples with lines."""
    num_defects: tuple[int, int] = (3, 8)
    """Minimum and maximum number of defects of a sample, both included."""
    amplitudes: tuple[Range, ...] = ((60.0, 60.0), (80.0, 80.0))
    """Ranges of magnitudes, in grey levels: one range is chosen, each equally likely, then a uniform value within it.
    The sign is random."""
    margin: int = 5
    """Minimum distance of a centre from the patch's edge, in pixels. In other modes than gaussian, the whole box of a
    kernel is kept inside instead."""
    min_target_only: int = 1
    """Minimum number of defects that are in target alone; 0 allows samples with defects and an empty label."""

    partial_leak_prob: float = 0.0
    """Probability that a target-only defect also shows weakly in one reference. It stays labelled."""
    partial_leak_scale: Range = (0.2, 0.7)
    """Range of its amplitude there, as a share of that in target."""

    hard_negative_ratio: float = 0.0
    """Share of samples that are crops of hard negatives, real images in which nothing may be detected."""
    line_ratio: float = 0.0
    """Share of samples with 1 to 3 lines that are stronger in target than in the references; their label is empty."""

    mode: DefectMode = "gaussian"
    """gaussian: spots; psf: diffraction patterns; board: larger shapes with full swing, as on circuit boards."""

    shift_px: float = 0.0
    """Maximum shift of a reference against target in x and in y, in pixels; shifts are fractional."""
    noise: float = 0.0
    """Standard deviation of the noise in each plane, in grey levels."""
    edge_noise: float = 0.0
    """Noise in proportion to the local difference of neighbouring pixels, which makes edges ragged."""
    gain: float = 0.0
    """Maximum relative change of a plane's contrast."""
    offset: float = 0.0
    """Maximum change of a plane's brightness, in grey levels."""
    steepness: float = 1.0
    """Contrast factor around middle grey, applied after shift and noise. In black-and-white scans, every edge is a full
    step even after a sub-pixel shift; interpolation would make it grey."""
    one_reference: bool = False
    """There is only one reference: ref2 repeats ref1, with the same shift, noise and defects."""

    def __post_init__(self) -> None:
        low, high = self.num_defects
        if not 2 <= low <= high <= 64:
            raise ConfigError(
                f"num_defects_range={low} {high}: the first number must be 2 or more (a single defect cannot be "
                "divided between target and references), the second must not be smaller, nor above 64."
            )
        for name in ("defect_share", "partial_leak_prob", "hard_negative_ratio", "line_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: it must lie in 0..1.")
        if self.hard_negative_ratio + self.line_ratio > 1:
            raise ConfigError(
                f"hard_negative_ratio={self.hard_negative_ratio} and line_ratio={self.line_ratio} are shares of the "
                "same samples and together exceed 1. Lower one of them."
            )
        if self.min_target_only not in (0, 1):
            raise ConfigError(f"min_target_only={self.min_target_only}: it must be 0 or 1.")
        for name in ("shift_px", "noise", "edge_noise", "gain", "offset", "steepness", "margin"):
            if not 0 <= getattr(self, name) < 256:
                raise ConfigError(f"{name}={getattr(self, name)}: it must be at least 0 and below 256.")
        for each in (*self.amplitudes, self.partial_leak_scale):
            if not 0 <= each[0] <= each[1]:
                raise ConfigError(f"{list(each)} is not a range: write the smaller number first, neither below 0.")

    @property
    def has_disturbances(self) -> bool:
        """Whether planes are shifted, rescaled or made noisy before defects are painted."""
        return self.steepness != 1 or any((self.shift_px, self.noise, self.edge_noise, self.gain, self.offset))

    @property
    def sign_from_pixels(self) -> bool:
        """Whether a defect's sign and label depend on the pixels under it: at full swing only one sign is visible."""
        return self.mode == "board"
