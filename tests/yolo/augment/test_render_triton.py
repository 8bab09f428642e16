"""The kernels render what torch renders, to the bit: in Triton's interpreter, and on a GPU."""

import logging

import pytest
import torch

from flatout.yolo.augment.gpu import batches
from flatout.yolo.augment.gpu.batches import renderer_for
from flatout.yolo.augment.gpu.paste_torch import fill_polygons, paste_objects
from flatout.yolo.augment.gpu.render_torch import TorchRender
from tests.feed.test_device import needs_gpu
from tests.triton_interpreter import check_in_interpreter, needs_triton
from tests.yolo.augment.two_renderers import CHANGES, by_both, by_torch, copied, pasted


@needs_triton
def test_the_kernel_renders_the_bits_of_torch_in_the_interpreter():
    check_in_interpreter("tests.yolo.augment.two_renderers")


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CHANGES)
def test_the_kernel_renders_the_bits_of_torch_on_a_gpu(name, dtype, channels_last):
    mine, theirs = by_both(name, dtype, "cuda", num=16, channels_last=channels_last)
    assert mine.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert torch.equal(mine, theirs)
    assert mine.float().std() > 0


@pytest.mark.gpu
@needs_gpu
@needs_triton
def test_colours_stay_as_they_are_for_validation_on_a_gpu():
    mine, theirs = by_both("single", torch.uint8, "cuda", num=8, recolor=False)
    assert torch.equal(mine, theirs)


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("name", CHANGES)
def test_the_kernel_renders_the_bits_of_torch_from_subsampled_images_on_a_gpu(name):
    mine, theirs = by_both(name, torch.bfloat16, "cuda", num=16, subsampled=True)
    assert torch.equal(mine, theirs)
    assert mine.float().std() > 0


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("subsampled", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_the_kernel_pastes_the_bits_of_torch_on_a_gpu(dtype, subsampled):
    from flatout.yolo.augment.gpu import paste_triton

    kernels, plain = (
        pasted(paste, dtype, "cuda", subsampled=subsampled) for paste in (paste_triton.paste_objects, paste_objects)
    )
    for mine, theirs in zip(kernels, plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("subsampled", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_the_kernels_copy_the_bits_of_torch_on_a_gpu(dtype, subsampled):
    from flatout.yolo.augment.gpu import paste_triton
    from flatout.yolo.augment.gpu.render_triton import TritonRender

    ways = (
        (paste_triton.fill_polygons, TritonRender(subsampled=subsampled)),
        (fill_polygons, TorchRender(mixup=True, subsampled=subsampled)),
    )
    kernels, plain = (copied(fill, render, dtype, "cuda", subsampled=subsampled) for fill, render in ways)
    for mine, theirs in zip(kernels, plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CHANGES)
def test_torch_renders_the_same_bits_on_the_gpu_as_on_the_cpu(name):
    on_gpu, on_cpu = (by_torch(name, dtype=torch.float16, device=device, num=8) for device in ("cuda", "cpu"))
    assert torch.equal(on_gpu.cpu(), on_cpu)


def test_without_triton_torch_renders_on_a_gpu_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(batches, "HAS_TRITON", False)
    batches._warn_triton_missing.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert isinstance(renderer_for("cuda", mixup=True), TorchRender)
        assert isinstance(renderer_for("cuda", mixup=True), TorchRender)
    assert caplog.text.count("pip install triton") == 1


def test_on_a_cpu_torch_renders_without_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert isinstance(renderer_for("cpu", mixup=True), TorchRender)
    assert not caplog.text
