"""Compares the Triton renderer with the torch renderer; as a program, in Triton's interpreter.

The interpreter has to be enabled before Triton is imported, which needs a separate process.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.defect.render import PatchRenderer
from flatout.defect.source import ParameterSource
from flatout.feed import Plan
from flatout.feed.device_store import Sources
from tests.defect.synthetic import Textures, recipe_for
from tests.reference.plain_feed import plain_batches

RECIPES: dict[str, dict[str, Any]] = {
    "standard": {},
    "crowded": {"num_defects": (20, 40), "defect_share": 1.0},
    "leaks and lines": {"partial_leak_prob": 0.5, "line_ratio": 0.5},
    "hard negatives": {"hard": 2, "hard_negative_ratio": 0.5},
    "disturbed": {"shift_px": 2.5, "noise": 3.0, "edge_noise": 0.2, "gain": 0.1, "offset": 9.0},
    "one reference": {"shift_px": 2.5, "noise": 3.0, "steepness": 4.0, "one_reference": True},
    "boards": {"mode": "board", "defect_share": 1.0},
    "optics": {"mode": "psf", "defect_share": 1.0},
}


def rendered(
    renderer: PatchRenderer, images: np.ndarray, params: dict[str, Any], device: str, *, channels_last: bool = False
) -> dict[str, Tensor]:
    """Render a batch of patches from images [N, 3, H, W] in one contiguous array."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in params.items()}
    num, height, width = len(params["num"]), *renderer._patch_hw
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = {
        "images": torch.full((num, 3, height, width), -1.0, device=device).contiguous(memory_format=layout),
        "masks": torch.full((num, 1, height, width), 9, dtype=torch.uint8, device=device),
    }
    begin = tensors["items"].long() * images[0].size
    data = torch.from_numpy(images).reshape(-1).to(device)
    renderer(Sources(data, begin, torch.empty(0)), tensors, out)
    return out


def by_both(name: str, device: str, *, num: int | None = None, channels_last: bool = False) -> list[dict[str, Tensor]]:
    """The first samples of a recipe, rendered by the Triton renderer and by the torch renderer."""
    from flatout.defect.render_triton import TritonRenderer

    images = Textures(4)
    recipe = recipe_for(images, **RECIPES[name])
    plan = Plan(num_samples=len(recipe), batch_size=num or len(recipe), seed=5, shuffle=False)
    params = next(iter(plain_batches(ParameterSource(recipe, images.where), plan, 1)))
    pixels = np.stack(images.images)
    return [
        rendered(
            kind(recipe.grid, recipe.config, recipe.kernels, torch.device(device)),
            pixels, dict(params.fields), device, channels_last=channels_last,
        )
        for kind in (TritonRenderer, PatchRenderer)
    ]  # fmt: skip


def main() -> None:
    from flatout.defect import render_triton

    # One program per sample, because the interpreter takes time per operation, not per pixel.
    render_triton.BLOCK_ROWS = render_triton.BLOCK_COLUMNS = 64
    torch.cuda.current_device = lambda: 0  # interpreted kernels are launched without a device
    for name in RECIPES:
        mine, theirs = by_both(name, "cpu", num=6, channels_last=name == "standard")
        assert torch.equal(mine["images"], theirs["images"]), name
        assert torch.equal(mine["masks"], theirs["masks"]), name
        assert mine["masks"].any() and mine["masks"].max() == 1, name


if __name__ == "__main__":
    main()
