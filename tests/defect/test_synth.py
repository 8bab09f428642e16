"""Defects are painted as specified, wherever they lie and whatever they overlap."""

import cv2
import numpy as np
import pytest

from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import IN_PLANE_GC, draw_samples, groups_by_rank, row_of
from flatout.defect.synth.paint import PatchLine, add_line, headroom_of, paint, paint_isolated
from flatout.defect.synth.pool import (
    SHAPES,
    Kernels,
    Psf,
    camera_crop,
    cut_out,
    gaussian_kernel,
    label_of,
    make_kernels,
)
from flatout.errors import ConfigError
from flatout.feed.store.keep import Lru
from tests.defect.golden_files import arrays_split, records
from tests.golden_cases import golden_cases
from tests.reference.plain_defects import GROUPS, paint_plain


@pytest.mark.parametrize("case", golden_cases("defect/kernels.npz", arrays_split))
def test_kernels_are_built_from_their_ids(case):
    name, arrays = case
    kernel = gaussian_kernel(name.removeprefix("mask_"))
    if name.startswith("mask_"):
        np.testing.assert_array_equal(label_of(kernel), arrays[name].astype(bool))
        return
    np.testing.assert_allclose(kernel, arrays[name], rtol=0, atol=1e-12)
    square = Kernels([kernel]).value_QSS[0]
    middle, (up, left) = len(square) // 2, (side // 2 for side in kernel.shape)
    inside = square[middle - up : middle + up + 1, middle - left : middle + left + 1]
    np.testing.assert_allclose(inside, arrays[name], rtol=0, atol=1e-7)
    assert np.count_nonzero(square) == np.count_nonzero(inside)


@pytest.mark.parametrize("kernel_id", ["3x3", "3x3_s0", "0x3_s1", "3x3_s1.0_", "axb_s1"])
def test_other_kernel_ids_are_refused(kernel_id):
    with pytest.raises(ConfigError, match="kernel"):
        gaussian_kernel(kernel_id)


def sample_of(defects: list[dict], kernel_ids: list[str]) -> dict[str, np.ndarray]:
    """A golden list of defects in the form that `draw_samples` returns."""
    amplitude = np.zeros((len(defects), 3), np.float32)
    for place, defect in enumerate(defects):
        amplitude[place] = defect["amp"] * IN_PLANE_GC[GROUPS.index(defect["group"])]
        if "leak_ref" in defect:
            amplitude[place, defect["leak_ref"]] = defect["amp"] * defect["leak_scale"]
    return {
        "num": np.array(len(defects)),
        "center": np.array([[defect["cx"], defect["cy"]] for defect in defects]),
        "kernel": np.array([kernel_ids.index(defect["kernel"]) for defect in defects]),
        "amplitude": amplitude,
        "labelled": np.array([defect["group"] == "T" for defect in defects]),
    }


@pytest.mark.parametrize("case", golden_cases("defect/render.json", records("cases"), also=("defect/render.npz",)))
def test_painting_matches_the_golden_patches(case):
    record, arrays = case
    name = record["name"]
    patch_HWC, expected_CHW = arrays[f"{name}_patch"], arrays[f"{name}_out"]
    plain_CHW, plain_mask = paint_plain(patch_HWC.transpose(2, 0, 1), record["defects"])
    np.testing.assert_array_equal(plain_mask, arrays[f"{name}_mask"])
    if record["dtype"] == "uint8":
        # The old way of painting, which truncates: only in the plain reference, to compare with old results.
        np.testing.assert_array_equal(plain_CHW, expected_CHW)
        return
    np.testing.assert_allclose(plain_CHW, expected_CHW, rtol=0, atol=2e-4)
    kernel_ids = sorted({defect["kernel"] for defect in record["defects"]})
    patch_CHW = np.ascontiguousarray(patch_HWC.transpose(2, 0, 1), np.float32)
    mask_HW = np.zeros(patch_CHW.shape[1:], np.bool_)
    kernels = Kernels([gaussian_kernel(kernel_id) for kernel_id in kernel_ids])
    paint(patch_CHW, mask_HW, sample_of(record["defects"], kernel_ids), kernels, full_swing=False)
    np.testing.assert_allclose(patch_CHW, expected_CHW, rtol=0, atol=2e-4)
    np.testing.assert_array_equal(mask_HW, arrays[f"{name}_mask"].astype(bool))


@pytest.mark.parametrize("seed", range(12))
def test_painting_equals_the_plain_reference_wherever_defects_lie(seed):
    rng = np.random.default_rng(seed)
    kernel_ids = ["3x3_s1.3", "3x5_s1.0_1.5", "7x9_s2.0_1.5"]
    defects = [
        {
            "cx": int(rng.integers(-6, 40)),
            "cy": int(rng.integers(-6, 36)),
            "kernel": kernel_ids[rng.integers(3)],
            "amp": float(rng.uniform(-200, 200)),
            "group": GROUPS[rng.integers(4)],
        }
        for _ in range(30)
    ]
    patch_CHW = rng.uniform(0, 255, (3, 30, 34)).astype(np.float32)
    expected_CHW, expected_mask = paint_plain(patch_CHW, defects)
    mask_HW = np.zeros((30, 34), np.bool_)
    kernels = Kernels([gaussian_kernel(kernel_id) for kernel_id in kernel_ids])
    paint(patch_CHW, mask_HW, sample_of(defects, kernel_ids), kernels, full_swing=False)
    np.testing.assert_allclose(patch_CHW, expected_CHW, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(mask_HW, expected_mask.astype(bool))


@pytest.mark.parametrize("case", golden_cases("defect/alloc.json", records("examples")))
def test_groups_match_the_golden_examples(case):
    record, _ = case
    order = [*record["target_only"], *record["shuffled_rest"]]
    rank_1K = np.argsort(order)[None]
    num_1, target_only_1 = np.array([record["n"]]), np.array([len(record["target_only"])])
    coin = np.array([bool(record["R2"])])  # decides only where a single defect is left
    group_K = groups_by_rank(rank_1K, num_1, target_only_1, coin)[0]
    assert sorted(np.flatnonzero(group_K == 0)) == sorted(record["target_only"])
    for number, name in enumerate(GROUPS):
        if name in record:
            assert np.flatnonzero(group_K == number).tolist() == sorted(record[name])
    for plane, name in enumerate(("in_target", "in_ref1", "in_ref2")):
        assert np.flatnonzero(IN_PLANE_GC[group_K, plane]).tolist() == sorted(record[name])


@pytest.mark.parametrize("case", golden_cases("defect/lines.json", records("cases"), also=("defect/lines.npz",)))
def test_lines_match_the_golden_patches(case):
    record, arrays = case
    patch_CHW = np.ascontiguousarray(arrays[f"{record['name']}_patch"].transpose(2, 0, 1), np.float32)
    line = PatchLine(record["horizontal"], record["pos"], record["width"], record["amp"])
    headroom = headroom_of(patch_CHW[line.area()])
    assert headroom.up == pytest.approx(record["headroom_up"], abs=1e-3)
    assert headroom.down == pytest.approx(record["headroom_down"], abs=1e-3)
    assert (headroom.allows_bright, headroom.allows_dark) == (record["bright_allowed"], record["dark_allowed"])
    add_line(patch_CHW, line, record["ref_scale"])
    np.testing.assert_allclose(np.clip(patch_CHW, 0, 255), arrays[f"{record['name']}_out"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", golden_cases("defect/psf.json", records("cases"), also=("defect/psf.npz",)))
def test_optical_kernels_match_the_golden_ones(case):
    record, arrays = case
    optics = {key: value for key, value in record.items() if key not in ("name", "offset")}
    crop = camera_crop(Psf(**optics), offset=tuple(record.get("offset", (0, 0))))
    expected = arrays[f"{record['name']}_crop"]
    np.testing.assert_allclose(crop, expected, rtol=0, atol=1e-5 * expected.max())
    kernel = cut_out(crop, record["threshold_multiplier"])
    assert kernel.shape == arrays[f"{record['name']}_kernel"].shape
    np.testing.assert_allclose(kernel, arrays[f"{record['name']}_kernel"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_board_shapes_are_connected_have_the_expected_proportions_and_the_documented_size(shape):
    """The ratio of longest to shortest extent distinguishes bridges and cuts from discs; docs/defect.md gives sizes."""
    drawn = [SHAPES[shape](np.random.default_rng((3, number))) for number in range(60)]
    for kernel in drawn:
        assert kernel.dtype == np.float32 and kernel.min() >= 0 and kernel.max() > 0.99
        assert all(side % 2 == 1 and 3 <= side <= 41 for side in kernel.shape)
        assert cv2.connectedComponents((kernel > 0.5).astype(np.uint8))[0] == 2
    slim = np.median([_slimness(kernel) for kernel in drawn])
    low, high = {"blob": (1, 4), "open": (2, 8), "short": (4, 12), "spur": (1.5, 5), "pinhole": (1, 1.3)}[shape]
    assert low <= slim <= high


def _slimness(kernel: np.ndarray) -> float:
    """Ratio of the standard deviations along and across."""
    points = np.argwhere(kernel > 0.5) - np.asarray(kernel.shape) // 2
    # A pixel itself has a variance of 1/12.
    spread = np.linalg.eigvalsh(points.T @ points / len(points) + np.eye(2) / 12)
    return float(np.sqrt(spread[1] / spread[0]))


def test_a_pool_has_every_shape_equally_often_and_blobs_alone_are_the_default():
    def pool(*shapes):
        return make_kernels("board", psf_type="type1", pool_size=6, seed=4, board_shapes=shapes).value_QSS

    generators = [np.random.default_rng((4, 0xDEF, number)) for number in range(6)]
    expected = Kernels([SHAPES["pinhole" if number % 2 else "short"](rng) for number, rng in enumerate(generators)])
    np.testing.assert_array_equal(pool("short", "pinhole"), expected.value_QSS)
    assert np.array_equal(make_kernels("board", psf_type="type1", pool_size=6, seed=4).value_QSS, pool("blob"))
    with pytest.raises(ConfigError, match="board_shapes is empty: name some of blob, open, short, spur, pinhole"):
        pool()


@pytest.mark.parametrize("case", golden_cases("defect/lru.json", records("cases")))
def test_the_lru_of_the_feed_keeps_the_golden_keys(case):
    record, _ = case
    cache: Lru[int, int] = Lru(record["capacity"])
    hits, evicted = "", []
    for key in record["sequence"]:
        hit = cache.get(key) is not None
        hits += "01"[hit]
        if not hit:
            evicted += cache.put(key, key)
    assert hits == record["hits"]
    assert hits.count("1") == record["n_hits"]
    assert evicted == record["evicted"]
    assert list(cache) == record["left_oldest_first"]


@pytest.mark.parametrize("num_defects", [(2, 3), (3, 8), (20, 40)])
def test_painting_many_defects_at_once_equals_painting_them_one_by_one(num_defects):
    kernels = Kernels.standard()
    config = SynthConfig(num_defects=num_defects, defect_share=0.9, partial_leak_prob=0.3)
    draws = draw_samples(config, kernels, patch_hw=(40, 36), seed=1, epoch=0, positions_M=np.arange(24))
    patches = np.random.default_rng(0).uniform(0, 255, (24, 3, 40, 36)).astype(np.float32)
    masks, expected, expected_masks = np.zeros((24, 40, 36), bool), patches.copy(), np.zeros((24, 40, 36), bool)
    for number in range(24):
        paint(expected[number], expected_masks[number], row_of(draws, number), kernels, full_swing=False)
    left = paint_isolated(patches, masks, draws, kernels)
    for number in np.flatnonzero(left.any(1)):
        rest = {name: draws[name][number][left[number]] for name in ("kernel", "amplitude", "center", "labelled")}
        paint(patches[number], masks[number], rest | {"num": left[number].sum()}, kernels, full_swing=False)
    np.testing.assert_array_equal(patches, expected)
    np.testing.assert_array_equal(masks, expected_masks)
    used = np.arange(draws["kernel"].shape[1]) < draws["num"][:, None]
    assert (used & ~left).any(), "some defects are isolated"
