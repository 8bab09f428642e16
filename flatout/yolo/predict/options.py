"""How to detect, and what else `detect.py` was asked to do: one field per flag, under the flag's own name. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from flatout.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How pictures are looked at; the defaults live here and nowhere else."""

    img_size: int = 640
    """Longer side of the input, rounded up to the network's stride."""
    conf_thres: float = 0.25
    """Detections that are less certain are forgotten."""
    iou_thres: float = 0.45
    """Of two detections that overlap more, the more certain one is kept."""
    classes: tuple[int, ...] | None = None
    """Only these."""
    agnostic_nms: bool = False
    """Detections of different classes suppress each other, too."""
    augment: bool = False
    """At three scales, once mirrored."""
    at_once: int | None = None
    """Pictures per call of the network; None: what suits the device."""
    workers: int = 8
    """Threads that read, at most."""

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class DetectOptions(PredictOptions):
    """A detection as its command says it."""

    # Flags of YOLOv7
    weights: tuple[str, ...] = ("yolov7.pt",)
    """Several files: an ensemble."""
    source: str = "inference/images"
    device: str = ""
    view_img: bool = False
    save_txt: bool = False
    save_conf: bool = False
    nosave: bool = False
    update: bool = False
    project: str = "runs/detect"
    name: str = "exp"
    exist_ok: bool = False
    no_trace: bool = False

    # Ours
    save_crop: bool = False
    save_json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights:
            raise ConfigError("--weights: name at least one file")
        if not self.source:
            raise ConfigError("--source: name a picture, a folder, a video, the number of a camera or a URL")


def _problems(options: PredictOptions) -> Iterator[str]:
    for name in ("img_size", "at_once", "workers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} {value} must be 1 or more"
    for name in ("conf_thres", "iou_thres"):
        if not 0 <= getattr(options, name) <= 1:
            yield f"--{name.replace('_', '-')} {getattr(options, name)} is outside 0 to 1"
    if options.classes is not None and min(options.classes, default=0) < 0:
        yield f"--classes {' '.join(map(str, options.classes))}: classes are numbered from 0"
