"""What a Python caller gives to look at: paths, arrays, or several of them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.data.find import is_image_name
from flatout.yolo.predict.files import frames_of, read_frame
from flatout.yolo.predict.frames import Frame, Origin, ReadFrame, given
from flatout.yolo.predict.live import LiveFrames
from flatout.yolo.predict.sources import Streams, find_sources

Given = str | Path | np.ndarray
"""A path, pattern or URL; or pixels, uint8 [H, W, 3], BGR."""


def frames_of_given(source: Given | Sequence[Given], stack: ExitStack) -> Iterable[ReadFrame]:
    """The frames of one thing or of several, in order; cameras and streams are closed with the stack."""
    if isinstance(source, str | Path):
        found = find_sources(str(source))
        if isinstance(found, Streams):
            return stack.enter_context(LiveFrames(found.addresses))
        return frames_of(found)
    if not isinstance(source, np.ndarray | Iterable):
        raise ConfigError(f"{source!r} is nothing to look at: give a path, an array, or a list of these.")
    return _of_several([source] if isinstance(source, np.ndarray) else list(source))


def _of_several(several: Sequence[Given]) -> Iterator[ReadFrame]:
    for number, each in enumerate(several):
        if isinstance(each, np.ndarray):
            origin = Origin(f"array {number}", "array", number, len(several))
            yield partial(given, Frame(_checked(each, origin.path), origin))
        elif is_image_name(str(each)):
            # Whether it is there shows when it is read, so that all that are missing are told together.
            yield partial(read_frame, Origin(str(each), "image", number, len(several)))
        else:
            found = find_sources(str(each))
            if isinstance(found, Streams):
                raise ConfigError(f"{each}: a camera or stream is looked at alone, not in a list of pictures.")
            yield from frames_of(found)


def _checked(image: np.ndarray, where: str) -> np.ndarray:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        shape = list(image.shape)
        raise ConfigError(
            f"{where}: {image.dtype} {shape} is no picture: uint8 [height, width, 3] in BGR order is, "
            "as cv2.imread gives it."
        )
    return image
