r"""From draws to samples: pixels into the batch, labels to targets. No randomness of its own.

    draws -> sheets -> labels on canvases -> warped labels --+
                  \-> tiles -> painter: warp, mix, colour --+-> paste in -> flip -> images, targets

Dimension key:  M samples   N pictures   T labels   C H W channels (RGB), height and width of the output
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import cv2
import numpy as np

from flatout.clock import clock
from flatout.errors import ConfigError
from flatout.feed import Fetch, read_at_once
from flatout.yolo.augment.color import Color, colors
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.draw import FOUR, PLAIN, pick
from flatout.yolo.augment.labels import CanvasLabels, gather_labels, to_targets
from flatout.yolo.augment.layout import Sheets, as_scanned, lay_out, needs_all_tiles, resized_wh, without_unseen
from flatout.yolo.augment.paint import CutOut, Painter, Placed, collect, compose, cut_out, paste_in
from flatout.yolo.augment.paste import Pick, copy_objects
from flatout.yolo.augment.warp_labels import warp_labels
from flatout.yolo.data.image_set import Labels
from flatout.yolo.data.letterbox import PADDING


class Pictures(Protocol):
    """Decoded pictures by number, uint8 [h, w, 3], BGR, longer side as in training: a Store, or any list."""

    def __getitem__(self, index: int, /) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """Makes training samples of `size` x `size` pixels, or of the slot's shape where no mosaic is drawn."""

    pictures: Pictures
    size_wh_N2: np.ndarray
    """Of the files; the pictures are smaller or larger."""
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
    ) -> tuple[np.ndarray, np.ndarray]:
        """Paint M samples into `out_MCHW`, uint8; returns targets float32 [T, 6] and how many each has, int64 [M].

        The samples are those from row `first_row` of their batch on. `fetch` reads the pictures; what is painted where
        it returns None is of no use.
        """
        out_wh = (out_MCHW.shape[3], out_MCHW.shape[2])
        if out_wh != (self.size, self.size) and (draws["kind"] > PLAIN).any():
            raise ConfigError(
                f"A mosaic is {self.size} x {self.size}, but the plan asks for {out_wh[0]} x {out_wh[1]}: "
                "use mosaic=0 with rectangular batches."
            )
        with clock.stage("labels"):
            sheets = lay_out(draws, self._wh_N2, size=self.size, out_wh=out_wh)
            needs_all = needs_all_tiles(self.config, self.labels)
            labels = gather_labels(self.labels, sheets, seen_in=None if needs_all else out_wh)
            copied: list[list[np.ndarray]] = [[] for _ in sheets.kind_Q]
            if self.config.copy_paste:
                labels, copied = copy_objects(labels, sheets, draws["copy_key"], self.config.copy_paste, self.pick)
            warped = warp_labels(labels, sheets, out_wh=out_wh, perspective=self.config.perspective > 0)
            label_T5 = np.concatenate((warped.class_T[:, None], warped.box_T4), axis=1)
            found = np.split(label_T5, np.searchsorted(warped.sample_T, np.arange(1, len(out_MCHW))))
            first_Q = np.searchsorted(sheets.sample_Q, np.arange(len(out_MCHW) + 1))
            shown = sheets if needs_all else without_unseen(sheets, out_wh, draws.get("in_full"))
            changes = [Color(*one) for one in zip(*colors(draws), strict=True)]
        for m, out_CHW in enumerate(out_MCHW):
            placed = [self._place(shown, copied[q], q, out_wh, fetch) for q in range(first_Q[m], first_Q[m + 1])]
            image = self._picture(placed, float(draws["mix"][m]))
            if not draws["paste"][m]:
                self.painter.finish(image, changes[m], draws["flip"][m], out_CHW)
                continue
            with clock.stage("color"):
                image = self.painter.recolor(image, changes[m])
            found[m] = paste_in(image, found[m], collect(self._rounds(draws, m, fetch)), draws["paste_tries"][m])
            with clock.stage("deliver"):
                self.painter.deliver(image, draws["flip"][m], out_CHW)
        count_M = np.array(list(map(len, found)))
        sample_T = np.repeat(np.arange(len(found)), count_M)
        return to_targets(sample_T, np.concatenate(found), out_wh, draws["flip"], first_row=first_row), count_M

    def _picture(self, placed: list[Placed], share: float) -> np.ndarray:
        with clock.stage("warp"):
            image = self.painter.paint(placed[0])
            return self.painter.mix(image, self.painter.paint(placed[1], slot=1), share) if len(placed) > 1 else image

    def _place(
        self, sheets: Sheets, copied: list[np.ndarray], q: int, out_wh: tuple[int, int], fetch: Fetch = read_at_once
    ) -> Placed:
        num_tiles = int(sheets.kind_Q[q])
        tiles = [self._tile(int(sheets.picture_Q9[q, k]), sheets.size_Q92[q, k], fetch) for k in range(num_tiles)]
        return Placed(
            tiles,
            sheets.origin_Q92[q, :num_tiles],
            (int(sheets.canvas_Q2[q, 0]), int(sheets.canvas_Q2[q, 1])),
            copied,
            sheets.matrix_Q33[q],
            out_wh,
            is_mosaic=num_tiles != PLAIN,
            perspective=self.config.perspective > 0,
        )

    def _tile(self, picture: int, size_2: np.ndarray, fetch: Fetch) -> np.ndarray:
        """A picture in the size that its place has: mosaics show it as it is kept, a single one is fitted in.

        Where nothing of it is seen, any pixels will do, and no picture is read.
        """
        size_wh = (int(size_2[0]), int(size_2[1]))
        image = None
        if picture >= 0:
            image = fetch(picture, lambda: as_scanned(self.pictures[picture], self._wh_N2[picture]))
        if image is None:
            return _grey(max(self.size, *size_wh))[: size_wh[1], : size_wh[0]]
        return image if image.shape[1::-1] == size_wh else np.asarray(cv2.resize(image, size_wh))

    @cached_property
    def _wh_N2(self) -> np.ndarray:
        return resized_wh(self.size_wh_N2, self.size)

    def _rounds(self, draws: Mapping[str, np.ndarray], m: int, fetch: Fetch) -> Iterator[list[CutOut]]:
        """Objects cut out of one mosaic after the other, half of those each one has."""
        num_rounds = len(draws["paste_tiles"][m])
        tiles_R19 = np.full((num_rounds, 1, 9), -1)
        tiles_R19[..., :4] = draws["paste_tiles"][m][:, None]
        rounds = {
            "kind": np.full((num_rounds, 1), FOUR),
            "tiles": tiles_R19,
            "centre": draws["paste_centre"][m][:, None],
            "warp": np.zeros((num_rounds, 1, 8)),
            "aspect": np.ones((num_rounds, 1)),
        }
        for r in range(num_rounds):
            one = {name: array[r : r + 1] for name, array in rounds.items()}
            sheets = lay_out(one, self._wh_N2, size=self.size, out_wh=(1, 1))
            labels = gather_labels(self.labels, sheets)
            in_full = "paste_in_full" in draws and bool(draws["paste_in_full"][m, r])
            yield self._cut_half(labels, sheets, int(draws["paste_key"][m, r]), fetch, in_full=in_full)

    def _cut_half(self, labels: CanvasLabels, sheets: Sheets, key: int, fetch: Fetch, *, in_full: bool) -> list[CutOut]:
        """`in_full`: all pictures are read, also if there is nothing to cut out."""
        with_polygon = np.flatnonzero(labels.num_points_T)
        if not (len(with_polygon) or in_full):
            return []
        chosen = with_polygon[self.pick(key, len(with_polygon), round(0.5 * len(with_polygon)))]
        placed = self._place(sheets, [], 0, (1, 1), fetch)
        canvas = compose(placed.tiles, placed.origin_K2, placed.canvas_wh)
        polygons = [labels.polygon(label) for label in chosen]
        return cut_out(canvas, labels.class_T[chosen], labels.box_T4[chosen], polygons)


@cache
def _grey(side: int) -> np.ndarray:
    """As large as any tile."""
    return np.full((side, side, 3), PADDING, np.uint8)


# Four samples in one of twice the size, as YOLOv7's --quad collates them.
#
# Dimension key:  B samples   G groups of four   T targets   C H W channels, height and width of a sample

ENLARGED = 0.5
"""Share of the groups of which only the first sample is shown, enlarged."""
PLACES = ((0, 0), (1, 0), (0, 1), (1, 1))
"""Row and column of each of the four: the second goes below the first."""


def quad(images_BCHW: np.ndarray, targets_T6: np.ndarray, uniform_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [G, C, 2H, 2W] and their targets; samples that fill no group are left out.

    Targets are (number of the image, class, cx, cy, w, h), in the order of images. `uniform_G` decides for each group.
    """
    num_groups = len(images_BCHW) // 4
    _, channels, height, width = images_BCHW.shape
    out = np.empty((num_groups, channels, 2 * height, 2 * width), np.uint8)
    targets = [np.zeros((0, 6), np.float32)]
    for group, uniform in enumerate(uniform_G[:num_groups]):
        members = range(4 * group, 4 * group + 4)
        own = [targets_T6[targets_T6[:, 0] == member].copy() for member in members]
        if uniform < ENLARGED:
            out[group] = _enlarged(images_BCHW[members[0]])
            own = own[:1]
        else:
            for member, (row, column), target in zip(members, PLACES, own, strict=True):
                place = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
                out[group][:, *place] = images_BCHW[member]
                target[:, 2:] = (target[:, 2:] + np.array([column, row, 0, 0], np.float32)) / 2
        joined = np.concatenate(own)
        joined[:, 0] = group
        targets.append(joined)
    return out, np.concatenate(targets)


def _enlarged(image_CHW: np.ndarray) -> np.ndarray:
    """Twice the size, bilinear; truncated."""
    channels, height, width = image_CHW.shape
    doubled = [cv2.resize(plane.astype(np.float32), (2 * width, 2 * height)) for plane in image_CHW]
    return np.stack(doubled).astype(np.uint8).reshape(channels, 2 * height, 2 * width)
