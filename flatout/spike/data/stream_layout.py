"""What does a spike file of this size and content hold? A decision table, pure.

A `.dat` has no header. Size alone cannot tell bit-packed from one byte per pixel: every packed file of 8 k frames is
also k whole uint8 frames. Content can: a byte above 1 is no single pixel. Where the answer is not certain there is an
error that says what would fit, never a guess.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.yaml_strict import load_yaml

logger = logging.getLogger(__name__)

Format = Literal["auto", "packed", "uint8", "bytes"]
Content = Literal["zero", "binary", "bytes"]

CONTENTS: tuple[Content, ...] = ("zero", "binary", "bytes")
"""All bytes 0; the largest is 1; some are larger. Rising: of several files the highest counts."""

DEFAULT_HW = (360, 640)
"""GoPro-Spike."""
MISREAD_HW = {2_534_400: (396, 640), 1_612_800: (252, 640), 2_995_200: (468, 640)}
"""Sizes of bit-packed 360 x 640 files, and what they look like if read as ten uint8 frames that are 640 wide."""
MISREAD_FRAMES = 10
KNOWN_HW = (
    (360, 640), (250, 400), (1000, 1000), (1000, 1024), (250, 416), (180, 320), (384, 384), (256, 256), (256, 448),
)  # fmt: skip
"""Cameras and data sets: GoPro-Spike, Vidar, its raw dump and the megapixel one, S-SDM, X4K."""

BEGIN = "Cannot reshape spike data"
MANY_HINTS = 6


@dataclass(frozen=True, kw_only=True)
class StreamWishes:
    """What the config says about spike files; None: find out."""

    format: Format = "auto"
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    flipud: bool | None = None
    """Are stored rows upside down? None: yes if packed, which is what the camera writes."""

    def __post_init__(self) -> None:
        if (self.height is None) != (self.width is None):
            raise ConfigError(
                f"SPIKE_H={self.height} and SPIKE_W={self.width}: set both, or neither to use config.yaml beside the "
                "spikes or 360 x 640."
            )
        for name, value in (("SPIKE_H", self.height), ("SPIKE_W", self.width), ("SPIKE_T", self.frames)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more.")


@dataclass(frozen=True)
class Layout:
    """How the bytes of a stream are to be read."""

    format: Literal["packed", "uint8", "bytes"]
    frames: int
    height: int
    width: int
    flipud: bool
    warning: str = ""
    """`legacy_geometry`: the config repeats a known misreading; `all_zero`: no file told what it is."""

    @property
    def frame_bytes(self) -> int:
        pixels = self.height * self.width
        return pixels // 8 if self.format == "packed" else pixels

    @property
    def nbytes(self) -> int:
        return self.frames * self.frame_bytes


class StreamError(DataError):
    """A spike file that cannot be read as what it should be. `kind`: empty, reshape or not_binary."""

    def __init__(self, text: str, *, kind: str, hints: Sequence[tuple[int, int, int]] = ()) -> None:
        super().__init__(f"{BEGIN}: {text}")
        self.kind = kind
        self.hints = list(hints)
        """(height, width, frames) of known geometries that would fit, bit-packed."""


def decide(
    size: int, content: Content, wishes: StreamWishes, sidecar_hw: tuple[int, int] | None = None, *, where: str = "file"
) -> Layout:
    """The layout of a file of `size` bytes; StreamError, naming `where`, if nothing fits."""
    if size == 0:
        raise StreamError(f"{where} is empty (0 bytes). Copy or make it again.", kind="empty")
    explicit_hw = (wishes.height, wishes.width) if wishes.height and wishes.width else sidecar_hw
    height, width = explicit_hw or DEFAULT_HW
    packed = _packed(size, height, width, wishes)
    plain = _plain(size, height, width, wishes, implicit=explicit_hw is None)
    if wishes.format == "uint8" and content == "bytes":
        raise StreamError(_not_binary(where, size, packed), kind="not_binary")
    for layout in _candidates(size, content, wishes, explicit_hw, packed, plain):
        if layout is not None:
            return layout
    raise StreamError(
        _unfit(where, size, wishes, height, width), kind="reshape", hints=fitting_geometries(size)
    )  # fmt: skip


def highest(contents: Sequence[Content]) -> Content:
    """The content class of a set of files."""
    return max(contents, key=CONTENTS.index, default="zero")


def fitting_geometries(size: int) -> list[tuple[int, int, int]]:
    """(height, width, frames) of the known geometries whose packed frames divide the size."""
    return [
        (height, width, size * 8 // (height * width)) for height, width in KNOWN_HW if size % (height * width // 8) == 0
    ]


def _candidates(
    size: int,
    content: Content,
    wishes: StreamWishes,
    explicit_hw: tuple[int, int] | None,
    packed: Layout | None,
    plain: Layout | None,
) -> Sequence[Layout | None]:
    """What may be meant, most likely first."""
    if wishes.format == "packed":
        return (packed,)
    if wishes.format in ("uint8", "bytes"):
        return (plain,)
    if content == "bytes":
        legacy = explicit_hw == MISREAD_HW.get(size) and explicit_hw and wishes.frames in (None, MISREAD_FRAMES)
        misread = _layout("packed", size * 8 // (360 * 640), DEFAULT_HW, wishes, "legacy_geometry") if legacy else None
        return (misread, packed)
    if content == "binary":
        return (plain, packed)
    return tuple(
        layout and Layout(layout.format, layout.frames, layout.height, layout.width, layout.flipud, "all_zero")
        for layout in (packed, plain)
    )


def _packed(size: int, height: int, width: int, wishes: StreamWishes) -> Layout | None:
    frame_bytes, rest = divmod(height * width, 8)
    if rest or size % frame_bytes or wishes.frames not in (None, size // frame_bytes):
        return None
    return _layout("packed", size // frame_bytes, (height, width), wishes)


def _plain(size: int, height: int, width: int, wishes: StreamWishes, *, implicit: bool) -> Layout | None:
    """One byte per pixel; `bytes` if the values are to be kept as they are."""
    kind: Literal["uint8", "bytes"] = "bytes" if wishes.format == "bytes" else "uint8"
    if implicit and size in MISREAD_HW and wishes.frames in (None, MISREAD_FRAMES):
        return _layout(kind, MISREAD_FRAMES, MISREAD_HW[size], wishes)
    if size % (height * width) or wishes.frames not in (None, size // (height * width)):
        return None
    return _layout(kind, size // (height * width), (height, width), wishes)


def _layout(
    kind: Literal["packed", "uint8", "bytes"],
    frames: int,
    shape_hw: tuple[int, int],
    wishes: StreamWishes,
    warning: str = "",
) -> Layout:
    flipud = wishes.flipud if wishes.flipud is not None else kind == "packed"
    return Layout(kind, frames, *shape_hw, flipud, warning)


def _unfit(where: str, size: int, wishes: StreamWishes, height: int, width: int) -> str:
    frame_bytes = height * width // 8 if wishes.format in ("auto", "packed") else height * width
    rest = f"{frame_bytes} bytes per frame leave a remainder of {size % frame_bytes}" if frame_bytes else "no frame"
    wanted = f", SPIKE_T={wishes.frames}" if wishes.frames else ""
    odd = " (a packed frame needs height * width to be a multiple of 8)" if height * width % 8 else ""
    return (
        f"{where} has {size} bytes; tried {wishes.format} {height} x {width}{wanted}: {rest}{odd}. "
        f"{_hints_text(size)} Set DATA.SPIKE_H, SPIKE_W and SPIKE_FORMAT (and leave SPIKE_T out unless you are sure)."
    )


def _hints_text(size: int) -> str:
    hints = fitting_geometries(size)
    if not hints:
        return "No known geometry fits bit-packed: the file may be cut off."
    listed = ", ".join(f"{height} x {width} ({frames} frames)" for height, width, frames in hints[:MANY_HINTS])
    return f"Bit-packed these known geometries would fit: {listed}."


def _not_binary(where: str, size: int, packed: Layout | None) -> str:
    reading = f"{packed.frames} frames of {packed.height} x {packed.width}" if packed else "no whole frames"
    return (
        f"{where} ({size} bytes) holds bytes above 1, so it is not one byte per pixel as SPIKE_FORMAT: uint8 says. It "
        f"looks bit-packed: {reading}. Set DATA.SPIKE_FORMAT: packed, or auto."
    )


# Is a stream the right way up, and of the right size? Its light must look like the blurry frame.
#
# A pixel fires in proportion to its brightness, so the sum of all spikes is a picture of the exposure. Turned or
# flipped, or cut into rows of a wrong length, it is not.
#
# Dimension key:  H W spike picture

LEAST_R = 0.5
LEAST_LEAD = 0.05
TURNS = ("identity", "flipud", "fliplr", "rot180")


class Orientation(NamedTuple):
    """Correlations of the spike rate with the blurry frame, as decoded and turned."""

    r: dict[str, float]
    mean_rate: float
    mean_blur: float

    @property
    def gain(self) -> float:
        """Brightness per spike: the camera's threshold in units of full scale."""
        return self.mean_blur / self.mean_rate if self.mean_rate else float("inf")

    @property
    def problem(self) -> str:
        """What is wrong, in a sentence; empty if the stream fits the frame."""
        others = {turn: value for turn, value in self.r.items() if turn != "identity"}
        best = max(others, key=lambda turn: others[turn])
        if not self.r["identity"] >= LEAST_R:
            better = f" {best} fits better ({others[best]:.2f})." if others[best] >= LEAST_R else ""
            return (
                f"spikes do not look like their frame (correlation {self.r['identity']:.2f}, expected 0.9 or more): "
                f"wrong SPIKE_H, SPIKE_W, SPIKE_FORMAT or SPIKE_FLIPUD, or frames and streams do not belong "
                f"together.{better}"
            )
        if self.r["identity"] < others[best] + LEAST_LEAD:
            return (
                f"turned by {best} the spikes fit their frame as well ({others[best]:.2f}) as they are "
                f"({self.r['identity']:.2f}): look at SPIKE_FLIPUD, or choose a frame with more structure."
            )
        return ""


def compare(rate_HW: np.ndarray, blur_HW: np.ndarray) -> Orientation:
    """`rate_HW`: mean of the spikes; `blur_HW`: the grey frame in 0..1 at the same size."""
    turned = (rate_HW, rate_HW[::-1], rate_HW[:, ::-1], rate_HW[::-1, ::-1])
    r = {turn: _pearson(picture, blur_HW) for turn, picture in zip(TURNS, turned, strict=True)}
    return Orientation(r, float(rate_HW.mean()), float(blur_HW.mean()))


def grey_at(frame_HW3: np.ndarray, shape_hw: tuple[int, int]) -> np.ndarray:
    """A frame, uint8 RGB, as grey in 0..1, shrunk by area."""
    import cv2

    grey = cv2.cvtColor(np.ascontiguousarray(frame_HW3), cv2.COLOR_RGB2GRAY).astype(np.float64) / 255
    return np.asarray(cv2.resize(grey, (shape_hw[1], shape_hw[0]), interpolation=cv2.INTER_AREA))


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    x, y = (np.asarray(each, np.float64).ravel() - np.mean(each) for each in (a, b))
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else 0.0


# config.yaml beside spike files, as SpikeCV writes it: `spike_h` and `spike_w`, in their folder or any above it.

NAME = "config.yaml"
MOST_LEVELS = 8


def find_geometry(folder: Path) -> tuple[int, int] | None:
    """(height, width) from the nearest config.yaml that says both; links are followed, so the raw tree's counts."""
    start = folder.resolve()
    for above in (start, *start.parents)[:MOST_LEVELS]:
        if (above / NAME).is_file() and (found := _geometry_in(above / NAME)):
            return found
    return None


def _geometry_in(path: Path) -> tuple[int, int] | None:
    try:
        values = load_yaml(path)
    except ConfigError as error:
        logger.warning("%s It is left aside.", error)
        return None
    match values:
        case {"spike_h": int(height), "spike_w": int(width)} if height > 0 and width > 0:
            return height, width
    return None
