"""Labels that a worker leaves open: the device warps, clips and judges them, and makes targets of them.

Polygons are judged by 1000 points each. A worker that does it is busy with little else, so it only says for every label
that may be seen which one it is and where its picture lies; all the points of the data set are on the device. A row of
the field `targets` is then one of two things, int32 [6]:

    open      -1 - place, number of the label in the data set, four zeros
    finished  the bits of a target's six float32 numbers; the first, the number of an image, is never negative

A place is a tile of a batch: 18 for each sample, nine of its own sheet and nine of the one mixed in. Samples that
objects are pasted into are finished by the worker, which must know what a pasted object would cover; so are all
samples with copy_paste.

Dimension key:  M samples   Q sheets   T labels
"""

import numpy as np

from flatout.feed.source import Field, Fields, Out, Rows
from flatout.yolo.augment.canvas_labels import Candidates, list_candidates
from flatout.yolo.augment.draw import NINE
from flatout.yolo.augment.layout import Sheets
from flatout.yolo.data.image_set import Labels

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
