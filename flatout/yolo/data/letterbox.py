"""Resizing and letterboxing images, batches of one shape, and the input sizes that a network accepts.

`flatout.yolo.boxes` maps boxes from the input back to the image.

Dimension key:  N images   S batches (steps)   HWC height, width, channels
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

logger = logging.getLogger(__name__)

PADDING = 114
"""Grey value of the padding, in all channels."""


# Letterboxing


class Fit(NamedTuple):
    """Where an image lies in the network's input, for pixels and for labels."""

    inner_wh: tuple[int, int]
    """Size of the resized image inside the input."""
    ratio_wh: tuple[float, float]
    """Input pixels per image pixel."""
    pad_wh: tuple[float, float]
    """Half of the padding, not rounded. Labels use this, so they may be off by half a pixel from the image."""
    top: int
    bottom: int
    left: int
    right: int

    @property
    def size_hw(self) -> tuple[int, int]:
        """Size of the input, including the padding."""
        return self.inner_wh[1] + self.top + self.bottom, self.inner_wh[0] + self.left + self.right


def fit(native_hw: tuple[int, int], target_hw: tuple[int, int], *, enlarge: bool = True) -> Fit:
    """Scale an image to fit into the target and centre it. Training enlarges small images, validation does not."""
    ratio, inner_wh = _scaled(native_hw, target_hw, enlarge)
    return _with_bars(inner_wh, (ratio, ratio), target_hw[1] - inner_wh[0], target_hw[0] - inner_wh[1])


def fit_tightly(native_hw: tuple[int, int], target_hw: tuple[int, int], *, stride: int, enlarge: bool = True) -> Fit:
    """Like `fit`, but pad only to the next multiple of the stride; for prediction on single images."""
    ratio, inner_wh = _scaled(native_hw, target_hw, enlarge)
    wide, high = (target_hw[1] - inner_wh[0]) % stride, (target_hw[0] - inner_wh[1]) % stride
    return _with_bars(inner_wh, (ratio, ratio), wide, high)


def letterbox(image_HWC: np.ndarray, fitted: Fit) -> np.ndarray:
    """Resize and pad the pixels, uint8 [H, W, 3]; always a new array."""
    import cv2

    height, width = fitted.size_hw
    out = np.full((height, width, 3), PADDING, np.uint8)
    inner = out[fitted.top : height - fitted.bottom, fitted.left : width - fitted.right]
    if image_HWC.shape[1::-1] == fitted.inner_wh:
        inner[:] = image_HWC
    else:
        inner[:] = cv2.resize(image_HWC, fitted.inner_wh, interpolation=cv2.INTER_LINEAR)
    return out


def _scaled(native_hw: tuple[int, int], target_hw: tuple[int, int], enlarge: bool) -> tuple[float, tuple[int, int]]:
    ratio = min(target_hw[0] / native_hw[0], target_hw[1] / native_hw[1])
    if not enlarge:
        ratio = min(ratio, 1.0)
    # Python's rounding, half to even. A side never becomes 0.
    return ratio, (max(round(native_hw[1] * ratio), 1), max(round(native_hw[0] * ratio), 1))


def _with_bars(inner_wh: tuple[int, int], ratio_wh: tuple[float, float], wide: int, high: int) -> Fit:
    pad_w, pad_h = wide / 2, high / 2
    # The 0.1 puts the odd pixel at the bottom and on the right.
    return Fit(
        inner_wh,
        ratio_wh,
        (pad_w, pad_h),
        top=round(pad_h - 0.1),
        bottom=round(pad_h + 0.1),
        left=round(pad_w - 0.1),
        right=round(pad_w + 0.1),
    )


# Rectangular batches: images of similar aspect ratio together, each batch as small as its images allow


class RectBatches(NamedTuple):
    """The images ordered by aspect ratio, and the input shape of each batch in that order."""

    order_N: np.ndarray
    """int64: image indices by height / width, wide ones first."""
    shape_hw_S2: np.ndarray
    """int64: height and width of the network's input, multiples of the stride."""
    batch_N: np.ndarray
    """int64: batch of each position in the order."""

    def share(self, rank: int, num_ranks: int) -> "RectBatches | None":
        """The batches of one rank: every `num_ranks`-th one from number `rank` on; None if there are none."""
        mine = [self.order_N[self.batch_N == batch] for batch in range(rank, len(self.shape_hw_S2), num_ranks)]
        if not mine:
            return None
        batch_N = np.repeat(np.arange(len(mine)), [len(batch) for batch in mine])
        return RectBatches(np.concatenate(mine), self.shape_hw_S2[rank::num_ranks], batch_N)


def step_shapes(shape_hw_S2: np.ndarray) -> Callable[[int, int], Mapping[str, tuple[int, ...]]]:
    """Shape of the images in each step for a `flatout.feed.Plan`, the same in every epoch."""
    shapes = [(3, height, width) for height, width in shape_hw_S2.tolist()]
    return lambda epoch, step: {"images": shapes[step]}


def rect_batches(
    size_wh_N2: np.ndarray, *, batch_size: int, img_size: int, stride: int = 32, pad: float = 0.0
) -> RectBatches:
    """Group images of similar aspect ratio into batches.

    `pad` is 0 for training and 0.5 for validation, where a square image of 640 px therefore becomes 672 px.
    """
    aspect_N = size_wh_N2[:, 1] / size_wh_N2[:, 0]
    order_N = np.argsort(aspect_N, kind="stable")
    batch_N = np.arange(len(order_N)) // batch_size
    begins_S = np.arange(0, len(order_N), batch_size)
    low_S = np.minimum.reduceat(aspect_N[order_N], begins_S)
    high_S = np.maximum.reduceat(aspect_N[order_N], begins_S)
    height_S = np.where(high_S < 1, high_S, 1.0)
    width_S = np.where(low_S > 1, 1 / low_S, 1.0)
    relative_S2 = np.stack((height_S, width_S), 1)
    shape_S2 = np.ceil(relative_S2 * img_size / stride + pad).astype(np.int64) * stride
    return RectBatches(order_N, shape_S2, batch_N)


# Batches of one shape, of images that come one after another

T = TypeVar("T")


class ShapeBatcher(Generic[T]):
    """Collects what comes into batches of the same shape, or of the same of whatever `shape_of` returns."""

    def __init__(self, at_once: int, shape_of: Callable[[T], Hashable], *, patience: int = 2) -> None:
        """A batch is complete with `at_once` items, or when more than `patience` * `at_once` items wait in total:
        large photos take memory. Which items share a batch depends on their order alone, never on time."""
        self._at_once, self._shape_of, self._most_waiting = at_once, shape_of, patience * at_once
        self._waiting: dict[Hashable, list[T]] = {}
        """Shape -> the items of it that wait; the shape of the item that waits longest comes first."""

    def add(self, item: T) -> list[T]:
        """Add an item; returns a batch of one shape that is due (perhaps without this item), or []."""
        shape = self._shape_of(item)
        alike = self._waiting.setdefault(shape, [])
        alike.append(item)
        if len(alike) == self._at_once:
            return self._waiting.pop(shape)
        if sum(map(len, self._waiting.values())) > self._most_waiting:
            return next(self.rest())
        return []

    def rest(self) -> Iterator[list[T]]:
        """All waiting items, as batches."""
        while self._waiting:
            yield self._waiting.pop(next(iter(self._waiting)))

    def clear(self) -> None:
        self._waiting.clear()


# Resizing the long side of an image to the training size, as YOLOv7 does


class Resized(NamedTuple):
    """An image at training size, with its height and width before and after."""

    image: np.ndarray
    """uint8 [H, W, 3], BGR; the given array itself if no resize was needed."""
    native_hw: tuple[int, int]
    hw: tuple[int, int]


def resized_hw(native_hw: tuple[int, int], img_size: int) -> tuple[int, int]:
    """Height and width after the resize. Truncation makes the long side img_size - 1 at times, as in YOLOv7 (golden
    yolov7-data/load_image.npz)."""
    ratio = img_size / max(native_hw)
    if ratio == 1:
        return native_hw
    return int(native_hw[0] * ratio), int(native_hw[1] * ratio)


def resize_long_side(image_HWC: np.ndarray, img_size: int, *, augment: bool) -> Resized:
    """Resize an image so that its long side becomes `img_size`; small images are enlarged.

    Interpolates by area if the image shrinks and is not augmented, otherwise bilinearly.
    """
    import cv2

    native_hw = image_HWC.shape[0], image_HWC.shape[1]
    height, width = resized_hw(native_hw, img_size)
    # Decided by the ratio, not by the size: a ratio just off 1 resizes to the same size, which changes no pixel.
    if max(native_hw) != img_size:
        shrinks = img_size < max(native_hw)
        how = cv2.INTER_AREA if shrinks and not augment else cv2.INTER_LINEAR
        # A very thin image must not shrink to 0 pixels.
        image_HWC = cv2.resize(image_HWC, (max(width, 1), max(height, 1)), interpolation=how)
    return Resized(image_HWC, native_hw, (image_HWC.shape[0], image_HWC.shape[1]))


def resize_scaled_decode(part_HWC: np.ndarray, native_hw: tuple[int, int], img_size: int) -> np.ndarray:
    """Like `resize_long_side` for training, for a JPEG of size `native_hw` that was decoded at a half or less.

    A decoded pixel covers 2, 4 or 8 pixels of the file. If a side is not a multiple of that, the last decoded pixel
    reaches beyond the image: a plain resize would shift the content by up to a pixel against its boxes.
    """
    import cv2

    num_per_pixel = round(max(native_hw) / max(part_HWC.shape[:2]))
    height, width = resized_hw(native_hw, img_size)
    if native_hw == (part_HWC.shape[0] * num_per_pixel, part_HWC.shape[1] * num_per_pixel):
        is_done = part_HWC.shape[:2] == (height, width)
        return part_HWC if is_done else np.asarray(cv2.resize(part_HWC, (width, height)))
    scale_y, scale_x = native_hw[0] / height / num_per_pixel, native_hw[1] / width / num_per_pixel
    to_part = np.array([[scale_x, 0, (scale_x - 1) / 2], [0, scale_y, (scale_y - 1) / 2]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(part_HWC, to_part, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)


# Input sizes that a network accepts

MIN_GRID = 32
"""Sides of the input are multiples of at least this, whatever the strides of the network are."""


def round_up_img_size(size: int, grid: int) -> int:
    """The next input size that the network accepts; logs a warning if it differs from `size`."""
    fits = -(-size // grid) * grid
    if fits != size:
        logger.warning("--img-size %d is not a multiple of the largest stride, %d: using %d.", size, grid, fits)
    return fits
