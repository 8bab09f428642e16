"""What CPU and device sources share: resized images as store items, draws of training samples, letterboxed samples.

Dimension key:  M samples   N images   T labels or targets   Q canvases   9 tiles of a canvas at most
                K tiles that are replaced   R rounds of collecting objects to paste
"""

from collections.abc import Mapping

import numpy as np

from flatout.clock import clock
from flatout.errors import ConfigError
from flatout.feed import Arrays, Fields, Out, Rows, Store, Substituted, Unreadable
from flatout.images import read_large, read_usable
from flatout.yolo.augment.draw import AugmentConfig, ClassAware, draw_training, identity_draws, redraw_warps
from flatout.yolo.augment.labels import gather_labels, to_targets
from flatout.yolo.augment.layout import (
    Canvases,
    check_scanned_size,
    lay_out,
    needs_all_tiles,
    resized_wh,
    visible_tiles,
)
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import resize_long_side, resize_scaled_decode
from flatout.yolo.data.tile_set import TileSet


class _ImageFiles:
    """The image files of a data set, by number."""

    def __init__(self, image_set: ImageSet) -> None:
        self._paths = image_set.paths

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> str:
        return self._paths[index]

    def where(self, index: int) -> str:
        return self._paths[index]


class ResizedImages(_ImageFiles):
    """Images of a data set as items of a `flatout.feed.Store`: uint8 [h, w, 3], BGR, longer side `size`.

    Open a store with them and pass it to a source, or pass them directly: then every access decodes the file.
    """

    store_kind = "ResizedPictures"
    """The former name of this class, which is part of the keys of existing stores."""

    def __init__(self, image_set: ImageSet, *, size: int, augment: bool, shrunk: bool = False) -> None:
        """`shrunk`: decode JPEG files at a half, a quarter or an eighth of their size, where that is not below `size`.

        This is faster and gives smoother images than decoding at full size and picking pixels, but not YOLOv7's pixels
        (bench/augment_shrunk.py): for training only, and only on request.
        """
        assert augment or not shrunk
        super().__init__(image_set)
        self._size = size
        self._augment = augment
        self._at_least_px = size if shrunk else 0

    @property
    def parameters(self) -> str:
        import cv2

        shrunk = ", decoded small" if self._at_least_px else ""
        return f"BGR, longest side {self._size}, augment {self._augment}, OpenCV {cv2.__version__}, version 1{shrunk}"

    def __getitem__(self, index: int) -> np.ndarray:
        return self.decode(index)

    def decode(self, index: int) -> np.ndarray:
        """Decode and resize image `index`."""
        with clock.stage("decode"):
            decoded = read_usable(self._paths[index], at_least_px=self._at_least_px)
        with clock.stage("resize"):
            width, height = decoded.header.size_wh
            if decoded.image.shape[:2] != (height, width):
                return resize_scaled_decode(decoded.image, (height, width), self._size)
            return resize_long_side(decoded.image, self._size, augment=self._augment).image


class SizeCheckedImages:
    """Images that must have the sizes that follow from the scan; DecodeError for one that has changed since."""

    def __init__(self, images: Arrays, wh_N2: np.ndarray) -> None:
        self._images, self._wh_N2 = images, wh_N2

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> np.ndarray:
        return check_scanned_size(self._images[index], self._wh_N2[index])


class SizedImages(SizeCheckedImages):
    """The same images, whose shapes are known without reading them."""

    dtype = np.dtype(np.uint8)

    def __init__(self, images: Arrays, wh_N2: np.ndarray) -> None:
        super().__init__(images, wh_N2)
        self.shapes_ND = np.concatenate((wh_N2[:, ::-1], np.full((len(wh_N2), 1), 3)), 1).astype(np.int64)


class WholeImages(_ImageFiles):
    """Images of a data set in their own size as items of a `flatout.feed.Store`, for tiles: uint8 [H, W, 3], BGR."""

    store_kind = "WholeImages"

    def __init__(self, image_set: ImageSet) -> None:
        super().__init__(image_set)
        self.num_bytes = 3 * int(image_set.size_wh_N2.astype(np.int64).prod(1).sum())
        """Size of all images, decoded."""

    @property
    def parameters(self) -> str:
        import cv2

        return f"BGR, own size, OpenCV {cv2.__version__}, version 1"

    def decode(self, index: int) -> np.ndarray:
        with clock.stage("decode"):
            return np.ascontiguousarray(read_large(self._paths[index]))


class TileImages:
    """Tiles of a `TileSet`, cut from decoded images: uint8 [h, w, 3], BGR, longer side `size`. Copies only the tile."""

    def __init__(self, tiles: TileSet, whole: Store | Mapping[int, np.ndarray], *, size: int) -> None:
        self._tiles, self._whole, self._size = tiles, whole, size

    def __len__(self) -> int:
        return len(self._tiles)

    def __getitem__(self, index: int) -> np.ndarray:
        number = int(self._tiles.image_N[index])
        image = check_scanned_size(self._whole[number], self._tiles.whole.size_wh_N2[number])
        left, top, right, bottom = self._tiles.window_N4[index].tolist()
        with clock.stage("resize"):
            tile = np.ascontiguousarray(image[top:bottom, left:right])
            return resize_long_side(tile, self._size, augment=True).image


def label_id_fields(expected_targets: float) -> Fields:
    """A field with the number of each target's label in the data set, in the order of `targets`; -1 without one."""
    return {"label_ids": Rows(1, np.int32, expected=expected_targets)}


class ImageSetSource:
    """Base of all sources: the samples are numbered like the images of a data set, and so are the items they read."""

    def __init__(self, image_set: ImageSet, *, size: int) -> None:
        self._image_set = image_set
        self._size = size
        self._wh_N2 = resized_wh(image_set.size_wh_N2, size)

    def __len__(self) -> int:
        return len(self._image_set)

    @property
    def num_items(self) -> int:
        return len(self)

    @property
    def labels_per_image(self) -> float:
        return len(self._image_set.labels.class_box_T5) / max(1, len(self))

    def where(self, index: int) -> str:
        images = self._image_set
        return images.where(index) if isinstance(images, TileSet) else images.paths[index]

    def where_item(self, item: int) -> str:
        return self.where(item)


class TrainingSourceBase(ImageSetSource):
    """Base of the training sources of CPU and device: samples of `size` x `size` pixels and their draws."""

    def __init__(
        self, image_set: ImageSet, config: AugmentConfig, *, size: int, class_aware: ClassAware | None = None
    ) -> None:
        if size < 2 or size % 2:
            raise ConfigError(f"size={size} must be even: half of it is cut off a mosaic on every side.")
        super().__init__(image_set, size=size)
        self._config = config
        self._class_aware = class_aware

    @property
    def expected_targets(self) -> float:
        """Estimated targets per sample: a mosaic shows about the area of two images. Memory grows if there are more."""
        return 2 + 3 * self.labels_per_image

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return draw_training(
            self._config,
            num_images=len(self),
            size=self._size,
            seed=seed,
            epoch=epoch,
            positions_M=positions,
            indices_M=indices,
            class_aware=self._class_aware,
        )

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        """Draws with other images, and their labels, in place of unreadable ones; all other numbers stay.

        A sample changes if a tile that is read is unreadable. Then all its unreadable tiles are replaced, and with
        `in_full` all its tiles are read: whether a tile is read must not depend on what was known when it was drawn,
        and a replaced neighbour may make a tile visible. The same holds for a round of collecting objects to paste,
        which is read if it has a polygon (`paste_in_full`).
        """
        tiles_M29, is_bad_M29 = draws["tiles"].copy(), unreadable.among(draws["tiles"])
        is_changed_M = np.asarray(is_bad_M29.any((1, 2)))
        if is_changed_M.any():
            is_read_M29 = self.tiles_read({name: drawn_M[is_changed_M] for name, drawn_M in draws.items()})
            is_changed_M[is_changed_M] = (is_bad_M29[is_changed_M] & is_read_M29).any((1, 2))
        at_K = np.nonzero(is_bad_M29 & is_changed_M[:, None, None])
        tiles_M29[at_K] = unreadable.substitutes(at_K[0], tiles_M29[at_K], unreadable.is_bad_N)
        draws = {**draws, "tiles": tiles_M29, "in_full": is_changed_M, **self._replace_in_rounds(draws, unreadable)}
        if self._class_aware is not None and is_changed_M.any():
            draws["warp"] = redraw_warps(
                draws,
                self._config,
                seed=unreadable.seed,
                epoch=unreadable.epoch,
                positions_M=unreadable.positions_M,
                class_aware=self._class_aware,
            )
        num_replaced_M = np.bincount(at_K[0], minlength=len(indices))
        return Substituted(tiles_M29[:, 0, 0], draws, num_replaced_M)

    def tiles_read(self, draws: Mapping[str, np.ndarray]) -> np.ndarray:
        """Which tiles of samples are read: those that are visible or needed otherwise, bool [M, 2, 9]."""
        if needs_all_tiles(self._config, self._image_set.labels):
            return np.ones(draws["tiles"].shape, bool)
        # A single image is always visible, whatever the shape of its batch.
        canvases = lay_out(draws, self._wh_N2, size=self._size, out_wh=(self._size, self._size))
        is_read_M29 = np.zeros(draws["tiles"].shape, bool)
        is_read_M29[canvases.sample_Q, canvases.layer_Q] = visible_tiles(canvases, (self._size, self._size))
        return is_read_M29

    def _replace_in_rounds(self, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Mapping[str, np.ndarray]:
        """`paste_tiles` with unreadable images replaced in rounds that are read, and `paste_in_full` bool [M, R]."""
        tiles_MR4 = draws["paste_tiles"].copy()
        is_bad_MR4 = unreadable.among(tiles_MR4) & draws["paste"][:, None, None]
        if is_bad_MR4.any():
            is_bad_MR4 &= self._image_set.labels.has_polygon_N[tiles_MR4].any(2, keepdims=True)
        at_K = np.nonzero(is_bad_MR4)
        tiles_MR4[at_K] = unreadable.substitutes(at_K[0], tiles_MR4[at_K], unreadable.is_bad_N)
        return {"paste_tiles": tiles_MR4, "paste_in_full": is_bad_MR4.any(2)}


# Letterboxed samples, as validation on any device shows them.


def write_letterboxed(
    image_set: ImageSet, wh_N2: np.ndarray, indices_M: np.ndarray, out_wh: tuple[int, int], out: Out
) -> Canvases:
    """Write targets and shapes of M letterboxed samples and return their canvases; no label is clipped or left out."""
    draws = identity_draws(indices_M)
    canvases = lay_out(draws, wh_N2, size=max(out_wh), out_wh=out_wh, enlarge=False)
    labels = gather_labels(image_set.labels, canvases)
    label_T5 = np.concatenate((labels.class_T[:, None], labels.box_T4), axis=1)
    targets_T6 = to_targets(labels.canvas_T, label_T5, out_wh, draws["flip"], first_row=out.first_row)
    out["targets"].put_all(targets_T6, np.bincount(labels.canvas_T, minlength=len(indices_M)))
    out["shapes"][:] = shape_rows(image_set.size_wh_N2[indices_M], wh_N2[indices_M], canvases.label_origin_Q92[:, 0])
    return canvases


def shape_rows(native_wh_M2: np.ndarray, wh_M2: np.ndarray, pad_M2: np.ndarray) -> np.ndarray:
    """The field `shapes`: h0, w0, h / h0, w / w0, padding x, padding y; float64 [M, 6]."""
    return np.concatenate((native_wh_M2[:, ::-1], (wh_M2 / native_wh_M2)[:, ::-1], pad_M2), axis=1)
