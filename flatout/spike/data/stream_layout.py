"""Decides the layout of a spike file from its size and content, by a table.

A `.dat` file has no header. Its size alone cannot distinguish bit-packed data from one byte per pixel: a packed file of
8 k frames has the size of k uint8 frames. Its content can: a byte above 1 is not a single pixel. If the answer is not
certain, an error lists what would fit; nothing is guessed.

Dimension key:  H W spike frame
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError

Format = Literal["auto", "packed", "uint8", "bytes"]
Content = Literal["zero", "binary", "bytes"]

CONTENTS: tuple[Content, ...] = ("zero", "binary", "bytes")
"""All bytes are 0; the largest is 1; some are larger. In rising order: of several files, the highest one is used."""

DEFAULT_HW = (360, 640)
"""Size of spike frames of GoPro-Spike."""
MISREAD_HW = {2_534_400: (396, 640), 1_612_800: (252, 640), 2_995_200: (468, 640)}
"""Sizes of bit-packed 360 x 640 files -> frame size if they are misread as ten uint8 frames that are 640 wide."""
MISREAD_FRAMES = 10
KNOWN_HW = (
    (360, 640), (250, 400), (1000, 1000), (1000, 1024), (250, 416), (180, 320), (384, 384), (256, 256), (256, 448),
)  # fmt: skip
"""Frame sizes of known cameras and data sets: GoPro-Spike, Vidar, its raw dump and the megapixel one, S-SDM, X4K."""

BEGIN = "Cannot reshape spike data"
"""Beginning of the messages of StreamError."""
MANY_HINTS = 6
"""Maximum number of geometries that a message lists."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """The configured properties of spike files; None: to be decided."""

    format: Format = "auto"
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    flipud: bool | None = None
    """Whether rows are stored bottom-up. None: true for packed files, as the camera writes them."""

    def __post_init__(self) -> None:
        if (self.height is None) != (self.width is None):
            raise ConfigError(
                f"SPIKE_H={self.height} and SPIKE_W={self.width}: set both, or neither to use config.yaml beside the "
                "spikes, or 360 x 640."
            )
        for name, value in (("SPIKE_H", self.height), ("SPIKE_W", self.width), ("SPIKE_T", self.frames)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more.")


@dataclass(frozen=True)
class Layout:
    """How the bytes of a stream are read. Its text is part of fingerprints: do not rename it or its fields."""

    format: Literal["packed", "uint8", "bytes"]
    frames: int
    height: int
    width: int
    flipud: bool
    warning: str = ""
    """`legacy_geometry`: the config repeats a known misreading; `all_zero`: no file has content to decide by."""

    @property
    def frame_bytes(self) -> int:
        pixels = self.height * self.width
        return pixels // 8 if self.format == "packed" else pixels

    @property
    def nbytes(self) -> int:
        return self.frames * self.frame_bytes


class StreamError(DataError):
    """A spike file that does not fit the expected layout. `kind`: empty, reshape or not_binary."""

    def __init__(
        self, text: str, *, kind: str = "reshape", hints: Sequence[tuple[int, int, int]] = (), remedy: str = ""
    ) -> None:
        """`remedy`: the keys of a config to set, if that helps."""
        super().__init__(f"{BEGIN}: {text} {remedy}".rstrip())
        self.text, self.kind, self.remedy = text, kind, remedy
        self.hints = list(hints)
        """(height, width, frames) of known geometries that would fit as bit-packed data."""

    def advising(self, remedy: str) -> "StreamError":
        """The same error for commands that have flags instead of a config, with another remedy if there is one."""
        return StreamError(self.text, kind=self.kind, hints=self.hints, remedy=self.remedy and remedy)


def decide_layout(
    size: int,
    content: Content,
    settings: StreamSettings,
    sidecar_hw: tuple[int, int] | None = None,
    *,
    where: str = "file",
) -> Layout:
    """The layout of a file of `size` bytes; StreamError, naming `where`, if nothing fits."""
    if size == 0:
        raise StreamError(f"{where} is empty (0 bytes). Copy or create it again.", kind="empty")
    explicit_hw = (settings.height, settings.width) if settings.height and settings.width else sidecar_hw
    shape_hw = explicit_hw or DEFAULT_HW
    if settings.format == "uint8" and content == "bytes":
        packed = _fitting("packed", size, shape_hw, settings)
        raise StreamError(_not_binary(where, size, packed), kind="not_binary")
    if layout := _chosen(size, content, settings, explicit_hw):
        return layout
    raise StreamError(
        _unfit(where, size, settings, *shape_hw),
        hints=fitting_geometries(size),
        remedy="Set DATA.SPIKE_H, SPIKE_W and SPIKE_FORMAT (and omit SPIKE_T unless you are sure).",
    )


def highest_content(contents: Sequence[Content]) -> Content:
    """The content class of a set of files."""
    return max(contents, key=CONTENTS.index, default="zero")


def fitting_geometries(size: int) -> list[tuple[int, int, int]]:
    """(height, width, frames) of the known geometries whose packed frames divide the size."""
    return [
        (height, width, size * 8 // (height * width)) for height, width in KNOWN_HW if size % (height * width // 8) == 0
    ]


def _chosen(
    size: int, content: Content, settings: StreamSettings, explicit_hw: tuple[int, int] | None
) -> Layout | None:
    """The most likely of the layouts that fit; None if none does."""
    shape_hw, misread_hw = explicit_hw or DEFAULT_HW, MISREAD_HW.get(size)
    packed = _fitting("packed", size, shape_hw, settings)
    kind: Literal["uint8", "bytes"] = "bytes" if settings.format == "bytes" else "uint8"
    plain = _fitting(kind, size, shape_hw, settings)
    if misread_hw and not explicit_hw:
        plain = _fitting(kind, size, misread_hw, settings) or plain
    match settings.format, content:
        case "packed", _:
            return packed
        case "uint8" | "bytes", _:
            return plain
        case _, "bytes":
            if misread_hw and explicit_hw == misread_hw and settings.frames in (None, MISREAD_FRAMES):
                return _fitting("packed", size, DEFAULT_HW, replace(settings, frames=None), "legacy_geometry")
            return packed
        case _, "binary":
            return plain or packed
    found = packed or plain
    return found and replace(found, warning="all_zero")


def _fitting(
    kind: Literal["packed", "uint8", "bytes"],
    size: int,
    shape_hw: tuple[int, int],
    settings: StreamSettings,
    warning: str = "",
) -> Layout | None:
    """The layout with frames of this kind and shape; None if the size does not fit."""
    frame_bytes, rest = divmod(math.prod(shape_hw), 8 if kind == "packed" else 1)
    if rest or size % frame_bytes or settings.frames not in (None, size // frame_bytes):
        return None
    flipud = settings.flipud if settings.flipud is not None else kind == "packed"
    return Layout(kind, size // frame_bytes, *shape_hw, flipud, warning)


def _unfit(where: str, size: int, settings: StreamSettings, height: int, width: int) -> str:
    frame_bytes = height * width // 8 if settings.format in ("auto", "packed") else height * width
    rest = f"{frame_bytes} bytes per frame leave a remainder of {size % frame_bytes}" if frame_bytes else "no frame"
    expected = f", SPIKE_T={settings.frames}" if settings.frames else ""
    odd = " (a packed frame needs height * width to be a multiple of 8)" if height * width % 8 else ""
    return (
        f"{where} has {size} bytes; tried {settings.format} {height} x {width} (height x width){expected}: "
        f"{rest}{odd}. {_hints_text(size)}"
    )


def _hints_text(size: int) -> str:
    hints = fitting_geometries(size)
    if not hints:
        return "As bit-packed data, no known geometry fits: the file may be truncated."
    listed = ", ".join(f"{height} x {width} ({frames} frames)" for height, width, frames in hints[:MANY_HINTS])
    return f"As bit-packed data, these known geometries would fit: {listed}."


def _not_binary(where: str, size: int, packed: Layout | None) -> str:
    reading = f"{packed.frames} frames of {packed.height} x {packed.width}" if packed else "no whole frames"
    return (
        f"{where} ({size} bytes) holds bytes above 1, so it does not have one byte per pixel, as SPIKE_FORMAT: uint8 "
        f"says. It looks bit-packed: {reading}. Set DATA.SPIKE_FORMAT: packed, or auto."
    )


# Comparison of a stream with its blurry frame
#
# A pixel fires in proportion to its brightness, so the mean of all spikes looks like the blurry frame; if it is rotated
# or flipped, or divided into rows of a wrong length, it does not.

MIN_CORRELATION = 0.5
MIN_LEAD = 0.05
"""Margin by which the stored orientation must correlate better than all others."""


class Orientation(NamedTuple):
    """Correlations of the spike rate with the blurry frame, by orientation."""

    correlation: dict[str, float]
    mean_rate: float
    mean_blur: float
    flipud: bool | None = None
    """Whether the rows of the stream were read bottom-up; None if that is not known."""

    @property
    def gain(self) -> float:
        """Brightness per spike: the threshold of the camera in units of full scale."""
        return self.mean_blur / self.mean_rate if self.mean_rate else float("inf")

    @property
    def problem(self) -> str:
        """Description of the mismatch, in terms of the keys of a config; empty if the stream matches the frame."""
        value = " to the opposite value" if self.flipud is None else ": false" if self.flipud else ": true"
        return self._problem("SPIKE_H, SPIKE_W", f"Set DATA.SPIKE_FLIPUD{value}.")

    @property
    def problem_of_prepare(self) -> str:
        """As `problem`, in terms of the flags of `flatout spike prepare`."""
        flag, value = ("no", "false") if self.flipud else ("yes", "true")
        return self._problem(
            "--geometry or --spike_hw (in a training: SPIKE_H, SPIKE_W)",
            f"Prepare again with --flip {flag}, and train with SPIKE_FLIPUD: {value}.",
        )

    def _problem(self, size_setting: str, flip_remedy: str) -> str:
        stored = self.correlation["identity"]
        others = {name: value for name, value in self.correlation.items() if name != "identity"}
        best = max(others, key=lambda name: others[name])
        if others[best] >= max(MIN_CORRELATION, stored + MIN_LEAD):
            return (
                f"spikes are {TURNED[best]}: as they are read now they do not match their frame (correlation "
                f"{stored:.2f}), {UNTURNED[best]} they do ({others[best]:.2f}). "
                + (flip_remedy if best == "flipud" else "Turn the frames or the streams: no setting does that.")
            )
        if not stored >= MIN_CORRELATION:
            return (
                f"spikes do not look like their frame (correlation {stored:.2f}, expected 0.9 or more): "
                f"{size_setting} or SPIKE_FORMAT is wrong, or frames and streams do not belong together."
            )
        if stored < others[best] + MIN_LEAD:
            return (
                f"spikes match their frame as well {UNTURNED[best]} ({others[best]:.2f}) as they do now "
                f"({stored:.2f}), so this frame cannot tell. Check SPIKE_FLIPUD with a frame of more structure."
            )
        return ""


TURNED = {"flipud": "upside down", "fliplr": "mirrored from left to right", "rot180": "turned by 180 degrees"}
UNTURNED = {"flipud": "flipped vertically", "fliplr": "mirrored back", "rot180": "turned back"}


def compare_with_frame(rate_HW: np.ndarray, blur_HW: np.ndarray, *, flipud: bool | None = None) -> Orientation:
    """Correlate spikes with their frame. `rate_HW`: mean of the spikes; `blur_HW`: grey frame of that size in 0..1.

    `flipud`: whether the rows of the stream were read bottom-up, for the advice.
    """
    oriented = {
        "identity": rate_HW, "flipud": rate_HW[::-1], "fliplr": rate_HW[:, ::-1], "rot180": rate_HW[::-1, ::-1],
    }  # fmt: skip
    correlation = {name: _pearson(rate, blur_HW) for name, rate in oriented.items()}
    return Orientation(correlation, float(rate_HW.mean()), float(blur_HW.mean()), flipud)


def grey_at(frame_HW3: np.ndarray, shape_hw: tuple[int, int]) -> np.ndarray:
    """A uint8 RGB frame as grey in 0..1, resized by area averaging."""
    import cv2

    grey = cv2.cvtColor(np.ascontiguousarray(frame_HW3), cv2.COLOR_RGB2GRAY).astype(np.float64) / 255
    return np.asarray(cv2.resize(grey, (shape_hw[1], shape_hw[0]), interpolation=cv2.INTER_AREA))


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    x, y = (np.asarray(each, np.float64).ravel() - np.mean(each) for each in (a, b))
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else 0.0
