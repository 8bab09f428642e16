"""Aligns one image file to another, and plots the shifts that were found.

target, reference --align--> <reference>_aligned.png, <reference>_shifts.png

Dimension key:  C planes   H W image   G K blocks, rows and columns   2 (x, y)
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.defect.compare.align import AlignConfig, Alignment, align
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.pairs import read_planes
from flatout.defect.plots import grey_png, shifts_png
from flatout.errors import DataError
from flatout.feed import DecodeError


class AlignedFiles(NamedTuple):
    """What was found, and the files that were written."""

    alignment: Alignment
    difference_before: float
    """Mean absolute difference in grey levels, where the reference is known."""
    difference_after: float
    aligned: Path
    plot: Path

    def lines(self) -> list[str]:
        """The result in words."""
        shift_GK2 = self.alignment.shift_GK2
        length_GK = np.hypot(shift_GK2[..., 0], shift_GK2[..., 1])
        x, y = np.median(shift_GK2.reshape(-1, 2), 0)
        return [
            f"shifts: median {x:+.2f} px in x and {y:+.2f} px in y; 95 % of the blocks by at most "
            f"{np.quantile(length_GK, 0.95):.2f} px, all by at most {length_GK.max():.2f} px",
            f"mean difference: {self.difference_before:.2f} grey levels before, {self.difference_after:.2f} after",
            f"mean confidence: {self.alignment.confidence_GK.mean():.2f}",
            f"written: {self.aligned} and {self.plot}",
        ]


def align_files(target: Path, reference: Path, folder: Path, config: AlignConfig | None = None) -> AlignedFiles:
    """Align and write both files; DataError if the images cannot be used, ResourceError if nothing can be written."""
    try:
        planes_CHW = read_planes(EvaluationImage(target, None, is_good=False, references=(reference,)))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}.") from None
    except DecodeError as error:
        raise DataError(str(error)) from None
    target_HW, reference_HW, _ = planes_CHW
    found = align(target_HW, reference_HW, config)
    aligned, plot = folder / f"{reference.stem}_aligned.png", folder / f"{reference.stem}_shifts.png"
    grey_png(np.rint(found.reference_HW), aligned)
    shifts_png(target_HW, reference_HW, found, plot)
    inside = found.inside_HW
    before, after = (
        float(np.abs(target_HW - plane_HW)[inside].mean()) if inside.any() else 0.0
        for plane_HW in (reference_HW, found.reference_HW)
    )
    return AlignedFiles(found, before, after, aligned, plot)
