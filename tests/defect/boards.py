"""Generated boards: tracks as in scans, with a known smooth shift between template and inspected board."""

from pathlib import Path

import cv2
import numpy as np

DEFECTS_XY = ((60, 70), (150, 120), (100, 190))
"""Centres of the defects of `board_pair`."""
SIDE_PX = 8


def texture(shape_hw: tuple[int, int], seed: int = 0, smooth_px: float = 3.0) -> np.ndarray:
    """Smooth noise that fills 0..255, float32 [H, W]."""
    noise = np.random.default_rng(seed).random(shape_hw).astype(np.float32)
    plane = cv2.GaussianBlur(noise, (0, 0), smooth_px)
    return np.asarray((plane - plane.min()) / (plane.max() - plane.min()) * 255, np.float32)


def shifted(plane_HW: np.ndarray, shift_xy: tuple[float, float]) -> np.ndarray:
    """A plane that shows at p + shift what the given one shows at p, exact for smooth planes; it wraps around."""
    y, x = (np.fft.fftfreq(side) for side in plane_HW.shape)
    phase = np.exp(-2j * np.pi * (x * shift_xy[0] + y[:, None] * shift_xy[1]))
    return np.asarray(np.fft.ifft2(np.fft.fft2(plane_HW) * phase).real, np.float32)


def scan(seed: int = 0, side: int = 224) -> np.ndarray:
    """A black-and-white board, uint8 [side, side]."""
    return np.asarray((texture((side, side), seed, smooth_px=7) > 128) * 255, np.uint8)


def board_pair(
    seed: int = 0, *, good: bool = False, shift_xy: tuple[float, float] = (3.0, -2.0)
) -> tuple[np.ndarray, ...]:
    """Template, inspected board and mask of the defects, uint8 [224, 224] each; scans of one board, shifted."""
    wide = texture((256, 256), seed, smooth_px=7)
    template = np.asarray((shifted(wide, shift_xy)[16:-16, 16:-16] > 128) * 255, np.uint8)
    inspected = np.asarray((wide[16:-16, 16:-16] > 128) * 255, np.uint8)
    mask = np.zeros_like(inspected)
    for x, y in () if good else DEFECTS_XY:
        area = np.s_[y - SIDE_PX // 2 : y + SIDE_PX // 2, x - SIDE_PX // 2 : x + SIDE_PX // 2]
        inspected[area] = 255 - inspected[area]
        mask[area] = 255
    return template, inspected, mask


def write_boards(folder: Path, num: int, *, good: bool = False, first_seed: int = 0) -> Path:
    """Write pairs with masks as folder/temp, test and mask."""
    for number in range(num):
        for kind, image in zip(("temp", "test", "mask"), board_pair(first_seed + number, good=good), strict=True):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / kind / f"{number:02}.png"), image)
    return folder
