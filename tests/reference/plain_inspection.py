"""Plain references for scores of inspection: one threshold, one defect and one pixel after the other."""

from itertools import pairwise

import numpy as np


def regions_plain(mask_HW: np.ndarray) -> list[set[tuple[int, int]]]:
    """The connected regions of a mask, diagonal neighbours included, as sets of (y, x)."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask_HW), strict=True)}
    regions = []
    while left:
        region, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            region.add((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
        regions.append(region)
    return regions


def au_pro_plain(masks: list[np.ndarray], heats: list[np.ndarray], max_fpr: float) -> float:
    """Area under the mean overlap of all regions, by the trapezoidal rule over every distinct heat."""
    regions = [(heat, region) for heat, mask in zip(heats, masks, strict=True) for region in regions_plain(mask)]
    negatives = np.concatenate([heat[~mask] for heat, mask in zip(heats, masks, strict=True)])
    points = [(0.0, 0.0)]
    for threshold in sorted({float(value) for heat in heats for value in heat.flat}, reverse=True):
        overlaps = [np.mean([heat[at] >= threshold for at in region]) for heat, region in regions]
        points.append((float((negatives >= threshold).mean()), float(np.mean(overlaps))))
    area = 0.0
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 >= max_fpr or x1 == x0:
            continue
        end = min(x1, max_fpr)
        area += (end - x0) * (y0 + y0 + (y1 - y0) * (end - x0) / (x1 - x0)) / 2
    return area / max_fpr


def blobs_plain(
    heat_HW: np.ndarray, threshold: float, mask_HW: np.ndarray, near: set[tuple[int, int]]
) -> list[tuple[float, int, int]]:
    """Highest heat, area and number of defects hit of each component, highest first.

    A component hits a defect if two of their pixels are at one of the distances `near`, (dy, dx).
    """
    defects = regions_plain(mask_HW)
    found = []
    for blob in regions_plain(heat_HW >= threshold):
        hits = sum(any((y - v, x - u) in near for y, x in blob for v, u in region) for region in defects)
        found.append((max(float(heat_HW[at]) for at in blob), len(blob), hits))
    return sorted(found, key=lambda each: -each[0])
