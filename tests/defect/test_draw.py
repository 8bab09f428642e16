"""Drawn parameters have the promised frequencies, and depend on seed, epoch and position alone."""

import subprocess
import sys

import numpy as np
import pytest

from flatout.defect.source import PatchSource
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import DEFECTS, HARD_NEGATIVE, LINES, draw_samples
from flatout.defect.synth.pool import Kernels
from flatout.errors import ConfigError
from flatout.feed import Feed, FeedConfig, Plan
from tests.defect.golden_files import records
from tests.defect.synthetic import Textures, recipe_for
from tests.golden_cases import golden_cases
from tests.reference.plain_feed import plain_batches

PATCHES = 20_000


def drawn(num: int = PATCHES, **settings):
    config = SynthConfig(**settings)
    return draw_samples(config, Kernels.standard(), patch_hw=(128, 128), seed=7, epoch=3, positions_M=np.arange(num))


@pytest.fixture(scope="module")
def standard():
    return drawn()


def groups_of(draws, sample_M):
    """Numbers of T, R1, R2 and B defects, by sample."""
    used = np.arange(draws["kernel"].shape[1]) < draws["num"][sample_M][:, None]
    in_ref1, in_ref2 = (draws["amplitude"][sample_M][..., plane] != 0 for plane in (1, 2))
    return [
        (used & first & second).sum(1)
        for first, second in ((~in_ref1, ~in_ref2), (in_ref1, ~in_ref2), (~in_ref1, in_ref2), (in_ref1, in_ref2))
    ]


@pytest.mark.parametrize("case", golden_cases("defect/alloc.json", records("distributions")))
def test_allocation_has_the_golden_distribution(case):
    record, _ = case
    draws = drawn(num_defects=tuple(record["range"]), defect_share=1.0)
    everyone = np.arange(PATCHES)
    counts = np.stack([draws["num"], *groups_of(draws, everyone)], axis=1)
    for row in record["table"]:
        share = (counts == [row[name] for name in ("n", "T", "R1", "R2", "B")]).all(1).mean()
        assert share == pytest.approx(row["prob"], abs=5 * np.sqrt(row["prob"] / PATCHES))
    for place, name in enumerate(("n", "T", "R1", "R2", "B")):
        assert counts[:, place].mean() == pytest.approx(record["expectation"][name], abs=0.09)
    same = (counts[:, 2] == 0) & (counts[:, 3] == 0)
    assert same.mean() == pytest.approx(record["expectation"]["same_refs"], abs=0.022)


def test_standard_defects_have_the_promised_frequencies(standard):
    has_defects = standard["kind"] == DEFECTS
    assert has_defects.mean() == pytest.approx(0.5, abs=0.018)
    sample_M = np.flatnonzero(has_defects)
    used = np.arange(8) < standard["num"][sample_M][:, None]
    assert standard["num"][sample_M].mean() == pytest.approx(5.5, abs=0.09)
    target = standard["amplitude"][sample_M][..., 0][used]
    assert sorted(set(target.tolist())) == [-80, -60, 60, 80]
    for value in (-80, -60, 60, 80):
        assert (target == value).mean() == pytest.approx(0.25, abs=0.0095)
    assert (standard["kernel"][sample_M][used] == 0).mean() == pytest.approx(0.5, abs=0.011)
    center = standard["center"][sample_M][used]
    assert center.min() == 5 and center.max() == 122
    assert center.mean(0) == pytest.approx([63.5, 63.5], abs=0.75)
    assert (standard["num"][~has_defects] == 0).all()


def test_labelled_pixels_have_the_promised_number():
    images = Textures(1, (128, 128))
    source = PatchSource(recipe_for(images, patch=128, defect_share=1.0), images)
    plan = Plan(num_samples=1, batch_size=400, order=lambda epoch: np.zeros(400, np.int64))
    (batch,) = plain_batches(source, plan, 0)
    pixels = batch["masks"].sum((1, 2, 3))
    assert pixels.min() >= 9 and pixels.max() <= 30
    assert pixels.mean() == pytest.approx(17.0, abs=0.35 * 7)  # a tenth of the patches of the specified tolerance


def test_lines_and_hard_negatives_have_the_configured_frequencies():
    kinds = drawn(num=10_000, line_ratio=0.2, hard_negative_ratio=0.1)["kind"]
    assert (kinds == LINES).mean() == pytest.approx(0.2, abs=0.02)
    assert (kinds == HARD_NEGATIVE).mean() == pytest.approx(0.1, abs=0.015)
    assert (kinds == DEFECTS).mean() == pytest.approx(0.35, abs=0.025)


def test_leaks_are_weak_copies_in_one_reference_and_keep_the_label(standard):
    leaking = drawn(num=4000, partial_leak_prob=0.4)
    plain = {name: array[:4000] for name, array in standard.items()}
    np.testing.assert_array_equal(leaking["labelled"], plain["labelled"])
    changed = leaking["amplitude"] != plain["amplitude"]
    assert not changed[..., 0].any()
    assert (changed[..., 1:].sum(-1) <= 1).all()
    leaks = changed.any(-1)
    assert leaks[leaking["labelled"]].mean() == pytest.approx(0.4, abs=0.03)
    assert not leaks[~leaking["labelled"]].any()
    share = np.abs(leaking["amplitude"][..., 1:].sum(-1) / leaking["amplitude"][..., 0])[leaks]
    assert share.min() >= 0.2 and share.max() <= 0.7


def test_the_minimum_of_target_only_defects_can_be_zero():
    labelled = drawn(num=3000, min_target_only=0, defect_share=1.0)["labelled"].sum(1)
    assert set(labelled.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_defects": (1, 8)}, "2 or more"),
        ({"num_defects": (5, 4)}, "num_defects_range"),
        ({"line_ratio": 0.6, "hard_negative_ratio": 0.6}, "together exceed 1"),
        ({"amplitudes": ((80, 60),)}, "not a range"),
        ({"partial_leak_prob": 1.5}, "must lie in"),
    ],
)
def test_impossible_recipes_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        SynthConfig(**settings)


def test_what_a_worker_imports_does_not_load_torch():
    program = "import sys, flatout.defect.source, flatout.defect.data.items; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("workers", "backend"), [(0, "thread"), (1, "thread"), (4, "thread"), (8, "thread"), (4, "process")]
)
def test_batches_do_not_depend_on_workers_or_batch_size(workers, backend):
    images = Textures(3)
    source = PatchSource(recipe_for(images, line_ratio=0.2, noise=2.0, shift_px=1.5, edge_noise=0.1), images)
    plan = Plan(num_samples=len(source), batch_size=5, seed=11, last="short")
    expected = [batch.copy() for batch in plain_batches(source, plan, 2)]
    with Feed(source, plan, FeedConfig(workers=workers, backend=backend)) as feed:
        for batch, reference in zip(feed.epoch(2), expected, strict=True):
            for name in ("images", "masks"):
                np.testing.assert_array_equal(batch[name], reference[name])
    other = Plan(num_samples=len(source), batch_size=7, seed=11, last="short")
    together = [np.concatenate([batch["images"] for batch in plain_batches(source, each, 2)]) for each in (plan, other)]
    np.testing.assert_array_equal(*together)


@pytest.mark.parametrize("sizes", [[1] * 40, [3, 1, 4, 1, 5, 9, 2, 6, 9], [20, 20], [7, 33]])
def test_parameters_do_not_depend_on_how_many_samples_are_drawn_at_a_time(sizes):
    images = Textures(3)
    recipe, positions = recipe_for(images, partial_leak_prob=0.5), np.arange(40)
    expected = recipe_for(images, partial_leak_prob=0.5).draw(7, 2, positions, positions)
    parts = np.split(positions, np.cumsum(sizes)[:-1])
    found = [recipe.draw(7, 2, part, part) for part in parts]
    for name, array in expected.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in found]), array)


def test_another_epoch_or_seed_gives_other_parameters_even_for_single_samples():
    recipe, one = recipe_for(Textures(3)), np.array([5])
    draws = [recipe.draw(seed, epoch, one, one)["center"] for seed, epoch in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert not np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])
    np.testing.assert_array_equal(draws[0], draws[3])


def test_with_one_reference_both_reference_planes_are_equal():
    images = Textures(2)
    images.images = [np.repeat(image[:1], 3, axis=0) for image in images.images]
    recipe = recipe_for(images, one_reference=True, shift_px=2.0, noise=4.0, steepness=3.0, defect_share=1.0)
    plan = Plan(num_samples=len(recipe), batch_size=len(recipe))
    (batch,) = plain_batches(PatchSource(recipe, images), plan, 0)
    np.testing.assert_array_equal(batch["images"][:, 1], batch["images"][:, 2])
    assert (batch["images"][:, 0] != batch["images"][:, 1]).any()
