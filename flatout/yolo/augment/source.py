"""Samples for training and validation, as the feed reads them.

Dimension key:  M samples of a micro-batch   n labels of a picture
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from flatout.errors import ConfigError
from flatout.feed.source import Field, Fields, Out, Rows
from flatout.yolo.augment.class_aware import ClassAware
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.draw import PLAIN, draw_training
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.augment.paint import Classic, Painter
from flatout.yolo.augment.paint_fast import Fast
from flatout.yolo.augment.render import Pictures, Renderer, as_scanned
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import Fit, fit, letterbox

PAINTERS: Mapping[str, type[Painter]] = {"classic": Classic, "fast": Fast}


def sample_fields(height: int, width: int, *, expected_targets: float) -> Fields:
    """What a sample of the detection job consists of; the feed adds counts, indices and positions."""
    return {
        "images": Field((3, height, width)),
        # Number of the image in its batch (see targets.py), class, cx, cy, w, h.
        "targets": Rows(6, expected=expected_targets),
        # Height and width of the file, ratios h and w, padding x and y: where a picture lies. Zeros for a mosaic.
        "shapes": Field((6,), np.float64),
    }


class TrainingSource:
    """Augmented samples of `size` x `size` pixels; without mosaic also of the shape that the plan gives a step."""

    def __init__(
        self,
        image_set: ImageSet,
        pictures: Pictures,
        config: AugmentConfig,
        *,
        size: int,
        painter: Literal["classic", "fast"] = "fast",
        class_aware: ClassAware | None = None,
    ) -> None:
        """`pictures` are decoded and resized for training at `size` (flatout.yolo.data.resize, augment=True)."""
        if size < 2 or size % 2:
            raise ConfigError(f"size={size} must be even: a mosaic is cut off by half of it on every side.")
        if painter not in PAINTERS:
            raise ConfigError(f"painter={painter!r} is unknown: use {' or '.join(map(repr, PAINTERS))}.")
        self._image_set = image_set
        self._config = config
        self._class_aware = class_aware
        self._size = size
        self._painter = painter
        self._pictures = pictures
        self._renderer: Renderer | None = None
        self._wh_N2 = resized_wh(image_set.size_wh_N2, size)
        per_picture = len(image_set.labels.class_box_T5) / max(1, len(image_set))
        # A mosaic shows about the area of two pictures of four or nine; a plan that is too small only grows.
        self.fields = sample_fields(size, size, expected_targets=2 + 3 * per_picture)

    def __len__(self) -> int:
        return len(self._image_set)

    def where(self, index: int) -> str:
        return self._image_set.paths[index]

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return draw_training(
            self._config,
            num_pictures=len(self),
            size=self._size,
            seed=seed,
            epoch=epoch,
            positions_M=positions,
            indices_M=indices,
            class_aware=self._class_aware,
        )

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        if self._renderer is None:
            self._renderer = self._make_renderer()
        images_MCHW, targets, shapes_M6 = out["images"], out["targets"], out["shapes"]
        for m, label_T5 in enumerate(self._renderer.render(draws, images_MCHW, out.reading)):
            targets.put(m, np.pad(label_T5, ((0, 0), (1, 0))))
        shapes_M6[:] = 0
        for m in np.flatnonzero(draws["kind"][:, 0] == PLAIN).tolist():
            wh, native_wh = self._wh_N2[indices[m]], self._image_set.size_wh_N2[indices[m]]
            shapes_M6[m] = shape_row(native_wh, wh, _fit_into(wh, images_MCHW, enlarge=True))

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
    """Samples as they are, letterboxed to the shape that the plan gives a step (see flatout.yolo.data.rect)."""

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
        images_MCHW, targets, shapes_M6 = out["images"], out["targets"], out["shapes"]
        for m, index in enumerate(indices.tolist()):
            out.reading(m)
            wh = self._wh_N2[index]
            box = _fit_into(wh, images_MCHW, enlarge=False)
            image = letterbox(as_scanned(self._pictures[index], wh), box)
            images_MCHW[m] = image[..., ::-1].transpose(2, 0, 1)
            targets.put(m, _letterboxed(self._image_set.labels.of(index), wh, box, images_MCHW.shape[:1:-1]))
            shapes_M6[m] = shape_row(self._image_set.size_wh_N2[index], wh, box)


def shape_row(native_wh: np.ndarray, wh: np.ndarray, box: Fit) -> tuple[float, ...]:
    """h0, w0, h / h0, w / w0, padding x, padding y."""
    return (*native_wh[::-1].tolist(), *(wh / native_wh)[::-1].tolist(), *box.pad_wh)


def _fit_into(wh: np.ndarray, images_MCHW: np.ndarray, *, enlarge: bool) -> Fit:
    height, width = images_MCHW.shape[2:]
    return fit((int(wh[1]), int(wh[0])), (height, width), enlarge=enlarge)


def _letterboxed(class_box_n5: np.ndarray, wh: np.ndarray, box: Fit, out_wh: tuple[int, ...]) -> np.ndarray:
    """Targets [n, 6] of a picture that is only letterboxed; nothing is clipped or left out."""
    scale_2 = (wh * box.ratio_wh).astype(np.float32)
    centre_n2, half_n2 = class_box_n5[:, 1:3], class_box_n5[:, 3:5] / 2
    pad_2 = np.array(box.pad_wh, np.float32)
    # By way of the corners, as in YOLOv7: the rounding is part of its numbers.
    low_n2, high_n2 = scale_2 * (centre_n2 - half_n2) + pad_2, scale_2 * (centre_n2 + half_n2) + pad_2
    size_2 = np.array(out_wh, np.float32)
    parts = (class_box_n5[:, :1] * 0, class_box_n5[:, :1], (low_n2 + high_n2) / 2 / size_2, (high_n2 - low_n2) / size_2)
    return np.concatenate(parts, axis=1)
