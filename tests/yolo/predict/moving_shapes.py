"""Generated scenes of moving shapes that cross and hide each other, and IDF1, the score of their tracks.

Dimension key:  F frames   S shapes   H W image
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import cv2
import numpy as np
from scipy.optimize import linear_sum_assignment

from flatout.yolo.predict.files import Origin
from flatout.yolo.predict.result import Boxes, Result

SIZE_WH = 480, 320
NAMES = ("disc", "square")


class Scene(NamedTuple):
    """Rendered frames, and where every shape truly is."""

    images: list[np.ndarray]
    label_maps: list[np.ndarray]
    """int64 [H, W] per frame: the number of the shape that is in front, from 1; 0 for the background."""
    box_FS4: np.ndarray
    """True corners in pixels of the whole shape, also of what is hidden."""
    visible_FS: np.ndarray
    """Visible part of each shape, 0 to 1."""
    class_S: np.ndarray


@cache
def make_scene(seed: int, *, shapes: int = 6, frames: int = 120) -> Scene:
    """Shapes that cross the image in straight lines, one half from left to right, the other from right to left."""
    draws = np.random.default_rng(seed)
    width, height = SIZE_WH
    radius_S = draws.uniform(16, 26, shapes)
    starts_left_S = np.arange(shapes) % 2 == 0
    x_S2 = np.where(starts_left_S[:, None], [40, width - 40], [width - 40, 40])
    y_S2 = np.stack([draws.permutation(np.linspace(40, height - 40, shapes)) for _ in range(2)], 1)
    class_S = draws.integers(0, len(NAMES), shapes)
    color_S3 = draws.integers(60, 256, (shapes, 3))
    images, label_maps, boxes = [], [], np.zeros((frames, shapes, 4), np.float32)
    for frame, t in enumerate(np.linspace(0, 1, frames)):
        image, labels = np.zeros((height, width, 3), np.uint8), np.zeros((height, width), np.int32)
        for shape in range(shapes):
            x, y, r = x_S2[shape] @ [1 - t, t], y_S2[shape] @ [1 - t, t], radius_S[shape]
            boxes[frame, shape] = x - r, y - r, x + r, y + r
            for canvas, ink in ((image, color_S3[shape].tolist()), (labels, shape + 1)):
                _plot(canvas, class_S[shape], (x, y), r, ink)
        images.append(image)
        label_maps.append(labels)
    return Scene(images, label_maps, boxes, _visible(label_maps, boxes, class_S), class_S)


def _visible(label_maps: Sequence[np.ndarray], box_FS4: np.ndarray, class_S: np.ndarray) -> np.ndarray:
    pixels_FS = np.stack([np.bincount(labels.ravel(), minlength=len(class_S) + 1)[1:] for labels in label_maps])
    whole_FS = (box_FS4[..., 2:] - box_FS4[..., :2]).prod(-1) * np.where(class_S == 0, np.pi / 4, 1.0)
    return np.minimum(1.0, pixels_FS / whole_FS)


def _plot(canvas: np.ndarray, kind: int, centre: tuple[float, float], radius: float, ink: Any) -> None:
    x, y, r = round(centre[0]), round(centre[1]), round(radius)
    if NAMES[kind] == "disc":
        cv2.circle(canvas, (x, y), r, ink, cv2.FILLED)
    else:
        cv2.rectangle(canvas, (x - r, y - r), (x + r, y + r), ink, cv2.FILLED)


def crossings(scene: Scene) -> int:
    """Number of pairs of shapes that overlap by more than a third of their union in some frame."""
    most_SS = np.max([ious(box_S4, box_S4) for box_S4 in scene.box_FS4], 0)
    return int((np.triu(most_SS, 1) > 1 / 3).sum())


LEAST_VISIBLE = 0.25
"""What is hidden more than this is neither found nor counted, as in data sets for tracking."""


def detections(scene: Scene, seed: int, *, whole: bool = True) -> list[Result]:
    """What a plausible detector finds in the scene.

    Boxes are off by a pixel, and by more where a part is hidden; scores fall with what is hidden, 3 % are missed, and
    sometimes there is a false box. `whole`: the detector has learned from labels of whole shapes, as those of flatout's
    demo data are; else its boxes end where another shape begins.
    """
    draws = np.random.default_rng(seed)
    results = []
    for frame, (image, labels) in enumerate(zip(scene.images, scene.label_maps, strict=True)):
        rows = []
        for shape, kind in enumerate(scene.class_S):
            visible = scene.visible_FS[frame, shape]
            if visible < LEAST_VISIBLE or draws.random() < 0.03:
                continue
            y, x = np.nonzero(labels == shape + 1)
            corners = scene.box_FS4[frame, shape] if whole else np.array([x.min(), y.min(), x.max() + 1, y.max() + 1])
            corners = corners + draws.normal(0, 1 + 5 * (1 - visible) if whole else 1, 4)
            rows.append([*corners, 0.9 * visible + draws.uniform(-0.05, 0.05), kind])
        if draws.random() < 0.1:
            corner = draws.uniform(0, 280, 2)
            rows.append([*corner, *(corner + 30), draws.uniform(0.1, 0.3), 0])
        results.append(_result(np.array(rows).reshape(-1, 6), image, frame))
    return results


def _result(row_n6: np.ndarray, image: np.ndarray, frame: int) -> Result:
    row_n6 = row_n6[np.argsort(-row_n6[:, 4])].astype(np.float32)
    return Result(
        boxes=Boxes(row_n6[:, :4], (image.shape[0], image.shape[1])),
        scores=row_n6[:, 4],
        classes=row_n6[:, 5].astype(np.int64),
        names=NAMES,
        image=image,
        origin=Origin("scene.mp4", "video", 0, 1, frame=frame + 1),
    )


def ious(one_N4: np.ndarray, other_M4: np.ndarray) -> np.ndarray:
    """IoU of every pair, [N, M]."""
    low_NM2 = np.maximum(one_N4[:, None, :2], other_M4[None, :, :2])
    high_NM2 = np.minimum(one_N4[:, None, 2:], other_M4[None, :, 2:])
    inside_NM = np.maximum(high_NM2 - low_NM2, 0).prod(-1)
    area_N, area_M = ((each[:, 2:] - each[:, :2]).prod(-1) for each in (one_N4, other_M4))
    return inside_NM / (area_N[:, None] + area_M[None] - inside_NM)


def idf1(
    truth: Sequence[dict[int, np.ndarray]], found: Sequence[dict[int, np.ndarray]], *, least: float = 0.5
) -> float:
    """IDF1 (Ristani et al. 2016): 2 IDTP / (true boxes + found boxes), of boxes by id, frame by frame.

    IDTP is the number of frames in which a true track and the found track that is assigned to it overlap by an IoU of
    `least`; of all one-to-one assignments of whole tracks, the best one counts.
    """
    hits: Counter[tuple[int, int]] = Counter()
    for true_boxes, found_boxes in zip(truth, found, strict=True):
        if true_boxes and found_boxes:
            table = ious(np.stack(list(true_boxes.values())), np.stack(list(found_boxes.values())))
            pairs = product(true_boxes, found_boxes)
            hits.update(pair for pair, overlap in zip(pairs, table.ravel(), strict=True) if overlap >= least)
    true_ids, found_ids = (sorted({each for boxes in frames for each in boxes}) for frames in (truth, found))
    table = np.array([[hits[one, other] for other in found_ids] for one in true_ids]).reshape(len(true_ids), -1)
    rows, columns = linear_sum_assignment(table, maximize=True)
    num_boxes = sum(len(boxes) for frames in (truth, found) for boxes in frames)
    return 2 * float(table[rows, columns].sum()) / num_boxes


def by_id(results: Sequence[Result]) -> list[dict[int, np.ndarray]]:
    """The boxes of each frame by their ids, without those that have none."""
    return [
        {number: box for number, box in zip(np.array(each.ids).tolist(), each.boxes.xyxy, strict=True) if number > 0}
        for each in results
    ]


def true_by_id(scene: Scene) -> list[dict[int, np.ndarray]]:
    """The boxes of each frame by the numbers of their shapes, without those that are hidden."""
    return [
        {shape: box for shape, box in enumerate(box_S4) if visible_S[shape] >= LEAST_VISIBLE}
        for box_S4, visible_S in zip(scene.box_FS4, scene.visible_FS, strict=True)
    ]
