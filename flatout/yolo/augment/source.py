"""Samples for training and validation, as the feed reads them.

Dimension key:  M samples of a micro-batch   n labels of a picture
"""

from collections.abc import Callable, Mapping
from typing import Literal

import cv2
import numpy as np

from flatout.errors import ConfigError
from flatout.feed import Field, Fields, Out, Rows
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.draw import PLAIN, ClassAware
from flatout.yolo.augment.layout import as_scanned, fit_all, resized_wh
from flatout.yolo.augment.paint import Classic, Fast, Painter
from flatout.yolo.augment.paint_compiled import fastest_painter, library
from flatout.yolo.augment.render import Pictures, Renderer
from flatout.yolo.augment.sample_draws import DrawnSet, shape_rows, write_shown
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import PADDING

PAINTERS: Mapping[str, Callable[[], Painter]] = {"classic": Classic, "fast": fastest_painter, "opencv": Fast}
"""The same bytes in any case; "opencv" is what "fast" is where nothing can be compiled."""


def sample_fields(height: int, width: int, *, expected_targets: float) -> Fields:
    """What a sample of the detection job consists of; the feed adds counts, indices and positions."""
    return {
        "images": Field((3, height, width)),
        # Number of the image in its batch, class, cx, cy, w, h.
        "targets": Rows(6, expected=expected_targets),
        # Height and width of the file, ratios h and w, padding x and y: where a picture lies. Zeros for a mosaic.
        "shapes": Field((6,), np.float64),
    }


class TrainingSource(DrawnSet):
    """Augmented samples of `size` x `size` pixels; without mosaic also of the shape that the plan gives a step."""

    def __init__(
        self,
        image_set: ImageSet,
        pictures: Pictures,
        config: AugmentConfig,
        *,
        size: int,
        painter: Literal["classic", "fast", "opencv"] = "fast",
        class_aware: ClassAware | None = None,
    ) -> None:
        """`pictures` are decoded and resized for training at `size` (flatout.yolo.data.letterbox, augment=True)."""
        super().__init__(image_set, config, size=size, class_aware=class_aware)
        if painter not in PAINTERS:
            raise ConfigError(f"painter={painter!r} is unknown: use {' or '.join(map(repr, PAINTERS))}.")
        # Here, where it is said once, and compiled before workers ask for it.
        self._painter = "opencv" if painter == "fast" and library() is None else painter
        self._pictures = pictures
        self._renderer: Renderer | None = None
        self.fields = sample_fields(size, size, expected_targets=self.expected_targets)

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        if self._renderer is None:
            self._renderer = self._make_renderer()
        images_MCHW, shapes_M6 = out["images"], out["shapes"]
        targets = self._renderer.render(draws, images_MCHW, out.fetch, first_row=out.first_row)
        out["targets"].put_all(*targets)
        shapes_M6[:] = 0
        plain = draws["kind"][:, 0] == PLAIN
        shown = draws["tiles"][plain, 0, 0]
        wh_M2 = self._wh_N2[shown]
        pad_M2 = fit_all(wh_M2, np.array(images_MCHW.shape[:1:-1]), enlarge=True)[2]
        shapes_M6[plain] = shape_rows(self._image_set.size_wh_N2[shown], wh_M2, pad_M2)

    def _make_renderer(self) -> Renderer:
        """In the process that reads: a painter's buffers are its own."""
        return Renderer(
            pictures=self._pictures,
            size_wh_N2=self._image_set.size_wh_N2,
            labels=self._image_set.labels,
            config=self._config,
            size=self._size,
            painter=PAINTERS[self._painter](),
        )

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_renderer": None}


class ValidationSource:
    """Samples as they are, letterboxed to the shape that the plan gives a step (see flatout.yolo.data.letterbox)."""

    def __init__(
        self, image_set: ImageSet, pictures: Pictures, *, size: int, largest_hw: tuple[int, int] | None = None
    ) -> None:
        """`pictures` are resized for validation at `size`; `largest_hw` is the largest shape of any step."""
        self._image_set = image_set
        self._pictures = pictures
        self._wh_N2 = resized_wh(image_set.size_wh_N2, size)
        per_picture = len(image_set.labels.class_box_T5) / max(1, len(image_set))
        self.fields = sample_fields(*(largest_hw or (size, size)), expected_targets=2 + 2 * per_picture)

    def __len__(self) -> int:
        return len(self._image_set)

    def where(self, index: int) -> str:
        return self._image_set.paths[index]

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        images_MCHW = out["images"]
        out_wh = (images_MCHW.shape[3], images_MCHW.shape[2])
        sheets = write_shown(self._image_set, self._wh_N2, indices, out_wh, out)
        boxes = zip(sheets.origin_Q92[:, 0].tolist(), sheets.size_Q92[:, 0].tolist(), strict=True)
        for m, ((left, top), (width, height)) in enumerate(boxes):
            out.reading(m)
            image = as_scanned(self._pictures[int(indices[m])], self._wh_N2[indices[m]])
            if image.shape[1::-1] != (width, height):
                image = np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR))
            images_MCHW[m] = PADDING
            images_MCHW[m, :, top : top + height, left : left + width] = image[..., ::-1].transpose(2, 0, 1)
