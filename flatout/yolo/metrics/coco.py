"""Detections in the format of the COCO API: what is written to `*_predictions.json`, and what its evaluators read.

Dimension key:  D detections
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from flatout.errors import DataError
from flatout.yolo.nms.detections import Detections

COCO_CATEGORY_IDS = (
    *range(1, 12),
    *range(13, 26),
    *range(27, 29),
    *range(31, 45),
    *range(46, 66),
    67,
    70,
    *range(72, 83),
    *range(84, 91),
)
"""Class 0..79 -> COCO's own number, which runs to 90 with gaps."""


def image_id_of(path: str | PurePath) -> int | str:
    """The number in a picture's name, else its name without ending."""
    stem = PurePath(path).stem
    return int(stem) if stem.isnumeric() else stem


class CocoPicture(NamedTuple):
    """A picture as an annotation file knows it."""

    image_id: int | str
    scale_x: float = 1.0
    """From pixels of the picture to pixels of the annotations: they differ for a copy of another size."""
    scale_y: float = 1.0


class CocoExport:
    """Collects detections batch by batch; the copy to the host happens at the end."""

    def __init__(
        self, category_ids: Sequence[int] | None = None, pictures: Mapping[str, CocoPicture] | None = None
    ) -> None:
        """`category_ids` translates classes (COCO_CATEGORY_IDS for COCO); without, a class is its own number.

        `pictures` says by path what an annotation file calls each picture; without, `image_id_of` its name does.
        """
        self._category_ids = category_ids
        self._known = pictures
        self._batches: list[Detections] = []
        self._pictures: list[CocoPicture] = []

    def add(self, found: Detections, paths: Sequence[str | PurePath]) -> None:
        """A batch of detections in picture pixels (as `Evaluator.update` returns them), and its pictures."""
        if len(paths) != found.num_images:
            raise DataError(f"{len(paths)} paths for {found.num_images} images: give the path of every image.")
        self._batches.append(found._replace(image_D=found.image_D + len(self._pictures)))
        self._pictures += [self._known[str(path)] if self._known else CocoPicture(image_id_of(path)) for path in paths]

    @property
    def image_ids(self) -> list[int | str]:
        """Of all pictures so far, also of those where nothing was found."""
        return [picture.image_id for picture in self._pictures]

    def records(self) -> list[Mapping[str, Any]]:
        """One {image_id, category_id, bbox, score} per detection; bbox is x, y, w, h to 3 decimals, score to 5."""
        image_D, category_D, box_D4, score_D = self._columns()
        image_ids = [self._pictures[number].image_id for number in image_D.tolist()]
        columns = zip(image_ids, category_D.tolist(), box_D4.tolist(), score_D.tolist(), strict=True)
        names = ("image_id", "category_id", "bbox", "score")
        return [dict(zip(names, column, strict=True)) for column in columns]

    def table(self) -> np.ndarray:
        """The same numbers as float64 [D, 7]: image_id, x, y, w, h, score, category_id, as evaluators take them."""
        image_D, category_D, box_D4, score_D = self._columns()
        names = sorted(name for name in self.image_ids if isinstance(name, str))
        if names:
            raise DataError(
                f'The picture "{names[0]}" has no number in its name, and evaluators know pictures by number: take the '
                "numbers from an annotation file that names it."
            )
        image_id_D = np.array(self.image_ids, np.float64)[image_D]
        return np.column_stack((image_id_D, box_D4, score_D, category_D))

    def write(self, path: Path) -> None:
        """The records as a JSON list."""
        path.write_text(json.dumps(self.records()))

    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Image number, category, box x y w h, score; rounded."""
        if not self._batches:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0)
        row_D6 = torch.cat([batch.row_D6 for batch in self._batches]).cpu().numpy()
        image_D = torch.cat([batch.image_D for batch in self._batches]).cpu().numpy()
        category_D = row_D6[:, 5].astype(np.int64)
        if self._category_ids is not None:
            category_D = np.array(self._category_ids)[category_D]
        box_D4 = np.concatenate((row_D6[:, :2], row_D6[:, 2:4] - row_D6[:, :2]), axis=1).astype(np.float64)
        scale_N2 = np.array([(picture.scale_x, picture.scale_y) for picture in self._pictures])
        box_D4 *= np.tile(scale_N2[image_D], 2)
        return image_D, category_D, box_D4.round(3), row_D6[:, 4].astype(np.float64).round(5)
