"""Which objects are pasted where, and their labels: into a finished image, or mirrored within their mosaic. No pixels.

Dimension key:  M samples   Q canvases   T labels   K objects   A attempts to paste, or added labels
"""

from collections.abc import Callable, Sequence

import numpy as np

from flatout.yolo.augment.labels import CanvasLabels
from flatout.yolo.augment.layout import Canvases
from flatout.yolo.data.image_set import offsets

MAX_COVERED = 0.30
"""Largest fraction of any label's area that a pasted object may cover."""
ENOUGH_OBJECTS = 30
"""Objects are collected until there are this many."""
MAX_SIDES = (0.75,) * 2 + (0.5,) * 4 + (0.25,) * 4 + (0.125,) * 4 + (0.0625,) * 6
"""Largest side of a pasted object relative to the image's, for each attempt, from large to small."""
SKIP_PROBABILITY = 0.2
"""Probability that an attempt is skipped."""
MIN_SPACE, MIN_SIDE, MIN_VALUES = 20, 10, 60
"""Smallest side of the area and of the object in it, in pixels, and fewest non-zero values of the object."""

PasteArea = tuple[int, int, int, int]
"""x1, y1, x2, y2 in pixels."""
PasteOne = Callable[[int, PasteArea], tuple[int, int] | None]
"""(number of the object, area) -> width and height it has in the area, or None if it is not pasted."""


def covered_share(box_4: np.ndarray, label_box_T4: np.ndarray) -> np.ndarray:
    """Fraction of each label's area that lies in the box, [T]."""
    low, high = np.maximum(box_4[:2], label_box_T4[:, :2]), np.minimum(box_4[2:], label_box_T4[:, 2:])
    area = (label_box_T4[:, 2:] - label_box_T4[:, :2]).prod(1) + 1e-16
    return np.asarray((high - low).clip(0).prod(1) / area)


def paste_all(
    wh: tuple[int, int], label_T5: np.ndarray, class_K: list[float], tries_A6: np.ndarray, paste: PasteOne
) -> np.ndarray:
    """Try to paste objects of these classes; returns labels (class, corners in pixels) float32 [T + pasted, 5].

    `tries_A6` holds uniform numbers of each attempt: whether to paste, height, width, x, y, object.
    """
    width, height = wh
    for size, numbers in zip(MAX_SIDES, tries_A6, strict=True):
        if numbers[0] < SKIP_PROBABILITY or not class_K:
            continue
        mask_h = _between(1, int(height * size), numbers[1])
        mask_w = _between(1, int(width * size), numbers[2])
        x1 = max(0, _between(0, width, numbers[3]) - mask_w // 2)
        y1 = max(0, _between(0, height, numbers[4]) - mask_h // 2)
        x2, y2 = min(width, x1 + mask_w), min(height, y1 + mask_h)
        if x2 <= x1 + MIN_SPACE or y2 <= y1 + MIN_SPACE:
            continue
        if (covered_share(np.array([x1, y1, x2, y2], np.float32), label_T5[:, 1:]) >= MAX_COVERED).any():
            continue
        chosen = _between(0, len(class_K) - 1, numbers[5])
        pasted_wh = paste(chosen, (x1, y1, x2, y2))
        if pasted_wh is not None:
            label = [[class_K[chosen], x1, y1, x1 + pasted_wh[0], y1 + pasted_wh[1]]]
            label_T5 = np.concatenate((label_T5, np.array(label, np.float32)))
    return label_T5


def fit_into(area: PasteArea, cut_wh: tuple[int, int]) -> tuple[int, int] | None:
    """Width and height of an object that is scaled to fit into an area; None if it becomes too small."""
    scale = min((area[3] - area[1]) / cut_wh[1], (area[2] - area[0]) / cut_wh[0])
    width, height = int(cut_wh[0] * scale), int(cut_wh[1] * scale)
    return None if width <= MIN_SIDE or height <= MIN_SIDE else (width, height)


def _between(low: int, high: int, uniform: float) -> int:
    """An integer from low to high, both included."""
    return low + int(uniform * (high - low + 1))


# Objects with polygons, mirrored and pasted into the same mosaic.

Pick = Callable[[int, int, int], np.ndarray]
"""(key, number of things, how many to pick) -> numbers of those picked, in order; see `draw.pick`."""


def copy_objects(
    labels: CanvasLabels, canvases: Canvases, key_M2: np.ndarray, share: float, pick: Pick
) -> tuple[CanvasLabels, list[list[np.ndarray]]]:
    """Labels including those of copies, and the polygons to copy on each canvas; `key_M2` has a key for each canvas."""
    key_Q = key_M2[canvases.sample_Q, canvases.layer_Q]
    extended, copies = choose_copies(labels, canvases.canvas_wh_Q2, key_Q, share, pick)
    return extended, [[labels.polygon(label) for label in of_canvas] for of_canvas in copies]


def choose_copies(
    labels: CanvasLabels, canvas_wh_Q2: np.ndarray, key_Q: np.ndarray, share: float, pick: Pick
) -> tuple[CanvasLabels, list[list[int]]]:
    """Labels with those of the mirrored copies appended to each canvas, and the labels to copy on each canvas.

    The labels to copy are numbered as in `labels`.
    """
    copies = [
        _choose_in_canvas(labels, np.flatnonzero(labels.canvas_T == canvas), int(width), int(key), share, pick)
        for canvas, (width, key) in enumerate(zip(canvas_wh_Q2[:, 0], key_Q, strict=True))
    ]
    return (_append(labels, copies, canvas_wh_Q2[:, 0]) if any(copies) else labels), copies


def _choose_in_canvas(
    labels: CanvasLabels, of_canvas: np.ndarray, width: int, key: int, share: float, pick: Pick
) -> list[int]:
    """Numbers of the labels to copy: those whose mirror image covers little of any label or earlier copy."""
    with_polygon = of_canvas[labels.num_points_T[of_canvas] > 0]
    if not len(with_polygon):
        return []
    present, accepted = labels.box_T4[of_canvas], []
    for number in pick(key, len(with_polygon), round(share * len(with_polygon))):
        label = int(with_polygon[number])
        mirrored_4 = _mirrored_box(labels.box_T4[label], width)
        if (covered_share(mirrored_4, present) < MAX_COVERED).all():
            present = np.concatenate((present, mirrored_4[None]))
            accepted.append(label)
    return accepted


def _append(labels: CanvasLabels, copies: Sequence[Sequence[int]], width_Q: np.ndarray) -> CanvasLabels:
    """The labels of each canvas, followed by those of its mirrored copies."""
    added = np.array([label for of_canvas in copies for label in of_canvas], np.int64)
    width_A = width_Q[labels.canvas_T[added]].astype(np.float32)
    box_A4 = np.stack([_mirrored_box(labels.box_T4[label], w) for label, w in zip(added, width_A, strict=True)])
    polygons = [labels.polygon(label) for label in range(len(labels.canvas_T))]
    polygons += [
        np.stack((w - labels.polygon(label)[:, 0], labels.polygon(label)[:, 1]), axis=1)
        for label, w in zip(added, width_A, strict=True)
    ]
    canvas_T = np.concatenate((labels.canvas_T, labels.canvas_T[added]))
    order = np.argsort(canvas_T, kind="stable")
    return CanvasLabels(
        canvas_T[order],
        np.concatenate((labels.class_T, labels.class_T[added]))[order],
        np.concatenate((labels.box_T4, box_A4))[order],
        np.concatenate([polygons[label] for label in order]),
        offsets(np.array([len(polygons[label]) for label in order])),
        label_T=None if labels.label_T is None else np.append(labels.label_T, np.full(len(added), -1))[order],
    )


def _mirrored_box(box_4: np.ndarray, width: float) -> np.ndarray:
    return np.array([width - box_4[2], box_4[1], width - box_4[0], box_4[3]], np.float32)
