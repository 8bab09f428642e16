"""Chooses a threshold by the number of false blobs, on labelled or on good images.

    images --heat maps--> components --touch no labelled defect--> false blobs --at most k per image--> threshold,
                                                                                   which a settings file keeps

The images are not those that will be tested: a threshold that was chosen on them says nothing about others.

Dimension key:  H W image   N components   K labelled defects
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.config import build_config
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.items import MAX_GREY
from flatout.defect.data.pairs import read_boxes
from flatout.defect.evaluate.blobs import inspect_blobs
from flatout.defect.evaluate.evaluate import mask_of_image
from flatout.defect.evaluate.maps import MapMaker, Mapped, ReadImage, map_images
from flatout.defect.options import Method
from flatout.errors import ConfigError, DataError, counted
from flatout.yaml_strict import load_yaml, quoted

logger = logging.getLogger(__name__)

LOWEST = 0.2
"""Lowest threshold that is chosen, even if there are no false blobs above it: these images may show fewer kinds of
differences than others. For a network that was trained for a few steps only it is lower, see `lowest_for`."""
SQUARE_PX, SPACING_PX, MIN_SWING = 8, 48, 80.0
"""Side and distance of the squares that `response` paints, and by how many grey levels they differ at least."""
MAX_PROBED = 4
"""Images on which they are painted."""
ANY_HEAT = 1e-6
"""Threshold that every component of a heat map reaches that is 0 elsewhere."""
OUTLIER_SHARE, MIN_FOR_OUTLIERS = 0.02, 20
"""Share of images that are left out, those with most false blobs, and images from which on: one picture with a wrong
label, or with writing on it, must not decide for all."""


class Blobs(NamedTuple):
    """The components of a heat map that are not 0, compared with the labels of the image."""

    heat_N: np.ndarray
    """Highest heat of each."""
    is_false_N: np.ndarray
    best_K: np.ndarray
    """For every labelled defect, the highest heat of a component that touches it; 0 if none does."""


def heat_blobs(heat_HW: np.ndarray, image: EvaluationImage, *, least: float = LOWEST / 2) -> Blobs:
    """Components of the pixels with a heat of at least `least`; DataError if the image has no label.

    Which of them are false is decided as in a test.
    """
    if not image.is_labelled and image.boxes is None:
        raise DataError(
            f"{image.path}: it has neither a mask nor boxes, and is not known to be good. Good images are those of a "
            "folder named good, and pairs with an empty mask or an empty file of boxes."
        )
    boxes = None if image.is_good or image.boxes is None else read_boxes(image.boxes)
    found = inspect_blobs(heat_HW, least, mask_of_image(image, heat_HW.shape), boxes)
    best_K = np.zeros(found.num_defects)
    for blob in found.blobs:
        for defect in blob.hits:
            best_K[defect] = max(best_K[defect], blob.score)
    heat_N = np.array([blob.score for blob in found.blobs], np.float32)
    return Blobs(heat_N, np.array([not blob.hits for blob in found.blobs], np.bool_), best_K)


def threshold_for(false_heat: Sequence[np.ndarray], per_image: float, *, lowest: float = LOWEST) -> float:
    """The lowest threshold, from `lowest` on, with at most `per_image` false blobs per image at or above it.

    `false_heat`: the heat of the false blobs of every image. Of 20 images or more, the worst fiftieth is left out.
    """
    kept = _without_worst(false_heat)
    falling_N = np.sort(np.concatenate([*kept, np.empty(0, np.float32)]).astype(np.float32))[::-1]
    allowed = int(per_image * len(kept) + 1e-9)
    if len(falling_N) <= allowed:
        return lowest
    return max(lowest, float(np.nextafter(falling_N[allowed], np.float32(2))))


def lowest_for(own: float | None, response: Callable[[], float]) -> float:
    """The lowest threshold for a network: LOWEST, or less if it does not reach as much for defects.

    `own`: the threshold in its weights, which was chosen on defects. None: half of the `response` decides.
    """
    return min(LOWEST, response() / 2 if own is None else own)


def response(
    images: Sequence[EvaluationImage], read: ReadImage, maker: MapMaker, *, threads: int | None = None
) -> float:
    """Median heat of squares that are painted on target, dark on bright and bright on dark.

    It says what heat a network gives to obvious defects, if no labelled ones are there. `threads`: see `map_images`.
    """

    def highest(image: EvaluationImage, mapped: Mapped) -> np.ndarray:
        heat_HW = mapped.heat_HW
        return np.array([heat_HW[rows, columns].max() for rows, columns in _squares(heat_HW.shape)])

    found = map_images(images[:MAX_PROBED], lambda path: _with_squares(read(path)), maker, highest, threads=threads)
    return float(np.median(np.concatenate(list(found))))


def _with_squares(planes_CHW: np.ndarray) -> np.ndarray:
    """A copy of the planes with squares in target, in their own type."""
    painted_CHW = planes_CHW.copy()
    target_HW = planes_CHW[0].astype(np.float32)
    low, high = np.quantile(target_HW, (0.01, 0.99))
    swing = max(float(high - low), MIN_SWING)
    for square in _squares(target_HW.shape):
        inside_HW = target_HW[square]
        opposite_HW = np.where(inside_HW < (low + high) / 2, inside_HW + swing, inside_HW - swing)
        painted_CHW[0][square] = np.clip(opposite_HW, 0, MAX_GREY)
    return painted_CHW


def _squares(shape_hw: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Rows and columns of the squares, one in the middle of an image that has no room for more."""
    tops, lefts = (
        range(min(SPACING_PX, max(side - SQUARE_PX, 0)) // 2, max(side - SQUARE_PX, 1), SPACING_PX) for side in shape_hw
    )
    return [(slice(y, y + SQUARE_PX), slice(x, x + SQUARE_PX)) for y in tops for x in lefts]


def _without_worst(false_heat: Sequence[np.ndarray]) -> list[np.ndarray]:
    num_left_out = math.ceil(OUTLIER_SHARE * len(false_heat)) if len(false_heat) >= MIN_FOR_OUTLIERS else 0
    return sorted(false_heat, key=lambda heat_N: float(np.sum(heat_N)))[: len(false_heat) - num_left_out]


def _per_image(false_heat: Sequence[np.ndarray], threshold: float) -> float:
    """Mean number of false blobs at or above a threshold."""
    return sum(int((heat_N >= threshold).sum()) for heat_N in false_heat) / len(false_heat)


# The settings file


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a calibration chose, and on what."""

    method: Method
    threshold: float
    """Heat at or above which a pixel counts as defect."""
    false_blobs: float
    """False blobs per image that were allowed."""
    images: int
    """Images it was chosen on."""
    chosen_on: str
    """Their folder."""

    def as_yaml(self) -> str:
        """The text of a settings file, one name per line."""
        texts = {name: quoted(value) if isinstance(value, str) else value for name, value in asdict(self).items()}
        return "".join(f"{name}: {text}\n" for name, text in texts.items())


def read_settings(path: str | Path) -> Settings:
    """Read a settings file; ConfigError names what is wrong in it."""
    content = load_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: it is not a settings file. Write one with: flatout defect calibrate")
    return build_config({str(name): value for name, value in content.items()}, Settings, where=str(path))


def choose_settings(
    blobs: Iterable[Blobs],
    *,
    method: Method,
    false_blobs: float,
    chosen_on: str,
    lowest: float = LOWEST,
) -> Settings:
    """Choose the threshold by the blobs of labelled or good images. `lowest`: as for `threshold_for`."""
    false: list[np.ndarray] = []
    best: list[np.ndarray] = []
    for each in blobs:
        false.append(each.heat_N[each.is_false_N])
        best.append(each.best_K)
    if not false:
        raise DataError(f"{chosen_on}: there are no images to choose a threshold on.")
    threshold = threshold_for(false, false_blobs, lowest=lowest)
    kept = _without_worst(false)
    num_left_out = len(false) - len(kept)
    best_K = np.concatenate(best)
    found = int((best_K >= threshold).sum())
    logger.info(
        "Threshold %.4f: %.2f false blobs per image on %s%s%s.",
        threshold,
        _per_image(kept, threshold),
        counted(len(kept), "image"),
        f" ({_per_image(false, threshold):.2f} with the worst {num_left_out}, left out)" if num_left_out else "",
        f", {found} of {counted(len(best_K), 'labelled defect')} found" if len(best_K) else ", all good",
    )
    if len(best_K) and not found:
        logger.warning(
            "None of the %s reaches this threshold: %s", counted(len(best_K), "labelled defect"),
            f"a threshold below {lowest:.4g} is not chosen. Train the network longer, or give --threshold yourself."
            if threshold == lowest
            else "allow more --false_blobs, or train the network longer.",
        )  # fmt: skip
    if threshold > 1:
        logger.warning(
            "No image can reach this threshold, because false blobs have the highest heat that there is: everything "
            "would pass. Allow more --false_blobs, or train the network longer."
        )
    return Settings(method=method, threshold=threshold, false_blobs=false_blobs, images=len(false), chosen_on=chosen_on)
