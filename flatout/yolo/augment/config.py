"""How much pictures are changed in training: the augmentation keys of a YOLOv7 hyper-parameter file."""

from dataclasses import dataclass, fields

from flatout.errors import ConfigError

PROBABILITIES = ("flipud", "fliplr", "mosaic", "mixup", "copy_paste", "paste_in")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Probabilities and ranges; the defaults are those of YOLOv7's hyp.scratch.p5.yaml."""

    hsv_h: float = 0.015
    """Hue is multiplied by 1 +- this."""
    hsv_s: float = 0.7
    hsv_v: float = 0.4
    degrees: float = 0.0
    """Turned by +- this."""
    translate: float = 0.2
    """Moved by +- this share of the output's side."""
    scale: float = 0.9
    """Scaled by 1 - this to 1.1 + this."""
    shear: float = 0.0
    """Degrees, +-, on each axis."""
    perspective: float = 0.0
    """+-, per pixel; 0.001 is much."""
    flipud: float = 0.0
    """Probabilities from here on."""
    fliplr: float = 0.5
    mosaic: float = 1.0
    """Of 4 or 9 pictures in one, 4 in 80 % of the cases."""
    mixup: float = 0.15
    """Of a second mosaic laid over the first."""
    copy_paste: float = 0.0
    """Share of a mosaic's polygons that are pasted again, mirrored."""
    paste_in: float = 0.15
    """Of objects cut from other pictures and pasted in; needs polygons."""

    aspect: float = 0.0
    """Width over height is multiplied by 1 / (1 + this) to 1 + this, with the area kept."""
    gamma: float = 0.0
    """Brightness is bent by an exponent from exp(-this) to exp(this)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, most = getattr(self, field.name), 1 if field.name in PROBABILITIES else float("inf")
            if not 0 <= value <= most:
                rule = "a probability from 0 to 1" if field.name in PROBABILITIES else "0 or more"
                raise ConfigError(f"{field.name}={value} must be {rule}.")
        if self.scale >= 1:
            raise ConfigError(f"scale={self.scale} must be below 1: pictures are scaled by 1 - scale at the least.")
