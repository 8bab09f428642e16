"""Every random decision of a batch, as arrays: which tiles, where, how warped, coloured, mixed, pasted, flipped.

`AugmentConfig` holds probabilities and ranges, `draw_training` draws the parameters of samples, and `colors` makes
lookup tables from the drawn changes of colour.

Each number has its own column in a row that follows from (seed, epoch, position) alone, and is drawn whether it is
needed or not. So no decision shifts another one, a batch is drawn without a loop, and any part of a batch gets the
same rows as the whole. Nothing here reads a pixel.

Dimension key:  M samples   N images of the data set   2 canvases of a sample: its own and the one mixed in
                R rounds of collecting objects to paste   20 attempts to paste one
                W columns of random numbers of a canvas   H heads   Q mosaics of four   T labels of all images
                3 hue, saturation, value   V the 256 values of a byte
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError
from flatout.feed import Field, Fields, keyed_bits
from flatout.yolo.data.image_set import Labels

PROBABILITIES = ("flipud", "fliplr", "mosaic", "mixup", "copy_paste", "paste_in")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How much images are changed in training: the augmentation keys of a YOLOv7 hyper-parameter file.

    The defaults are those of YOLOv7's hyp.scratch.p5.yaml.
    """

    hsv_h: float = 0.015
    """Hue is multiplied by 1 +- this; saturation and value likewise."""
    hsv_s: float = 0.7
    hsv_v: float = 0.4
    degrees: float = 0.0
    """Rotation in degrees, +- this."""
    translate: float = 0.2
    """Translation, +- this fraction of the output's side."""
    scale: float = 0.9
    """Scale factor, from 1 - this to 1.1 + this."""
    shear: float = 0.0
    """Shear along each axis in degrees, +- this."""
    perspective: float = 0.0
    """Perspective per pixel, +- this; 0.001 is strong."""
    flipud: float = 0.0
    """Probability of an up-down flip."""
    fliplr: float = 0.5
    """Probability of a left-right flip."""
    mosaic: float = 1.0
    """Probability of a mosaic: of 4 images in 80 % of the cases, else of 9."""
    mixup: float = 0.15
    """Probability that a second mosaic is blended into the first."""
    copy_paste: float = 0.0
    """Fraction of a mosaic's polygons that are pasted again, mirrored."""
    paste_in: float = 0.15
    """Probability that objects cut from other images are pasted in; needs polygons."""

    aspect: float = 0.0
    """Width over height is multiplied by 1 / (1 + this) to 1 + this, with the area kept."""
    gamma: float = 0.0
    """Brightness is raised to a power from exp(-this) to exp(this)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, maximum = getattr(self, field.name), 1 if field.name in PROBABILITIES else float("inf")
            if not 0 <= value <= maximum:
                rule = "a probability from 0 to 1" if field.name in PROBABILITIES else "0 or more"
                raise ConfigError(f"{field.name}={value} must be {rule}.")
        if self.scale >= 1:
            raise ConfigError(f"scale={self.scale} must be below 1: the smallest scale factor is 1 - scale.")


@dataclass(frozen=True)
class ClassAware:
    """Rotation and shear by what a mosaic shows: each head of the network has its own ranges for its classes."""

    degrees_H: np.ndarray
    shear_H: np.ndarray
    count_NH: np.ndarray
    """int64: how many labels of each head an image has."""

    @classmethod
    def of(cls, labels: Labels, head_of_class: np.ndarray, degrees_H: np.ndarray, shear_H: np.ndarray) -> "ClassAware":
        """For the labels of a data set; `head_of_class` gives the head of each class. Raises ConfigError."""
        head_of_class, num_heads = np.asarray(head_of_class), len(degrees_H)
        if len(shear_H) != num_heads or head_of_class.min() < 0 or head_of_class.max() >= num_heads:
            raise ConfigError(
                f"There are degrees for {num_heads} heads, shear for {len(shear_H)}, and the classes belong to heads "
                f"{head_of_class.min()} to {head_of_class.max()}. Give one of each for every head."
            )
        head_T = head_of_class[labels.class_box_T5[:, 0].astype(np.int64)]
        count_NH = np.zeros((len(labels.first_N) - 1, num_heads), np.int64)
        np.add.at(count_NH, (labels.image_T, head_T), 1)
        return cls(np.asarray(degrees_H, np.float64), np.asarray(shear_H, np.float64), count_NH)

    def mosaic_ranges(self, image_Q4: np.ndarray, uniform_Q: np.ndarray) -> np.ndarray:
        """Degrees and shear of mosaics of four images, float64 [Q, 2]: those of a head chosen by `uniform_Q`.

        A head's probability is its fraction of the mosaic's labels; without labels all heads are equally likely.
        """
        count_QH = self.count_NH[image_Q4].sum(1)
        count_QH = np.where(count_QH.any(1, keepdims=True), count_QH, 1)
        below_QH = np.cumsum(count_QH, axis=1) <= uniform_Q[:, None] * count_QH.sum(1, keepdims=True)
        head_Q = below_QH.sum(1)
        return np.stack((self.degrees_H[head_Q], self.shear_H[head_Q]), axis=1)


NONE, PLAIN, FOUR, NINE = 0, 1, 4, 9
"""Kinds of canvas: the number of tiles on it."""
FOUR_SHARE = 0.8
MIX_ORDER = 15
"""The median of this many uniform numbers is distributed as Beta(8, 8)."""
PASTE_ROUNDS = 32
"""At most this many mosaics are searched for objects to paste; YOLOv7 goes on until it has 30 objects."""
PASTE_ATTEMPTS = 20

# Columns of random numbers: of a sample, then of each of its canvases.
_MOSAIC, _MIXUP, _PARTNER, _PASTE, _FLIP, _HSV, _BETA, _CANVASES = 0, 1, 2, 3, 4, 6, 9, 24
_KIND, _CENTRE, _TILES, _WARP, _KEY, _HEAD, _CANVAS_COLUMNS = 0, 1, 3, 11, 19, 20, 21
_COLUMNS = _CANVASES + 2 * _CANVAS_COLUMNS
_ROUND_COLUMNS = 7
_PASTE_COLUMNS = PASTE_ROUNDS * _ROUND_COLUMNS + PASTE_ATTEMPTS * 6
# Behind all others, so that options added later do not change what was drawn before they existed.
_ASPECT = _COLUMNS + _PASTE_COLUMNS
_GAMMA = _ASPECT + 2


def draw_training(
    config: AugmentConfig,
    *,
    num_images: int,
    size: int,
    seed: int,
    epoch: int,
    positions_M: np.ndarray,
    indices_M: np.ndarray,
    class_aware: ClassAware | None = None,
) -> dict[str, np.ndarray]:
    """Parameters of M training samples of `size` x `size` pixels; row m depends on the seed, the epoch and
    positions_M[m], which give its random numbers, and on indices_M[m], its first image.

    kind        int8 [M, 2]         NONE, PLAIN, FOUR or NINE tiles
    tiles       int64 [M, 2, 9]     image numbers, -1 for none
    centre      float64 [M, 2, 2]   x, y: where four tiles meet, or the corner of the window onto nine
    warp        float64 [M, 2, 8]   perspective x, y; degrees; scale; shear x, y in degrees; centre x, y: 0.5 is none
    aspect      float64 [M, 2]      factor of width over height in the warp, which keeps the area
    copy_key    uint64 [M, 2]       decides which polygons are copied: see `pick`
    mix         float64 [M]         weight of the sample's own canvas
    hsv         float64 [M, 3]      gains
    gamma       float64 [M]         exponent of brightness, relative to 255; absent if config.gamma is 0
    flip        bool [M, 2]         up-down, left-right
    paste       bool [M]
    paste_tiles int64 [M, R, 4], paste_centre float64 [M, R, 2], paste_key uint64 [M, R]
    paste_tries float64 [M, 20, 6]  uniform: whether to paste, height, width, x, y, object
    """
    bits = keyed_bits(seed, epoch, positions_M, _COLUMNS)
    uniform = _uniform(bits)
    has_mosaic_M = uniform[:, _MOSAIC] < config.mosaic
    has_canvas_M2 = np.stack((np.ones_like(has_mosaic_M), has_mosaic_M & (uniform[:, _MIXUP] < config.mixup)), 1)
    uniform_M2W = uniform[:, _CANVASES:].reshape(-1, 2, _CANVAS_COLUMNS)
    mosaic_kind_M2 = np.where(uniform_M2W[..., _KIND] < FOUR_SHARE, FOUR, NINE)
    kind_M2 = np.where(has_canvas_M2, np.where(has_mosaic_M[:, None], mosaic_kind_M2, PLAIN), NONE)
    first_M2 = np.stack((np.asarray(indices_M), _choice(uniform[:, _PARTNER], num_images)), 1)
    tiles_M29 = np.concatenate((first_M2[..., None], _choice(uniform_M2W[..., _TILES:_WARP], num_images)), 2)
    paste_M = uniform[:, _PASTE] < config.paste_in
    return {
        "kind": kind_M2.astype(np.int8),
        "tiles": np.where(np.arange(9) < kind_M2[..., None], tiles_M29, -1),
        "centre": _centres(uniform_M2W[..., _CENTRE:_TILES], kind_M2, size),
        "warp": _warps(uniform_M2W, kind_M2, tiles_M29, config, class_aware),
        "aspect": _aspects(config, seed, epoch, np.asarray(positions_M)),
        "copy_key": bits[:, _CANVASES:].reshape(-1, 2, _CANVAS_COLUMNS)[..., _KEY],
        "mix": np.where(has_canvas_M2[:, 1], np.median(uniform[:, _BETA : _BETA + MIX_ORDER], axis=1), 1.0),
        "hsv": 1 + (2 * uniform[:, _HSV:_BETA] - 1) * (config.hsv_h, config.hsv_s, config.hsv_v),
        **_draw_gamma(config, seed, epoch, np.asarray(positions_M)),
        "flip": uniform[:, _FLIP:_HSV] < (config.flipud, config.fliplr),
        "paste": paste_M,
        **_draw_paste(config, num_images, size, seed, epoch, np.asarray(positions_M), paste_M),
    }


def redraw_warps(
    draws: Mapping[str, np.ndarray],
    config: AugmentConfig,
    *,
    seed: int,
    epoch: int,
    positions_M: np.ndarray,
    class_aware: ClassAware | None,
) -> np.ndarray:
    """`warp` as `draw_training` gives it, for samples whose `tiles` were replaced after they were drawn."""
    uniform = _uniform(keyed_bits(seed, epoch, positions_M, _COLUMNS))
    uniform_M2W = uniform[:, _CANVASES:].reshape(-1, 2, _CANVAS_COLUMNS)
    return _warps(uniform_M2W, draws["kind"], draws["tiles"], config, class_aware)


def identity_draws(indices_M: np.ndarray) -> dict[str, np.ndarray]:
    """Draws that change nothing: each sample is its one image."""
    num = len(indices_M)
    tiles_M29 = np.full((num, 2, 9), -1)
    tiles_M29[:, 0, 0] = indices_M
    return {
        "kind": np.tile(np.array([PLAIN, NONE], np.int8), (num, 1)),
        "tiles": tiles_M29,
        "centre": np.zeros((num, 2, 2)),
        "warp": np.tile(np.array([0, 0, 0, 1, 0, 0, 0.5, 0.5]), (num, 2, 1)),
        "aspect": np.ones((num, 2)),
        "mix": np.ones(num),
        "hsv": np.ones((num, 3)),
        "flip": np.zeros((num, 2), bool),
    }


def mosaic_draws(tiles_A4: np.ndarray, centre_A2: np.ndarray) -> dict[str, np.ndarray]:
    """Draws of A mosaics of four images that are not warped, to cut objects out of."""
    num = len(tiles_A4)
    tiles_A19 = np.full((num, 1, 9), -1)
    tiles_A19[:, 0, :4] = tiles_A4
    return {
        "kind": np.full((num, 1), FOUR),
        "tiles": tiles_A19,
        "centre": centre_A2[:, None],
        "warp": np.zeros((num, 1, 8)),
        "aspect": np.ones((num, 1)),
    }


def warp_ranges(config: AugmentConfig) -> np.ndarray:
    """Lowest and highest values of the eight numbers of a warp, float64 [2, 8]."""
    c = config
    middle_8 = np.array([0, 0, 0, 1, 0, 0, 0.5, 0.5])
    reach_8 = np.array([c.perspective, c.perspective, c.degrees, c.scale, c.shear, c.shear, c.translate, c.translate])
    # Not symmetric: images are enlarged by up to a tenth more than they are shrunk.
    return np.stack((middle_8 - reach_8, middle_8 + reach_8 + np.array([0, 0, 0, 0.1, 0, 0, 0, 0])))


def pick(key: int, num_things: int, count: int) -> np.ndarray:
    """`count` distinct numbers below `num_things` in random order, as a pure function of a 64-bit key."""
    return np.argsort(keyed_bits(int(key), 0, np.arange(num_things), 1)[:, 0], kind="stable")[:count]


def _warps(
    uniform_M2W: np.ndarray,
    kind_M2: np.ndarray,
    tiles_M29: np.ndarray,
    config: AugmentConfig,
    class_aware: ClassAware | None,
) -> np.ndarray:
    """The eight numbers of each warp; with `class_aware`, mosaics of four have the ranges of a head of their labels."""
    low_8, high_8 = warp_ranges(config)
    warp_M28 = low_8 + (high_8 - low_8) * uniform_M2W[..., _WARP:_KEY]
    if class_aware is not None:
        four_M2 = kind_M2 == FOUR
        uniform_QW, warp_Q8 = uniform_M2W[four_M2], warp_M28[four_M2]
        degrees_shear_Q2 = class_aware.mosaic_ranges(tiles_M29[four_M2][:, :4], uniform_QW[:, _HEAD])
        warp_Q8[:, [2, 4, 5]] = (2 * uniform_QW[:, _WARP:_KEY][:, [2, 4, 5]] - 1) * degrees_shear_Q2[:, [0, 1, 1]]
        warp_M28[four_M2] = warp_Q8
    return np.asarray(warp_M28)


def _aspects(config: AugmentConfig, seed: int, epoch: int, positions_M: np.ndarray) -> np.ndarray:
    """Factors of width over height, float64 [M, 2]; a factor and its reciprocal are equally likely."""
    if config.aspect == 0:
        return np.ones((len(positions_M), 2))
    uniform_M2 = _uniform(keyed_bits(seed, epoch, positions_M, 2, skip=_ASPECT))
    return np.asarray((1 + config.aspect) ** (2 * uniform_M2 - 1))


def _draw_gamma(config: AugmentConfig, seed: int, epoch: int, positions_M: np.ndarray) -> Mapping[str, np.ndarray]:
    """Exponents of brightness; an exponent and its reciprocal (darker, brighter) are equally likely."""
    if config.gamma == 0:
        return {}
    uniform_M = _uniform(keyed_bits(seed, epoch, positions_M, 1, skip=_GAMMA))[:, 0]
    return {"gamma": np.exp((2 * uniform_M - 1) * config.gamma)}


def _centres(uniform_M22: np.ndarray, kind_M2: np.ndarray, size: int) -> np.ndarray:
    """Four tiles meet in the middle half of the canvas; the window onto nine begins within the first third."""
    low_M2 = np.where(kind_M2 == NINE, 0.0, size / 2)
    return np.asarray(low_M2[..., None] + size * uniform_M22)


def _draw_paste(
    config: AugmentConfig,
    num_images: int,
    size: int,
    seed: int,
    epoch: int,
    positions_M: np.ndarray,
    paste_M: np.ndarray,
) -> Mapping[str, np.ndarray]:
    """The numbers of paste-in, drawn for the few samples that need them and zero for the others."""
    num_rounds, num_attempts = (PASTE_ROUNDS, PASTE_ATTEMPTS) if config.paste_in else (0, 0)
    num_samples = len(positions_M)
    bits = np.zeros((num_samples, num_rounds * _ROUND_COLUMNS + num_attempts * 6), np.uint64)
    if paste_M.any():
        bits[paste_M] = keyed_bits(seed, epoch, positions_M[paste_M], _PASTE_COLUMNS, skip=_COLUMNS)
    round_MR7 = bits[:, : num_rounds * _ROUND_COLUMNS].reshape(num_samples, num_rounds, _ROUND_COLUMNS)
    kind_MR = np.full(round_MR7.shape[:2], FOUR)
    return {
        "paste_tiles": _choice(_uniform(round_MR7[..., :4]), num_images),
        "paste_centre": _centres(_uniform(round_MR7[..., 4:6]), kind_MR, size),
        "paste_key": round_MR7[..., 6],
        "paste_tries": _uniform(bits[:, num_rounds * _ROUND_COLUMNS :]).reshape(num_samples, num_attempts, 6),
    }


def _uniform(bits: np.ndarray) -> np.ndarray:
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def _choice(uniform: np.ndarray, num: int) -> np.ndarray:
    return (uniform * num).astype(np.int64)


# Changes of colour, applied to 8-bit hue, saturation and value. Painters on the CPU get lookup tables; a device gets
# the numbers from which it makes the same tables. Only this section knows which draws go into either.

MIN_MARGIN = 6e-5
"""More than the error of float32 arithmetic on 0..255."""
HUES = 180
"""Hue has this many values, in steps of two degrees."""


class Color(NamedTuple):
    """The change of one sample's colours (or of M samples, with a leading axis)."""

    gain_3: np.ndarray
    table_3V: np.ndarray
    """uint8: the new value of every value."""
    offset_3: np.ndarray
    """float64: round(gain * x + offset) equals the table, but for the wrap-around of hue; NaN where it does not."""


def colors(draws: Mapping[str, np.ndarray]) -> Color:
    """Tables of M samples: products are truncated and clipped to 255; hue is multiplied, too, and wraps around."""
    gain_M3 = draws["hsv"]
    product_M3V = np.arange(256) * gain_M3[..., None]
    table_M3V = np.minimum(product_M3V, 255).astype(np.uint8)
    table_M3V[:, 0] = product_M3V[:, 0] % HUES
    offset_M3 = _offsets(product_M3V)
    if "gamma" in draws:
        table_M3V[:, 2], offset_M3[:, 2] = _gamma_tables(draws), np.nan
    return Color(gain_M3, table_M3V, offset_M3)


def color_fields(config: AugmentConfig) -> Fields:
    """Fields of a sample that describe the change of its colours to a device."""
    fields = {"gain": Field((3,), np.float64)}  # of hue, saturation and value
    return {**fields, "value_table": Field((256,))} if config.gamma else fields


def color_parameters(draws: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The arrays of M samples for `color_fields`."""
    parameters = {"gain": draws["hsv"]}
    # As a table, because a device may round powers differently.
    return {**parameters, "value_table": _gamma_tables(draws)} if "gamma" in draws else parameters


def _gamma_tables(draws: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tables of the value channel, uint8 [M, V]: raised to a power, which leaves 0 and 255 alone, then multiplied."""
    curved_MV = 255 * (np.arange(256) / 255) ** draws["gamma"][:, None]
    return np.asarray(np.minimum(curved_MV * draws["hsv"][:, 2:], 255).astype(np.uint8))


def _offsets(product_M3V: np.ndarray) -> np.ndarray:
    """Offsets with which rounding gives the integer part of every product, even after float32 arithmetic; else NaN.

    NaN for one gain in thirty, where some product is too close to the next integer.
    """
    # Products above 255 are clipped whatever they round to; there is no hue above 179.
    matters_M3V = (product_M3V < 255) & (np.arange(256) < [[HUES], [256], [256]])
    fraction_M3V = product_M3V - np.floor(product_M3V)
    largest_M3 = np.multiply(fraction_M3V, matters_M3V, out=fraction_M3V).max(2)
    usable_M3 = largest_M3 < 1 - 2 * MIN_MARGIN
    usable_M3[:, 0] &= product_M3V[:, 0, HUES - 1] < 255
    return np.where(usable_M3, -largest_M3 / 2, np.nan)
