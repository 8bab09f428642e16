"""Samples are as specified, and a batch painted on a device equals the one painted by workers."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from flatout.defect import render
from flatout.defect.patches import Grid
from flatout.defect.render import PatchRenderer, renderer_for
from flatout.defect.source import ParameterSource, PatchSource
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import DEFECTS, LINES
from flatout.defect.synth.pool import Kernels, gaussian_kernel
from flatout.feed import DecodeError, Feed, FeedConfig, Plan
from tests.defect.golden_files import records
from tests.defect.synthetic import Textures, recipe_for
from tests.defect.test_synth import sample_of
from tests.defect.two_renderers import RECIPES, by_both, rendered
from tests.golden_cases import golden_cases
from tests.reference.plain_feed import plain_batches
from tests.triton_interpreter import check_in_interpreter, needs_triton

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


def arrays_of(
    renderer: PatchRenderer, images: np.ndarray, params: dict[str, Any], device: str
) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().numpy() for name, tensor in rendered(renderer, images, params, device).items()}


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("case", golden_cases("defect/render.json", records("cases"), also=("defect/render.npz",)))
def test_the_device_renderer_matches_the_golden_patches(case, device):
    record, arrays = case
    if record["dtype"] != "float32":
        pytest.skip("painting in 8 bits is not supported")
    name = record["name"]
    patch_CHW = np.ascontiguousarray(arrays[f"{name}_patch"].transpose(2, 0, 1), np.float32)
    kernel_ids = sorted({defect["kernel"] for defect in record["defects"]})
    kernels = Kernels([gaussian_kernel(kernel_id) for kernel_id in kernel_ids])
    shape_hw = patch_CHW.shape[1], patch_CHW.shape[2]
    grid = Grid(shape_hw, shape_hw, (2, 2))
    sample = {key: array[None] for key, array in sample_of(record["defects"], kernel_ids).items()}
    sample |= {
        "kind": np.array([DEFECTS], np.int8),
        "corner": np.zeros((1, 2), np.int32),
        "items": np.zeros(1, np.int32),
    }
    renderer = renderer_for(grid, SynthConfig(), kernels, torch.device(device))
    found = arrays_of(renderer, patch_CHW[None], sample, device)
    np.testing.assert_allclose(found["images"][0], arrays[f"{name}_out"], rtol=0, atol=2e-4)
    np.testing.assert_array_equal(found["masks"][0, 0], arrays[f"{name}_mask"])


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", RECIPES)
def test_painting_on_a_device_equals_painting_by_workers(name, device):
    images = Textures(4)
    recipe = recipe_for(images, **RECIPES[name])
    plan = Plan(num_samples=len(recipe), batch_size=len(recipe), seed=5, shuffle=False)
    (expected,) = plain_batches(PatchSource(recipe, images), plan, 1)
    (params,) = plain_batches(ParameterSource(recipe, images.where), plan, 1)
    renderer = renderer_for(recipe.grid, recipe.config, recipe.kernels, torch.device(device))
    found = arrays_of(renderer, np.stack(images.images), dict(params.fields), device)
    np.testing.assert_allclose(found["images"], expected["images"], rtol=0, atol=2e-4)
    np.testing.assert_array_equal(found["masks"], expected["masks"])
    assert expected["masks"].any()


@needs_triton
def test_the_kernel_paints_the_bits_of_torch_in_the_interpreter():
    check_in_interpreter("tests.defect.two_renderers")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@needs_triton
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_on_a_gpu_the_kernel_paints_the_bits_of_torch(name, channels_last):
    mine, theirs = by_both(name, "cuda", channels_last=channels_last)
    assert torch.equal(mine["images"], theirs["images"])
    assert torch.equal(mine["masks"], theirs["masks"])


def test_without_triton_a_gpu_paints_by_torch_and_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(render, "HAS_TRITON", False)
    render.warn_without_triton.cache_clear()
    monkeypatch.setattr(PatchRenderer, "__init__", lambda self, *arguments: None)
    arguments: Any = (None, None, None, torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        assert {type(renderer_for(*arguments)) for _ in range(2)} == {PatchRenderer}
    assert [record.message[:23] for record in caplog.records] == ["Triton is not installed"]


def test_patches_without_defects_are_the_image_bit_for_bit_and_images_stay_as_they_are():
    images = Textures(3)
    kept = [image.copy() for image in images.images]
    recipe = recipe_for(images)
    source = PatchSource(recipe, images)
    plan = Plan(num_samples=len(source), batch_size=len(source), shuffle=False)
    (batch,) = plain_batches(source, plan, 0)
    draws = recipe.draw(plan.seed, 0, batch.positions, batch.indices)
    image_M, y_M, x_M = recipe.grid.locate(batch.indices)
    plain = draws["kind"] != DEFECTS
    assert plain.any() and not plain.all()
    for m in np.flatnonzero(plain):
        cut = kept[image_M[m]][:, y_M[m] : y_M[m] + 48, x_M[m] : x_M[m] + 48]
        np.testing.assert_array_equal(batch["images"][m], cut)
        assert not batch["masks"][m].any()
    for image, before in zip(images.images, kept, strict=True):
        np.testing.assert_array_equal(image, before)


def test_the_label_is_where_target_differs_from_both_references_and_nowhere_else():
    images = Textures(2)
    equal = np.full((3, 96, 80), 120, np.float32)
    images.images = [equal, equal]
    recipe = recipe_for(images, num_defects=(3, 3), defect_share=1.0, amplitudes=((60, 60),))
    source = PatchSource(recipe, images)
    (batch,) = plain_batches(source, Plan(num_samples=len(source), batch_size=len(source)), 0)
    target, ref1, ref2 = np.moveaxis(batch["images"], 1, 0)
    only_target = (np.abs(target - ref1) > 1e-3) & (np.abs(target - ref2) > 1e-3)
    # Where defects overlap, a difference may vanish or come from saturation; neither happens here.
    assert (only_target == batch["masks"][:, 0].astype(bool)).mean() > 0.999
    np.testing.assert_array_equal(ref1, ref2)  # of three defects, one is in target alone, two are in all planes


def test_painting_the_whole_image_then_cropping_equals_cropping_then_painting():
    images = Textures(1, (96, 96))
    kernels = Kernels.standard()
    rng = np.random.default_rng(3)
    sample = {
        "num": np.array(40),
        "center": rng.integers(0, 96, (40, 2)),
        "kernel": rng.integers(0, 2, 40),
        "amplitude": rng.choice([-80, 80], (40, 1)).astype(np.float32) * np.array([1, 1, 0.5], np.float32),
        "labelled": rng.random(40) < 0.5,
    }
    from flatout.defect.synth.paint import paint

    whole, mask = images[0].copy(), np.zeros((96, 96), np.bool_)
    paint(whole, mask, sample, kernels, full_swing=False)
    part, part_mask = images[0][:, 20:68, 30:78].copy(), np.zeros((48, 48), np.bool_)
    paint(part, part_mask, sample | {"center": sample["center"] - [30, 20]}, kernels, full_swing=False)
    np.testing.assert_array_equal(part, whole[:, 20:68, 30:78])
    np.testing.assert_array_equal(part_mask, mask[20:68, 30:78])


def test_lines_have_an_empty_label_and_are_stronger_in_target():
    images = Textures(6)
    recipe = recipe_for(images, line_ratio=1.0)
    source = PatchSource(recipe, images)
    (batch,) = plain_batches(source, Plan(num_samples=len(source), batch_size=len(source), shuffle=False), 0)
    draws = recipe.draw(0, 0, batch.positions, batch.indices)
    assert (draws["kind"] == LINES).all()
    assert not batch["masks"].any()
    image_M, y_M, x_M = recipe.grid.locate(batch.indices)
    before = np.stack([images[i][:, y : y + 48, x : x + 48] for i, y, x in zip(image_M, y_M, x_M, strict=True)])
    change = np.abs(batch["images"] - before).sum((2, 3))
    assert (change[:, 0] > 1.3 * change[:, 1]).mean() > 0.9
    np.testing.assert_allclose(change[:, 1], change[:, 2], rtol=1e-3)


class DamagedTextures(Textures):
    def __init__(self, num: int, damaged: set[int]) -> None:
        super().__init__(num)
        self.damaged = damaged

    def __getitem__(self, index: int) -> np.ndarray:
        if index in self.damaged:
            raise DecodeError("a damaged image")
        return super().__getitem__(index)


def whole_epoch(source: Any, *, unreadable: dict[int, str] | None = None, **changes: Any) -> tuple[list[Any], set[int]]:
    plan = Plan(num_samples=len(source), batch_size=8, seed=5, last="short")
    settings: dict[str, Any] = {"workers": 0, "on_error": "substitute", "bad_share": 0.5}
    config = FeedConfig(**settings | changes)
    with Feed(source, plan, config, unreadable=unreadable) as feed:
        return [batch.copy() for batch in feed], set(feed.bad_samples)


@pytest.mark.parametrize("damaged", [{1}, {6}, {1, 6}, {6, 7}], ids=str)
def test_patches_of_a_damaged_image_are_cut_at_the_same_place_of_another_one(damaged):
    images = DamagedTextures(8, damaged)
    recipe = recipe_for(Textures(8), hard=2, hard_negative_ratio=0.5)
    undamaged, _ = whole_epoch(ParameterSource(recipe, Textures(8).where))
    known = dict.fromkeys(damaged, "found by the device")
    params, _ = whole_epoch(ParameterSource(recipe, Textures(8).where), unreadable=known)
    patches, bad = whole_epoch(PatchSource(recipe, images))
    assert bad == damaged
    for other in ({"workers": 2, "start_method": "fork"}, {"unreadable": {min(damaged): "known"}}):
        for mine, theirs in zip(whole_epoch(PatchSource(recipe, images), **other)[0], patches, strict=True):
            np.testing.assert_array_equal(mine["images"], theirs["images"])
            np.testing.assert_array_equal(mine["masks"], theirs["masks"])
    num_replaced = 0
    renderer = renderer_for(recipe.grid, recipe.config, recipe.kernels, torch.device("cpu"))
    for before, replaced, finished in zip(undamaged, params, patches, strict=True):
        is_bad = np.isin(before["items"], list(damaged))
        num_replaced += is_bad.sum()
        np.testing.assert_array_equal(replaced["items"] != before["items"], is_bad)
        np.testing.assert_array_equal(replaced["corner"], before["corner"])
        was_hard = before["items"] >= 6
        np.testing.assert_array_equal(replaced["items"] >= 6, was_hard & (damaged != {6, 7}))
        np.testing.assert_array_equal(replaced.indices, finished.indices)
        found = arrays_of(renderer, np.stack(Textures(8).images), dict(replaced.fields), "cpu")
        np.testing.assert_allclose(found["images"], finished["images"], rtol=0, atol=2e-4)
    assert num_replaced > 2
