"""Registration: known shifts are found, defects do not bend them, the torch version agrees."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from flatout.__main__ import main
from flatout.defect.compare import align_torch
from flatout.defect.compare.align import AlignConfig, align, find_shifts, gaussian_matrix, pooled, tone_change
from flatout.defect.compare.align_torch import align_batch
from flatout.defect.demo_data import generate_strip
from flatout.errors import ConfigError
from tests.defect.boards import board_pair, scan, shifted, texture, write_boards

BOARDS = Path(os.environ.get("FLATOUT_DATA", "none")) / "deeppcb_mini"
MARGIN = 3
"""Blocks near the edge, where the reference would have to be known beyond its own."""


def pair(shift_xy, shape_hw=(240, 208), seed=0):
    wide = texture((shape_hw[0] + 64, shape_hw[1] + 64), seed)
    inner = np.s_[32:-32, 32:-32]
    return wide[inner].copy(), shifted(wide, shift_xy)[inner].copy()


@pytest.mark.parametrize("shift_xy", [(0, 0), (0.3, -0.7), (4.4, -5.25), (-9.6, 7.1), (0.5, 12.5)])
def test_a_known_shift_is_found_to_a_tenth_of_a_pixel(shift_xy):
    target, reference = pair(shift_xy)
    inner = find_shifts(target, reference)[0][MARGIN:-MARGIN, MARGIN:-MARGIN]
    np.testing.assert_allclose(np.median(inner, (0, 1)), shift_xy, atol=0.05)
    assert np.abs(inner - shift_xy).max() < 0.1


def test_shifts_that_differ_from_place_to_place_are_found():
    wide = texture((320, 320))
    y, x = np.mgrid[:320, :320].astype(np.float32)
    bent_x, bent_y = 5 * np.sin(y / 150), 5 * np.cos(x / 150)
    # Target shows at p what the reference, `wide`, shows at p + bend.
    target = cv2.remap(wide, x + bent_x, y + bent_y, cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT)
    found = align(target, wide)
    expected = np.stack((bent_x, bent_y), -1)[8::16, 8::16]
    error = np.abs(found.shift_GK2 - expected)[MARGIN:-MARGIN, MARGIN:-MARGIN]
    assert error.max() < 0.25 and error.mean() < 0.1
    before, after = (np.abs(target - plane)[found.inside_HW].mean() for plane in (wide, found.reference_HW))
    assert after < before / 10


def test_defects_do_not_bend_the_shifts():
    target, reference = pair((3.3, -1.6))
    without = find_shifts(target, reference)[0]
    for x, y in ((60, 70), (150, 120), (100, 190)):
        target[y - 4 : y + 4, x - 4 : x + 4] = 255 - target[y - 4 : y + 4, x - 4 : x + 4]
    assert np.abs(find_shifts(target, reference)[0] - without).max() < 0.15


def test_brightness_and_contrast_of_the_reference_do_not_matter():
    target, reference = pair((2.5, 1.5))
    inner = find_shifts(target, reference * 0.6 + 40)[0][MARGIN:-MARGIN, MARGIN:-MARGIN]
    assert np.abs(inner - (2.5, 1.5)).max() < 0.1


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(("gain", "offset"), [(0.5, 0), (0.6, 90), (1.0, -60)])
def test_an_aligned_reference_has_the_brightness_and_contrast_of_target(gain, offset, dtype):
    """A darker stain over an eighth of target, as a defect, does not change what the rest is compared with."""
    target, reference = pair((2.5, 1.5))
    target, reference = 60 + target * 0.55, 60 + reference * 0.55
    expected = target.copy()
    target[:, :26] *= 0.7
    target, reference = target.astype(dtype), (reference * gain + offset).astype(dtype)
    found = align(target, reference)
    assert found.reference_HW.dtype == dtype
    inside = found.inside_HW.copy()
    inside[:48], inside[-48:], inside[:, :80], inside[:, -48:] = (False,) * 4
    assert np.abs(found.reference_HW.astype(np.float32) - expected)[inside].mean() < 4
    assert np.abs(found.reference_HW.astype(np.float32) - expected)[inside].max() < 12


@pytest.mark.parametrize(
    "change",
    [
        lambda plane: plane * 0.95 + 4,  # too little to matter
        lambda plane: 255 - plane,  # no lamp does this
        lambda plane: plane * 0 + 90,  # nothing is there any more
        lambda plane: np.where(np.arange(plane.shape[1]) < 60, 255, plane),  # a defect over a quarter
    ],
)
def test_a_reference_keeps_its_own_brightness_if_that_of_target_is_no_matter_of_light(change):
    reference = scan()
    target = np.asarray(change(reference.astype(np.float32)), np.float32)
    everywhere = np.ones(target.shape, np.bool_)
    for inside in (everywhere, ~everywhere):
        assert tone_change(target, reference, inside) == (1.0, 0.0)
        batch = (torch.from_numpy(plane)[None] for plane in (target, reference.astype(np.float32), inside))
        assert [float(each) for each in align_torch._tone_changes(*batch)] == [1.0, 0.0]


def test_noise_and_a_periodic_texture_do_not_make_a_shift():
    strip_CHW = generate_strip(1)
    shift_GK2, _ = find_shifts(strip_CHW[0], strip_CHW[1])
    assert np.abs(shift_GK2).max() < 1.0


def test_without_structure_nothing_is_moved_and_the_confidence_is_low():
    plane = np.full((96, 128), 90, np.uint8)
    found = align(plane, plane)
    assert not found.shift_GK2.any() and not found.confidence_GK.any()
    np.testing.assert_array_equal(found.reference_HW, plane)
    target, reference = pair((1.0, 0.0))
    assert align(target, reference).confidence_GK[MARGIN:-MARGIN, MARGIN:-MARGIN].min() > 0.8


def test_beyond_its_edge_the_reference_repeats_target():
    target, reference = pair((8.0, 0.0))
    found = align(target, reference)
    assert not found.inside_HW[:, -6:].any() and found.inside_HW[4:-4, :-12].all()
    np.testing.assert_array_equal(found.reference_HW[~found.inside_HW], target[~found.inside_HW])


@pytest.mark.parametrize("shape_hw", [(240, 208), (101, 77), (33, 250)])
def test_torch_finds_the_same_shifts(shape_hw):
    pairs = [pair((3.3, -1.6), shape_hw, 1), pair((-0.4, 5.2), shape_hw, 2), pair((1.0, 2.0), shape_hw, 3)]
    pairs[2] = pairs[2][0], pairs[2][1] * 0.6 + 20
    targets, references = (torch.from_numpy(np.stack(planes)) for planes in zip(*pairs, strict=True))
    batch = align_batch(targets, references)
    for number, (target, reference) in enumerate(pairs):
        alone = align(target, reference)
        np.testing.assert_allclose(batch.shift_BGK2[number].numpy(), alone.shift_GK2, atol=0.05)
        np.testing.assert_allclose(batch.confidence_BGK[number].numpy(), alone.confidence_GK, atol=0.05)
        assert np.abs(batch.reference_BHW[number].numpy() - alone.reference_HW).mean() < 0.5


@pytest.mark.skipif(not BOARDS.is_dir(), reason="FLATOUT_DATA names no folder with deeppcb_mini")
def test_torch_finds_the_same_shifts_on_real_boards():
    tests = sorted((BOARDS / "val/test").iterdir())[:3]
    planes = [
        np.stack([cv2.imread(str(folder / path.name), 0) for path in tests]).astype(np.float32)
        for folder in (BOARDS / "val/test", BOARDS / "val/temp")
    ]
    batch = align_batch(*map(torch.from_numpy, planes))
    for number, (target, reference) in enumerate(zip(*planes, strict=True)):
        difference = np.abs(batch.shift_BGK2[number].numpy() - align(target, reference).shift_GK2)
        assert np.quantile(difference, 0.99) < 0.05 and difference.max() < 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_finds_the_same_shifts_as_the_cpu():
    target, reference = (torch.from_numpy(plane)[None] for plane in pair((3.3, -1.6)))
    on_gpu, on_cpu = align_batch(target.cuda(), reference.cuda()), align_batch(target, reference)
    torch.testing.assert_close(on_gpu.shift_BGK2.cpu(), on_cpu.shift_BGK2, atol=0.01, rtol=0)


def test_constants_that_a_cuda_graph_reads_stay_where_they_are():
    device = torch.device("cpu")
    first = align_torch._gaussian_matrix(7, 1.0, device)
    for side in range(8, 108):
        align_torch._gaussian_matrix(side, 1.0, device)
    assert align_torch._gaussian_matrix(7, 1.0, device) is first


@pytest.mark.parametrize("sigma", [0.7, 1.5, 4.0])
@pytest.mark.parametrize("shape", [(40, 3, 40), (61, 49, 11), (1, 2, 1), (2, 1, 5)])
def test_averages_over_blocks_are_the_products_that_torch_computes(shape, sigma):
    values_GNK = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rows, columns = (gaussian_matrix(count, sigma).astype(np.float64) for count in (shape[0], shape[2]))
    expected = np.einsum("gr,rnc,kc->gnk", rows, values_GNK, columns)
    np.testing.assert_allclose(pooled(values_GNK, sigma), expected, atol=1e-6)


def test_images_of_two_sizes_and_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="both must be grey images of one size"):
        align(np.zeros((64, 64), np.uint8), np.zeros((64, 65), np.uint8))
    with pytest.raises(ConfigError, match=r"align_px=65.*0\.\.64"):
        AlignConfig(reach_px=65)


def test_the_command_writes_the_aligned_image_and_a_plot(tmp_path, capsys):
    write_boards(tmp_path, 1)
    words = ["defect", "align", str(tmp_path / "test/00.png"), str(tmp_path / "temp/00.png")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "median +3.0" in shown and "px in y" in shown
    aligned = cv2.imread(str(tmp_path / "out/00_aligned.png"), cv2.IMREAD_UNCHANGED)
    template, inspected, _ = board_pair(0)
    inner = np.s_[8:-8, 8:-8]
    before, after = (np.abs(inspected.astype(float) - plane)[inner].mean() for plane in (template, aligned))
    assert after < before / 3
    assert cv2.imread(str(tmp_path / "out/00_shifts.png")).shape == (224, 4 * 224 + 3 * 4, 3)
    assert main([*words[:3], str(tmp_path / "none.png")]) == 3
    assert f"{tmp_path}/none.png: cannot be read: No such file" in capsys.readouterr().err
