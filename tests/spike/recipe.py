"""Simulates the spike streams of the golden files, with integers only, so that every program gets the same result."""

from collections.abc import Mapping

import numpy as np

NAMES = ("T", "H", "W", "seed", "vx", "vy", "P", "lo", "amp", "theta")


def simulate(parameters: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Spikes uint8 [T, H, W], and the light that caused them, summed over the frames, int64 [H, W]."""
    T, H, W, seed, vx, vy, P, lo, amp, theta = (parameters[name] for name in NAMES)
    y, x = np.mgrid[0:H, 0:W].astype(np.int64)
    charge = (7919 * x + 104729 * y + 1299709 * seed) % theta
    spikes = np.empty((T, H, W), np.uint8)
    light_sum = np.zeros((H, W), np.int64)
    for t in range(T):
        m = (3 * x + 5 * y + vx * t + 11 * seed) % P
        light = lo + (amp * np.minimum(m, P - m)) // (P // 2)
        x0, y0 = (seed + vx * t) % W, (2 * seed + vy * t) % H
        square = ((x - x0) % W < W // 4) & ((y - y0) % H < H // 4)
        light = np.where(square, 255 - light, light)
        light_sum += light
        charge += light
        spikes[t] = charge >= theta
        charge -= theta * (charge >= theta)
    return spikes, light_sum
