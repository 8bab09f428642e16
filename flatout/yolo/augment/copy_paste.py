"""Objects with polygons, mirrored and pasted into the same mosaic: which ones, and with what labels.

Dimension key:  Q sheets   T labels
"""

from collections.abc import Callable, Sequence

import numpy as np

from flatout.yolo.augment.canvas_labels import CanvasLabels, offsets
from flatout.yolo.augment.layout import Sheets
from flatout.yolo.augment.paste_plan import MOST_COVERED, covered_share

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
