"""Detection in whole images by tiles: images are cut in memory, the network sees batches of tiles, boxes are merged.

    image --rows of tiles--> device --tiles of one shape, of any images--> network, NMS per tile
          --boxes in pixels of the image--> merge over the image (flatout/yolo/nms/merge_tiles.py)

`detect`, `test` and the validation of a training use it. An image that is not larger than a tile takes the same way
as without tiles.

Dimension key:  B tiles of a batch   h w input   H W image   D boxes of a batch   n boxes of an image
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.feed import DecodeError
from flatout.images import TileGrid, in_opencv_order, read_large, release
from flatout.yolo.boxes import Letterbox, to_native
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import ShapeBatcher, fit_tightly, letterbox
from flatout.yolo.evaluate.validation_input import ValidationBatch
from flatout.yolo.nms import Detections, NmsConfig, non_max_suppression
from flatout.yolo.nms.merge_tiles import TileRows, merge_tiles
from flatout.yolo.predict.threads import Prefetcher

if TYPE_CHECKING:
    from flatout.yolo.options import TestOptions
    from flatout.yolo.predict.options import PredictOptions

logger = logging.getLogger(__name__)

AT_ONCE = {"cuda": 32, "cpu": 1}
"""Tiles per call of the network. On a CPU one tile keeps all cores busy, and stays in their caches."""
FULL_VIEW = -1
"""Number of the full view among the tiles of an image."""

Forward = Callable[[Tensor], Tensor]
"""uint8 images [B, 3, h, w], RGB, on the device -> decoded predictions [B, N, 5 + classes]."""


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How images are cut for detection."""

    tile: int
    """Side of a tile in pixels of the image."""
    overlap: float = 0.2
    """Least part of its side that a tile shares with each neighbour."""
    full_view: bool = False
    """Also detect in the whole image, shrunk to the network's input, for objects longer than the overlap."""

    def __str__(self) -> str:
        full_view = " and the full view" if self.full_view else ""
        return f"tiles of {self.tile} px, overlap {self.overlap:g}{full_view}"

    def grid(self, height: int, width: int) -> TileGrid:
        return TileGrid.overlapping((height, width), self.tile, self.overlap)

    def num_views(self, grid: TileGrid) -> int:
        """How often the network looks at an image: at its tiles, and at the full view if there are several."""
        return grid.per_image + (self.full_view and grid.per_image > 1)

    def views_of_all(self, size_wh_N2: np.ndarray) -> int:
        """How often the network looks at images of these sizes together."""
        return sum(self.num_views(self.grid(height, width)) for width, height in size_wh_N2.tolist())


def tile_config(options: "PredictOptions | TestOptions", trained: int | None) -> TileConfig | None:
    """How the options ask for tiles; None: not at all. Warns if the network sees tiles at another size.

    `trained` is the side of the tiles that the network was trained on.
    """
    if options.tiles is None:
        if trained is not None:
            logger.info(
                "These weights were trained on tiles of %d px: use --tiles %d for larger images.", trained, trained
            )
        return None
    if options.tiles > options.img_size:
        logger.warning(
            "--tiles %d is larger than --img-size %d: tiles are shrunk, and small objects with them. "
            "Give both the same value, unless that is intended.",
            options.tiles,
            options.img_size,
        )
    return TileConfig(tile=options.tiles, overlap=options.tile_overlap, full_view=options.tile_full_view)


Watch = Callable[[int, int], bool]
"""Called after every tile of an image with the number of tiles that are done, and of all of them; False: no more."""


class _Image:
    """An image with the boxes of its tiles so far."""

    def __init__(self, key: int, image_HWC: np.ndarray, grid: TileGrid, num_views: int) -> None:
        self.key, self.image, self.grid, self.num_missing = key, image_HWC, grid, num_views
        self.rows: list[tuple[int, np.ndarray]] = []
        self.seconds = 0.0


class _Tile(NamedTuple):
    image: _Image
    number: int
    input_3hw: Tensor
    """uint8, RGB, on the device."""
    native_hw: tuple[int, int]
    offset_xy: tuple[int, int]

    @property
    def is_alone(self) -> bool:
        """Whether it is a whole image."""
        return self.image.grid.per_image == 1


class WholeImage(NamedTuple):
    """The detections of one image."""

    key: int
    row_n6: np.ndarray
    """float32: left, top, right, bottom in pixels of the image, score, class; highest score first."""
    seconds: float
    """Time of the network and NMS."""


class TileDetector:
    """Detects in images that are added one after another. Tiles of several images share a batch."""

    def __init__(
        self,
        forward: Forward,
        config: TileConfig,
        *,
        size: int,
        stride: int,
        device: torch.device,
        nms: NmsConfig,
        at_once: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`size`: longer side of the network's input; tiles of another size are resized to it."""
        self._watch = watch
        self._forward, self._config, self._nms = forward, config, nms
        self._size, self._stride, self._device = size, stride, device
        at_once = at_once or AT_ONCE["cuda" if device.type == "cuda" else "cpu"]
        self._waiting = ShapeBatcher[_Tile](at_once, lambda tile: (tile.input_3hw.shape, tile.is_alone))
        self.nms_s = 0.0
        self.num_done = 0
        """Tiles and full views that the network has seen, of all images."""

    def add(self, key: int, image_HWC: np.ndarray) -> Iterator[WholeImage]:
        """Cut an image; yields the images that are complete now. `key` names it in the results."""
        grid = self._config.grid(image_HWC.shape[0], image_HWC.shape[1])
        num_views = self._config.num_views(grid)
        image = _Image(key, image_HWC, grid, num_views)
        for tile in self._tiles(image, has_full_view=num_views > grid.per_image):
            yield from self._run(self._waiting.add(tile))
            if self._watch is not None and not self._watch(num_views - image.num_missing, num_views):
                self._waiting.clear()
                return

    def rest(self) -> Iterator[WholeImage]:
        """Everything that waits for a full batch; yields all remaining images."""
        for batch in self._waiting.rest():
            yield from self._run(batch)

    def _tiles(self, image: _Image, *, has_full_view: bool) -> Iterator[_Tile]:
        """The tiles of an image, uploaded row by row: a row of tiles is one piece of the image's memory."""
        grid, pixels = image.grid, image.image
        height, width = grid.tile_hw
        is_input = grid.tile_hw == (self._size, self._size)
        for row, top in enumerate(grid.ys):
            strip_hWC = np.ascontiguousarray(pixels[top : top + height])
            release(pixels)
            on_device = self._upload(strip_hWC) if is_input else None
            for column, left in enumerate(grid.xs):
                if on_device is not None:
                    input_3hw = on_device[:, left : left + width].permute(2, 0, 1).flip(0)
                else:
                    input_3hw = self._fitted(strip_hWC[:, left : left + width])
                yield _Tile(image, row * len(grid.xs) + column, input_3hw, grid.tile_hw, (left, top))
        if has_full_view:
            hw = (pixels.shape[0], pixels.shape[1])
            yield _Tile(image, FULL_VIEW, self._fitted(in_opencv_order(pixels)), hw, (0, 0))
            release(pixels)

    def _fitted(self, image_HWC: np.ndarray) -> Tensor:
        """An image letterboxed as `detect` does it."""
        hw = (image_HWC.shape[0], image_HWC.shape[1])
        boxed = letterbox(image_HWC, fit_tightly(hw, (self._size, self._size), stride=self._stride))
        return self._upload(np.ascontiguousarray(boxed[..., ::-1].transpose(2, 0, 1)))

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self._device)

    @torch.no_grad()
    def _run(self, batch: Sequence[_Tile]) -> Iterator[WholeImage]:
        if not batch:
            return
        begin_s = time.perf_counter()
        images_B3hw = torch.stack([tile.input_3hw for tile in batch])
        if not batch[0].is_alone:
            # 1.2 to 1.5 times as fast on a CPU (bench/tiles.py), but rounded differently. A whole image must give the
            # result that it has without tiles.
            images_B3hw = images_B3hw.contiguous(memory_format=torch.channels_last)
        decoded = self._forward(images_B3hw)
        nms_begin_s = time.perf_counter()
        found = non_max_suppression(decoded, self._nms)
        input_hw = int(images_B3hw.shape[2]), int(images_B3hw.shape[3])
        fitted = Letterbox.centred(input_hw, [tile.native_hw for tile in batch], str(self._device))
        found.row_D6[:, :4] = to_native(found.box_D4, found.image_D, fitted)
        rows = found._replace(row_D6=found.row_D6.cpu(), image_D=found.image_D.cpu()).per_image()
        self.nms_s += time.perf_counter() - nms_begin_s
        each_s = (time.perf_counter() - begin_s) / len(batch)
        self.num_done += len(batch)
        for tile, row_n6 in zip(batch, rows, strict=True):
            image = tile.image
            image.rows.append(
                (tile.number, row_n6.numpy() + np.array([*tile.offset_xy, *tile.offset_xy, 0, 0], np.float32))
            )
            image.num_missing -= 1
            image.seconds += each_s
            if not image.num_missing:
                yield self._merged(image)

    def _merged(self, image: _Image) -> WholeImage:
        """One tile is the result of its own NMS; several are merged."""
        begin_s = time.perf_counter()
        if len(image.rows) == 1:
            row_n6 = image.rows[0][1]
        else:
            numbers = np.repeat([number for number, _ in image.rows], [len(rows) for _, rows in image.rows])
            found = TileRows(np.concatenate([rows for _, rows in image.rows]), numbers.astype(np.int64))
            row_n6 = merge_tiles(found, image.grid, iou_thres=self._nms.iou_thres, agnostic=self._nms.agnostic)
        taken_s = time.perf_counter() - begin_s
        self.nms_s += taken_s
        return WholeImage(image.key, row_n6, image.seconds + taken_s)


# Validation on whole images

PLOTTED = 3
"""Images with pixels for plots; the others have none."""
PLOT_PX = 1920
"""Longest side of these plots: as large as a plot may be, so that small objects can be seen."""


class TiledInput:
    """Whole images of a set with their labels, detected by tiles: takes the place of a `ValidationInput`.

    A batch is one image. With several ranks each gets every `num_ranks`-th image.
    """

    def __init__(
        self,
        image_set: ImageSet,
        config: TileConfig,
        *,
        size: int,
        stride: int,
        device: torch.device,
        threads: int,
        batch_size: int | None = None,
        single_cls: bool = False,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """`batch_size`: tiles per call of the network on a GPU; on a CPU there is one."""
        self.image_set, self._config = image_set, config
        self._device = device
        self._threads, self._single_cls = max(1, threads), single_cls
        at_once = batch_size if device.type == "cuda" else None
        self._make_detector = partial(
            TileDetector, config=config, size=size, stride=stride, device=device, at_once=at_once
        )
        self._own = range(rank, len(image_set), num_ranks)
        self.nms_s = 0.0

    @property
    def num_images(self) -> int:
        return len(self.image_set)

    @cached_property
    def num_tiles(self) -> int:
        """Tiles and full views of this rank's images."""
        return self._config.views_of_all(self.image_set.size_wh_N2[self._own.start :: self._own.step])

    def detected(
        self, forward: Forward, nms: NmsConfig, on_tiles: Callable[[int], object] = lambda done: None
    ) -> Iterator[tuple[ValidationBatch, Detections]]:
        """Every image as a batch of its own, with its detections in pixels of that batch's input.

        The input of a batch is the image shrunk by a power of two: boxes are scaled without rounding. `on_tiles` is
        called often, with the number of tiles that are done, of all images; what it raises ends the detection.
        """

        def watch(of_image: int, in_image: int) -> bool:
            on_tiles(detector.num_done)
            return True

        detector = self._make_detector(forward, nms=nms, watch=watch)
        calls = (partial(self._read, index) for index in self._own)
        views: dict[int, np.ndarray] = {}
        with Prefetcher(calls, threads=self._threads, depth=self._threads) as prefetched:
            for index, image_HWC in zip(self._own, prefetched.results(), strict=False):
                if index in self._own[:PLOTTED]:
                    views[index] = self._view(index, image_HWC)
                for found in detector.add(index, image_HWC):
                    yield self._batch(found, views.pop(found.key, None))
            for found in detector.rest():
                on_tiles(detector.num_done)
                yield self._batch(found, views.pop(found.key, None))
        self.nms_s = detector.nms_s

    def _read(self, index: int) -> np.ndarray:
        width, height = self.image_set.size_wh_N2[index].tolist()
        path = self.image_set.paths[index]
        try:
            image = read_large(path)
        except (OSError, DecodeError) as error:
            logger.warning("%s can no longer be read: %s. Its labels count as missed.", path, error)
            return np.full((height, width, 3), 114, np.uint8)
        if image.shape[:2] != (height, width):
            logger.warning("%s has changed since the scan: its labels count as missed.", path)
            return np.full((height, width, 3), 114, np.uint8)
        return image

    def _gain(self, index: int) -> float:
        gain = 1.0
        while self.image_set.size_wh_N2[index].max() * gain > PLOT_PX:
            gain /= 2
        return gain

    def _view(self, index: int, image_HWC: np.ndarray) -> np.ndarray:
        import cv2

        height, width = np.ceil(np.array(image_HWC.shape[:2]) * self._gain(index)).astype(int).tolist()
        shrunk = cv2.resize(in_opencv_order(image_HWC), (width, height), interpolation=cv2.INTER_AREA)
        release(image_HWC)
        return np.ascontiguousarray(shrunk[..., ::-1].transpose(2, 0, 1))

    def _batch(self, found: WholeImage, view_3hw: np.ndarray | None) -> tuple[ValidationBatch, Detections]:
        index, gain = found.key, self._gain(found.key)
        native_wh = self.image_set.size_wh_N2[index]
        width, height = np.ceil(native_wh * gain).astype(int).tolist()
        blank = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1, 3, height, width)
        images = blank if view_3hw is None else torch.from_numpy(view_3hw)[None]
        label_n5 = self.image_set.labels.of(index).astype(np.float64)
        targets = np.zeros((len(label_n5), 6))
        targets[:, 1] = 0 if self._single_cls else label_n5[:, 0]
        targets[:, 2:] = label_n5[:, 1:] * np.tile(native_wh * gain / (width, height), 2)
        device = self._device
        letterbox = Letterbox(
            torch.tensor(native_wh[None], dtype=torch.float32, device=device),
            torch.tensor([gain], dtype=torch.float32, device=device),
            torch.zeros(1, 2, device=device),
        )
        batch = ValidationBatch(
            images,
            torch.tensor(targets, dtype=torch.float32, device=device),
            letterbox,
            np.array([index]),
            np.array([len(label_n5)], np.int32),
            (self.image_set.paths[index],),
        )
        row_D6 = torch.from_numpy(np.array(found.row_n6)).to(device)
        row_D6[:, :4] *= gain
        return batch, Detections(row_D6, torch.zeros(len(row_D6), dtype=torch.int64, device=device), 1)
