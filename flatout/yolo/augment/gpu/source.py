"""Sources for the device: workers draw parameters, and make the labels or defer them to the device.

The draws are those of `TrainingSource`, hence the samples are the same; a renderer on the device turns the parameters
into images. Nothing here loops over samples or labels, except for objects that are pasted or copied.

Dimension key:  M samples of a micro-batch   B samples of a batch   N images   Q canvases   9 tiles of a canvas at most
                T labels or targets   A samples that are pasted into   K objects   C columns of an object
                P polygon points
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError
from flatout.feed import Field, Fields, Out, Rows, StreamedItems, Substituted, Unreadable
from flatout.yolo.augment.draw import (
    NINE,
    AugmentConfig,
    ClassAware,
    color_fields,
    color_parameters,
    identity_draws,
    mosaic_draws,
    pick,
)
from flatout.yolo.augment.labels import (
    VisibleLabels,
    find_visible_labels,
    gather_labels,
    target_label_ids,
    to_targets,
    warp_labels,
)
from flatout.yolo.augment.layout import Canvases, lay_out, needs_all_tiles, without_invisible
from flatout.yolo.augment.paste import ENOUGH_OBJECTS, MIN_VALUES, PasteArea, copy_objects, fit_into, paste_all
from flatout.yolo.augment.samples import ImageSetSource, TrainingSourceBase, label_id_fields, write_letterboxed
from flatout.yolo.data.image_set import ImageSet, Labels

TILES = 2 * NINE
"""Tiles of a sample: nine of its own canvas and nine of the one mixed in."""

OBJECT_COLUMNS = 12
"""Columns of a pasted object: x, y, w, h in the output before flips; image; x, y of the image on its canvas; x, y, w, h
of the box that is cut out of that canvas; number of polygon points."""

IMAGE_COLUMN = 4
"""Column of the image number."""

SPAN_COLUMNS = 7
"""Columns of a copied object: mask, first point, number of points, box of its pixels x1, y1, x2, y2 (inclusive)."""


class PastePlan(NamedTuple):
    """The objects that are pasted into M samples, one sample after the other."""

    label_T5: list[np.ndarray]
    """All labels of each sample, pasted objects included."""
    object_KC: np.ndarray
    """int32 [K, OBJECT_COLUMNS]."""
    num_objects_M: np.ndarray
    point_P2: np.ndarray
    """int32: polygon points of all objects."""
    num_points_M: np.ndarray


def parameter_fields(*, expected_targets: float) -> Fields:
    """Fields of a sample for a renderer on the device: its geometry and targets, without its colours."""
    return {
        "items": Field((TILES,), np.int32),  # image numbers; any number where there is no tile
        "tiles": Field((TILES, 4), np.int32),  # x, y on the canvas, w, h there; w = 0 for no tile
        "num_tiles": Field((2,), np.int32),  # of each canvas; 0 for a canvas that does not exist
        "canvas": Field((2, 2), np.int32),  # w, h
        "inverse": Field((2, 3, 3), np.float64),  # output pixel to canvas pixel
        "mix": Field((), np.float64),
        "flip": Field((2,), np.bool_),  # up-down, left-right
        "targets": Rows(6, expected=expected_targets),
    }


class TargetRows(NamedTuple):
    """The targets of M samples, in the order of samples."""

    row_T6: np.ndarray
    """float32, see `to_targets`; int32 if some are deferred."""
    sample_T: np.ndarray
    """int64, ascending: number of the sample."""
    label_T1: np.ndarray
    """int32: number of each target's label in the data set; -1 for objects that are pasted or copied."""


NO_TARGETS = TargetRows(np.zeros((0, 6), np.float32), np.zeros(0, np.int64), np.zeros((0, 1), np.int32))


class ParameterSource(TrainingSourceBase):
    """Parameters and targets of training samples of `size` x `size` pixels; without mosaics, of their batch's shape."""

    def __init__(
        self,
        image_set: ImageSet,
        config: AugmentConfig,
        *,
        size: int,
        class_aware: ClassAware | None = None,
        out_wh_N2: np.ndarray | None = None,
        streamed: StreamedItems | None = None,
        defer_labels: bool = False,
        label_ids: bool = False,
    ) -> None:
        """`out_wh_N2`: width and height of the batch that each image is in, for rectangular batches.

        `streamed` writes the images that the device store does not keep. With `defer_labels` the device finishes the
        targets; only where `can_defer_labels` allows it. With `label_ids`, a field of this name has the number in the
        data set of each target's label.
        """
        super().__init__(image_set, config, size=size, class_aware=class_aware)
        if out_wh_N2 is not None and config.mosaic:
            raise ConfigError(f"Mosaics are square: use mosaic=0 with rectangular batches, not mosaic={config.mosaic}.")
        self._out_wh_N2 = out_wh_N2
        self.fields: Fields = {**parameter_fields(expected_targets=self.expected_targets), **color_fields(config)}
        self._defer_labels = defer_labels
        if defer_labels:
            assert can_defer_labels(image_set, config)
            self.fields = {**self.fields, **deferred_fields(expected_rows=self._expected_rows())}
        if label_ids:
            expected_rows = self._expected_rows() if defer_labels else self.expected_targets
            self.fields = {**self.fields, **label_id_fields(expected_rows)}
        has_polygons = len(image_set.labels.point_P2) > 0
        self._paste: PastePlanner | None = None
        if config.paste_in and has_polygons:
            self._paste = PastePlanner(labels=image_set.labels, wh_N2=self._wh_N2, size=size)
            self.fields = {**self.fields, **paste_fields(config.paste_in)}
        self._streamed = streamed
        if streamed is not None:
            # Tiles per sample: a single image or a mosaic of four, sometimes of nine, sometimes with a second one.
            per_sample = (1 + 3.5 * config.mosaic) * (1 + config.mixup) + 4 * config.paste_in * has_polygons
            self.fields = {**self.fields, **streamed.fields(per_sample)}
        self._copies = config.copy_paste > 0 and has_polygons
        if self._copies:
            self.fields = {**self.fields, **copy_fields(config.copy_paste)}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out_wh = _shape(self._out_wh_N2, indices, self._size)
        perspective = self._config.perspective > 0
        canvases = lay_out(draws, self._wh_N2, size=self._size, out_wh=out_wh)
        visible_in = None if needs_all_tiles(self._config, self._image_set.labels) else out_wh
        pasted = None
        if self._defer_labels:
            finished, deferred_canvases = NO_TARGETS, canvases
            if self._paste is not None:
                is_pasted_Q = draws["paste"][canvases.sample_Q]
                finished, pasted = self._finish_on_worker(canvases.select(is_pasted_Q), draws, out_wh, visible_in, out)
                deferred_canvases = canvases.select(~is_pasted_Q)
            rows = write_deferred(self._image_set.labels, deferred_canvases, finished, out, visible_in=visible_in)
        else:
            rows, pasted = self._finish_on_worker(canvases, draws, out_wh, visible_in, out)
        count_M = np.bincount(rows.sample_T, minlength=len(indices))
        out["targets"].put_all(rows.row_T6, count_M)
        if "label_ids" in self.fields:
            out["label_ids"].put_all(rows.label_T1, count_M)
        shown = canvases if visible_in is None else without_invisible(canvases, out_wh, draws.get("in_full"))
        write_parameters(shown, draws, out, perspective=perspective)
        for name, parameter_M in color_parameters(draws).items():
            out[name][:] = parameter_M
        if self._streamed is not None:
            write_streamed(self._streamed, shown, pasted, len(indices), out)

    def items_read(self, draws: Mapping[str, np.ndarray]) -> np.ndarray:
        """Numbers of the images that these samples are rendered from, or that the choice of substitutes depends on; in
        any order, with repeats."""
        tiles = draws["tiles"][self.tiles_read(draws)]
        if self._paste is not None:
            chosen = np.flatnonzero(draws["paste"])
            is_read_AR = self._paste.rounds_read(draws, chosen)
            tiles = np.concatenate((tiles, draws["paste_tiles"][chosen][is_read_AR].reshape(-1)))
        return np.asarray(tiles[tiles >= 0])

    def _finish_on_worker(
        self,
        canvases: Canvases,
        draws: Mapping[str, np.ndarray],
        out_wh: tuple[int, int],
        visible_in: tuple[int, int] | None,
        out: Out,
    ) -> tuple["TargetRows", PastePlan | None]:
        """Targets of the samples of these canvases, and what is pasted; writes pastes and copies to `out`."""
        num_samples = len(draws["flip"])
        labels = gather_labels(self._image_set.labels, canvases, visible_in=visible_in)
        if self._copies:
            labels, copied = copy_objects(labels, canvases, draws["copy_key"], self._config.copy_paste, pick)
            write_copies(canvases, copied, num_samples, out)
        warped = warp_labels(labels, canvases, out_wh=out_wh, perspective=self._config.perspective > 0)
        label_T5, sample_T = np.concatenate((warped.class_T[:, None], warped.box_T4), axis=1), warped.sample_T
        pasted = None
        if self._paste is not None:
            first_M = np.searchsorted(sample_T, np.arange(1, num_samples))
            pasted = self._paste.plan(draws, np.split(label_T5, first_M), out_wh)
            out["pasted"].put_all(pasted.object_KC, pasted.num_objects_M)
            out["outlines"].put_all(pasted.point_P2, pasted.num_points_M)
            label_T5 = np.concatenate(pasted.label_T5)
            sample_T = np.repeat(np.arange(num_samples), list(map(len, pasted.label_T5)))
        target_T6 = to_targets(sample_T, label_T5, out_wh, draws["flip"], first_row=out.first_row)
        label_T1 = target_label_ids(warped, np.bincount(sample_T, minlength=num_samples))
        return TargetRows(target_T6, sample_T, label_T1), pasted

    def _expected_rows(self) -> float:
        """Rows per sample with deferred labels. With perspective, all labels of its five tiles are listed."""
        if self._config.perspective == 0:
            return self.expected_targets
        return 2 + (1 + 4 * self._config.mosaic) * (1 + self._config.mixup) * self.labels_per_image


def can_defer_labels(image_set: ImageSet, config: AugmentConfig) -> bool:
    """Whether the device can finish the targets: there are polygons, and no label depends on another."""
    return len(image_set.labels.point_P2) > 0 and config.copy_paste == 0


class ValidationParameters(ImageSetSource):
    """Parameters and targets of validation samples: letterboxed to the shape of their batch, or to a square."""

    def __init__(
        self,
        image_set: ImageSet,
        *,
        size: int,
        out_wh_N2: np.ndarray | None = None,
        streamed: StreamedItems | None = None,
    ) -> None:
        """The images are resized for validation at `size`; the other arguments are those of `ParameterSource`."""
        super().__init__(image_set, size=size)
        self._out_wh_N2 = out_wh_N2
        self._streamed = streamed
        self.fields: Fields = {
            **parameter_fields(expected_targets=2 + 2 * self.labels_per_image),
            "shapes": Field((6,), np.float64),
            **(streamed.fields(1) if streamed is not None else {}),
        }

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return identity_draws(indices)

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        is_bad_M, shown_M = unreadable.among(indices), indices.copy()
        shown_M[is_bad_M] = unreadable.substitutes(np.flatnonzero(is_bad_M), indices[is_bad_M], unreadable.is_bad_N)
        return Substituted(shown_M, identity_draws(shown_M), is_bad_M)

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out_wh = _shape(self._out_wh_N2, indices, self._size)
        canvases = write_letterboxed(self._image_set, self._wh_N2, draws["tiles"][:, 0, 0], out_wh, out)
        write_parameters(canvases, draws, out, perspective=False)
        if self._streamed is not None:
            write_streamed(self._streamed, canvases, None, len(indices), out)


def write_parameters(
    canvases: Canvases, draws: Mapping[str, np.ndarray], out: Mapping[str, np.ndarray], *, perspective: bool
) -> None:
    """Write tiles, inverse matrices, mixing weights and flips of M samples into the arrays of `parameter_fields`.

    Unused entries become 0.
    """
    num_samples = len(draws["mix"])
    at = (canvases.sample_Q, canvases.layer_Q)
    has_tile_Q9 = canvases.image_Q9 >= 0
    for name in ("items", "tiles", "num_tiles", "canvas", "inverse"):
        out[name][:] = 0
    out["items"].reshape(num_samples, 2, NINE)[at] = np.where(has_tile_Q9, canvases.image_Q9, 0)
    tiles = out["tiles"].reshape(num_samples, 2, NINE, 4)
    tiles[at] = np.where(has_tile_Q9[..., None], np.concatenate((canvases.origin_Q92, canvases.size_Q92), 2), 0)
    out["num_tiles"][at] = canvases.kind_Q
    out["canvas"][at] = canvases.canvas_wh_Q2
    out["inverse"][at] = np.linalg.inv(canvases.matrix_Q33) if perspective else inverse_affine(canvases.matrix_Q33)
    out["mix"][:] = draws["mix"]
    out["flip"][:] = draws["flip"]


def inverse_affine(matrix_Q33: np.ndarray) -> np.ndarray:
    """Inverse matrices, computed in OpenCV's order of operations, since its rounding depends on the last bits."""
    (a, b, c), (d, e, f) = np.moveaxis(matrix_Q33[:, :2], 0, 2)
    determinant = a * e - b * d
    scale = np.divide(1.0, determinant, out=np.zeros_like(determinant), where=determinant != 0)
    a, b, d, e = e * scale, b * -scale, d * -scale, a * scale
    rows = np.array([[a, b, -a * c - b * f], [d, e, -d * c - e * f], [a * 0, a * 0, a * 0 + 1]])
    return np.ascontiguousarray(np.moveaxis(rows, 2, 0))


def write_streamed(
    streamed: StreamedItems, canvases: Canvases, pasted: PastePlan | None, num_samples: int, out: Out
) -> None:
    """Write the images of M samples that the device store does not keep."""
    is_shown_Q9 = canvases.image_Q9 >= 0
    numbers = [canvases.image_Q9[is_shown_Q9]]
    samples = [np.repeat(canvases.sample_Q, is_shown_Q9.sum(1))]
    if pasted is not None:
        numbers.append(pasted.object_KC[:, IMAGE_COLUMN])
        samples.append(np.repeat(np.arange(num_samples), pasted.num_objects_M))
    # A canvas has number 0 where it has no tile, so image 0 must be there.
    streamed.write(np.concatenate(numbers), np.concatenate(samples), num_samples, out, placeholder=0)


def _shape(out_wh_N2: np.ndarray | None, indices: np.ndarray, size: int) -> tuple[int, int]:
    """Width and height of the batch that these images are in."""
    return (size, size) if out_wh_N2 is None else (int(out_wh_N2[indices[0], 0]), int(out_wh_N2[indices[0], 1]))


# Objects to paste on the device: which ones, where to, and along which polygon they are cut out of their image.
#
# As `paint.paste_in` on the CPU, with the same draws, but without pixels: whether enough of an object is left is
# decided by the area of its polygon instead of by counting values.


def paste_fields(share: float) -> Fields:
    """Fields of the objects that are pasted into a fraction of the samples, and of their polygons."""
    return {
        "pasted": Rows(OBJECT_COLUMNS, np.int32, expected=1 + 8 * share),
        "outlines": Rows(2, np.int32, expected=16 + 300 * share),
    }


class CutObject(NamedTuple):
    """An object that may be pasted."""

    class_number: float
    image: int
    """Its number in the data set."""
    tile_xy: tuple[int, int]
    box_xywh: tuple[int, int, int, int]
    polygon_P2: np.ndarray
    """float32, canvas pixels."""


@dataclass(frozen=True, kw_only=True)
class PastePlanner:
    """Chooses objects from all images of a data set to paste into samples of `size` x `size` pixels."""

    labels: Labels
    wh_N2: np.ndarray
    size: int

    def plan(self, draws: Mapping[str, np.ndarray], label_T5: list[np.ndarray], out_wh: tuple[int, int]) -> PastePlan:
        """Plan the pastes into M samples with these labels (class, corners in pixels)."""
        chosen = np.flatnonzero(draws["paste"])
        cuts = dict(zip(chosen.tolist(), self._collect(draws, chosen), strict=True))
        objects: list[list[list[int]]] = [[] for _ in label_T5]
        points: list[list[np.ndarray]] = [[] for _ in label_T5]
        for m, own in cuts.items():
            paste = partial(_record_paste, own, objects[m], points[m])
            classes = [cut.class_number for cut in own]
            label_T5[m] = paste_all(out_wh, label_T5[m], classes, draws["paste_tries"][m], paste)
        return PastePlan(
            label_T5,
            np.array([row for of_sample in objects for row in of_sample], np.int32).reshape(-1, OBJECT_COLUMNS),
            np.array([len(of_sample) for of_sample in objects]),
            np.concatenate([np.zeros((0, 2), np.int32), *(each for of_sample in points for each in of_sample)]),
            np.array([sum(map(len, of_sample)) for of_sample in points]),
        )

    def _collect(self, draws: Mapping[str, np.ndarray], chosen: np.ndarray) -> list[list[CutObject]]:
        """Objects of one mosaic after the other, until there are enough; none if the first mosaic has none."""
        found: list[list[CutObject]] = [[] for _ in chosen]
        searching = np.arange(len(chosen))
        for round_number in range(draws["paste_tiles"].shape[1]):
            if not len(searching):
                break
            for own, cuts in zip(searching.tolist(), self._round(draws, chosen[searching], round_number), strict=True):
                found[own] += cuts
            searching = np.array([own for own in searching.tolist() if 0 < len(found[own]) < ENOUGH_OBJECTS], np.int64)
        return found

    def rounds_read(self, draws: Mapping[str, np.ndarray], chosen: np.ndarray) -> np.ndarray:
        """Which mosaics may be searched for objects to paste into the chosen samples, bool [A, R]: all that are, and
        perhaps more, since this only counts objects."""
        is_read_AR = np.zeros((len(chosen), draws["paste_tiles"].shape[1]), bool)
        searching, fewest_A = np.arange(len(chosen)), np.zeros(len(chosen), np.int64)
        for number in range(is_read_AR.shape[1]):
            if not len(searching):
                break
            is_read_AR[searching, number] = True
            canvases = self._mosaics(draws, chosen[searching], number)
            found = find_visible_labels(self.labels, canvases, visible_in=None, outlines=False)
            has_polygon_T = found.num_points_T > 0
            x1, y1, x2, y2 = self._whole_boxes(found.box_T4).T
            num_A, num_empty_A = (
                np.bincount(found.canvas_T[which_T], minlength=len(searching))
                for which_T in (has_polygon_T, has_polygon_T & ((x2 <= x1) | (y2 <= y1)))
            )
            picked_A = np.rint(0.5 * num_A).astype(np.int64)
            fewest_A[searching] += np.maximum(picked_A - num_empty_A, 0)
            # Nothing is found after a first mosaic without objects.
            searching = searching[(fewest_A[searching] < ENOUGH_OBJECTS) & ((number > 0) | (picked_A > 0))]
        return is_read_AR

    def _mosaics(self, draws: Mapping[str, np.ndarray], chosen: np.ndarray, number: int) -> Canvases:
        mosaics = mosaic_draws(draws["paste_tiles"][chosen, number], draws["paste_centre"][chosen, number])
        return lay_out(mosaics, self.wh_N2, size=self.size, out_wh=(1, 1))

    def _whole_boxes(self, box_T4: np.ndarray) -> np.ndarray:
        """Boxes in whole pixels, int64."""
        # Clipped to the last pixel, which is then left out, as on the CPU.
        return box_T4.clip(0, 2 * self.size - 1).astype(np.int64)

    def _round(self, draws: Mapping[str, np.ndarray], chosen: np.ndarray, number: int) -> list[list[CutObject]]:
        """Half of the objects with polygons of one mosaic, for each chosen sample."""
        num = len(chosen)
        canvases = self._mosaics(draws, chosen, number)
        labels = gather_labels(self.labels, canvases)
        assert labels.tile_T is not None  # gather_labels always sets it
        edges_A = np.searchsorted(labels.canvas_T, np.arange(num + 1))
        num_points_T = labels.num_points_T
        box_T4 = self._whole_boxes(labels.box_T4)
        cuts: list[list[CutObject]] = [[] for _ in range(num)]
        for a, key in enumerate(draws["paste_key"][chosen, number].tolist()):
            with_polygon = edges_A[a] + np.flatnonzero(num_points_T[edges_A[a] : edges_A[a + 1]])
            if not len(with_polygon):
                continue
            for label in with_polygon[pick(key, len(with_polygon), round(0.5 * len(with_polygon)))].tolist():
                x1, y1, x2, y2 = box_T4[label].tolist()
                if x2 <= x1 or y2 <= y1:
                    continue
                tile = labels.tile_T[label]
                x, y = canvases.origin_Q92[a, tile].tolist()
                image, box = int(canvases.image_Q9[a, tile]), (x1, y1, x2 - x1, y2 - y1)
                cuts[a].append(CutObject(float(labels.class_T[label]), image, (x, y), box, labels.polygon(label)))
        return cuts


def _record_paste(
    cuts: list[CutObject], objects: list[list[int]], points: list[np.ndarray], number: int, area: PasteArea
) -> tuple[int, int] | None:
    """Record an object that is pasted into a sample, and its polygon; its width and height there, None if too little is
    left of it."""
    cut = cuts[number]
    wh = fit_into(area, cut.box_xywh[2:])
    if wh is None:
        return None
    outline = cut.polygon_P2.astype(np.int32)
    # Times three, because the CPU counts values of all three channels.
    if 3 * _area(outline) * (wh[0] * wh[1]) / (cut.box_xywh[2] * cut.box_xywh[3]) <= MIN_VALUES:
        return None
    objects.append([*area[:2], *wh, cut.image, *cut.tile_xy, *cut.box_xywh, len(outline)])
    points.append(outline)
    return wh


def _area(point_P2: np.ndarray) -> float:
    x, y = point_P2.T.astype(np.float64)
    return float(abs(np.dot(x[1:], y[:-1]) + x[0] * y[-1] - np.dot(y[1:], x[:-1]) - y[0] * x[-1]) / 2)


# Objects copied on the device: mirrored within their mosaic, along the polygons that `paste.copy_objects` chooses.
#
# The mosaic itself never exists there. Instead there is a mask of its canvas, one byte per pixel, and a renderer that
# looks up a canvas pixel takes the mirrored one where the mask is set.


class CopyPlan(NamedTuple):
    """The copied objects of a batch, on the host."""

    span_K7: np.ndarray
    """int32; see SPAN_COLUMNS."""
    mask_of_B2: np.ndarray
    """int32: number of each canvas's mask, -1 where nothing is copied."""
    num_masks: int
    """One for each canvas with copies."""


def copy_fields(share: float) -> Fields:
    """Fields of copied objects (layer 0 or 1, number of points, box of its pixels), and their points on the canvas."""
    return {
        "copied": Rows(6, np.int32, expected=1 + 8 * share),
        "copy_points": Rows(2, np.int32, expected=16 + 300 * share),
    }


def write_copies(canvases: Canvases, copied: Sequence[Sequence[np.ndarray]], num_samples: int, out: Out) -> None:
    """Write the polygons to copy on each canvas, in canvas pixels, into the fields of `copy_fields`."""
    rows: list[list[int]] = []
    points = [np.zeros((0, 2), np.int32)]
    num_objects_M, num_points_M = np.zeros((2, num_samples), np.int64)
    is_second_Q = np.concatenate(([False], canvases.sample_Q[1:] == canvases.sample_Q[:-1])).astype(int).tolist()
    for q, (sample, layer) in enumerate(zip(canvases.sample_Q.tolist(), is_second_Q, strict=True)):
        last = canvases.canvas_wh_Q2[q] - 1
        for polygon in copied[q]:
            truncated = polygon.astype(np.int32)
            low, high = truncated.min(0), np.minimum(truncated.max(0), last)
            rows.append([layer, len(truncated), *low.tolist(), *high.tolist()])
            points.append(truncated)
            num_objects_M[sample] += 1
            num_points_M[sample] += len(truncated)
    out["copied"].put_all(np.array(rows, np.int32).reshape(-1, 6), num_objects_M)
    out["copy_points"].put_all(np.concatenate(points), num_points_M)


def plan_copies(copied_K6: np.ndarray, count_B: np.ndarray) -> CopyPlan:
    """Combine the fields of a whole batch, whose samples have `count_B` objects each."""
    sample_K = np.repeat(np.arange(len(count_B)), count_B)
    layer_K, num_points_K = copied_K6[:, 0], copied_K6[:, 1]
    with_copies, mask_K = np.unique(2 * sample_K + layer_K, return_inverse=True)
    mask_of_B2 = np.full(2 * len(count_B), -1, np.int32)
    mask_of_B2[with_copies] = np.arange(len(with_copies))
    first_point_K = np.cumsum(num_points_K) - num_points_K
    span_K7 = np.column_stack((mask_K, first_point_K, num_points_K, copied_K6[:, 2:])).astype(np.int32)
    return CopyPlan(span_K7, mask_of_B2.reshape(-1, 2), len(with_copies))


# Deferred labels: the device warps, clips and filters them, and makes them targets.
#
# A polygon has 1000 points along it, which would take most of a worker's time. So a worker only lists the labels that
# may be visible, with the tile of each; all polygon points of the data set are on the device. A row of the field
# `targets` is then one of two things, int32 [6]:
#
#     deferred  -1 - tile, number of the label in the data set, four zeros
#     finished  the bits of a target's six float32 numbers; the first, the number of an image, is never negative
#
# Tiles are numbered through the batch: 18 for each sample, nine of its own canvas and nine of the one mixed in. Samples
# that objects are pasted into are finished by the worker, which must know what a pasted object would cover; so are all
# samples with copy_paste.


def deferred_fields(*, expected_rows: float) -> Fields:
    """Fields that the device needs to finish a sample's labels, in addition to `parameter_fields`."""
    return {
        "targets": Rows(6, np.int32, expected=expected_rows),
        "label_tiles": Field((TILES, 4), np.float32),  # w, h, then x, y on the canvas; not rounded for single images
        "matrix": Field((2, 3, 3), np.float64),  # canvas pixel to output pixel
        "scale": Field((2,), np.float64),
        "by_polygons": Field((2,), np.bool_),  # whether a canvas has any polygon
    }


def write_deferred(
    labels: Labels, canvases: Canvases, finished: TargetRows, out: Out, *, visible_in: tuple[int, int] | None
) -> TargetRows:
    """The deferred labels of these canvases, among finished targets; writes to `out` what is needed to finish them.

    With `visible_in`, labels that do not reach an output of this width and height are left out; for affine warps.
    """
    found = find_visible_labels(labels, canvases, visible_in=visible_in)
    assert found.has_polygons_Q is not None  # nothing is deferred without polygons
    _write_geometry(canvases, found.has_polygons_Q, out)
    row_T6 = deferred_rows(found, canvases, first_row=out.first_row)
    sample_T = np.concatenate((canvases.sample_Q[found.canvas_T], finished.sample_T))
    order_T = np.argsort(sample_T, kind="stable")
    return TargetRows(
        np.concatenate((row_T6, finished.row_T6.view(np.int32)))[order_T],
        sample_T[order_T],
        np.concatenate((found.label_T[:, None].astype(np.int32), finished.label_T1))[order_T],
    )


def deferred_rows(found: VisibleLabels, canvases: Canvases, *, first_row: int) -> np.ndarray:
    """Rows of deferred labels, int32 [T, 6]; the micro-batch begins at row `first_row` of the batch."""
    row_T6 = np.zeros((len(found.label_T), 6), np.int32)
    first_tile_Q = (first_row + canvases.sample_Q) * TILES + canvases.layer_Q * NINE
    row_T6[:, 0] = -1 - first_tile_Q[found.canvas_T] - found.tile_T
    row_T6[:, 1] = found.label_T
    return row_T6


def _write_geometry(canvases: Canvases, has_polygons_Q: np.ndarray, out: Out) -> None:
    for name in ("label_tiles", "matrix", "scale", "by_polygons"):
        out[name][:] = 0
    at = (canvases.sample_Q, canvases.layer_Q)
    tiles_M294 = out["label_tiles"].reshape(-1, 2, NINE, 4)
    tiles_M294[at] = np.concatenate((canvases.label_size_Q92, canvases.label_origin_Q92), 2)
    out["matrix"][at] = canvases.matrix_Q33
    out["scale"][at] = canvases.scale_Q
    out["by_polygons"][at] = has_polygons_Q
