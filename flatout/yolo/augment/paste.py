"""Where objects are pasted into a finished picture: twenty attempts, from large to small. Pixels are others' affair."""

from collections.abc import Callable, Sequence

import numpy as np

from flatout.yolo.augment.labels import CanvasLabels, offsets
from flatout.yolo.augment.layout import Sheets

MOST_COVERED = 0.30
"""Of any label's area, by what is pasted over it."""
ENOUGH = 30
"""Objects are collected until there are so many."""
SIZES = (0.75,) * 2 + (0.5,) * 4 + (0.25,) * 4 + (0.125,) * 4 + (0.0625,) * 6
"""Greatest side of a pasted object as a share of the picture's, attempt by attempt."""
SKIPPED = 0.2
LEAST_SPACE, LEAST_SIDE, LEAST_VALUES = 20, 10, 60

Space = tuple[int, int, int, int]
"""x1, y1, x2, y2 in pixels."""
Paste = Callable[[int, Space], tuple[int, int] | None]
"""(number of the object, space) -> width and height that it takes of the space, or None if it is not pasted."""


def covered_share(box_4: np.ndarray, label_box_T4: np.ndarray) -> np.ndarray:
    """Share of each label's area that lies in the box, [T]."""
    low, high = np.maximum(box_4[:2], label_box_T4[:, :2]), np.minimum(box_4[2:], label_box_T4[:, 2:])
    area = (label_box_T4[:, 2:] - label_box_T4[:, :2]).prod(1) + 1e-16
    return np.asarray((high - low).clip(0).prod(1) / area)


def paste_all(
    wh: tuple[int, int], label_T5: np.ndarray, class_K: list[float], tries_A6: np.ndarray, paste: Paste
) -> np.ndarray:
    """Try to paste objects of these classes; returns labels (class, corners in pixels) float32 [T + pasted, 5].

    tries_A6 holds uniform numbers for each attempt: whether, height, width, x, y, which object.
    """
    width, height = wh
    for size, numbers in zip(SIZES, tries_A6, strict=True):
        if numbers[0] < SKIPPED or not class_K:
            continue
        mask_h = _between(1, int(height * size), numbers[1])
        mask_w = _between(1, int(width * size), numbers[2])
        x1 = max(0, _between(0, width, numbers[3]) - mask_w // 2)
        y1 = max(0, _between(0, height, numbers[4]) - mask_h // 2)
        x2, y2 = min(width, x1 + mask_w), min(height, y1 + mask_h)
        if x2 <= x1 + LEAST_SPACE or y2 <= y1 + LEAST_SPACE:
            continue
        if (covered_share(np.array([x1, y1, x2, y2], np.float32), label_T5[:, 1:]) >= MOST_COVERED).any():
            continue
        chosen = _between(0, len(class_K) - 1, numbers[5])
        pasted_wh = paste(chosen, (x1, y1, x2, y2))
        if pasted_wh is not None:
            label = [[class_K[chosen], x1, y1, x1 + pasted_wh[0], y1 + pasted_wh[1]]]
            label_T5 = np.concatenate((label_T5, np.array(label, np.float32)))
    return label_T5


def fitted(space: Space, cut_wh: tuple[int, int]) -> tuple[int, int] | None:
    """Width and height of an object that is scaled to fit into a space; None if that is too small to be seen."""
    scale = min((space[3] - space[1]) / cut_wh[1], (space[2] - space[0]) / cut_wh[0])
    width, height = int(cut_wh[0] * scale), int(cut_wh[1] * scale)
    return None if width <= LEAST_SIDE or height <= LEAST_SIDE else (width, height)


def _between(low: int, high: int, uniform: float) -> int:
    """A whole number from low to high, both included."""
    return low + int(uniform * (high - low + 1))


# Objects with polygons, mirrored and pasted into the same mosaic: which ones, and with what labels.
#
# Dimension key:  Q sheets   T labels

Pick = Callable[[int, int, int], np.ndarray]
"""(key, number of things, how many to pick) -> numbers of those picked, in order."""


def copy_objects(
    labels: CanvasLabels, sheets: Sheets, key_M2: np.ndarray, share: float, pick: Pick
) -> tuple[CanvasLabels, list[list[np.ndarray]]]:
    """Labels with those of the copies, and for each sheet the polygons to copy; keys are drawn for two sheets each."""
    key_Q = key_M2[sheets.sample_Q, sheets.slot_Q]
    extended, copies = choose_copies(labels, sheets.canvas_Q2, key_Q, share, pick)
    return extended, [[labels.polygon(label) for label in of_sheet] for of_sheet in copies]


def choose_copies(
    labels: CanvasLabels, canvas_Q2: np.ndarray, key_Q: np.ndarray, share: float, pick: Pick
) -> tuple[CanvasLabels, list[list[int]]]:
    """Labels with those of the mirrored copies appended to their sheets, and for each sheet the labels to copy.

    Copied labels are numbered as in the `labels` given.
    """
    copies = [
        _choose_in_sheet(labels, np.flatnonzero(labels.sheet_T == sheet), int(width), int(key), share, pick)
        for sheet, (width, key) in enumerate(zip(canvas_Q2[:, 0], key_Q, strict=True))
    ]
    return (_append(labels, copies, canvas_Q2[:, 0]) if any(copies) else labels), copies


def _choose_in_sheet(
    labels: CanvasLabels, of_sheet: np.ndarray, width: int, key: int, share: float, pick: Pick
) -> list[int]:
    """Numbers of the labels whose mirror image covers nothing that is there already."""
    with_polygon = of_sheet[labels.num_points_T[of_sheet] > 0]
    if not len(with_polygon):
        return []
    present, accepted = labels.box_T4[of_sheet], []
    for number in pick(key, len(with_polygon), round(share * len(with_polygon))):
        label = int(with_polygon[number])
        mirrored_4 = _mirrored_box(labels.box_T4[label], width)
        if (covered_share(mirrored_4, present) < MOST_COVERED).all():
            present = np.concatenate((present, mirrored_4[None]))
            accepted.append(label)
    return accepted


def _append(labels: CanvasLabels, copies: Sequence[Sequence[int]], width_Q: np.ndarray) -> CanvasLabels:
    """Behind the labels of each sheet, its mirrored copies."""
    added = np.array([label for of_sheet in copies for label in of_sheet], np.int64)
    width_A = width_Q[labels.sheet_T[added]].astype(np.float32)
    box_A4 = np.stack([_mirrored_box(labels.box_T4[label], w) for label, w in zip(added, width_A, strict=True)])
    polygons = [labels.polygon(label) for label in range(len(labels.sheet_T))]
    polygons += [
        np.stack((w - labels.polygon(label)[:, 0], labels.polygon(label)[:, 1]), axis=1)
        for label, w in zip(added, width_A, strict=True)
    ]
    sheet_T = np.concatenate((labels.sheet_T, labels.sheet_T[added]))
    order = np.argsort(sheet_T, kind="stable")
    return CanvasLabels(
        sheet_T[order],
        np.concatenate((labels.class_T, labels.class_T[added]))[order],
        np.concatenate((labels.box_T4, box_A4))[order],
        np.concatenate([polygons[label] for label in order]),
        offsets(np.array([len(polygons[label]) for label in order])),
    )


def _mirrored_box(box_4: np.ndarray, width: float) -> np.ndarray:
    return np.array([width - box_4[2], box_4[1], width - box_4[0], box_4[3]], np.float32)
