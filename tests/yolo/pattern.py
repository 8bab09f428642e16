"""The test image of the yolov7-data goldens, and how near to a golden image is near enough."""

from collections.abc import Mapping

import cv2
import numpy as np

FAMILY = f"@cv{cv2.__version__.split('.')[0]}"
EXACT_VERSIONS = ("4.14", "5.0")


def pattern(height: int, width: int, k: int) -> np.ndarray:
    """uint8 [H, W, 3]: zigzags with a checkerboard on top, different in each channel and for each k."""
    y, x, c = np.ogrid[:height, :width, :3]
    t = (2 + c) * x + (3 - c) * y + 29 * k + 40 * c
    return (abs(t % 400 - 200) + 40 * ((x // 16 + y // 16 + k + c) % 2)).astype(np.uint8)


def near_opencv(found: np.ndarray, variants: Mapping[str, np.ndarray]) -> None:
    """Equal to the variant of the installed OpenCV's family; other versions may be off by 1 in 2 % of the values."""
    chosen = [array for name, array in variants.items() if "@" not in name or name.endswith(FAMILY)]
    for expected in chosen:
        assert found.shape == expected.shape
        difference = np.abs(found.astype(int) - expected)
        if cv2.__version__.startswith(EXACT_VERSIONS):
            assert difference.max(initial=0) == 0
        assert difference.max(initial=0) <= 1
        assert (difference > 0).mean() <= 0.02
