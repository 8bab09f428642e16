"""Samples for the device: workers draw numbers, and make labels or leave them open for the device to finish.

The same draws as `TrainingSource`, hence the same samples; a renderer on the device turns the parameters into pictures.
Nothing here loops over samples or labels, but for objects that are pasted or copied.

Dimension key:  M samples   N pictures   Q sheets   18 tiles of a sample's two sheets, nine each

Objects to paste on the device: which ones, where to, and along which polygon they are cut out of their picture.

As `paste_in` on the CPU, with the same draws, but without a pixel: whether enough of an object is left is judged by the
area of its polygon instead of by counting values.

Dimension key:  M samples   A samples that are pasted into   R rounds   K objects   T labels
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError
from flatout.feed import Field, Fields, Out, Rows, StreamedItems, Substituted, Unreadable
from flatout.yolo.augment.draw import (
    FOUR,
    NINE,
    AugmentConfig,
    ClassAware,
    color_fields,
    color_parameters,
    pick,
    undrawn,
)
from flatout.yolo.augment.labels import Candidates, gather_labels, list_candidates, to_targets, warp_labels
from flatout.yolo.augment.layout import Sheets, lay_out, needs_all_tiles, resized_wh, without_unseen
from flatout.yolo.augment.paste import ENOUGH, LEAST_VALUES, Space, copy_objects, fitted, paste_all
from flatout.yolo.augment.samples import DrawnSet, write_shown
from flatout.yolo.data.image_set import ImageSet, Labels

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


# Labels that a worker leaves open: the device warps, clips and judges them, and makes targets of them.
#
# Polygons are judged by 1000 points each. A worker that does it is busy with little else, so it only says for every
# label that may be seen which one it is and where its picture lies; all the points of the data set are on the device.
# A row of the field `targets` is then one of two things, int32 [6]:
#
#     open      -1 - place, number of the label in the data set, four zeros
#     finished  the bits of a target's six float32 numbers; the first, the number of an image, is never negative
#
# A place is a tile of a batch: 18 for each sample, nine of its own sheet and nine of the one mixed in. Samples that
# objects are pasted into are finished by the worker, which must know what a pasted object would cover; so are all
# samples with copy_paste.
#
# Dimension key:  M samples   Q sheets   T labels

TILES = 2 * NINE


def open_fields(*, expected_rows: float) -> Fields:
    """What the device must know of a sample to finish its labels, beside its layout."""
    return {
        "targets": Rows(6, np.int32, expected=expected_rows),
        "label_tiles": Field((TILES, 4), np.float32),  # w, h, then x, y on the canvas; not rounded for single pictures
        "matrix": Field((2, 3, 3), np.float64),  # canvas pixel to output pixel
        "scale": Field((2,), np.float64),
        "by_polygons": Field((2,), np.bool_),  # of each sheet
    }


def write_open(
    labels: Labels, sheets: Sheets, finished_T6: np.ndarray, out: Out, *, seen_in: tuple[int, int] | None
) -> None:
    """Write the labels of these sheets, and what is needed to finish them, among the finished targets of other samples.

    With `seen_in` labels are left out that do not reach an output of this width and height; for affine warps.
    """
    found = list_candidates(labels, sheets, seen_in=seen_in)
    assert found.has_polygons_Q is not None  # nothing is left open without polygons
    _write_geometry(sheets, found.has_polygons_Q, out)
    row_T6 = open_rows(found, sheets, first_row=out.first_row)
    sample_T = sheets.sample_Q[found.sheet_T]
    if len(finished_T6):
        sample_T = np.concatenate((sample_T, finished_T6[:, 0].astype(np.int64) - out.first_row))
        row_T6 = np.concatenate((row_T6, finished_T6.view(np.int32)))[np.argsort(sample_T, kind="stable")]
    out["targets"].put_all(row_T6, np.bincount(sample_T, minlength=len(out["matrix"])))


def open_rows(found: Candidates, sheets: Sheets, *, first_row: int) -> np.ndarray:
    """int32 [T, 6]; the first sample of the micro-batch is in row `first_row` of the batch."""
    row_T6 = np.zeros((len(found.label_T), 6), np.int32)
    place_Q = (first_row + sheets.sample_Q) * TILES + sheets.slot_Q * NINE
    row_T6[:, 0] = -1 - place_Q[found.sheet_T] - found.tile_T
    row_T6[:, 1] = found.label_T
    return row_T6


def _write_geometry(sheets: Sheets, has_polygons_Q: np.ndarray, out: Out) -> None:
    for name in ("label_tiles", "matrix", "scale", "by_polygons"):
        out[name][:] = 0
    place = (sheets.sample_Q, sheets.slot_Q)
    tiles_M294 = out["label_tiles"].reshape(-1, 2, NINE, 4)
    tiles_M294[place] = np.concatenate((sheets.label_size_Q92, sheets.label_origin_Q92), 2)
    out["matrix"][place] = sheets.matrix_Q33
    out["scale"][place] = sheets.scale_Q
    out["by_polygons"][place] = has_polygons_Q


def parameter_fields(*, expected_targets: float) -> Fields:
    """What a renderer on the device needs to know of a sample but for its colours, and its targets."""
    return {
        "items": Field((TILES,), np.int32),  # picture numbers; any where there is no tile
        "tiles": Field((TILES, 4), np.int32),  # x, y on the canvas, w, h there; w = 0 for no tile
        "num_tiles": Field((2,), np.int32),  # of each sheet; 0 for a sheet that is not there
        "canvas": Field((2, 2), np.int32),  # w, h
        "inverse": Field((2, 3, 3), np.float64),  # output pixel to canvas pixel
        "mix": Field((), np.float64),
        "flip": Field((2,), np.bool_),  # up-down, left-right
        "targets": Rows(6, expected=expected_targets),
    }


def paste_fields(share: float) -> Fields:
    """The objects that are pasted into a share of the samples, and their polygons (see `device_paste`)."""
    return {
        "pasted": Rows(OBJECT_COLUMNS, np.int32, expected=1 + 8 * share),
        "outlines": Rows(2, np.int32, expected=16 + 300 * share),
    }


class ParameterSource(DrawnSet):
    """Parameters and targets of samples of `size` x `size` pixels, or of each picture's own shape without mosaics."""

    def __init__(
        self,
        image_set: ImageSet,
        config: AugmentConfig,
        *,
        size: int,
        class_aware: ClassAware | None = None,
        out_wh_N2: np.ndarray | None = None,
        bringing: StreamedItems | None = None,
        opens_labels: bool = False,
    ) -> None:
        """`out_wh_N2`: width and height of the batch that each picture is in, for rectangular batches.

        `bringing` writes the pictures that the device store does not keep. With `opens_labels` targets are left for the
        device to finish (see `can_open`); not for data sets and settings that `can_open` refuses.
        """
        super().__init__(image_set, config, size=size, class_aware=class_aware)
        if out_wh_N2 is not None and config.mosaic:
            raise ConfigError(f"A mosaic is square: use mosaic=0 with rectangular batches, not mosaic={config.mosaic}.")
        self._out_wh_N2 = out_wh_N2
        self.fields: Fields = {**parameter_fields(expected_targets=self.expected_targets), **color_fields(config)}
        self._opens_labels = opens_labels
        if opens_labels:
            assert can_open(image_set, config)
            self.fields = {**self.fields, **open_fields(expected_rows=self._expected_rows())}
        has_polygons = len(image_set.labels.point_P2) > 0
        self._paste: DevicePaste | None = None
        if config.paste_in and has_polygons:
            self._paste = DevicePaste(labels=image_set.labels, wh_N2=self._wh_N2, size=size)
            self.fields = {**self.fields, **paste_fields(config.paste_in)}
        self._bringing = bringing
        if bringing is not None:
            # A single picture or a mosaic of four, and now and then a second one, or one of nine.
            per_sample = (1 + 3.5 * config.mosaic) * (1 + config.mixup) + 4 * config.paste_in * has_polygons
            self.fields = {**self.fields, **bringing.fields(per_sample)}
        self._copies = config.copy_paste > 0 and has_polygons
        if self._copies:
            self.fields = {**self.fields, **copy_fields(config.copy_paste)}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out_wh = _shape(self._out_wh_N2, indices, self._size)
        perspective = self._config.perspective > 0
        sheets = lay_out(draws, self._wh_N2, size=self._size, out_wh=out_wh)
        seen_in = None if needs_all_tiles(self._config, self._image_set.labels) else out_wh
        pasted = None
        if self._opens_labels:
            targets_T6, open_sheets = np.zeros((0, 6), np.float32), sheets
            if self._paste is not None:
                is_pasted_Q = draws["paste"][sheets.sample_Q]
                targets_T6, pasted = self._finished(sheets.taken(is_pasted_Q), draws, out_wh, seen_in, out)
                open_sheets = sheets.taken(~is_pasted_Q)
            write_open(self._image_set.labels, open_sheets, targets_T6, out, seen_in=seen_in)
        else:
            targets_T6, pasted = self._finished(sheets, draws, out_wh, seen_in, out)
            sample_T = targets_T6[:, 0].astype(np.int64) - out.first_row
            out["targets"].put_all(targets_T6, np.bincount(sample_T, minlength=len(indices)))
        shown = sheets if seen_in is None else without_unseen(sheets, out_wh, draws.get("in_full"))
        write_parameters(shown, draws, out, perspective=perspective)
        for name, parameter_M in color_parameters(draws).items():
            out[name][:] = parameter_M
        if self._bringing is not None:
            bring(self._bringing, shown, pasted, len(indices), out)

    def _finished(
        self,
        sheets: Sheets,
        draws: Mapping[str, np.ndarray],
        out_wh: tuple[int, int],
        seen_in: tuple[int, int] | None,
        out: Out,
    ) -> tuple[np.ndarray, Pasted | None]:
        """Targets [T, 6] of the samples of these sheets, and what is pasted; objects that move are written to `out`."""
        num_samples = len(draws["flip"])
        labels = gather_labels(self._image_set.labels, sheets, seen_in=seen_in)
        if self._copies:
            labels, copied = copy_objects(labels, sheets, draws["copy_key"], self._config.copy_paste, pick)
            write_copies(sheets, copied, num_samples, out)
        warped = warp_labels(labels, sheets, out_wh=out_wh, perspective=self._config.perspective > 0)
        label_T5, sample_T = np.concatenate((warped.class_T[:, None], warped.box_T4), axis=1), warped.sample_T
        pasted = None
        if self._paste is not None:
            first_M = np.searchsorted(sample_T, np.arange(1, num_samples))
            pasted = self._paste.plan(draws, np.split(label_T5, first_M), out_wh)
            out["pasted"].put_all(pasted.object_KC, pasted.num_objects_M)
            out["outlines"].put_all(pasted.point_P2, pasted.num_points_M)
            label_T5 = np.concatenate(pasted.label_T5)
            sample_T = np.repeat(np.arange(num_samples), list(map(len, pasted.label_T5)))
        return to_targets(sample_T, label_T5, out_wh, draws["flip"], first_row=out.first_row), pasted

    def _expected_rows(self) -> float:
        """Of a sample whose labels are left open. Where the warp tilts, all labels of its five tiles may be seen."""
        if self._config.perspective == 0:
            return self.expected_targets
        per_picture = len(self._image_set.labels.class_box_T5) / max(1, len(self))
        return 2 + (1 + 4 * self._config.mosaic) * (1 + self._config.mixup) * per_picture


def can_open(image_set: ImageSet, config: AugmentConfig) -> bool:
    """Whether targets can be left for the device to finish: there are polygons, and no label depends on another."""
    return len(image_set.labels.point_P2) > 0 and config.copy_paste == 0


class ValidationParameters:
    """Samples as they are, letterboxed to the shape of the batch that each picture is in, or to a square."""

    def __init__(
        self,
        image_set: ImageSet,
        *,
        size: int,
        out_wh_N2: np.ndarray | None = None,
        bringing: StreamedItems | None = None,
    ) -> None:
        """The pictures are kept as for validation at `size`; the rest as for `ParameterSource`."""
        self._image_set = image_set
        self._size = size
        self._wh_N2 = resized_wh(image_set.size_wh_N2, size)
        self._out_wh_N2 = out_wh_N2
        per_picture = len(image_set.labels.class_box_T5) / max(1, len(image_set))
        shapes: Fields = {"shapes": Field((6,), np.float64)}
        self._bringing = bringing
        brought: Fields = bringing.fields(1) if bringing is not None else {}
        self.fields = {**parameter_fields(expected_targets=2 + 2 * per_picture), **shapes, **brought}

    def __len__(self) -> int:
        return len(self._image_set)

    def where(self, index: int) -> str:
        return self._image_set.paths[index]

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return undrawn(indices)

    @property
    def num_items(self) -> int:
        return len(self)

    def where_item(self, item: int) -> str:
        return self.where(item)

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        is_bad_M, shown_M = unreadable.among(indices), indices.copy()
        shown_M[is_bad_M] = unreadable.stand_ins(np.flatnonzero(is_bad_M), indices[is_bad_M], unreadable.is_bad_N)
        return Substituted(shown_M, undrawn(shown_M), is_bad_M)

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out_wh = _shape(self._out_wh_N2, indices, self._size)
        sheets = write_shown(self._image_set, self._wh_N2, draws["tiles"][:, 0, 0], out_wh, out)
        write_parameters(sheets, draws, out, perspective=False)
        if self._bringing is not None:
            bring(self._bringing, sheets, None, len(indices), out)


def bring(bringing: StreamedItems, sheets: Sheets, pasted: Pasted | None, num_samples: int, out: Out) -> None:
    """Write the pictures of M samples that the device store does not keep."""
    is_shown_Q9 = sheets.picture_Q9 >= 0
    numbers = [sheets.picture_Q9[is_shown_Q9]]
    samples = [np.repeat(sheets.sample_Q, is_shown_Q9.sum(1))]
    if pasted is not None:
        numbers.append(pasted.object_KC[:, PICTURE_COLUMN])
        samples.append(np.repeat(np.arange(num_samples), pasted.num_objects_M))
    # Picture 0 stands where a sheet has no tile, so it must be there.
    bringing.write(np.concatenate(numbers), np.concatenate(samples), num_samples, out, placeholder=0)


def _shape(out_wh_N2: np.ndarray | None, indices: np.ndarray, size: int) -> tuple[int, int]:
    """Width and height of the batch that these pictures are in."""
    return (size, size) if out_wh_N2 is None else (int(out_wh_N2[indices[0], 0]), int(out_wh_N2[indices[0], 1]))


def write_parameters(
    sheets: Sheets, draws: Mapping[str, np.ndarray], out: Mapping[str, np.ndarray], *, perspective: bool
) -> None:
    """Geometry of M samples into arrays [M, ...], by the names of the fields."""
    num_samples = len(draws["mix"])
    place = (sheets.sample_Q, sheets.slot_Q)
    has_tile_Q9 = sheets.picture_Q9 >= 0
    for name in ("items", "tiles", "num_tiles", "canvas", "inverse"):
        out[name][:] = 0
    out["items"].reshape(num_samples, 2, NINE)[place] = np.where(has_tile_Q9, sheets.picture_Q9, 0)
    tiles = out["tiles"].reshape(num_samples, 2, NINE, 4)
    tiles[place] = np.where(has_tile_Q9[..., None], np.concatenate((sheets.origin_Q92, sheets.size_Q92), 2), 0)
    out["num_tiles"][place] = sheets.kind_Q
    out["canvas"][place] = sheets.canvas_Q2
    out["inverse"][place] = np.linalg.inv(sheets.matrix_Q33) if perspective else inverse_affine(sheets.matrix_Q33)
    out["mix"][:] = draws["mix"]
    out["flip"][:] = draws["flip"]


def inverse_affine(matrix_Q33: np.ndarray) -> np.ndarray:
    """Inverse matrices, in the order of operations that OpenCV uses: its rounding depends on the last bits."""
    (a, b, c), (d, e, f) = np.moveaxis(matrix_Q33[:, :2], 0, 2)
    determinant = a * e - b * d
    scale = np.divide(1.0, determinant, out=np.zeros_like(determinant), where=determinant != 0)
    a, b, d, e = e * scale, b * -scale, d * -scale, a * scale
    rows = np.array([[a, b, -a * c - b * f], [d, e, -d * c - e * f], [a * 0, a * 0, a * 0 + 1]])
    return np.ascontiguousarray(np.moveaxis(rows, 2, 0))
