"""Training samples for the device: workers draw numbers and make labels, the pixels stay where they are.

The same draws as `TrainingSource`, hence the same samples; `render_torch` turns the parameters into pictures.

Dimension key:  M samples   18 tiles of a sample's two sheets, nine each   V the 256 values of a byte
"""

from collections.abc import Mapping

import numpy as np

from flatout.errors import ConfigError
from flatout.feed.source import Field, Fields, Out, Rows
from flatout.yolo.augment.canvas_labels import gather_labels
from flatout.yolo.augment.class_aware import ClassAware
from flatout.yolo.augment.color import colors
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.draw import NINE, draw_training
from flatout.yolo.augment.layout import Sheets, lay_out, resized_wh
from flatout.yolo.augment.targets import to_targets
from flatout.yolo.augment.warp_labels import warp_labels
from flatout.yolo.data.image_set import ImageSet

TILES = 2 * NINE


def parameter_fields(*, expected_targets: float) -> Fields:
    """What a renderer on the device needs to know of a sample, and its targets."""
    return {
        "items": Field((TILES,), np.int64),  # picture numbers; any where there is no tile
        "tiles": Field((TILES, 4), np.int32),  # x, y on the canvas, w, h there; w = 0 for no tile
        "canvas": Field((2, 2), np.int32),  # w, h; 0 for a sheet that is not there
        "inverse": Field((2, 3, 3), np.float64),  # output pixel to canvas pixel
        "mix": Field((), np.float64),
        "tables": Field((3, 256)),
        "flip": Field((2,), np.bool_),  # up-down, left-right
        "targets": Rows(6, expected=expected_targets),
    }


class ParameterSource:
    """Parameters and targets of samples of `size` x `size` pixels."""

    def __init__(
        self, image_set: ImageSet, config: AugmentConfig, *, size: int, class_aware: ClassAware | None = None
    ) -> None:
        has_polygons = len(image_set.labels.point_P2) > 0
        for name in ("copy_paste", "paste_in"):
            if getattr(config, name) and has_polygons:
                raise ConfigError(
                    f"{name}={getattr(config, name)} cannot be rendered on the device: it cuts objects out along their "
                    f"polygons. Use {name}=0, or the CPU path."
                )
        if size < 2 or size % 2:
            raise ConfigError(f"size={size} must be even: a mosaic is cut off by half of it on every side.")
        self._image_set = image_set
        self._config = config
        self._class_aware = class_aware
        self._size = size
        self._wh_N2 = resized_wh(image_set.size_wh_N2, size)
        per_picture = len(image_set.labels.class_box_T5) / max(1, len(image_set))
        self.fields = parameter_fields(expected_targets=2 + 3 * per_picture)

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
        out_wh = (self._size, self._size)
        sheets = lay_out(draws, self._wh_N2, size=self._size, out_wh=out_wh)
        labels = gather_labels(self._image_set.labels, sheets)
        perspective = self._config.perspective > 0
        warped = warp_labels(labels, sheets, out_wh=out_wh, perspective=perspective)
        label_T5 = np.concatenate((warped.class_T[:, None], warped.box_T4), axis=1)
        of_samples = np.split(label_T5, np.searchsorted(warped.sample_T, np.arange(1, len(indices))))
        for m, (own_T5, flip_2) in enumerate(zip(of_samples, draws["flip"], strict=True)):
            out["targets"].put(m, np.pad(to_targets(own_T5, out_wh, flip_2), ((0, 0), (1, 0))))
        for name, array in parameters_of(sheets, draws, perspective=perspective).items():
            out[name][:] = array


def parameters_of(sheets: Sheets, draws: Mapping[str, np.ndarray], *, perspective: bool) -> dict[str, np.ndarray]:
    """Geometry and colours of M samples as arrays [M, ...], by the names of the fields."""
    num_samples = len(draws["mix"])
    slot_Q = np.concatenate(([0], (sheets.sample_Q[1:] == sheets.sample_Q[:-1]).astype(np.int64)))
    place = (sheets.sample_Q, slot_Q)
    items, tiles = np.zeros((num_samples, 2, NINE), np.int64), np.zeros((num_samples, 2, NINE, 4), np.int32)
    canvas, inverse = np.zeros((num_samples, 2, 2), np.int32), np.zeros((num_samples, 2, 3, 3))
    has_tile_Q9 = sheets.picture_Q9 >= 0
    items[place] = np.where(has_tile_Q9, sheets.picture_Q9, 0)
    tiles[place] = np.where(has_tile_Q9[..., None], np.concatenate((sheets.origin_Q92, sheets.size_Q92), 2), 0)
    canvas[place] = sheets.canvas_Q2
    inverse[place] = np.linalg.inv(sheets.matrix_Q33) if perspective else inverse_affine(sheets.matrix_Q33)
    return {
        "items": items.reshape(num_samples, TILES),
        "tiles": tiles.reshape(num_samples, TILES, 4),
        "canvas": canvas,
        "inverse": inverse,
        "mix": draws["mix"],
        "tables": colors(draws["hsv"]).table_3V,
        "flip": draws["flip"],
    }


def inverse_affine(matrix_Q33: np.ndarray) -> np.ndarray:
    """Inverse matrices, in the order of operations that OpenCV uses: its rounding depends on the last bits."""
    (a, b, c), (d, e, f) = np.moveaxis(matrix_Q33[:, :2], 0, 2)
    determinant = a * e - b * d
    scale = np.divide(1.0, determinant, out=np.zeros_like(determinant), where=determinant != 0)
    a, b, d, e = e * scale, b * -scale, d * -scale, a * scale
    rows = np.array([[a, b, -a * c - b * f], [d, e, -d * c - e * f], [a * 0, a * 0, a * 0 + 1]])
    return np.ascontiguousarray(np.moveaxis(rows, 2, 0))
