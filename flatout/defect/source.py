r"""Sources of training samples: painted patches, or parameters for a GPU renderer.

    draw parameters --> PatchSource: crop, paint --> finished patches and masks
                    \-> ParameterSource -----------> parameters; `render` crops and paints on the device

Both draw the same parameters, hence give the same samples.

Dimension key:  M samples   P patch side   K defects per sample at most   C planes   N images   H W image   Q kernels
                S side of a kernel's square
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import numpy as np

from flatout.defect.data.items import PLANES
from flatout.defect.patches import Grid
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import HARD_NEGATIVE, LINES, MAX_LINES, BlockDraw, draw_samples, row_of
from flatout.defect.synth.paint import (
    MAX_BATCHED_PX,
    crop,
    crop_disturbed,
    noise_table,
    paint,
    paint_isolated,
    paint_lines,
)
from flatout.defect.synth.pool import Kernels
from flatout.feed import Field, Fields, Out, Substituted, Unreadable

MIN_BATCHED_DEFECTS = 8
"""Number of defects in a micro-batch from which on painting them together is faster than one by one."""


class DecodedImages(Protocol):
    """Canonical images by number, float32 [3, H, W], read-only."""

    def __getitem__(self, index: int, /) -> np.ndarray: ...

    def where(self, index: int) -> str: ...


class SampleRecipe:
    """Defines the samples of a run: their patches, and what is painted into them. Deterministic; pickled for workers.

    Images 0 .. num_images - 1 are divided into patches by the grid; `num_hard_negatives` more images follow them.
    """

    def __init__(
        self, grid: Grid, config: SynthConfig, kernels: Kernels, *, num_images: int, num_hard_negatives: int = 0
    ) -> None:
        self.grid, self.config, self.kernels = grid, config, kernels
        self.num_images = num_images
        self.num_hard_negatives = num_hard_negatives
        self._block_draw = BlockDraw(partial(draw_samples, config, kernels, grid.patch_hw))

    def __len__(self) -> int:
        return self.num_images * self.grid.per_image

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Parameters of samples as `draw_samples` returns them, and what to crop: `item` int32 [M], the image, and
        `corner` int32 [M, 2] (y, x)."""
        patch_hw = self.grid.patch_hw
        draws = self._block_draw(seed, epoch, np.asarray(positions))
        image_M, y_M, x_M = self.grid.locate(indices)
        corner_M2 = np.stack((y_M, x_M), axis=1)
        if self.num_hard_negatives:
            is_hard_M = draws["kind"] == HARD_NEGATIVE
            num_corners_2 = np.asarray(self.grid.shape_hw) - patch_hw + 1
            corner_M2 = np.where(is_hard_M[:, None], (draws["crop"] * num_corners_2).astype(np.int64), corner_M2)
            hard_M = self.num_images + np.asarray(indices) % self.num_hard_negatives
            image_M = np.where(is_hard_M, hard_M, image_M)
        return draws | {"item": image_M.astype(np.int32), "corner": corner_M2.astype(np.int32)}

    @property
    def num_items(self) -> int:
        """Number of images, hard negatives included."""
        return self.num_images + self.num_hard_negatives

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        """Replace unreadable images by the same patch of other images; hard negatives by others, if any is left."""
        item_M, is_bad_M = draws["item"].astype(np.int64), unreadable.among(draws["item"])
        is_patch_M, is_bad_N = item_M < self.num_images, unreadable.is_bad_N
        bad = np.flatnonzero(is_bad_M & is_patch_M)
        item_M[bad] = unreadable.substitutes(bad, item_M[bad], is_bad_N[: self.num_images])
        index_M = np.where(is_patch_M, item_M * self.grid.per_image + indices % self.grid.per_image, indices)
        bad = np.flatnonzero(is_bad_M & ~is_patch_M)
        first = 0 if is_bad_N[self.num_images :].all() else self.num_images
        item_M[bad] = first + unreadable.substitutes(bad, item_M[bad] - first, is_bad_N[first:])
        return Substituted(index_M, {**draws, "item": item_M.astype(np.int32)}, is_bad_M)


class _RecipeSource:
    """The part of the feed's source protocol that depends on the recipe alone: lengths, names, draws, substitutes."""

    def __init__(self, recipe: SampleRecipe, where_item: Callable[[int], str]) -> None:
        self._recipe, self.where_item = recipe, where_item
        self.num_items, self.draw, self.substitute = recipe.num_items, recipe.draw, recipe.substitute

    def __len__(self) -> int:
        return len(self._recipe)

    def where(self, index: int) -> str:
        return self.where_item(index // self._recipe.grid.per_image)


class PatchSource(_RecipeSource):
    """Source of finished samples: `images` float32 [3, P, P] in 0..255, `masks` uint8 [1, P, P] of 0 and 1."""

    def __init__(self, recipe: SampleRecipe, images: DecodedImages) -> None:
        super().__init__(recipe, images.where)
        self._images = images
        height, width = recipe.grid.patch_hw
        self.fields: Fields = {
            "images": Field((PLANES, height, width), np.float32),
            "masks": Field((1, height, width), np.uint8),
        }
        self._noise = (
            noise_table(recipe.grid.patch_hw) if recipe.config.has_disturbances else np.empty((0, 0), np.float32)
        )

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        recipe, patches_MCPP = self._recipe, out["images"]
        out["masks"].fill(0)
        mask_MPP = out["masks"][:, 0].view(np.bool_)
        crops = zip(draws["item"].tolist(), draws["corner"].tolist(), draws["kind"].tolist(), strict=True)
        for i, (item, (y, x), kind) in enumerate(crops):
            planes_CHW, patch_CPP = out.fetch(item, partial(self._images.__getitem__, item)), patches_MCPP[i]
            if planes_CHW is None:
                continue
            if recipe.config.has_disturbances and kind != HARD_NEGATIVE:
                crop_disturbed(planes_CHW, (y, x), row_of(draws, i), recipe.config, self._noise, patch_CPP)
            else:
                crop(planes_CHW, (y, x), patch_CPP)
            if kind == LINES:
                paint_lines(patch_CPP, row_of(draws, i))
        self._paint(patches_MCPP, mask_MPP, draws)

    def _paint(self, patches_MCPP: np.ndarray, mask_MPP: np.ndarray, draws: Mapping[str, np.ndarray]) -> None:
        """Paint the defects: isolated ones all at once where that is faster, the others one by one."""
        kernels, sign_from_pixels = self._recipe.kernels, self._recipe.config.sign_from_pixels
        left_MK = np.arange(draws["kernel"].shape[1]) < draws["num"][:, None]
        is_small = kernels.value_QSS[0].size <= MAX_BATCHED_PX and not sign_from_pixels
        if (
            is_small
            and left_MK.sum() >= MIN_BATCHED_DEFECTS
            and patches_MCPP.flags.c_contiguous
            and mask_MPP.flags.c_contiguous
        ):
            left_MK = paint_isolated(patches_MCPP, mask_MPP, draws, kernels)
        for i in np.flatnonzero(left_MK.any(1)).tolist():
            sample = {name: draws[name][i][left_MK[i]] for name in ("kernel", "amplitude", "center", "labelled")}
            sample["num"] = left_MK[i].sum()
            paint(patches_MCPP[i], mask_MPP[i], sample, kernels, full_swing=sign_from_pixels)


class ParameterSource(_RecipeSource):
    """Source of the same samples as parameters, for the renderers of `render`."""

    def __init__(self, recipe: SampleRecipe, where_item: Callable[[int], str]) -> None:
        super().__init__(recipe, where_item)
        config, max_defects = recipe.config, recipe.config.num_defects[1]
        fields: dict[str, Field] = {
            "items": Field((), np.int32),
            "corner": Field((2,), np.int32),
            "kind": Field((), np.int8),
            "num": Field((), np.int32),
            "center": Field((max_defects, 2), np.int32),
            "kernel": Field((max_defects,), np.int32),
            "amplitude": Field((max_defects, PLANES), np.float32),
            "labelled": Field((max_defects,), np.bool_),
        }
        if config.line_ratio:
            fields |= {"num_lines": Field((), np.int32), "lines": Field((MAX_LINES, 5), np.float32)}
        if config.has_disturbances:
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
