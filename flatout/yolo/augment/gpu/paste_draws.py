"""Objects to paste on the device: which ones, where to, and along which polygon they are cut out of their picture.

As `paste_in` on the CPU, with the same draws, but without a pixel: whether enough of an object is left is judged by the
area of its polygon instead of by counting values.

Dimension key:  M samples   A samples that are pasted into   R rounds   K objects   T labels
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flatout.feed import Fields, Out, Rows
from flatout.yolo.augment.draw import FOUR, pick
from flatout.yolo.augment.labels import gather_labels
from flatout.yolo.augment.layout import Sheets, lay_out
from flatout.yolo.augment.paste import ENOUGH, LEAST_VALUES, Space, fitted, paste_all
from flatout.yolo.data.image_set import Labels

OBJECT_COLUMNS = 12
"""x, y, w, h in the output before flips; picture; where the picture lies on its canvas, x, y; what is cut out of that
canvas, x, y, w, h; number of the polygon's points."""
PICTURE_COLUMN = 4


class Cut(NamedTuple):
    """An object that may be pasted."""

    class_number: float
    picture: int
    tile_xy: tuple[int, int]
    box_xywh: tuple[int, int, int, int]
    polygon_P2: np.ndarray
    """float32, canvas pixels."""


class Pasted(NamedTuple):
    """What is pasted into M samples, one after the other."""

    label_T5: list[np.ndarray]
    """Of each sample, all its labels."""
    object_KC: np.ndarray
    """int32 [K, OBJECT_COLUMNS]."""
    num_objects_M: np.ndarray
    point_P2: np.ndarray
    """int32: points of all objects."""
    num_points_M: np.ndarray


@dataclass(frozen=True, kw_only=True)
class DevicePaste:
    """Plans pastes into samples of `size` pixels from all pictures of a data set."""

    labels: Labels
    wh_N2: np.ndarray
    size: int

    def plan(self, draws: Mapping[str, np.ndarray], label_T5: list[np.ndarray], out_wh: tuple[int, int]) -> Pasted:
        """For M samples with these labels (class, corners in pixels)."""
        chosen = np.flatnonzero(draws["paste"])
        cuts = dict(zip(chosen.tolist(), self._collect(draws, chosen), strict=True))
        objects: list[list[list[int]]] = [[] for _ in label_T5]
        points: list[list[np.ndarray]] = [[] for _ in label_T5]
        for m, own in cuts.items():
            placing = _Placing(own, objects[m], points[m])
            classes = [cut.class_number for cut in own]
            label_T5[m] = paste_all(out_wh, label_T5[m], classes, draws["paste_tries"][m], placing)
        return Pasted(
            label_T5,
            np.array([row for of_sample in objects for row in of_sample], np.int32).reshape(-1, OBJECT_COLUMNS),
            np.array([len(of_sample) for of_sample in objects]),
            np.concatenate([np.zeros((0, 2), np.int32), *(each for of_sample in points for each in of_sample)]),
            np.array([sum(map(len, of_sample)) for of_sample in points]),
        )

    def _collect(self, draws: Mapping[str, np.ndarray], chosen: np.ndarray) -> list[list[Cut]]:
        """Objects of one mosaic after the other, until there are enough, or none at all."""
        found: list[list[Cut]] = [[] for _ in chosen]
        searching = np.arange(len(chosen))
        for round_number in range(draws["paste_tiles"].shape[1]):
            if not len(searching):
                break
            for own, cuts in zip(searching.tolist(), self._round(draws, chosen[searching], round_number), strict=True):
                found[own] += cuts
            searching = np.array([own for own in searching.tolist() if 0 < len(found[own]) < ENOUGH], np.int64)
        return found

    def _round(self, draws: Mapping[str, np.ndarray], chosen: np.ndarray, number: int) -> list[list[Cut]]:
        """Half of the objects with polygons of one mosaic for each sample."""
        num = len(chosen)
        tiles_A19 = np.full((num, 1, 9), -1)
        tiles_A19[:, 0, :4] = draws["paste_tiles"][chosen, number]
        mosaics = {
            "kind": np.full((num, 1), FOUR),
            "tiles": tiles_A19,
            "centre": draws["paste_centre"][chosen, number][:, None],
            "warp": np.zeros((num, 1, 8)),
            "aspect": np.ones((num, 1)),
        }
        sheets = lay_out(mosaics, self.wh_N2, size=self.size, out_wh=(1, 1))
        labels = gather_labels(self.labels, sheets)
        assert labels.tile_T is not None  # gathered, not made up
        edges_A = np.searchsorted(labels.sheet_T, np.arange(num + 1))
        num_points_T = labels.num_points_T
        # Up to the last pixel, which is then left out, as on the CPU.
        box_T4 = labels.box_T4.clip(0, 2 * self.size - 1).astype(np.int64)
        cuts: list[list[Cut]] = [[] for _ in range(num)]
        for a, key in enumerate(draws["paste_key"][chosen, number].tolist()):
            with_polygon = edges_A[a] + np.flatnonzero(num_points_T[edges_A[a] : edges_A[a + 1]])
            if not len(with_polygon):
                continue
            for label in with_polygon[pick(key, len(with_polygon), round(0.5 * len(with_polygon)))].tolist():
                x1, y1, x2, y2 = box_T4[label].tolist()
                if x2 <= x1 or y2 <= y1:
                    continue
                tile = labels.tile_T[label]
                x, y = sheets.origin_Q92[a, tile].tolist()
                picture, box = int(sheets.picture_Q9[a, tile]), (x1, y1, x2 - x1, y2 - y1)
                cuts[a].append(Cut(float(labels.class_T[label]), picture, (x, y), box, labels.polygon(label)))
        return cuts


class _Placing:
    """Writes down every object that is pasted into a sample."""

    def __init__(self, cuts: list[Cut], objects: list[list[int]], points: list[np.ndarray]) -> None:
        self._cuts = cuts
        self._objects = objects
        self._points = points

    def __call__(self, number: int, space: Space) -> tuple[int, int] | None:
        cut = self._cuts[number]
        wh = fitted(space, cut.box_xywh[2:])
        if wh is None:
            return None
        points = cut.polygon_P2.astype(np.int32)
        # In all three channels, as values are counted on the CPU.
        if 3 * _area(points) * (wh[0] * wh[1]) / (cut.box_xywh[2] * cut.box_xywh[3]) <= LEAST_VALUES:
            return None
        self._objects.append([*space[:2], *wh, cut.picture, *cut.tile_xy, *cut.box_xywh, len(points)])
        self._points.append(points)
        return wh


def _area(point_P2: np.ndarray) -> float:
    x, y = point_P2.T.astype(np.float64)
    return float(abs(np.dot(x[1:], y[:-1]) + x[0] * y[-1] - np.dot(y[1:], x[:-1]) - y[0] * x[-1]) / 2)


# Objects copied on the device: mirrored within their mosaic, along the polygons that `copy_paste` chooses.
#
# The mosaic itself is never made there. What is copied is a mask of its canvas, one byte per pixel, and a renderer
# that looks up a canvas pixel takes the mirrored one where the mask says so.
#
# Dimension key:  M samples   Q sheets   K objects   P points   J masks, one per sheet with copies   B samples of a
# batch

SPAN_COLUMNS = 7
"""Of an object: mask, first point, number of points, box of its pixels x1, y1, x2, y2, both ends included."""


class CopyPlan(NamedTuple):
    """The copies of a batch, on the host."""

    span_K7: np.ndarray
    """int32, SPAN_COLUMNS."""
    mask_of_B2: np.ndarray
    """int32: number of the mask of each sheet, -1 where nothing is copied."""
    num_masks: int


def copy_fields(share: float) -> Fields:
    """Objects of a sample (sheet 0 or 1, number of points, box of its pixels), and their points on the canvas."""
    return {
        "copied": Rows(6, np.int32, expected=1 + 8 * share),
        "copy_points": Rows(2, np.int32, expected=16 + 300 * share),
    }


def write_copies(sheets: Sheets, copied: Sequence[Sequence[np.ndarray]], num_samples: int, out: Out) -> None:
    """The polygons of every sheet, in canvas pixels, into the fields of `copy_fields`."""
    rows: list[list[int]] = []
    points = [np.zeros((0, 2), np.int32)]
    num_objects_M, num_points_M = np.zeros((2, num_samples), np.int64)
    is_second_Q = np.concatenate(([False], sheets.sample_Q[1:] == sheets.sample_Q[:-1])).astype(int).tolist()
    for q, (sample, slot) in enumerate(zip(sheets.sample_Q.tolist(), is_second_Q, strict=True)):
        most = sheets.canvas_Q2[q] - 1
        for polygon in copied[q]:
            whole = polygon.astype(np.int32)
            low, high = whole.min(0), np.minimum(whole.max(0), most)
            rows.append([slot, len(whole), *low.tolist(), *high.tolist()])
            points.append(whole)
            num_objects_M[sample] += 1
            num_points_M[sample] += len(whole)
    out["copied"].put_all(np.array(rows, np.int32).reshape(-1, 6), num_objects_M)
    out["copy_points"].put_all(np.concatenate(points), num_points_M)


def plan_copies(copied_K6: np.ndarray, count_B: np.ndarray) -> CopyPlan:
    """Of a whole batch, whose samples have `count_B` objects each."""
    sample_K = np.repeat(np.arange(len(count_B)), count_B)
    slot_K, num_points_K = copied_K6[:, 0], copied_K6[:, 1]
    sheets, mask_K = np.unique(2 * sample_K + slot_K, return_inverse=True)
    mask_of_B2 = np.full(2 * len(count_B), -1, np.int32)
    mask_of_B2[sheets] = np.arange(len(sheets))
    first_point_K = np.cumsum(num_points_K) - num_points_K
    span_K7 = np.column_stack((mask_K, first_point_K, num_points_K, copied_K6[:, 2:])).astype(np.int32)
    return CopyPlan(span_K7, mask_of_B2.reshape(-1, 2), len(sheets))
