"""Sources given in Python: paths, arrays, PIL images, tensors, bytes, files, a camera, and lists of them, as frames.

Dimension key:  B images   C H W channels, rows and columns
"""

import io
import os
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Set, Sized
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from flatout.errors import ConfigError
from flatout.feed import DecodeError
from flatout.yolo.data.find import is_image_name
from flatout.yolo.predict.files import (
    Frame,
    Origin,
    ReadFrame,
    Streams,
    allowed,
    already_read,
    decode_frame,
    find_sources,
    frames_of,
    is_image_url,
    is_pattern,
    read_frame,
)
from flatout.yolo.predict.streams import LiveFrames

if TYPE_CHECKING:
    import PIL.Image

Content: TypeAlias = bytes | bytearray | memoryview | IO[bytes]
Given: TypeAlias = "str | Path | int | Content | np.ndarray | torch.Tensor | PIL.Image.Image"
"""A source of frames: a path, pattern or address; the number of a camera; the bytes of an image file, or the open file;
or pixels."""

MAY_BE_GIVEN = (
    "a path, folder or pattern, an array (uint8 [height, width, 3], BGR), a PIL image, a tensor (RGB, [3, height, "
    "width] or a batch, uint8 or 0 to 1), the bytes of an image file or the open file, the number of a camera, or a "
    "list of these"
)


def frames_of_source(
    source: "Given | Iterable[Given]",
    stack: ExitStack,
    *,
    large: bool = False,
    allow_urls: bool = False,
    one_of_live: bool = False,
) -> Iterable[ReadFrame]:
    """The frames of one source or of several, in order; cameras and streams are closed with the stack.

    `large` allows images of more than 100 megapixels, `allow_urls` addresses of images, which are downloaded.
    `one_of_live`: a single frame of a camera or of a stream without an end. An iterator is asked for an image when
    there is room for it, so it may be endless.
    """
    if _is_path(source) or _is_camera(source):
        found = find_sources(str(source), allow_urls=allow_urls, flag="")
        if isinstance(found, Streams):
            return stack.enter_context(LiveFrames(found.addresses, flag="", only_one=one_of_live))
        return frames_of(found, large=large)
    if _is_pixels(source) or _is_content(source):
        return _frames_of_several([source], large=large, allow_urls=allow_urls)
    if isinstance(source, Mapping | Set | io.TextIOBase) or not isinstance(source, Iterable):
        raise ConfigError(_refusal(source))
    return _frames_of_several(source, large=large, allow_urls=allow_urls)


def _frames_of_several(several: Iterable[Any], *, large: bool, allow_urls: bool) -> Iterator[ReadFrame]:
    total = len(several) if isinstance(several, Sized) else 0
    for number, each in enumerate(several):
        if _is_content(each):
            origin = Origin(f"bytes {number}", "array", number, total)
            yield partial(decode_frame, origin, partial(_content, each), large=large)
        elif _is_pixels(each):
            for name, image_HWC in _images_in(each, number):
                yield partial(already_read, Frame(image_HWC, Origin(name, "array", number, total)))
        elif _is_path(each) or _is_camera(each):
            yield from _frames_of_item(str(each), number, total, large=large, allow_urls=allow_urls)
        else:
            raise ConfigError(f"item {number}: {_refusal(each)}")


def _frames_of_item(text: str, number: int, total: int, *, large: bool, allow_urls: bool) -> Iterator[ReadFrame]:
    """The frames of a path in a list."""
    if is_image_url(text) or (is_image_name(text) and (os.path.exists(text) or not is_pattern(text))):
        if is_image_url(text):
            allowed(text, allow_urls)
        # A missing file is noticed when it is read, so that all missing files are reported together.
        yield partial(read_frame, Origin(text, "image", number, total), large=large)
        return
    found = find_sources(text, allow_urls=allow_urls, flag="")
    if isinstance(found, Streams):
        raise ConfigError(
            f"{text}: a camera or stream cannot be part of a list. Pass it as the only source, not in a list."
        )
    yield from frames_of(found, large=large)


def _is_path(value: object) -> bool:
    return isinstance(value, str | Path)


def _is_camera(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _is_content(value: object) -> bool:
    """Whether it is the bytes of an image file, or an open file that has them."""
    return isinstance(value, bytes | bytearray | memoryview | io.BufferedIOBase | io.RawIOBase) or (
        # Files of `tempfile`, fsspec or a web framework, whose classes are their own.
        callable(getattr(value, "read", None)) and not isinstance(value, io.TextIOBase)
    )


def _content(value: Content) -> bytes:
    """The bytes; DecodeError for something else that can be read, such as a cv2.VideoCapture."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    content = value.read()
    if not isinstance(content, bytes | bytearray | memoryview):
        raise DecodeError(
            f"{type(value).__name__}.read() gives a {type(content).__name__}, not the bytes of an image file; for a "
            "video, give its path"
        )
    return bytes(content)


def _is_pixels(value: object) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor) or _is_pil(value)


def _is_pil(value: object) -> bool:
    # Without importing Pillow: whoever has an image of it, has imported it.
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _refusal(value: object) -> str:
    if isinstance(value, io.TextIOBase):
        return f'{reprlib.repr(value)} was opened as text: open it with mode "rb".'
    return f"{reprlib.repr(value)} is no source of images: give {MAY_BE_GIVEN}."


# Pixels


def _images_in(value: Any, number: int) -> Iterator[tuple[str, np.ndarray]]:
    """Names and pixels, uint8 [H, W, 3], BGR: one image, or those of a batch."""
    if isinstance(value, np.ndarray):
        yield f"array {number}", _checked(value, f"array {number}")
    elif isinstance(value, torch.Tensor):
        yield from _images_of_tensor(value, f"tensor {number}")
    else:
        yield f"image {number}", _pixels_of_pil(value, f"image {number}")


def _checked(image_HWC: np.ndarray, where: str) -> np.ndarray:
    if image_HWC.dtype != np.uint8 or image_HWC.ndim != 3 or image_HWC.shape[2] != 3 or 0 in image_HWC.shape:
        shape = list(image_HWC.shape)
        raise ConfigError(
            f"{where}: {image_HWC.dtype} {shape} is not an image. Give uint8 [height, width, 3] in BGR order, "
            "as cv2.imread returns it."
        )
    return image_HWC


def _images_of_tensor(value: torch.Tensor, where: str) -> Iterator[tuple[str, np.ndarray]]:
    """The images of a tensor, [3, H, W] or [B, 3, H, W], RGB, uint8 or 0 to 1."""
    pixels = value.detach().cpu()
    batch_BCHW = pixels[None] if pixels.ndim == 3 else pixels
    problem = ""
    if batch_BCHW.ndim != 4 or batch_BCHW.shape[1] != 3 or 0 in batch_BCHW.shape:
        problem = "is not an image"
    elif pixels.is_floating_point():
        # Written so that nan is refused, too.
        if not (batch_BCHW.min() >= 0 and batch_BCHW.max() <= 1):
            problem = "has values outside 0 to 1 (divide by 255?)"
        else:
            batch_BCHW = (batch_BCHW.float() * 255).round().to(torch.uint8)
    elif pixels.dtype != torch.uint8:
        problem = "has the wrong type"
    if problem:
        raise ConfigError(
            f"{where}: {value.dtype} {list(value.shape)} {problem}. Give [3, height, width] or a batch "
            "[B, 3, height, width] in RGB order, uint8, or floating point from 0 to 1."
        )
    for index, image_HWC in enumerate(batch_BCHW.numpy().transpose(0, 2, 3, 1)):
        name = where if pixels.ndim == 3 else f"{where}-{index}"
        yield name, np.ascontiguousarray(image_HWC[..., ::-1])


PIL_MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})
"""Modes that become RGB without a loss of range; those with more than 8 bits do not."""


def _pixels_of_pil(image: "PIL.Image.Image", where: str) -> np.ndarray:
    """The pixels of a PIL image as they are: its EXIF orientation is not applied, and transparency is dropped."""
    if image.mode not in PIL_MODES:
        raise ConfigError(
            f"{where}: a PIL image of mode {image.mode!r} does not have 8 bits per channel. Scale its values to 0 to "
            "255, then convert it to 'RGB': convert() by itself cuts off all values above 255."
        )
    return _checked(np.ascontiguousarray(np.asarray(image.convert("RGB"))[..., ::-1]), where)
