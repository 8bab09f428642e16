"""PSNR, SSIM, the loss and tiles match stored values."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.spike.evaluate import in_tiles, ref_luma, ref_psnr, ref_ssim_y, standard_scores, tile_starts, tile_weights
from flatout.spike.step import charbonnier
from tests.golden_cases import golden_cases


def metric_groups(path: Path):
    """The entries of the JSON file, each with the inputs beside it."""
    inputs = path.with_name("metrics_inputs.npz")
    if inputs.exists():
        arrays = dict(np.load(inputs))
        yield from ((name, (name, value, arrays)) for name, value in json.loads(path.read_text()).items())


@pytest.mark.parametrize("case", golden_cases("spike/metrics.json", metric_groups, also=("spike/metrics_inputs.npz",)))
def test_scores_match_the_golden_ones(case):
    name, expected, arrays = case
    predicted, target = (torch.from_numpy(arrays[key]) for key in ("pred", "gt"))
    num_clips, length = predicted.shape[:2]
    if name == "charbonnier":
        for delta, loss in expected.items():
            assert float(charbonnier(predicted, target, float(delta))) == pytest.approx(loss, abs=1e-6)
    elif name == "standard":
        scores = standard_scores(predicted.flatten(0, 1), target.flatten(0, 1))
        found = {
            "psnr_per_frame": scores.psnr.view(num_clips, length).numpy(),
            "psnr": float(scores.psnr.mean()),
            "ssim_per_frame": scores.ssim.view(num_clips, length).numpy(),
            "ssim": float(scores.ssim.mean()),
        }
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-3 if key.startswith("psnr") else 1e-5)
    elif name == "reference":
        check_reference(expected, predicted, target)
    else:
        assert name == "identical_psnr_reference"
        assert float(ref_psnr(target, target)) == expected


def test_equal_frames_have_a_finite_psnr():
    """A black or still frame has no blur: with an infinite score, so would be the mean, and no epoch better."""
    sharp = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    restored = sharp.clone()
    restored[1, 0, 0, 0] = 1 - restored[1, 0, 0, 0]
    scores = standard_scores(restored, sharp)
    assert scores.psnr[0] == scores.psnr[2] == 99 and scores.psnr[1] < 99
    assert scores.ssim[0] == 1


def check_reference(expected, predicted, target):
    clips = list(zip(predicted, target, strict=True))
    per_clip = [float(ref_psnr(a, b)) for a, b in clips]
    found = {
        "psnr_rgb_per_clip": per_clip,
        "psnr_rgb": float(np.mean(per_clip)),
        "psnr_rgb_whole_batch": float(ref_psnr(predicted, target)),
        "psnr_y_per_clip": [float(ref_psnr(ref_luma(a), ref_luma(b))) for a, b in clips],
        "ssim_y_per_clip": [float(ref_ssim_y(a, b)) for a, b in clips],
    }
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-3 if key.startswith("psnr") else 5e-4)


@pytest.mark.parametrize("case", golden_cases("spike/tiles.json"))
def test_tiles_begin_where_the_golden_ones_do(case):
    starts = tile_starts(case["n"], case["tile"], case["overlap"])
    assert starts == case["starts"]
    total = np.zeros(case["n"])
    for start, weight in zip(starts, tile_weights(case["n"], case["tile"], case["overlap"]), strict=True):
        total[start : start + len(weight)] += weight
    np.testing.assert_allclose([total.min(), total.max()], case["weight_sum_min_max"], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("size", "tile", "overlap"), [((50, 70), 32, 8), ((64, 32), 32, 0), ((33, 90), 20, 8)])
def test_tiling_a_network_that_changes_nothing_changes_nothing(size, tile, overlap):
    height, width = size
    blur = torch.rand(1, 2, 3, 2 * height, 2 * width)
    spikes = torch.rand(1, 2, 5, height, width)

    def process(part, part_spikes):
        assert (part.shape[-2], part.shape[-1]) == (2 * part_spikes.shape[-2], 2 * part_spikes.shape[-1])
        return part

    found = in_tiles(process, blur, spikes, tile=2 * tile, overlap=2 * overlap, step=(2, 2))
    assert float((found - blur).abs().max()) < 1e-6


def test_tiles_get_the_spikes_of_the_same_position():
    rows = torch.arange(40.0)[:, None].expand(40, 60)
    blur = rows.repeat_interleave(2, 0).repeat_interleave(2, 1).expand(1, 1, 3, 80, 120)

    def process(part, part_spikes):
        return part_spikes.repeat_interleave(2, -2).repeat_interleave(2, -1).expand(part.shape)

    found = in_tiles(process, blur, rows[None, None, None], tile=32, overlap=8, step=(2, 2))
    assert float((found - blur).abs().max()) < 1e-4
