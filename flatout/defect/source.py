r"""Training samples: patches of kept images, with defects painted by a worker, or as parameters for a GPU.

    draw (numbers) --> PatchSource: crop, paint --> finished patches and masks
                   \-> ParameterSource ------------> numbers; `render_torch` crops and paints where the images are

Both draw the same numbers, hence the same samples.

Dimension key:  M samples   P patch side   K places for defects   C planes
"""

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import numpy as np

from flatout.defect.data.items import PLANES
from flatout.defect.patches import Grid
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import HARD_NEGATIVE, LINES, MOST_LINES, Ahead, draw_samples, row_of
from flatout.defect.synth.paint import (
    MOST_AT_ONCE_PX,
    crop,
    crop_disturbed,
    noise_table,
    paint,
    paint_apart,
    paint_lines,
)
from flatout.defect.synth.pool import Kernels
from flatout.feed import Field, Fields, Out, Substituted, Unreadable

AT_ONCE = 8
"""Defects of a micro-batch from which on painting them together is faster than one by one."""


class Images(Protocol):
    """Canonical images float32 [3, H, W] by number, read-only."""

    def __getitem__(self, index: int, /) -> np.ndarray: ...

    def where(self, index: int) -> str: ...


class SampleRecipe:
    """What a run's samples are: which patches there are, and what is done to them. Pure; pickled for workers.

    Images 0 .. num_images - 1 are cut up by the grid; `num_hard_negatives` more follow them.
    """

    def __init__(
        self, grid: Grid, config: SynthConfig, kernels: Kernels, *, num_images: int, num_hard_negatives: int = 0
    ) -> None:
        self.grid, self.config, self.kernels = grid, config, kernels
        self.num_images = num_images
        self.num_hard_negatives = num_hard_negatives
        self._numbers = Ahead(self._draw_numbers)

    def __len__(self) -> int:
        return self.num_images * self.grid.per_image

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Parameters of samples as `draw_samples` gives them, and where to cut: `item` int32 [M], `corner` int32
        [M, 2] (y, x)."""
        patch_hw = self.grid.patch_hw
        draws = self._numbers(seed, epoch, np.asarray(positions))
        image_M, y_M, x_M = self.grid.locate(indices)
        corner_M2 = np.stack((y_M, x_M), axis=1)
        if self.num_hard_negatives:
            is_hard_M = draws["kind"] == HARD_NEGATIVE
            room_2 = np.asarray(self.grid.shape_hw) - patch_hw + 1
            corner_M2 = np.where(is_hard_M[:, None], (draws["crop"] * room_2).astype(np.int64), corner_M2)
            hard_M = self.num_images + np.asarray(indices) % self.num_hard_negatives
            image_M = np.where(is_hard_M, hard_M, image_M)
        return draws | {"item": image_M.astype(np.int32), "corner": corner_M2.astype(np.int32)}

    @property
    def num_items(self) -> int:
        """Images, those that must not fire included."""
        return self.num_images + self.num_hard_negatives

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        """The same places of other images; of those that must not fire another such one, if any is left."""
        item_M, is_bad_M = draws["item"].astype(np.int64), unreadable.among(draws["item"])
        is_cut_M, is_bad_N = item_M < self.num_images, unreadable.is_bad_N
        bad = np.flatnonzero(is_bad_M & is_cut_M)
        item_M[bad] = unreadable.stand_ins(bad, item_M[bad], is_bad_N[: self.num_images])
        shown_M = np.where(is_cut_M, item_M * self.grid.per_image + indices % self.grid.per_image, indices)
        bad = np.flatnonzero(is_bad_M & ~is_cut_M)
        first = 0 if is_bad_N[self.num_images :].all() else self.num_images
        item_M[bad] = first + unreadable.stand_ins(bad, item_M[bad] - first, is_bad_N[first:])
        return Substituted(shown_M, {**draws, "item": item_M.astype(np.int32)}, is_bad_M)

    def _draw_numbers(self, seed: int, epoch: int, positions_M: np.ndarray) -> dict[str, np.ndarray]:
        patch_hw = self.grid.patch_hw
        return draw_samples(
            self.config, self.kernels, patch_hw=patch_hw, seed=seed, epoch=epoch, positions_M=positions_M
        )


class _RecipeSource:
    """Samples of a recipe by number: how many, where each is from, what is drawn for it, and what is shown instead."""

    def __init__(self, recipe: SampleRecipe, images: Images) -> None:
        self._recipe, self._images = recipe, images

    def __len__(self) -> int:
        return len(self._recipe)

    def where(self, index: int) -> str:
        return self._images.where(index // self._recipe.grid.per_image)

    @property
    def num_items(self) -> int:
        return self._recipe.num_items

    def where_item(self, item: int) -> str:
        return self._images.where(item)

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return self._recipe.draw(seed, epoch, positions, indices)

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        return self._recipe.substitute(indices, draws, unreadable)


class PatchSource(_RecipeSource):
    """Finished samples: `images` float32 [3, P, P] in 0..255, `masks` uint8 [1, P, P] of 0 and 1."""

    def __init__(self, recipe: SampleRecipe, images: Images) -> None:
        super().__init__(recipe, images)
        height, width = recipe.grid.patch_hw
        self.fields: Fields = {
            "images": Field((PLANES, height, width), np.float32),
            "masks": Field((1, height, width), np.uint8),
        }
        self._noise = noise_table(recipe.grid.patch_hw) if recipe.config.disturbs else np.empty((0, 0), np.float32)

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        recipe, patches_MCPP = self._recipe, out["images"]
        out["masks"].fill(0)
        mask_MPP = out["masks"][:, 0].view(np.bool_)
        places = zip(draws["item"].tolist(), draws["corner"].tolist(), draws["kind"].tolist(), strict=True)
        for i, (item, (y, x), kind) in enumerate(places):
            planes_CHW, patch_CPP = out.fetch(item, partial(self._images.__getitem__, item)), patches_MCPP[i]
            if planes_CHW is None:
                continue
            if recipe.config.disturbs and kind != HARD_NEGATIVE:
                crop_disturbed(planes_CHW, (y, x), row_of(draws, i), recipe.config, self._noise, patch_CPP)
            else:
                crop(planes_CHW, (y, x), patch_CPP)
            if kind == LINES:
                paint_lines(patch_CPP, row_of(draws, i))
        self._paint(patches_MCPP, mask_MPP, draws)

    def _paint(self, patches_MCPP: np.ndarray, mask_MPP: np.ndarray, draws: Mapping[str, np.ndarray]) -> None:
        """Defects: those that touch no other one all at once, where that pays, the others one by one."""
        kernels, reads_pixels = self._recipe.kernels, self._recipe.config.reads_pixels
        left_MK = np.arange(draws["kernel"].shape[1]) < draws["num"][:, None]
        is_small = kernels.value_QSS[0].size <= MOST_AT_ONCE_PX and not reads_pixels
        if is_small and left_MK.sum() >= AT_ONCE and patches_MCPP.flags.c_contiguous and mask_MPP.flags.c_contiguous:
            left_MK = paint_apart(patches_MCPP, mask_MPP, draws, kernels)
        for i in np.flatnonzero(left_MK.any(1)).tolist():
            sample = {name: draws[name][i][left_MK[i]] for name in ("kernel", "amplitude", "center", "labelled")}
            sample["num"] = left_MK[i].sum()
            paint(patches_MCPP[i], mask_MPP[i], sample, kernels, full_swing=reads_pixels)


class ParameterSource(_RecipeSource):
    """The same samples as numbers, for `render_torch`."""

    def __init__(self, recipe: SampleRecipe, images: Images) -> None:
        super().__init__(recipe, images)
        config, places = recipe.config, recipe.config.num_defects[1]
        fields: dict[str, Field] = {
            "items": Field((), np.int32),
            "corner": Field((2,), np.int32),
            "kind": Field((), np.int8),
            "num": Field((), np.int32),
            "center": Field((places, 2), np.int32),
            "kernel": Field((places,), np.int32),
            "amplitude": Field((places, PLANES), np.float32),
            "labelled": Field((places,), np.bool_),
        }
        if config.line_ratio:
            fields |= {"num_lines": Field((), np.int32), "lines": Field((MOST_LINES, 5), np.float32)}
        if config.disturbs:
            fields |= {
                "shift": Field((PLANES, 2), np.float32),
                "gain": Field((PLANES,), np.float32),
                "offset": Field((PLANES,), np.float32),
                "noise_at": Field((PLANES, 2), np.int32),
            }
        self.fields: Fields = fields

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for name in self.fields:
            out[name][...] = draws["item" if name == "items" else name]


class ImageNames:
    """Names of images whose pixels are on the device. Here, because workers unpickle it and must not load torch."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __getitem__(self, index: int) -> np.ndarray:
        raise AssertionError("pixels are on the device")

    def where(self, index: int) -> str:
        return self._names[index]
