"""Options of a prediction and of `detect.py`: one field per flag, under the flag's own name. Does not import torch."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flatout.errors import ConfigError
from flatout.runs import too_small

MIN_TILE = 32
"""Smallest side of a tile: the coarsest stride of most networks."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of a prediction; the only place that defines their defaults."""

    img_size: int = 640
    """Longer side of the input, rounded up to the network's stride."""
    conf_thres: float = 0.25
    """Detections with lower scores are dropped."""
    iou_thres: float = 0.45
    """NMS threshold: if two detections overlap more, only the one with the higher score is kept."""
    classes: tuple[int | str, ...] | None = None
    """Keep only these classes, by number or name; None: all."""
    agnostic_nms: bool = False
    """Let detections of different classes suppress each other."""
    augment: bool = False
    """Predict at three scales, one of them mirrored."""
    at_once: int | None = None
    """Images per call of the network; None: depends on the device."""
    workers: int = 8
    """Threads that read, at most."""
    track: bool = False
    """Give the objects of a video, or of images in a row, ids that stay the same from frame to frame."""
    track_buffer: int = 30
    """With track: frames for which an object that is not found keeps its id."""
    allow_urls: bool = False
    """Download images whose address is given; streams need no permission."""
    tiles: int | None = None
    """Cut images into tiles of this side, detect in each, and merge; None: images are shrunk to the input."""
    tile_overlap: float = 0.2
    """Least part of its side that a tile shares with each neighbour."""
    tile_full_view: bool = False
    """With tiles: detect in the whole image, too, for objects longer than the overlap."""

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class DetectOptions(PredictOptions):
    """Options of `detect.py`."""

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
            raise ConfigError("--source: name an image, a folder, a video, the number of a camera or a URL")


def _problems(options: PredictOptions) -> Iterator[str]:
    yield from too_small(options, 1, "img_size", "at_once", "workers", "track_buffer")
    for name in ("conf_thres", "iou_thres"):
        if not 0 <= getattr(options, name) <= 1:
            yield f"--{name.replace('_', '-')} {getattr(options, name)} is outside 0 to 1"
    yield from tile_problems(options.tiles, options.tile_overlap, full_view=options.tile_full_view)
    numbers = [each for each in options.classes or () if isinstance(each, int)]
    if min(numbers, default=0) < 0:
        yield f"--classes {' '.join(map(str, numbers))}: classes are numbered from 0"


def tile_problems(tiles: int | None, overlap: float, *, full_view: bool = False) -> Iterator[str]:
    """Mistakes in the options about tiles, which `detect`, `test` and `train` share; `tiles`: their side in px."""
    if tiles is not None and tiles < MIN_TILE:
        yield f"--tiles {tiles}: tiles have sides of {MIN_TILE} px or more"
    if not 0 <= overlap < 1:
        yield f"--tile-overlap {overlap} must be 0 or more and below 1"
    if full_view and tiles is None:
        yield "--tile-full-view is a pass in addition to tiles: use it with --tiles"


def class_numbers(classes: Sequence[int | str], names: Sequence[str]) -> tuple[int, ...]:
    """The numbers of classes that are given by number or name; ConfigError for one that the network does not have."""
    return tuple(_class_number(each, names) for each in classes)


def _class_number(given: int | str, names: Sequence[str]) -> int:
    if isinstance(given, str) and given in names:
        return names.index(given)
    if isinstance(given, int) or given.isdecimal():
        if int(given) < len(names):
            return int(given)
        raise ConfigError(f"--classes {given}: no such class, the network has classes 0 to {len(names) - 1}.")
    by_lower = {name.lower(): number for number, name in enumerate(names)}
    if given.lower() in by_lower:
        return by_lower[given.lower()]
    close = difflib.get_close_matches(given.lower(), by_lower, n=1)
    known = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
    advice = f"did you mean {names[by_lower[close[0]]]!r}?" if close else f"the network has {known}."
    raise ConfigError(f"--classes {given}: no such class; {advice}")


MAX_NAMED = 12
"""Classes that an error lists."""
