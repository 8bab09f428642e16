"""Images, sheets and videos from spike streams: what `flatout spike view` and `reconstruct` write.

    stream --range--> moments --TFP, TFI, raw or voxel around each--> grey images --> sheet, video or files

Only the spike frames around a moment are unpacked, so that streams of any length can be shown.

Dimension key:  H W spike frame
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError, ResourceError
from flatout.progress import progress
from flatout.spike.data.representations import tfi, tfp, window_around
from flatout.spike.data.stream_files import STREAM_EXTS, SpikeStream, open_stream
from flatout.spike.data.stream_layout import Format
from flatout.spike.data.voxels import bin_edges
from flatout.spike.visuals import VIDEO_EXTS, sheet, write_image, write_video

Representation = Literal["tfp", "tfi", "raw", "voxel"]
IMAGE_EXTS = (".png", ".jpg", ".jpeg", ".bmp")
SHEET_IMAGES = 12
"""Images of a sheet, unless `every` says otherwise."""
VIDEO_IMAGES = 250
"""Most images of a video, unless `every` says otherwise: ten seconds at 25 per second."""
BLOCK_FRAMES = 64
"""Spike frames that are unpacked at a time to average a range."""
GAIN_BLOCKS = 8
"""Blocks, spread over the range, from which the brightness is chosen."""
WHITE_PERCENTILE = 99.5


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """What is shown of a stream, and how."""

    show: Representation = "tfp"
    begin: int = 0
    """First spike frame of the range."""
    end: int | None = None
    """Spike frame after the last one; None: the end of the stream."""
    window: int = 32
    """Spike frames behind each image of TFP and TFI."""
    every: int | None = None
    """Spike frames between two images; None: as many as make a sheet or a short video."""
    bins: int = 8
    """Parts into which `voxel` divides the range."""
    gain: float | None = None
    """Brightness of a pixel that fires in every spike frame, 1 for white; None: the brightest pixels become white."""
    fps: float = 25.0
    """Images per second of a video."""

    def __post_init__(self) -> None:
        for name in ("window", "every", "bins", "gain", "fps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name} {value}: it must be above 0.")

    def range_of(self, num_frames: int) -> range:
        """The spike frames of the range; ConfigError if there are none."""
        end = num_frames if self.end is None else min(self.end, num_frames)
        if not 0 <= self.begin < end:
            raise ConfigError(
                f"--from {self.begin} --to {self.end if self.end is not None else num_frames}: not a range of spike "
                f"frames, of which the stream has {num_frames}. Use 0 <= from < to <= {num_frames}."
            )
        return range(self.begin, end)


class Moment(NamedTuple):
    """A spike frame, and the image around it."""

    frame: int
    image_HW: np.ndarray
    """uint8."""


@dataclass(frozen=True)
class Written:
    """What a command has written."""

    path: Path
    """The sheet or video, or the folder of images."""
    images: int
    gain: float


def view_stream(stream: SpikeStream, output: Path, config: ViewConfig) -> Written:
    """Write a sheet or a video of a stream, as the ending of `output` says."""
    ending = output.suffix.lower()
    if ending not in VIDEO_EXTS and ending not in IMAGE_EXTS:
        raise ConfigError(
            f"--out {output}: its ending decides what is written, {', '.join(VIDEO_EXTS)} a video, "
            f"{', '.join(IMAGE_EXTS)} a sheet."
        )
    frames = moments_of(len(stream), config, most=VIDEO_IMAGES if ending in VIDEO_EXTS else SHEET_IMAGES)
    gain = _gain(stream, config)
    images = images_at(stream, frames, gain, config)
    output.parent.mkdir(parents=True, exist_ok=True)
    if ending in VIDEO_EXTS:
        if not write_video(output, (_rgb(each.image_HW) for each in images), config.fps):
            raise ResourceError(f"{output} could not be written: this OpenCV lacks the codec. Write images instead.")
        return Written(output, len(frames), gain)
    shown = list(images)
    labels = [f"{config.show} {each.frame}" for each in shown]
    write_image(output, sheet([_rgb(each.image_HW) for each in shown], labels))
    return Written(output, len(shown), gain)


def reconstruct(
    source: Path,
    output: Path,
    config: ViewConfig,
    *,
    video: str = "",
    geometry: str = "",
    stored_as: Format = "auto",
    flipud: bool | None = None,
) -> Written:
    """Write images of a stream, or of all streams of a folder; `video` is the ending of a video to write instead.

    Without `config.every`, one image per stream, of its middle: OUTPUT/NAME.png. With it, OUTPUT/NAME/FRAME.png. The
    first stream decides the gain of all, so that a sequence does not flicker.
    """
    streams = streams_in(source)
    count, gain = 0, config.gain
    with progress("reconstruct", len(streams)) as advance:
        for number, path in enumerate(streams, 1):
            stream = open_stream(path, geometry=geometry, stored_as=stored_as, flipud=flipud)
            gain = gain or _gain(stream, config)
            if video:
                count += view_stream(stream, output / f"{path.stem}{video}", replace(config, gain=gain)).images
            else:
                frames = moments_of(len(stream), config, most=1)
                for each in images_at(stream, frames, gain, config):
                    name = f"{path.stem}/{each.frame:06d}.png" if config.every else f"{path.stem}.png"
                    write_image(output / name, _rgb(each.image_HW))
                count += len(frames)
            advance(number, count * stream.layout.height * stream.layout.width)
    return Written(output, count, gain or 1.0)


def streams_in(source: Path) -> list[Path]:
    """The streams of a folder by name, or the one that is given; DataError if there are none."""
    if not source.is_dir():
        return [source]
    found = sorted(path for path in source.iterdir() if path.suffix.lower() in STREAM_EXTS)
    if not found:
        raise DataError(f"{source} has no spike streams ({', '.join(STREAM_EXTS)}). Give the folder that holds them.")
    return found


def moments_of(num_frames: int, config: ViewConfig, *, most: int) -> list[int]:
    """The spike frames at which images are made: every `every`, or at most `most` spread over the range.

    Evenly spread ones are the middles of equal parts; for voxels they are the first spike frames of the bins.
    """
    kept = config.range_of(num_frames)
    if config.show == "voxel":
        edges = bin_edges(len(kept), config.bins)
        return [kept[int(first)] for first, end in pairwise(edges) if first < end]
    if config.every:
        return list(kept[:: config.every])
    count = min(most, len(kept))
    return [kept[(2 * part + 1) * len(kept) // (2 * count)] for part in range(count)]


def images_at(stream: SpikeStream, frames: list[int], gain: float, config: ViewConfig) -> Iterator[Moment]:
    """The image at each of these spike frames."""
    kept = config.range_of(len(stream))
    if config.show == "voxel":
        # A bin ends where the next one that is not empty begins; one at a time, because a range may be long.
        for frame, end in pairwise((*frames, kept.stop)):
            yield Moment(frame, as_grey(_mean_rate(stream, frame, end), gain))
        return
    for frame in frames:
        if config.show == "raw":
            yield Moment(frame, as_grey(stream[frame], 1.0))
            continue
        around = window_around(len(stream), frame, config.window)
        method = tfp if config.show == "tfp" else tfi
        yield Moment(frame, as_grey(method(stream[around], frame - around.start, config.window), gain))


def as_grey(rate_HW: np.ndarray, gain: float) -> np.ndarray:
    """Spikes per spike frame as a uint8 image: rate * gain is brightness, 1 is white."""
    return np.asarray(np.clip(rate_HW * np.float32(255 * gain) + np.float32(0.5), 0, 255), np.uint8)


def _mean_rate(stream: SpikeStream, begin: int, end: int) -> np.ndarray:
    """Mean of a range of spike frames, float32 [H, W], unpacked block by block."""
    blocks = (stream[first : min(first + BLOCK_FRAMES, end)] for first in range(begin, end, BLOCK_FRAMES))
    total_HW = sum(np.add.reduce(block, axis=0, dtype=np.float32) for block in blocks)
    return np.asarray(total_HW, np.float32) / np.float32(end - begin)


def _gain(stream: SpikeStream, config: ViewConfig) -> float:
    """The configured gain, or one for which the brightest pixels of the range are just white."""
    if config.gain is not None:
        return config.gain
    if config.show == "raw":
        return 1.0
    kept = config.range_of(len(stream))
    block = min(BLOCK_FRAMES, len(kept))
    starts = np.unique(np.linspace(0, len(kept) - block, GAIN_BLOCKS).astype(int)).tolist()
    rates = [_mean_rate(stream, kept[start], kept[start] + block) for start in starts]
    white = float(np.percentile(np.mean(rates, axis=0), WHITE_PERCENTILE))
    return 1 / white if white > 0 else 1.0


def _rgb(image_HW: np.ndarray) -> np.ndarray:
    return np.repeat(image_HW[..., None], 3, axis=2)
