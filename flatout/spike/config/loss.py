"""Section LOSS: what a wrong pixel costs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CharbonnierConfig:
    """The main loss: mean of sqrt(difference^2 + DELTA^2)."""

    DELTA: float = 1e-3
    """Differences below it cost little."""
    WEIGHT: float = 1.0
    """Factor of this term."""


@dataclass(frozen=True, kw_only=True)
class PerceptualConfig:
    """Difference of VGG-16 features; only with weights of your own."""

    WEIGHTS: str | None = None
    """File of VGG-16 weights in torchvision's names (features.N.weight), .safetensors or .pth; unset: no such term."""
    LAYERS: tuple[str, ...] = ("relu3_3",)
    """Which features."""
    WEIGHT: float = 0.1
    """Factor of this term."""
    MEAN: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """What these weights expect."""
    STD: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """What these weights expect."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What a wrong pixel costs."""

    CHARBONNIER: CharbonnierConfig = CharbonnierConfig()
    """The main loss."""
    VGG_PERCEPTUAL: PerceptualConfig = PerceptualConfig()
    """Off unless weights are given."""
