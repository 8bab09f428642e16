"""Detections as label files, one per picture: `--save-txt`, `--save-conf`.

Dimension key:  D detections   n of one picture
"""

from pathlib import Path, PurePath

import torch

from flatout.engine.checkpoint.atomic import write_error
from flatout.yolo.boxes import xyxy_to_cxcywh
from flatout.yolo.nms import Detections
from flatout.yolo.validation_input import ValidationBatch


class TxtLabels:
    """Writes `class cx cy w h [score]` per detection, the surest first, divided by the size of the picture.

    A file is appended to; a picture without detections gets none.
    """

    def __init__(self, folder: Path, *, scores: bool) -> None:
        self._folder = folder
        self._scores = scores
        self.num_files = 0
        folder.mkdir(parents=True, exist_ok=True)

    def watch(self, batch: ValidationBatch, found: Detections, native: Detections) -> None:
        """One batch; boxes in pixels of the pictures."""
        native_wh_D2 = batch.letterbox.native_wh_B2[native.image_D]
        box_D4 = xyxy_to_cxcywh(native.box_D4) / native_wh_D2.repeat(1, 2)
        columns = [native.row_D6[:, 5:], box_D4, *([native.row_D6[:, 4:5]] if self._scores else [])]
        table = native._replace(row_D6=torch.cat(columns, 1)).per_image()
        for path, row_n in zip(batch.paths, table, strict=True):
            if len(row_n):
                self._append(PurePath(path).stem, row_n.tolist())

    def _append(self, stem: str, rows: list[list[float]]) -> None:
        path = self._folder / f"{stem}.txt"
        text = "".join(" ".join(f"{number:g}" for number in row) + "\n" for row in rows)
        try:
            with path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise write_error(error, path, len(text)) from error
        self.num_files += 1
