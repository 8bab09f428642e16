"""Sizes and shapes: a picture kept, fitted into the network's input with grey bars, or batched by like shape.

Where boxes go back from the input to the picture is `flatout.yolo.boxes`.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

PADDING = 114
"""Grey of the bars, in all channels."""


class Fit(NamedTuple):
    """How a picture lies in the input; all that labels and pixels need."""

    inner_wh: tuple[int, int]
    """Size of the picture in the input."""
    ratio_wh: tuple[float, float]
    """Input pixels per picture pixel."""
    pad_wh: tuple[float, float]
    """Half of the bars, not rounded: labels use this, so they may be off by half a pixel against the picture."""
    top: int
    bottom: int
    left: int
    right: int

    @property
    def size_hw(self) -> tuple[int, int]:
        """Of the whole."""
        return self.inner_wh[1] + self.top + self.bottom, self.inner_wh[0] + self.left + self.right


def fit(native_hw: tuple[int, int], target_hw: tuple[int, int], *, enlarge: bool = True) -> Fit:
    """Scaled to fit into the target, in its middle. Training enlarges small pictures here, validation does not."""
    ratio, inner_wh = _scaled(native_hw, target_hw, enlarge)
    return _with_bars(inner_wh, (ratio, ratio), target_hw[1] - inner_wh[0], target_hw[0] - inner_wh[1])


def fit_tightly(native_hw: tuple[int, int], target_hw: tuple[int, int], *, stride: int, enlarge: bool = True) -> Fit:
    """As `fit`, with bars only as far as the next multiple of the stride; for prediction on single pictures."""
    ratio, inner_wh = _scaled(native_hw, target_hw, enlarge)
    wide, high = (target_hw[1] - inner_wh[0]) % stride, (target_hw[0] - inner_wh[1]) % stride
    return _with_bars(inner_wh, (ratio, ratio), wide, high)


def fit_stretched(native_hw: tuple[int, int], target_hw: tuple[int, int]) -> Fit:
    """Stretched to the target; no bars."""
    ratio_wh = target_hw[1] / native_hw[1], target_hw[0] / native_hw[0]
    return _with_bars((target_hw[1], target_hw[0]), ratio_wh, 0, 0)


def letterbox(image_HWC: np.ndarray, fitted: Fit) -> np.ndarray:
    """The pixels as `fitted` says, uint8 [H, W, 3]; always a new array."""
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
    # Halves to even, as Python rounds; a line of pixels keeps one.
    return ratio, (max(round(native_hw[1] * ratio), 1), max(round(native_hw[0] * ratio), 1))


def _with_bars(inner_wh: tuple[int, int], ratio_wh: tuple[float, float], wide: int, high: int) -> Fit:
    pad_w, pad_h = wide / 2, high / 2
    # The tenth sends an odd pixel to the bottom and to the right.
    return Fit(
        inner_wh,
        ratio_wh,
        (pad_w, pad_h),
        top=round(pad_h - 0.1),
        bottom=round(pad_h + 0.1),
        left=round(pad_w - 0.1),
        right=round(pad_w + 0.1),
    )


# Rectangular batches: pictures of like shape together, each batch as small as its pictures allow.
#
# Dimension key:  N pictures   S batches


class RectBatches(NamedTuple):
    """An order of the pictures, and the input shape of each batch in that order."""

    order_N: np.ndarray
    """int64: pictures by height / width, flat ones first."""
    shape_hw_S2: np.ndarray
    """int64: height and width of the network's input, multiples of the stride."""
    batch_N: np.ndarray
    """int64: batch of each place in the order."""

    def share(self, rank: int, num_ranks: int) -> "RectBatches | None":
        """Every `num_ranks`-th batch, beginning with number `rank`; None if there are fewer than that."""
        mine = [self.order_N[self.batch_N == batch] for batch in range(rank, len(self.shape_hw_S2), num_ranks)]
        if not mine:
            return None
        batch_N = np.repeat(np.arange(len(mine)), [len(batch) for batch in mine])
        return RectBatches(np.concatenate(mine), self.shape_hw_S2[rank::num_ranks], batch_N)


class StepShapes:
    """Shape of the pictures of each step for a `flatout.feed.Plan`, the same in every epoch."""

    def __init__(self, shape_hw_S2: np.ndarray) -> None:
        self._shapes = [(3, height, width) for height, width in shape_hw_S2.tolist()]

    def __call__(self, epoch: int, step: int) -> Mapping[str, tuple[int, ...]]:
        return {"images": self._shapes[step]}


def rect_batches(
    size_wh_N2: np.ndarray, *, batch_size: int, img_size: int, stride: int = 32, pad: float = 0.0
) -> RectBatches:
    """`pad` is 0 for training and 0.5 for validation, where square pictures of 640 px therefore become 672."""
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


# The size at which a picture is kept: its long side made equal to the training size, as YOLOv7 does it.


class Resized(NamedTuple):
    """A picture at training size, and its sizes before and after, height first."""

    image: np.ndarray
    """uint8 [H, W, 3], BGR; the given array itself where nothing had to be done."""
    native_hw: tuple[int, int]
    hw: tuple[int, int]


def kept_size_hw(native_hw: tuple[int, int], img_size: int) -> tuple[int, int]:
    """Size after the resize. Truncated double precision: the long side is sometimes img_size - 1 (pinned by golden
    yolov7-data/load_image.npz)."""
    ratio = img_size / max(native_hw)
    if ratio == 1:
        return native_hw
    return int(native_hw[0] * ratio), int(native_hw[1] * ratio)


def resize_long_side(image_HWC: np.ndarray, img_size: int, *, augment: bool) -> Resized:
    """Area interpolation where a picture shrinks and is not augmented, else bilinear; small ones are enlarged too."""
    import cv2

    native_hw = image_HWC.shape[0], image_HWC.shape[1]
    height, width = kept_size_hw(native_hw, img_size)
    # By the ratio, not by the size: a ratio just off 1 resizes to the same size, which leaves every pixel as it is.
    if max(native_hw) != img_size:
        shrinks = img_size < max(native_hw)
        how = cv2.INTER_AREA if shrinks and not augment else cv2.INTER_LINEAR
        # A line of pixels would shrink to nothing, which no picture survives.
        image_HWC = cv2.resize(image_HWC, (max(width, 1), max(height, 1)), interpolation=how)
    return Resized(image_HWC, native_hw, (image_HWC.shape[0], image_HWC.shape[1]))


def resize_part(part_HWC: np.ndarray, native_hw: tuple[int, int], img_size: int) -> np.ndarray:
    """As `resize_long_side` for training, bilinear, of a JPEG of `native_hw` that was decoded at a half or less.

    A decoded pixel stands for 2, 4 or 8 of the file. Where a side is no multiple of that, the last one reaches beyond
    the picture: a plain resize would squeeze everything by up to a pixel, and boxes would not fit.
    """
    import cv2

    num_per_pixel = round(max(native_hw) / max(part_HWC.shape[:2]))
    height, width = kept_size_hw(native_hw, img_size)
    if native_hw == (part_HWC.shape[0] * num_per_pixel, part_HWC.shape[1] * num_per_pixel):
        is_done = part_HWC.shape[:2] == (height, width)
        return part_HWC if is_done else np.asarray(cv2.resize(part_HWC, (width, height)))
    scale_y, scale_x = native_hw[0] / height / num_per_pixel, native_hw[1] / width / num_per_pixel
    to_part = np.array([[scale_x, 0, (scale_x - 1) / 2], [0, scale_y, (scale_y - 1) / 2]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(part_HWC, to_part, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)


# Which input sizes can a network take?

LEAST_GRID = 32
"""Sides are multiples of at least this, whatever the strides are."""


def rounded_up(size: int, grid: int) -> int:
    """A size that the network can take; a word in the log where it is another one."""
    fits = -(-size // grid) * grid
    if fits != size:
        logger.warning("--img-size %d is no multiple of the largest stride %d: %d is used.", size, grid, fits)
    return fits
