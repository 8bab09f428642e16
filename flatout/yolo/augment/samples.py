"""Pictures of a data set, decoded and resized: what a store keeps, and what sources read.

A data set whose training samples are drawn: what the sources of the CPU and of the device have in common.

Dimension key:  M samples   N pictures   K tiles that are replaced   R rounds of collecting objects to paste
"""

from collections.abc import Mapping

import numpy as np

from flatout.clock import clock
from flatout.errors import ConfigError
from flatout.feed import Out, Substituted, Unreadable
from flatout.images import read_usable
from flatout.yolo.augment.draw import AugmentConfig, ClassAware, draw_training, redrawn_warps, undrawn
from flatout.yolo.augment.labels import gather_labels, to_targets
from flatout.yolo.augment.layout import Sheets, are_seen, lay_out, needs_all_tiles, resized_wh
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import resize_long_side, resize_part


class ResizedImages:
    """Items of a `flatout.feed.Store`: uint8 [h, w, 3], BGR, longer side `size`.

    Open a store with them and give it to a source, or give them to it directly: then every visit decodes.
    """

    store_kind = "ResizedPictures"
    """The former name of this class, which is part of the keys of existing stores."""

    def __init__(self, image_set: ImageSet, *, size: int, augment: bool, shrunk: bool = False) -> None:
        """`shrunk`: JPEG files are decoded at a half, a quarter or an eighth, where that is not below `size`.

        That is faster and smoother than decoding all of it and picking pixels, but not YOLOv7's pixels
        (bench/augment_shrunk.py): for training only, and only for those who ask for speed.
        """
        assert augment or not shrunk
        self._paths = image_set.paths
        self._size = size
        self._augment = augment
        self._at_least_px = size if shrunk else 0

    @property
    def parameters(self) -> str:
        import cv2

        shrunk = ", decoded small" if self._at_least_px else ""
        return f"BGR, longest side {self._size}, augment {self._augment}, OpenCV {cv2.__version__}, version 1{shrunk}"

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.decode(index)

    def path(self, index: int) -> str:
        return self._paths[index]

    def where(self, index: int) -> str:
        return self._paths[index]

    def decode(self, index: int) -> np.ndarray:
        with clock.stage("decode"):
            picture = read_usable(self._paths[index], at_least_px=self._at_least_px)
        with clock.stage("resize"):
            width, height = picture.header.size_wh
            if picture.image.shape[:2] != (height, width):
                return resize_part(picture.image, (height, width), self._size)
            return resize_long_side(picture.image, self._size, augment=self._augment).image


class DrawnSet:
    """Samples of `size` x `size` pixels by number: how many, where each is from, and what is drawn for it."""

    def __init__(
        self, image_set: ImageSet, config: AugmentConfig, *, size: int, class_aware: ClassAware | None = None
    ) -> None:
        if size < 2 or size % 2:
            raise ConfigError(f"size={size} must be even: a mosaic is cut off by half of it on every side.")
        self._image_set = image_set
        self._config = config
        self._class_aware = class_aware
        self._size = size
        self._wh_N2 = resized_wh(image_set.size_wh_N2, size)

    @property
    def num_items(self) -> int:
        return len(self)

    @property
    def expected_targets(self) -> float:
        """Of a sample. A mosaic shows about the area of two pictures of four or nine; too small a plan only grows."""
        return 2 + 3 * len(self._image_set.labels.class_box_T5) / max(1, len(self))

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

    def where_item(self, item: int) -> str:
        return self.where(item)

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        """Draws with other pictures in place of unreadable ones, labels included; all other numbers stay.

        A sample is changed if a tile that is read is unreadable. Then all its unreadable tiles are replaced, and
        `in_full` has all of them read: whether a tile is read must not depend on what was known when it was drawn, and
        another picture beside it may bring it into view. The same goes for a round of collecting objects to paste,
        which is read if there is a polygon in it (`paste_in_full`).
        """
        tiles_M29, is_bad_M29 = draws["tiles"].copy(), unreadable.among(draws["tiles"])
        is_changed_M = np.asarray(is_bad_M29.any((1, 2)))
        if is_changed_M.any():
            is_read_M29 = self._are_read({name: drawn_M[is_changed_M] for name, drawn_M in draws.items()})
            is_changed_M[is_changed_M] = (is_bad_M29[is_changed_M] & is_read_M29).any((1, 2))
        place_K = np.nonzero(is_bad_M29 & is_changed_M[:, None, None])
        tiles_M29[place_K] = unreadable.stand_ins(place_K[0], tiles_M29[place_K], unreadable.is_bad_N)
        draws = {**draws, "tiles": tiles_M29, "in_full": is_changed_M, **self._other_rounds(draws, unreadable)}
        if self._class_aware is not None and is_changed_M.any():
            draws["warp"] = redrawn_warps(
                draws,
                self._config,
                seed=unreadable.seed,
                epoch=unreadable.epoch,
                positions_M=unreadable.positions_M,
                class_aware=self._class_aware,
            )
        num_replaced_M = np.bincount(place_K[0], minlength=len(indices))
        return Substituted(tiles_M29[:, 0, 0], draws, num_replaced_M)

    def _are_read(self, draws: Mapping[str, np.ndarray]) -> np.ndarray:
        """Which tiles of samples the output shows, or has to know, bool [M, 2, 9]."""
        if needs_all_tiles(self._config, self._image_set.labels):
            return np.ones(draws["tiles"].shape, bool)
        # A single picture is always seen, whatever shape its batch has.
        sheets = lay_out(draws, self._wh_N2, size=self._size, out_wh=(self._size, self._size))
        is_read_M29 = np.zeros(draws["tiles"].shape, bool)
        is_read_M29[sheets.sample_Q, sheets.slot_Q] = are_seen(sheets, (self._size, self._size))
        return is_read_M29

    def _other_rounds(self, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Mapping[str, np.ndarray]:
        """`paste_tiles` without unreadable pictures, where objects are cut out, and `paste_in_full` bool [M, R]."""
        tiles_MR4 = draws["paste_tiles"].copy()
        is_bad_MR4 = unreadable.among(tiles_MR4) & draws["paste"][:, None, None]
        if is_bad_MR4.any():
            is_bad_MR4 &= self._image_set.labels.has_polygon_N[tiles_MR4].any(2, keepdims=True)
        place_K = np.nonzero(is_bad_MR4)
        tiles_MR4[place_K] = unreadable.stand_ins(place_K[0], tiles_MR4[place_K], unreadable.is_bad_N)
        return {"paste_tiles": tiles_MR4, "paste_in_full": is_bad_MR4.any(2)}


# Samples that are shown as they are, letterboxed: where they lie, their targets and shapes. Validation on any device.
#
# Dimension key:  M samples   N pictures


def write_shown(
    image_set: ImageSet, wh_N2: np.ndarray, indices_M: np.ndarray, out_wh: tuple[int, int], out: Out
) -> Sheets:
    """Write targets and shapes of M samples, and return where their pixels go; no label is clipped or left out."""
    draws = undrawn(indices_M)
    sheets = lay_out(draws, wh_N2, size=max(out_wh), out_wh=out_wh, enlarge=False)
    labels = gather_labels(image_set.labels, sheets)
    label_T5 = np.concatenate((labels.class_T[:, None], labels.box_T4), axis=1)
    targets_T6 = to_targets(labels.sheet_T, label_T5, out_wh, draws["flip"], first_row=out.first_row)
    out["targets"].put_all(targets_T6, np.bincount(labels.sheet_T, minlength=len(indices_M)))
    out["shapes"][:] = shape_rows(image_set.size_wh_N2[indices_M], wh_N2[indices_M], sheets.label_origin_Q92[:, 0])
    return sheets


def shape_rows(native_wh_M2: np.ndarray, wh_M2: np.ndarray, pad_M2: np.ndarray) -> np.ndarray:
    """h0, w0, h / h0, w / w0, padding x, padding y; float64 [M, 6]."""
    return np.concatenate((native_wh_M2[:, ::-1], (wh_M2 / native_wh_M2)[:, ::-1], pad_M2), axis=1)
