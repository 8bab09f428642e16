"""The same samples by the Triton kernels and by plain torch.

Run as a program, it compares them in Triton's interpreter:

TRITON_INTERPRET=1 python -m tests.yolo.augment.two_renderers
"""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.feed import Plan
from flatout.feed.device import Render
from flatout.feed.device_store import DeviceStore
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu.batches import Fill, Paste
from flatout.yolo.augment.gpu.chroma import Subsampled
from flatout.yolo.augment.gpu.input import DeviceInputConfig, training_input
from flatout.yolo.augment.gpu.paste_torch import fill_polygons, paste_objects
from flatout.yolo.augment.gpu.render_torch import TorchRender
from flatout.yolo.augment.gpu.source import ParameterSource
from flatout.yolo.augment.layout import resized_wh
from tests.yolo.augment.scenes import busy_set, image_set_of, parameters_of

SIZE = 64
CHANGES: dict[str, dict[str, Any]] = {
    "mixed": {"mixup": 0.5, "degrees": 20, "shear": 5, "scale": 0.7, "flipud": 0.5},
    "perspective": {"mixup": 0.5, "perspective": 0.001, "degrees": 9},
    "stretched": {"aspect": 0.8, "mixup": 0.5},
    "gamma": {"gamma": 0.8, "mixup": 0.5},
    "single": {"mosaic": 0, "mixup": 0, "degrees": 5},
}


def rendered(
    name: str,
    render: Callable[..., Render],
    dtype: torch.dtype,
    device: str,
    *,
    num: int,
    channels_last: bool = True,
    recolor: bool = True,
    subsampled: bool = False,
) -> Tensor:
    """Images [num, 3, H, W] by a renderer; rectangular if there is no mosaic."""
    config = AugmentConfig(**{"paste_in": 0} | CHANGES[name])
    images, labels = busy_set(8, seed=2)
    image_set = image_set_of(images, labels)
    sizes = image_set.size_wh_N2
    out_wh_N2 = None if config.mosaic else np.tile([SIZE, SIZE // 2], (len(images), 1))
    params = parameters_of(ParameterSource(image_set, config, size=SIZE, out_wh_N2=out_wh_N2), np.arange(num))
    # Noise instead of resized images: this runs without OpenCV.
    rng = np.random.default_rng(0)
    kept = [rng.integers(0, 256, (height, width, 3), np.uint8) for width, height in resized_wh(sizes, SIZE).tolist()]
    store = DeviceStore(Subsampled(kept, resized_wh(sizes, SIZE)) if subsampled else kept, device)
    tensors = {name: torch.from_numpy(array).to(device) for name, array in params.items()}
    shape = (num, 3, SIZE if out_wh_N2 is None else SIZE // 2, SIZE)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.zeros(shape, dtype=dtype, device=device).to(memory_format=layout)
    renderer = render(perspective=config.perspective > 0, recolor=recolor, subsampled=subsampled)
    renderer(store.sources_of(params["items"]), tensors, {"images": out})
    return out


by_torch = partial(rendered, render=partial(TorchRender, mixup=True))


def by_both(name: str, dtype: torch.dtype, device: str, **more: Any) -> tuple[Tensor, Tensor]:
    """Images by the kernel, then by torch."""
    from flatout.yolo.augment.gpu.render_triton import TritonRender

    return (
        rendered(name, TritonRender, dtype, device, **more),
        by_torch(name, dtype=dtype, device=device, **more),
    )


def fed(
    augment: AugmentConfig, dtype: torch.dtype, device: str, *, subsampled: bool = False, **parts: Any
) -> list[Tensor]:
    """Batches of images with polygons, made with these parts of the input (`_paste`, `_fill`, `_render`)."""
    images, labels = busy_set(9, seed=1, polygons="all", largest=160)
    image_set = image_set_of(images, labels)
    rng = np.random.default_rng(0)
    wh_N2 = resized_wh(image_set.size_wh_N2, 2 * SIZE)
    kept = [rng.integers(0, 256, (height, width, 3), np.uint8) for width, height in wh_N2.tolist()]
    plan = Plan(num_samples=len(images), batch_size=3, seed=3)
    config = DeviceInputConfig(dtype=dtype, workers=0, subsampled=subsampled)
    with training_input(image_set, kept, augment, plan, size=2 * SIZE, device=device, config=config) as batches:
        for name, part in parts.items():
            setattr(batches, name, part)
        return [batch["images"].clone() for batch in islice(batches, 2)]


def pasted(paste: Paste, dtype: torch.dtype, device: str, **more: Any) -> list[Tensor]:
    """Batches with objects pasted into every sample, flipped and not."""
    return fed(AugmentConfig(mixup=0, paste_in=1.0, flipud=0.5), dtype, device, _paste=paste, **more)


def copied(fill: Fill, render: Render, dtype: torch.dtype, device: str, **more: Any) -> list[Tensor]:
    """Batches with most objects copied within their mosaics, mixed and not."""
    augment = AugmentConfig(mixup=0.5, paste_in=0, copy_paste=0.8, degrees=10)
    return fed(augment, dtype, device, _fill=fill, _render=render, **more)


def main() -> None:
    from flatout.yolo.augment.gpu import paste_triton, render_triton

    # One program per sample: the interpreter takes its time per operation, not per pixel.
    render_triton.BLOCK_ROWS = render_triton.BLOCK_COLUMNS = SIZE
    paste_triton.BLOCK_ROWS = paste_triton.BLOCK_COLUMNS = 2 * SIZE
    paste_triton.BLOCK_ROWS = paste_triton.BLOCK_COLUMNS = SIZE
    for name in CHANGES:
        mine, theirs = by_both(name, torch.uint8, "cpu", num=3)
        assert torch.equal(mine, theirs), name
    mine, theirs = by_both("mixed", torch.float32, "cpu", num=1, channels_last=False, recolor=False)
    assert torch.equal(mine, theirs), "float32"
    mine, theirs = by_both("mixed", torch.uint8, "cpu", num=2, subsampled=True)
    assert torch.equal(mine, theirs), "subsampled"
    for more in ({}, {"subsampled": True}):
        pastes = paste_triton.paste_objects, paste_objects
        kernels, plain = (pasted(paste, torch.uint8, "cpu", **more) for paste in pastes)
        for mine, theirs in zip(kernels, plain, strict=True):
            assert torch.equal(mine, theirs), f"pasted {more}"
    render_triton.BLOCK_ROWS = render_triton.BLOCK_COLUMNS = 2 * SIZE
    for more in ({}, {"subsampled": True}):
        ways: list[tuple[Fill, Render]] = [
            (paste_triton.fill_polygons, render_triton.TritonRender(**more)),
            (fill_polygons, TorchRender(mixup=True, **more)),
        ]
        kernels, plain = (copied(fill, render, torch.uint8, "cpu", **more) for fill, render in ways)
        for mine, theirs in zip(kernels, plain, strict=True):
            assert torch.equal(mine, theirs), f"copied {more}"


if __name__ == "__main__":
    main()
