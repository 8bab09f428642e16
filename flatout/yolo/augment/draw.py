"""Every random decision of a batch, as arrays: which tiles, where, how warped, coloured, mixed, pasted, flipped.

Each number has its own column in a row that follows from (seed, epoch, position) alone, and is drawn whether it is
needed or not. So no decision shifts another one, a batch is drawn without a loop, and any share of it gives the same
rows. Nothing here has seen a pixel.

Dimension key:  M samples   N pictures of the data set   2 sheets of a sample: its own and the one mixed in
                R rounds of collecting objects to paste   20 attempts to paste one

How much pictures are changed in training: the augmentation keys of a YOLOv7 hyper-parameter file.

Changes of colours, and how they are applied to 8-bit hue, saturation and value.

Painters on the CPU get tables, a device the numbers that it makes the same tables of. What of the draws goes into
either is known here alone.

Dimension key:  M samples   3 hue, saturation, value   V the 256 values of a byte
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
    """Probabilities and ranges; the defaults are those of YOLOv7's hyp.scratch.p5.yaml."""

    hsv_h: float = 0.015
    """Hue is multiplied by 1 +- this."""
    hsv_s: float = 0.7
    hsv_v: float = 0.4
    degrees: float = 0.0
    """Turned by +- this."""
    translate: float = 0.2
    """Moved by +- this share of the output's side."""
    scale: float = 0.9
    """Scaled by 1 - this to 1.1 + this."""
    shear: float = 0.0
    """Degrees, +-, on each axis."""
    perspective: float = 0.0
    """+-, per pixel; 0.001 is much."""
    flipud: float = 0.0
    """Probabilities from here on."""
    fliplr: float = 0.5
    mosaic: float = 1.0
    """Of 4 or 9 pictures in one, 4 in 80 % of the cases."""
    mixup: float = 0.15
    """Of a second mosaic laid over the first."""
    copy_paste: float = 0.0
    """Share of a mosaic's polygons that are pasted again, mirrored."""
    paste_in: float = 0.15
    """Of objects cut from other pictures and pasted in; needs polygons."""

    aspect: float = 0.0
    """Width over height is multiplied by 1 / (1 + this) to 1 + this, with the area kept."""
    gamma: float = 0.0
    """Brightness is bent by an exponent from exp(-this) to exp(this)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, most = getattr(self, field.name), 1 if field.name in PROBABILITIES else float("inf")
            if not 0 <= value <= most:
                rule = "a probability from 0 to 1" if field.name in PROBABILITIES else "0 or more"
                raise ConfigError(f"{field.name}={value} must be {rule}.")
        if self.scale >= 1:
            raise ConfigError(f"scale={self.scale} must be below 1: pictures are scaled by 1 - scale at the least.")


# Turn and shear by what a mosaic shows: each head of the network has ranges of its own for its classes.
#
# Dimension key:  N pictures   H heads   Q mosaics of four   T labels of all pictures


@dataclass(frozen=True)
class ClassAware:
    """Ranges of the heads, and how many labels of each head every picture has."""

    degrees_H: np.ndarray
    shear_H: np.ndarray
    count_NH: np.ndarray
    """int64."""

    @classmethod
    def of(cls, labels: Labels, head_of_class: np.ndarray, degrees_H: np.ndarray, shear_H: np.ndarray) -> "ClassAware":
        """For the labels of a data set; `head_of_class` says which head a class belongs to."""
        head_of_class, num_heads = np.asarray(head_of_class), len(degrees_H)
        if len(shear_H) != num_heads or head_of_class.min() < 0 or head_of_class.max() >= num_heads:
            raise ConfigError(
                f"{num_heads} heads have degrees, {len(shear_H)} have shear, and classes belong to heads "
                f"{head_of_class.min()} to {head_of_class.max()}: give one of each for every head."
            )
        picture_T = np.repeat(np.arange(len(labels.first_N) - 1), np.diff(labels.first_N))
        head_T = head_of_class[labels.class_box_T5[:, 0].astype(np.int64)]
        count_NH = np.zeros((len(labels.first_N) - 1, num_heads), np.int64)
        np.add.at(count_NH, (picture_T, head_T), 1)
        return cls(np.asarray(degrees_H, np.float64), np.asarray(shear_H, np.float64), count_NH)

    def reach(self, picture_Q4: np.ndarray, uniform_Q: np.ndarray) -> np.ndarray:
        """Degrees and shear of mosaics of four pictures, float64 [Q, 2]: those of a head that is drawn.

        A head's probability is its share of the mosaic's labels; all are equal where there is none.
        """
        count_QH = self.count_NH[picture_Q4].sum(1)
        count_QH = np.where(count_QH.any(1, keepdims=True), count_QH, 1)
        below_QH = np.cumsum(count_QH, axis=1) <= uniform_Q[:, None] * count_QH.sum(1, keepdims=True)
        head_Q = below_QH.sum(1)
        return np.stack((self.degrees_H[head_Q], self.shear_H[head_Q]), axis=1)


NONE, PLAIN, FOUR, NINE = 0, 1, 4, 9
"""Kinds of a sheet: number of its tiles."""
FOUR_SHARE = 0.8
MIX_ORDER = 15
"""The middle one of so many uniform numbers is distributed as Beta(8, 8)."""
PASTE_ROUNDS = 32
"""Mosaics that are searched for objects to paste, at most; YOLOv7 goes on until it has 30 objects."""
PASTE_ATTEMPTS = 20

_MOSAIC, _MIXUP, _PARTNER, _PASTE, _FLIP, _HSV, _BETA, _SHEETS = 0, 1, 2, 3, 4, 6, 9, 24
_KIND, _CENTRE, _TILES, _WARP, _KEY, _HEAD, _SHEET_WIDTH = 0, 1, 3, 11, 19, 20, 21
_WIDTH = _SHEETS + 2 * _SHEET_WIDTH
_ROUND_WIDTH = 7
_PASTE_WIDTH = PASTE_ROUNDS * _ROUND_WIDTH + PASTE_ATTEMPTS * 6
# Behind all others: a key that came later changes nothing that was drawn before it existed.
_ASPECT = _WIDTH + _PASTE_WIDTH
_GAMMA = _ASPECT + 2


def draw_training(
    config: AugmentConfig,
    *,
    num_pictures: int,
    size: int,
    seed: int,
    epoch: int,
    positions_M: np.ndarray,
    indices_M: np.ndarray,
    class_aware: ClassAware | None = None,
) -> dict[str, np.ndarray]:
    """Parameters of M training samples of `size` x `size` pixels; row m follows from position and index m.

    kind        int8 [M, 2]         NONE, PLAIN, FOUR or NINE tiles
    tiles       int64 [M, 2, 9]     picture numbers, -1 for none
    centre      float64 [M, 2, 2]   x, y: where four tiles meet, or the corner of the window on nine
    warp        float64 [M, 2, 8]   perspective x, y; degrees; scale; shear x, y in degrees; x, y as shares of the side
    aspect      float64 [M, 2]      by what the warp multiplies width over height, area kept
    copy_key    uint64 [M, 2]       which polygons are copied: see `pick`
    mix         float64 [M]         share of the own sheet
    hsv         float64 [M, 3]      gains
    gamma       float64 [M]         exponent of brightness, a share of 255; left out where none is asked for
    flip        bool [M, 2]         up-down, left-right
    paste       bool [M]
    paste_tiles int64 [M, R, 4], paste_centre float64 [M, R, 2], paste_key uint64 [M, R]
    paste_tries float64 [M, 20, 6]  uniform: whether, height, width, x, y, object
    """
    bits = keyed_bits(seed, epoch, positions_M, _WIDTH)
    uniform = _uniform(bits)
    has_mosaic_M = uniform[:, _MOSAIC] < config.mosaic
    has_sheet_M2 = np.stack((np.ones_like(has_mosaic_M), has_mosaic_M & (uniform[:, _MIXUP] < config.mixup)), 1)
    sheet_M2W = uniform[:, _SHEETS:].reshape(-1, 2, _SHEET_WIDTH)
    mosaic_kind_M2 = np.where(sheet_M2W[..., _KIND] < FOUR_SHARE, FOUR, NINE)
    kind_M2 = np.where(has_sheet_M2, np.where(has_mosaic_M[:, None], mosaic_kind_M2, PLAIN), NONE)
    first_M2 = np.stack((np.asarray(indices_M), _choice(uniform[:, _PARTNER], num_pictures)), 1)
    tiles_M29 = np.concatenate((first_M2[..., None], _choice(sheet_M2W[..., _TILES:_WARP], num_pictures)), 2)
    paste_M = uniform[:, _PASTE] < config.paste_in
    return {
        "kind": kind_M2.astype(np.int8),
        "tiles": np.where(np.arange(9) < kind_M2[..., None], tiles_M29, -1),
        "centre": _centres(sheet_M2W[..., _CENTRE:_TILES], kind_M2, size),
        "warp": _warps(sheet_M2W, kind_M2, tiles_M29, config, class_aware),
        "aspect": _aspects(config, seed, epoch, np.asarray(positions_M)),
        "copy_key": bits[:, _SHEETS:].reshape(-1, 2, _SHEET_WIDTH)[..., _KEY],
        "mix": np.where(has_sheet_M2[:, 1], np.median(uniform[:, _BETA : _BETA + MIX_ORDER], axis=1), 1.0),
        "hsv": 1 + (2 * uniform[:, _HSV:_BETA] - 1) * (config.hsv_h, config.hsv_s, config.hsv_v),
        **_draw_gamma(config, seed, epoch, np.asarray(positions_M)),
        "flip": uniform[:, _FLIP:_HSV] < (config.flipud, config.fliplr),
        "paste": paste_M,
        **_draw_paste(config, num_pictures, size, seed, epoch, np.asarray(positions_M), paste_M),
    }


def redrawn_warps(
    draws: Mapping[str, np.ndarray],
    config: AugmentConfig,
    *,
    seed: int,
    epoch: int,
    positions_M: np.ndarray,
    class_aware: ClassAware | None,
) -> np.ndarray:
    """`warp` of `draw_training` for samples whose `tiles` are others than were drawn."""
    uniform = _uniform(keyed_bits(seed, epoch, positions_M, _WIDTH))
    sheet_M2W = uniform[:, _SHEETS:].reshape(-1, 2, _SHEET_WIDTH)
    return _warps(sheet_M2W, draws["kind"], draws["tiles"], config, class_aware)


def undrawn(indices_M: np.ndarray) -> dict[str, np.ndarray]:
    """The draws of samples that are shown as they are: each its one picture, with nothing done to it."""
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


def warp_ranges(config: AugmentConfig) -> np.ndarray:
    """Least and greatest value of the eight numbers of a warp, float64 [2, 8]."""
    c = config
    middle_8 = np.array([0, 0, 0, 1, 0, 0, 0.5, 0.5])
    reach_8 = np.array([c.perspective, c.perspective, c.degrees, c.scale, c.shear, c.shear, c.translate, c.translate])
    # Not symmetric: pictures are enlarged by a tenth more than they are shrunk.
    return np.stack((middle_8 - reach_8, middle_8 + reach_8 + np.array([0, 0, 0, 0.1, 0, 0, 0, 0])))


def pick(key: int, num_things: int, count: int) -> np.ndarray:
    """`count` different numbers below `num_things` in random order, as a pure function of a 64-bit key."""
    return np.argsort(keyed_bits(int(key), 0, np.arange(num_things), 1)[:, 0], kind="stable")[:count]


def _warps(
    sheet_M2W: np.ndarray,
    kind_M2: np.ndarray,
    tiles_M29: np.ndarray,
    config: AugmentConfig,
    class_aware: ClassAware | None,
) -> np.ndarray:
    """The eight numbers of each warp; mosaics of four turn and shear as their labels' heads want it, if they do."""
    least_8, most_8 = warp_ranges(config)
    warp_M28 = least_8 + (most_8 - least_8) * sheet_M2W[..., _WARP:_KEY]
    if class_aware is not None:
        four_M2 = kind_M2 == FOUR
        sheet_QW, warp_Q8 = sheet_M2W[four_M2], warp_M28[four_M2]
        degrees_shear_Q2 = class_aware.reach(tiles_M29[four_M2][:, :4], sheet_QW[:, _HEAD])
        warp_Q8[:, [2, 4, 5]] = (2 * sheet_QW[:, _WARP:_KEY][:, [2, 4, 5]] - 1) * degrees_shear_Q2[:, [0, 1, 1]]
        warp_M28[four_M2] = warp_Q8
    return np.asarray(warp_M28)


def _aspects(config: AugmentConfig, seed: int, epoch: int, positions_M: np.ndarray) -> np.ndarray:
    """Factors of width over height, float64 [M, 2]: wider and narrower by the same factor are equally likely."""
    if config.aspect == 0:
        return np.ones((len(positions_M), 2))
    uniform_M2 = _uniform(keyed_bits(seed, epoch, positions_M, 2, skip=_ASPECT))
    return np.asarray((1 + config.aspect) ** (2 * uniform_M2 - 1))


def _draw_gamma(config: AugmentConfig, seed: int, epoch: int, positions_M: np.ndarray) -> Mapping[str, np.ndarray]:
    """Exponents of brightness: one and its reciprocal, darker and brighter, are equally likely."""
    if config.gamma == 0:
        return {}
    uniform_M = _uniform(keyed_bits(seed, epoch, positions_M, 1, skip=_GAMMA))[:, 0]
    return {"gamma": np.exp((2 * uniform_M - 1) * config.gamma)}


def _centres(uniform_M22: np.ndarray, kind_M2: np.ndarray, size: int) -> np.ndarray:
    """Four tiles meet in the middle half of the canvas; the window on nine begins within the first third."""
    low_M2 = np.where(kind_M2 == NINE, 0.0, size / 2)
    return np.asarray(low_M2[..., None] + size * uniform_M22)


def _draw_paste(
    config: AugmentConfig,
    num_pictures: int,
    size: int,
    seed: int,
    epoch: int,
    positions_M: np.ndarray,
    paste_M: np.ndarray,
) -> Mapping[str, np.ndarray]:
    """The numbers of paste-in: drawn for the few samples that need them, zero for the others."""
    num_rounds, num_attempts = (PASTE_ROUNDS, PASTE_ATTEMPTS) if config.paste_in else (0, 0)
    num_samples = len(positions_M)
    bits = np.zeros((num_samples, num_rounds * _ROUND_WIDTH + num_attempts * 6), np.uint64)
    if paste_M.any():
        bits[paste_M] = keyed_bits(seed, epoch, positions_M[paste_M], _PASTE_WIDTH, skip=_WIDTH)
    round_MR7 = bits[:, : num_rounds * _ROUND_WIDTH].reshape(num_samples, num_rounds, _ROUND_WIDTH)
    kind_MR = np.full(round_MR7.shape[:2], FOUR)
    return {
        "paste_tiles": _choice(_uniform(round_MR7[..., :4]), num_pictures),
        "paste_centre": _centres(_uniform(round_MR7[..., 4:6]), kind_MR, size),
        "paste_key": round_MR7[..., 6],
        "paste_tries": _uniform(bits[:, num_rounds * _ROUND_WIDTH :]).reshape(num_samples, num_attempts, 6),
    }


def _uniform(bits: np.ndarray) -> np.ndarray:
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def _choice(uniform: np.ndarray, num: int) -> np.ndarray:
    return (uniform * num).astype(np.int64)


LEAST_MARGIN = 6e-5
"""float32 arithmetic on 0..255 is off by less."""
HUES = 180
"""Hue is counted in steps of two degrees."""


class Color(NamedTuple):
    """The change of one sample's colours (or of M samples, with one more axis in front)."""

    gain_3: np.ndarray
    table_3V: np.ndarray
    """uint8: what every value becomes."""
    offset_3: np.ndarray
    """float64: round(gain * x + offset) is the table as well, NaN where it is not; hue then has still to go around."""


def colors(draws: Mapping[str, np.ndarray]) -> Color:
    """Tables of M samples: products are truncated and cut off at 255; hue is multiplied too, and goes around."""
    gain_M3 = draws["hsv"]
    product_M3V = np.arange(256) * gain_M3[..., None]
    table_M3V = np.minimum(product_M3V, 255).astype(np.uint8)
    table_M3V[:, 0] = product_M3V[:, 0] % HUES
    offset_M3 = _offsets(product_M3V)
    if "gamma" in draws:
        table_M3V[:, 2], offset_M3[:, 2] = _bent_values(draws), np.nan
    return Color(gain_M3, table_M3V, offset_M3)


def color_fields(config: AugmentConfig) -> Fields:
    """What a device is told of a sample's colours under these settings."""
    fields = {"gain": Field((3,), np.float64)}  # of hue, saturation and value
    return {**fields, "value_table": Field((256,))} if config.gamma else fields


def color_parameters(draws: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """What a device is told of the colours of M samples, by the names of `color_fields`."""
    parameters = {"gain": draws["hsv"]}
    # As a table: a device may round powers otherwise.
    return {**parameters, "value_table": _bent_values(draws)} if "gamma" in draws else parameters


def _bent_values(draws: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tables of values that are bent by an exponent, which leaves 0 and 255 alone, then multiplied; uint8 [M, V]."""
    bent_MV = 255 * (np.arange(256) / 255) ** draws["gamma"][:, None]
    return np.asarray(np.minimum(bent_MV * draws["hsv"][:, 2:], 255).astype(np.uint8))


def _offsets(product_M3V: np.ndarray) -> np.ndarray:
    """What takes every product down to its whole part when it is rounded, also after float32 arithmetic.

    For one gain in thirty, some product is too near to the next whole number.
    """
    # Beyond 255 everything is cut off, so it does not matter where it falls; there is no hue above 179.
    matters_M3V = (product_M3V < 255) & (np.arange(256) < [[HUES], [256], [256]])
    fraction_M3V = product_M3V - np.floor(product_M3V)
    largest_M3 = np.multiply(fraction_M3V, matters_M3V, out=fraction_M3V).max(2)
    usable_M3 = largest_M3 < 1 - 2 * LEAST_MARGIN
    usable_M3[:, 0] &= product_M3V[:, 0, HUES - 1] < 255
    return np.where(usable_M3, -largest_M3 / 2, np.nan)
