"""Samples for training and validation on the CPU: their sources for the feed, and the renderer behind them.

    draws -> canvases -> labels on canvases -> warped labels ----+
                     \\-> tiles -> painter: warp, mix, recolour --+-> paste in -> flip -> images, targets

Dimension key:  M samples of a micro-batch   N images of the data set   Q canvases   9 tiles of a canvas at most
                T labels or targets   R rounds of collecting objects to paste   B samples of a batch
                G groups of four samples   C H W channels (RGB), height and width
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple, Protocol

import cv2
import numpy as np

from flatout.clock import clock
from flatout.errors import ConfigError
from flatout.feed import Fetch, Field, Fields, Out, Rows, read_at_once
from flatout.yolo.augment.draw import PLAIN, AugmentConfig, ClassAware, Color, colors, mosaic_draws, pick
from flatout.yolo.augment.labels import CanvasLabels, gather_labels, target_label_ids, to_targets, warp_labels
from flatout.yolo.augment.layout import (
    Canvases,
    check_scanned_size,
    fit_all,
    lay_out,
    needs_all_tiles,
    resized_wh,
    without_invisible,
)
from flatout.yolo.augment.paint import (
    Classic,
    CutOut,
    Fast,
    Painter,
    PreparedCanvas,
    collect_cut_outs,
    compose,
    cut_out,
    paste_in,
)
from flatout.yolo.augment.paint_compiled import fastest_painter, pixels_library
from flatout.yolo.augment.paste import Pick, copy_objects
from flatout.yolo.augment.samples import (
    ImageSetSource,
    TrainingSourceBase,
    label_id_fields,
    shape_rows,
    write_letterboxed,
)
from flatout.yolo.data.image_set import ImageSet, Labels
from flatout.yolo.data.letterbox import PADDING

PAINTERS: Mapping[str, Callable[[], Painter]] = {"classic": Classic, "fast": fastest_painter, "opencv": Fast}
"""All give the same bytes; "fast" becomes "opencv" where pixels.c cannot be compiled."""


class Rendered(NamedTuple):
    """What belongs to M rendered samples besides their pixels."""

    target_T6: np.ndarray
    """float32, see `to_targets`."""
    count_M: np.ndarray
    """int64: targets of each sample."""
    label_T1: np.ndarray
    """int32: number of each target's label in the data set; -1 for objects that were pasted or copied."""


class DecodedImages(Protocol):
    """Decoded images by number, uint8 [h, w, 3], BGR, resized for training: a Store, or any list."""

    def __getitem__(self, index: int, /) -> np.ndarray: ...


# The renderer: from draws to pixels and targets. No randomness of its own.


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """Renders training samples of `size` x `size` pixels, or of any shape if there is no mosaic among them."""

    images: DecodedImages
    size_wh_N2: np.ndarray
    """Sizes of the image files, before they were resized."""
    labels: Labels
    config: AugmentConfig
    size: int
    painter: Painter
    pick: Pick = pick

    def render(
        self,
        draws: Mapping[str, np.ndarray],
        out_MCHW: np.ndarray,
        fetch: Fetch = read_at_once,
        *,
        first_row: int = 0,
    ) -> Rendered:
        """Render M samples into `out_MCHW`, uint8.

        The first sample is in row `first_row` of its batch. `fetch` reads the images; a sample for which it returned
        None is not usable.
        """
        out_wh = (out_MCHW.shape[3], out_MCHW.shape[2])
        if out_wh != (self.size, self.size) and (draws["kind"] > PLAIN).any():
            raise ConfigError(
                f"A mosaic is {self.size} x {self.size} pixels, but the plan asks for {out_wh[0]} x {out_wh[1]}: "
                "use mosaic=0 with rectangular batches."
            )
        with clock.stage("labels"):
            canvases = lay_out(draws, self._wh_N2, size=self.size, out_wh=out_wh)
            needs_all = needs_all_tiles(self.config, self.labels)
            labels = gather_labels(self.labels, canvases, visible_in=None if needs_all else out_wh)
            copied: list[list[np.ndarray]] = [[] for _ in canvases.kind_Q]
            if self.config.copy_paste:
                labels, copied = copy_objects(labels, canvases, draws["copy_key"], self.config.copy_paste, self.pick)
            warped = warp_labels(labels, canvases, out_wh=out_wh, perspective=self.config.perspective > 0)
            label_T5 = np.concatenate((warped.class_T[:, None], warped.box_T4), axis=1)
            found = np.split(label_T5, np.searchsorted(warped.sample_T, np.arange(1, len(out_MCHW))))
            first_Q = np.searchsorted(canvases.sample_Q, np.arange(len(out_MCHW) + 1))
            shown = canvases if needs_all else without_invisible(canvases, out_wh, draws.get("in_full"))
            changes = [Color(*one) for one in zip(*colors(draws), strict=True)]
        for m, out_CHW in enumerate(out_MCHW):
            prepared = [self._prepare(shown, copied[q], q, out_wh, fetch) for q in range(first_Q[m], first_Q[m + 1])]
            image = self._paint_sample(prepared, float(draws["mix"][m]))
            if not draws["paste"][m]:
                self.painter.finish(image, changes[m], draws["flip"][m], out_CHW)
                continue
            with clock.stage("color"):
                image = self.painter.recolor(image, changes[m])
            found[m] = paste_in(
                image, found[m], collect_cut_outs(self._rounds(draws, m, fetch)), draws["paste_tries"][m]
            )
            with clock.stage("deliver"):
                self.painter.deliver(image, draws["flip"][m], out_CHW)
        count_M = np.array(list(map(len, found)))
        sample_T = np.repeat(np.arange(len(found)), count_M)
        target_T6 = to_targets(sample_T, np.concatenate(found), out_wh, draws["flip"], first_row=first_row)
        return Rendered(target_T6, count_M, target_label_ids(warped, count_M))

    def _paint_sample(self, prepared: list[PreparedCanvas], share: float) -> np.ndarray:
        with clock.stage("warp"):
            image = self.painter.paint(prepared[0])
            return (
                self.painter.mix(image, self.painter.paint(prepared[1], layer=1), share) if len(prepared) > 1 else image
            )

    def _prepare(
        self, canvases: Canvases, copied: list[np.ndarray], q: int, out_wh: tuple[int, int], fetch: Fetch = read_at_once
    ) -> PreparedCanvas:
        num_tiles = int(canvases.kind_Q[q])
        tiles = [self._tile(int(canvases.image_Q9[q, k]), canvases.size_Q92[q, k], fetch) for k in range(num_tiles)]
        return PreparedCanvas(
            tiles,
            canvases.origin_Q92[q, :num_tiles],
            (int(canvases.canvas_wh_Q2[q, 0]), int(canvases.canvas_wh_Q2[q, 1])),
            copied,
            canvases.matrix_Q33[q],
            out_wh,
            is_mosaic=num_tiles != PLAIN,
            perspective=self.config.perspective > 0,
        )

    def _tile(self, number: int, size_2: np.ndarray, fetch: Fetch) -> np.ndarray:
        """An image in the size of its tile: a mosaic has it as it is stored, a single image is fitted in.

        `number` is -1 for an invisible tile: any pixels will do, and nothing is read.
        """
        size_wh = (int(size_2[0]), int(size_2[1]))
        image = None
        if number >= 0:
            image = fetch(number, lambda: check_scanned_size(self.images[number], self._wh_N2[number]))
        if image is None:
            return _grey_tile(max(self.size, *size_wh))[: size_wh[1], : size_wh[0]]
        return image if image.shape[1::-1] == size_wh else np.asarray(cv2.resize(image, size_wh))

    @cached_property
    def _wh_N2(self) -> np.ndarray:
        return resized_wh(self.size_wh_N2, self.size)

    def _rounds(self, draws: Mapping[str, np.ndarray], m: int, fetch: Fetch) -> Iterator[list[CutOut]]:
        """Objects cut out of one mosaic after the other: half of those of each."""
        rounds = mosaic_draws(draws["paste_tiles"][m], draws["paste_centre"][m])
        for r in range(len(rounds["kind"])):
            one = {name: array[r : r + 1] for name, array in rounds.items()}
            canvases = lay_out(one, self._wh_N2, size=self.size, out_wh=(1, 1))
            labels = gather_labels(self.labels, canvases)
            in_full = "paste_in_full" in draws and bool(draws["paste_in_full"][m, r])
            yield self._cut_half(labels, canvases, int(draws["paste_key"][m, r]), fetch, in_full=in_full)

    def _cut_half(
        self, labels: CanvasLabels, canvases: Canvases, key: int, fetch: Fetch, *, in_full: bool
    ) -> list[CutOut]:
        """Cut half of the objects out. `in_full`: all images are read even if there is nothing to cut out."""
        with_polygon = np.flatnonzero(labels.num_points_T)
        if not (len(with_polygon) or in_full):
            return []
        chosen = with_polygon[self.pick(key, len(with_polygon), round(0.5 * len(with_polygon)))]
        prepared = self._prepare(canvases, [], 0, (1, 1), fetch)
        canvas = compose(prepared.tiles, prepared.origin_K2, prepared.canvas_wh)
        polygons = [labels.polygon(label) for label in chosen]
        return cut_out(canvas, labels.class_T[chosen], labels.box_T4[chosen], polygons)


@cache
def _grey_tile(side: int) -> np.ndarray:
    """Grey pixels, as large as any tile."""
    return np.full((side, side, 3), PADDING, np.uint8)


# Sources, as the feed reads them.


def sample_fields(height: int, width: int, *, expected_targets: float) -> Fields:
    """Fields of a sample of the detection job; the feed adds counts, indices and positions."""
    return {
        "images": Field((3, height, width)),
        # Image in the batch, class, cx, cy, w, h.
        "targets": Rows(6, expected=expected_targets),
        # Height and width of the file, ratios h and w, padding x and y; zeros for a mosaic.
        "shapes": Field((6,), np.float64),
    }


class TrainingSource(TrainingSourceBase):
    """Augmented samples of `size` x `size` pixels; without mosaics also of the shape that the plan gives to a step."""

    def __init__(
        self,
        image_set: ImageSet,
        images: DecodedImages,
        config: AugmentConfig,
        *,
        size: int,
        painter: Literal["classic", "fast", "opencv"] = "fast",
        class_aware: ClassAware | None = None,
        label_ids: bool = False,
    ) -> None:
        """`images` are decoded and resized for training at `size` (flatout.yolo.data.letterbox, augment=True).

        With `label_ids`, a field of this name has the number in the data set of each target's label.
        """
        super().__init__(image_set, config, size=size, class_aware=class_aware)
        if painter not in PAINTERS:
            raise ConfigError(f"Unknown painter={painter!r}: use {' or '.join(map(repr, PAINTERS))}.")
        # In this process, so that it is compiled, and a failure logged, once, before workers need it.
        self._painter = "opencv" if painter == "fast" and pixels_library() is None else painter
        self._images = images
        self._renderer: Renderer | None = None
        self.fields = sample_fields(size, size, expected_targets=self.expected_targets)
        if label_ids:
            self.fields = {**self.fields, **label_id_fields(self.expected_targets)}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        if self._renderer is None:
            self._renderer = self._make_renderer()
        images_MCHW, shapes_M6 = out["images"], out["shapes"]
        rendered = self._renderer.render(draws, images_MCHW, out.fetch, first_row=out.first_row)
        out["targets"].put_all(rendered.target_T6, rendered.count_M)
        if "label_ids" in self.fields:
            out["label_ids"].put_all(rendered.label_T1, rendered.count_M)
        shapes_M6[:] = 0
        plain = draws["kind"][:, 0] == PLAIN
        shown = draws["tiles"][plain, 0, 0]
        wh_M2 = self._wh_N2[shown]
        pad_M2 = fit_all(wh_M2, np.array(images_MCHW.shape[:1:-1]), enlarge=True)[2]
        shapes_M6[plain] = shape_rows(self._image_set.size_wh_N2[shown], wh_M2, pad_M2)

    def _make_renderer(self) -> Renderer:
        """Made in the process that reads, because a painter's buffers are not shared."""
        return Renderer(
            images=self._images,
            size_wh_N2=self._image_set.size_wh_N2,
            labels=self._image_set.labels,
            config=self._config,
            size=self._size,
            painter=PAINTERS[self._painter](),
        )

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_renderer": None}


class ValidationSource(ImageSetSource):
    """Samples without augmentation, letterboxed to the shape of their step (see flatout.yolo.data.letterbox)."""

    def __init__(
        self, image_set: ImageSet, images: DecodedImages, *, size: int, largest_hw: tuple[int, int] | None = None
    ) -> None:
        """`images` are resized for validation at `size`; `largest_hw` is the largest shape of any step."""
        super().__init__(image_set, size=size)
        self._images = images
        self.fields = sample_fields(*(largest_hw or (size, size)), expected_targets=2 + 2 * self.labels_per_image)

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        images_MCHW = out["images"]
        out_wh = (images_MCHW.shape[3], images_MCHW.shape[2])
        canvases = write_letterboxed(self._image_set, self._wh_N2, indices, out_wh, out)
        boxes = zip(canvases.origin_Q92[:, 0].tolist(), canvases.size_Q92[:, 0].tolist(), strict=True)
        for m, ((left, top), (width, height)) in enumerate(boxes):
            out.reading(m)
            image = check_scanned_size(self._images[int(indices[m])], self._wh_N2[indices[m]])
            if image.shape[1::-1] != (width, height):
                image = np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR))
            images_MCHW[m] = PADDING
            images_MCHW[m, :, top : top + height, left : left + width] = image[..., ::-1].transpose(2, 0, 1)


# Four samples in one of twice the size, as YOLOv7's --quad collates them.

ENLARGE_PROBABILITY = 0.5
"""Probability that a group shows only its first sample, enlarged."""

QUADRANTS = ((0, 0), (1, 0), (0, 1), (1, 1))
"""Row and column of each of the four samples: the second is below the first."""


def quad(
    images_BCHW: np.ndarray, targets_T6: np.ndarray, uniform_G: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images uint8 [G, C, 2H, 2W], their targets, and the row in `targets_T6` that each of these comes from.

    Targets are (image in the batch, class, cx, cy, w, h), in the order of images. `uniform_G` decides for each group
    whether it shows four samples or one; samples left over after the last whole group are dropped.
    """
    num_groups = len(images_BCHW) // 4
    _, channels, height, width = images_BCHW.shape
    out = np.empty((num_groups, channels, 2 * height, 2 * width), np.uint8)
    targets, rows = [np.zeros((0, 6), np.float32)], [np.zeros(0, np.int64)]
    for group, uniform in enumerate(uniform_G[:num_groups]):
        members = range(4 * group, 4 * group + 4)
        own_rows = [np.flatnonzero(targets_T6[:, 0] == member) for member in members]
        if uniform < ENLARGE_PROBABILITY:
            own_rows = own_rows[:1]
            own = [targets_T6[own_rows[0]]]
            out[group] = _enlarged(images_BCHW[members[0]])
        else:
            own = [targets_T6[row_n] for row_n in own_rows]
            for member, (row, column), target in zip(members, QUADRANTS, own, strict=True):
                place = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
                out[group][:, *place] = images_BCHW[member]
                target[:, 2:] = (target[:, 2:] + np.array([column, row, 0, 0], np.float32)) / 2
        joined = np.concatenate(own)
        joined[:, 0] = group
        targets.append(joined)
        rows += own_rows
    return out, np.concatenate(targets), np.concatenate(rows)


def _enlarged(image_CHW: np.ndarray) -> np.ndarray:
    """Twice the size, bilinear, truncated to integers."""
    channels, height, width = image_CHW.shape
    doubled = [cv2.resize(plane.astype(np.float32), (2 * width, 2 * height)) for plane in image_CHW]
    return np.stack(doubled).astype(np.uint8).reshape(channels, 2 * height, 2 * width)
