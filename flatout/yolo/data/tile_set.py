"""A training set of tiles: every image is cut by a grid, and each tile is an image of its own with its own labels.

    images, labels --grid--> windows --clip, keep what is visible enough--> tiles with labels, some of the empty ones

No pixel is read here. Labels keep their boxes and lose their polygons.

Dimension key:  N tiles   I images   T tiles of one image   L labels of one image   4 left top right bottom
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flatout.errors import DataError, counted
from flatout.images import TileGrid
from flatout.yolo.data.image_set import ImageSet, Labels, offsets

MIN_SIDE_PX = 2
"""A label is left out of a tile that shows less than this of its width or height."""
MAX_PAIRS = 1 << 20
"""Pairs of a tile and a label that are compared at a time."""
SAME_AREA = 1e-6
"""Relative difference up to which two areas are the same."""
CHOICE_SEED = 0x711E
"""Seed of the choice of empty tiles: the same in every run."""


@dataclass(frozen=True)
class TileSet(ImageSet):
    """Tiles as images: path, size and labels of a tile are those of an image. Sorted by image, then by row and column.

    `paths` are the files that the tiles are cut from.
    """

    whole: ImageSet
    """The images that the tiles are cut from."""
    image_N: np.ndarray
    """int64: number of the image in `whole`."""
    window_N4: np.ndarray
    """int64: part of the image, in pixels."""
    num_empty: int
    """Tiles without labels, before some were chosen."""
    label_L: np.ndarray
    """int64: number of each label in `whole`."""
    shows_most_L: np.ndarray
    """bool: whether no other tile shows more of that label's object."""

    def __str__(self) -> str:
        num_with = int((np.diff(self.labels.first_N) > 0).sum())
        return (
            f"{counted(len(self), 'tile')} of {counted(len(self.whole), 'image')}: {num_with:,} with labels, "
            f"{len(self) - num_with:,} of {self.num_empty:,} without"
        )

    def where(self, tile: int) -> str:
        """The tile, for messages."""
        left, top, *_ = self.window_N4[tile].tolist()
        return f"{self.paths[tile]}, tile at {left}, {top}"


def whole_images(images: ImageSet) -> ImageSet:
    """The images that tiles are cut from; an image set without tiles itself."""
    return images.whole if isinstance(images, TileSet) else images


class _Cut(NamedTuple):
    """The tiles of one image."""

    window_T4: np.ndarray
    count_T: np.ndarray
    """int64: labels of each tile."""
    label_L: np.ndarray
    """int64: number of each of these labels in the image set, tiles ascending."""
    visible_px_L: np.ndarray
    """float64: area that the tile shows of it."""
    class_box_L5: np.ndarray


def cut_into_tiles(images: ImageSet, *, tile: int, overlap: float, min_visible: float) -> TileSet:
    """Cut all images; a label is in every tile that shows at least `min_visible` of its area.

    Of the tiles without labels, as many are used as there are tiles with labels, at most: which ones follows from a
    fixed seed. DataError if no tile has a label.
    """
    cuts = [_cut(images, image, tile, overlap, min_visible) for image in range(len(images))]
    image_N = np.repeat(np.arange(len(cuts)), [len(cut.window_T4) for cut in cuts])
    window_N4, count_N, label_L, visible_px_L, class_box_L5 = map(np.concatenate, zip(*cuts, strict=True))
    if not count_N.any():
        raise DataError(
            f"In no tile of {tile} px is {min_visible:.0%} of any labelled object visible: objects are larger than "
            "tiles. Use larger --tiles, or a smaller --tile-min-visible."
        )
    kept_N = choose_tiles(count_N)  # tiles that are left out are empty, so all labels stay
    window_N4 = window_N4[kept_N]
    image_N = image_N[kept_N]
    return TileSet(
        tuple(images.paths[image] for image in image_N.tolist()),
        (window_N4[:, 2:] - window_N4[:, :2]).astype(np.int32),
        Labels(
            class_box_L5.astype(np.float32),
            offsets(count_N[kept_N]),
            np.zeros((0, 2), np.float32),
            np.zeros(len(class_box_L5) + 1, np.int64),
        ),
        images.names,
        whole=images,
        image_N=image_N,
        window_N4=window_N4,
        num_empty=int((count_N == 0).sum()),
        label_L=label_L,
        shows_most_L=shows_most(label_L, visible_px_L),
    )


def shows_most(label_L: np.ndarray, visible_px_L: np.ndarray) -> np.ndarray:
    """Whether an entry shows as much of its label as any other entry does, bool [L]."""
    most_px = np.zeros(label_L.max(initial=-1) + 1)
    np.maximum.at(most_px, label_L, visible_px_L)
    return np.asarray(visible_px_L >= most_px[label_L] * (1 - SAME_AREA))


def choose_tiles(count_N: np.ndarray) -> np.ndarray:
    """Tiles to train on, ascending int64, from the labels of each: all with labels, and at most as many without."""
    with_labels, empty = np.flatnonzero(count_N), np.flatnonzero(count_N == 0)
    chosen = np.random.default_rng(CHOICE_SEED).permutation(empty)[: len(with_labels)]
    return np.sort(np.concatenate((with_labels, chosen)))


def clip_labels(
    box_L4: np.ndarray, window_T4: np.ndarray, min_visible: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tile, label and clipped box of every label that a tile shows well enough: int64, int64, float64 [n, 4].

    That is at least `min_visible` of the label's area, and MIN_SIDE_PX of its width and of its height; a label that is
    thinner than that is kept if all of it is visible. In pixels of the image, tiles ascending.
    """
    low_TL2 = np.maximum(window_T4[:, None, :2], box_L4[None, :, :2])
    high_TL2 = np.minimum(window_T4[:, None, 2:], box_L4[None, :, 2:])
    side_TL2 = np.maximum(high_TL2 - low_TL2, 0)
    whole_L2 = box_L4[:, 2:] - box_L4[:, :2]
    is_shown_TL = side_TL2.prod(2) >= min_visible * whole_L2.prod(1)
    is_shown_TL &= (side_TL2 >= np.minimum(MIN_SIDE_PX, whole_L2)).all(2) & (side_TL2 > 0).all(2)
    tile_n, label_n = np.nonzero(is_shown_TL)
    return tile_n, label_n, np.concatenate((low_TL2[tile_n, label_n], high_TL2[tile_n, label_n]), 1)


def _cut(images: ImageSet, image: int, tile: int, overlap: float, min_visible: float) -> _Cut:
    width, height = images.size_wh_N2[image].tolist()
    window_T4 = TileGrid.overlapping((height, width), tile, overlap).window_T4
    label_L5 = images.labels.of(image).astype(np.float64)
    size_4 = np.array([width, height, width, height])
    centre_L2, half_L2 = label_L5[:, 1:3], label_L5[:, 3:] / 2
    box_L4 = np.concatenate((centre_L2 - half_L2, centre_L2 + half_L2), 1) * size_4
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 4)))]
    step = max(1, MAX_PAIRS // max(1, len(box_L4)))
    for first in range(0, len(window_T4), step):
        tile_n, label_n, box_n4 = clip_labels(box_L4, window_T4[first : first + step], min_visible)
        found.append((tile_n + first, label_n, box_n4))
    tile_n, label_n, box_n4 = (np.concatenate(parts) for parts in zip(*found, strict=True))
    corner_n2, side_n2 = window_T4[tile_n, :2], window_T4[tile_n, 2:] - window_T4[tile_n, :2]
    low_n2, high_n2 = (box_n4[:, :2] - corner_n2) / side_n2, (box_n4[:, 2:] - corner_n2) / side_n2
    class_box_n5 = np.concatenate((label_L5[label_n, :1], (low_n2 + high_n2) / 2, high_n2 - low_n2), 1)
    count_T = np.bincount(tile_n, minlength=len(window_T4))
    visible_px_n = (box_n4[:, 2:] - box_n4[:, :2]).prod(1)
    return _Cut(window_T4, count_T, label_n + images.labels.first_N[image], visible_px_n, class_box_n5)
