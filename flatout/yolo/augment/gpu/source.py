"""Samples for the device: workers draw numbers, and make labels or leave them open for the device to finish.

The same draws as `TrainingSource`, hence the same samples; a renderer on the device turns the parameters into pictures.
Nothing here loops over samples or labels, but for objects that are pasted or copied.

Dimension key:  M samples   N pictures   Q sheets   18 tiles of a sample's two sheets, nine each
"""

from collections.abc import Mapping

import numpy as np

from flatout.errors import ConfigError
from flatout.feed import Bringing, Field, Fields, Out, Rows, Substituted, Unreadable
from flatout.yolo.augment.color import color_fields, color_parameters
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.draw import NINE, ClassAware, pick, undrawn
from flatout.yolo.augment.gpu.paste_draws import (
    OBJECT_COLUMNS,
    PICTURE_COLUMN,
    DevicePaste,
    Pasted,
    copy_fields,
    write_copies,
)
from flatout.yolo.augment.labels import Candidates, gather_labels, list_candidates, to_targets
from flatout.yolo.augment.layout import Sheets, lay_out, needs_all_tiles, resized_wh, without_unseen
from flatout.yolo.augment.paste import copy_objects
from flatout.yolo.augment.sample_draws import DrawnSet, write_shown
from flatout.yolo.augment.warp_labels import warp_labels
from flatout.yolo.data.image_set import ImageSet, Labels

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
        bringing: Bringing | None = None,
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
        bringing: Bringing | None = None,
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


def bring(bringing: Bringing, sheets: Sheets, pasted: Pasted | None, num_samples: int, out: Out) -> None:
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
