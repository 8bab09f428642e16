"""Which boxes are worth keeping."""

from dataclasses import dataclass

from flatout.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NmsConfig:
    """The knobs of non-maximum suppression; the defaults are those of detection."""

    conf_thres: float = 0.25
    """Objectness, and then the score, must be greater. Compared in the prediction's own precision."""

    iou_thres: float = 0.45
    """A box goes if it overlaps a better one of its class by more."""

    multi_label: bool = False
    """One candidate for every class above `conf_thres` instead of the best class only (evaluation)."""

    agnostic: bool = False
    """Boxes suppress each other across classes."""

    classes: tuple[int, ...] | None = None
    """Only these classes."""

    max_det: int = 300
    """At most so many boxes of an image, the best ones."""

    max_nms: int = 30_000
    """At most so many candidates of an image, the best ones."""

    merge: bool = False
    """Replace each box by the mean, weighted by score, of the candidates that overlap it, and drop boxes that no
    second candidate supports; in images with 2 to 2999 candidates. YOLOv7 never switches this on."""

    kernel: str = "auto"
    """Who suppresses: "sweep" (plain torch, any device), "triton" (CUDA), "torchvision" (its kernel, image by image),
    or "auto": triton on CUDA where it is installed, else sweep. All give the same boxes."""

    def __post_init__(self) -> None:
        for name in ("conf_thres", "iou_thres"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"nms.{name}={getattr(self, name)} is outside 0..1.")
        for name in ("max_det", "max_nms"):
            if not 1 <= getattr(self, name) <= 1_000_000:
                raise ConfigError(f"nms.{name}={getattr(self, name)} is outside 1..1000000.")
        if self.kernel not in ("auto", "sweep", "triton", "torchvision"):
            raise ConfigError(f'nms.kernel="{self.kernel}" is unknown. Use auto, sweep, triton or torchvision.')
