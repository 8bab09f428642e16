"""Finds defects without a network: what differs from an aligned reference by more than edges do.

    difference        of target and reference, above a share of the contrast          --> pixels that are drawn
    core              part of it that no move of an edge by one pixel explains         --> components that count
    heat of a pixel   s / (s + 10), where s is the core of its component in pixels     --> 0.5 for ten pixels

The core is measured both ways: target against the neighbourhood of a pixel in the reference, and the reference against
that in target; otherwise a thin line that is missing in target would be explained by the background beside it. With two
references, a difference counts if it is there for both.

Dimension key:  C planes (target, ref1, ref2)   H W image   N components   M pixels that are drawn
"""

from typing import NamedTuple

import numpy as np

HALF_AT = 10.0
"""Core, in pixels, of a component whose heat is 0.5."""
_BOX_3, _BOX_2 = np.ones((3, 3), np.uint8), np.ones((2, 2), np.uint8)
STRIDE = 4
"""Rows and columns between the pixels from which the contrast is taken."""
DARK, BRIGHT = 0.01, 0.99
"""Quantiles of these pixels that are the contrast apart."""
MIN_CONTRAST = 8.0
"""Contrast in grey levels that images are taken to have at least, so that the noise of flat ones is not found."""
MIN_DIFFERENCE = 0.4
"""Lowest difference that is drawn, as a share of the contrast."""
CORE_SHARE = 0.8
"""Share of the bound of a difference above which pixels that no move of an edge explains are drawn, opening or not."""


class Differences(NamedTuple):
    """How target differs from its references, pixel by pixel; uint8 [H, W] each."""

    drawn_HW: np.ndarray
    """1 where pixels are drawn, 0 elsewhere."""
    there_HW: np.ndarray
    """What of target no move of an edge by one pixel explains, in grey levels."""
    missing_HW: np.ndarray
    """The same of the references."""
    contrast: float
    """From the darkest to the brightest percent of ref1, in grey levels."""


class Components(NamedTuple):
    """The connected differences of an image; all of them, whatever their size."""

    pixels_M: np.ndarray
    """Flat indices of the pixels of all components."""
    number_M: np.ndarray
    """int32: the component of each, from 0."""
    core_N: np.ndarray
    """Pixels that no move of an edge by one pixel explains, each weighted with its share of the full contrast."""


def find_differences(planes_CHW: np.ndarray) -> Differences:
    """The differences of target to both references, which must be aligned; planes in 0..255.

    `flatout.defect.compare.classical_torch` computes the same for batches, on any device.
    """
    import cv2

    planes = [_bytes(plane_HW) for plane_HW in planes_CHW]
    target_HW, references = planes[0], planes[1:]
    if np.array_equal(references[0], references[-1]):
        references = references[:1]
    contrast = max(_contrast(references[0]), MIN_CONTRAST)
    bound = MIN_DIFFERENCE * contrast
    differs_HW, there_HW, missing_HW = _differences(target_HW, references[0])
    for reference_HW in references[1:]:
        others = _differences(target_HW, reference_HW)
        differs_HW, there_HW, missing_HW = map(cv2.min, (differs_HW, there_HW, missing_HW), others)
    drawn_HW = opened((differs_HW > bound).astype(np.uint8))
    drawn_HW |= cv2.max(there_HW, missing_HW) > bound * CORE_SHARE
    return Differences(drawn_HW, there_HW, missing_HW, contrast)


def components_of(differences: Differences) -> Components:
    """The connected components of the pixels that are drawn."""
    pixels_M, number_M, count = _numbered(differences.drawn_HW)
    cores = [
        np.bincount(number_M, plane_HW.reshape(-1)[pixels_M], minlength=count) / differences.contrast
        for plane_HW in (differences.there_HW, differences.missing_HW)
    ]
    return Components(pixels_M, number_M, np.maximum(*cores))


def _numbered(drawn_HW: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """The flat indices of the pixels that are drawn, the component of each, from 0, and how many there are."""
    import cv2

    count, number_HW = cv2.connectedComponents(drawn_HW, connectivity=8)
    pixels_M = np.flatnonzero(drawn_HW)
    return pixels_M, number_HW.reshape(-1)[pixels_M] - 1, count - 1


def heat_of_differences(differences: Differences) -> np.ndarray:
    """Heat map of the classical method, float32 [H, W] in 0..1; every pixel of a component has its heat."""
    found = components_of(differences)
    heat_N = np.asarray(found.core_N / (found.core_N + HALF_AT), np.float32)
    heat_HW = np.zeros(differences.drawn_HW.shape, np.float32)
    heat_HW.reshape(-1)[found.pixels_M] = heat_N[found.number_M]
    return heat_HW


def refined(heat_HW: np.ndarray, planes_CHW: np.ndarray) -> np.ndarray:
    """The heat map of a network, drawn by the difference: a component gets the highest heat in it, the rest gets 0.

    A network knows which differences are defects, but not to the pixel where they end; the difference does.
    """
    return drawn_by(find_differences(planes_CHW).drawn_HW, heat_HW)


def drawn_by(drawn_HW: np.ndarray, heat_HW: np.ndarray) -> np.ndarray:
    """The same as `refined`, from the pixels that are drawn."""
    pixels_M, number_M, count = _numbered(drawn_HW)
    heat_N = np.zeros(count, np.float32)
    np.maximum.at(heat_N, number_M, heat_HW.reshape(-1)[pixels_M])
    refined_HW = np.zeros(drawn_HW.shape, np.float32)
    refined_HW.reshape(-1)[pixels_M] = heat_N[number_M]
    return refined_HW


def opened(mask_HW: np.ndarray) -> np.ndarray:
    """What is left of a mask after an opening with 2 x 2 pixels: lines of one pixel vanish; uint8 [H, W]."""
    import cv2

    # OpenCV's own opening shifts the mask by a pixel if the kernel has an even side: it does not mirror the kernel.
    return cv2.dilate(cv2.erode(mask_HW, _BOX_2, anchor=(1, 1)), _BOX_2, anchor=(0, 0))


def _differences(target_HW: np.ndarray, reference_HW: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The plain difference, and what of it no move by one pixel explains: in target, and in the reference; uint8."""
    import cv2

    differs_HW = cv2.absdiff(target_HW, reference_HW)
    return differs_HW, _unexplained(target_HW, reference_HW), _unexplained(reference_HW, target_HW)


def _unexplained(here_HW: np.ndarray, there_HW: np.ndarray) -> np.ndarray:
    """How far a pixel is outside of the range of values around it in the other image, uint8."""
    import cv2

    above_HW = cv2.subtract(here_HW, cv2.dilate(there_HW, _BOX_3))
    below_HW = cv2.subtract(cv2.erode(there_HW, _BOX_3), here_HW)
    return cv2.max(above_HW, below_HW)


def _contrast(plane_HW: np.ndarray) -> float:
    """Grey levels between the darkest and the brightest percent of the pixels."""
    low, high = np.quantile(plane_HW[::STRIDE, ::STRIDE], (DARK, BRIGHT))
    return float(high - low)


def _bytes(plane_HW: np.ndarray) -> np.ndarray:
    if plane_HW.dtype == np.uint8:
        return plane_HW
    return np.asarray(np.clip(np.rint(plane_HW), 0, 255), np.uint8)
