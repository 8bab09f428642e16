"""Pictures to compare a file with its network on: those of a data set, of folders, or drawn ones.

    file -> BGR pixels -> letterboxed to the input -> RGB, 0..1, float32 [P, 3, H, W]

Real pictures and not noise: noise shows neither how far the values of a trained network go nor boxes that overlap.

Dimension key:  P pictures   H, W input of the network
"""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flatout.errors import DataError
from flatout.feed import DecodeError
from flatout.images import read_picture
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.find import find_images
from flatout.yolo.data.letterbox import fit, letterbox
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.find_file import find_file

logger = logging.getLogger(__name__)

DRAWN_PX = (640, 480)


class Pictures(NamedTuple):
    """Decoded pictures of any size, uint8 [h, w, 3] BGR each."""

    images: list[np.ndarray]
    origin: str
    """Such as `8 drawn pictures`."""

    def as_input(self, hw: tuple[int, int]) -> np.ndarray:
        """All of them as a network sees them, float32 [P, 3, H, W], RGB in 0..1."""
        boxed = [letterbox(image, fit((image.shape[0], image.shape[1]), hw)) for image in self.images]
        rgb_PHWC = np.stack(boxed)[..., ::-1]
        return np.ascontiguousarray(rgb_PHWC.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)


def pictures_for(options: ExportOptions) -> Pictures:
    """What the options name; DataError if there is nothing that can be read."""
    if options.data:
        data = read_data_yaml(find_file(options.data))
        return _from_files(data.entries["val"], options.pictures, options.data)
    if options.images:
        return _from_files(options.images, options.pictures, ", ".join(options.images))
    return drawn(options.pictures)


def drawn(count: int) -> Pictures:
    """Scenes of the demo set; the same on every machine."""
    from flatout.yolo.demo_data.files import DemoDataConfig, draw_number

    config = DemoDataConfig(width=DRAWN_PX[0], height=DRAWN_PX[1])
    images = [draw_number(config, "val", number).image for number in range(count)]
    return Pictures(images, f"{count} drawn {_pictures(count)}")


def _from_files(entries: Sequence[str], count: int, origin: str) -> Pictures:
    found = find_images(entries)
    if found.absent:
        raise DataError(f"{found.absent[0]}: does not exist. Name pictures, folders or lists that are there.")
    images: list[np.ndarray] = []
    for image in _readable(found.paths):
        images.append(image)
        if len(images) == count:
            break
    if not images:
        raise DataError(f"{origin}: no picture that can be read. Name others, or none: then drawn ones are used.")
    return Pictures(images, f"{len(images)} {_pictures(len(images))} of {origin}")


def _readable(paths: Sequence[str]) -> Iterator[np.ndarray]:
    for path in paths:
        try:
            yield read_picture(path)
        except (OSError, DecodeError) as error:
            logger.warning("%s: left out: %s", path, error)


def _pictures(count: int) -> str:
    return "picture" if count == 1 else "pictures"
