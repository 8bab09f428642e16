"""Every decision is drawn with the configured probability and range, and follows from its key alone."""

from dataclasses import replace

import numpy as np
import pytest

from flatout.errors import ConfigError
from flatout.yolo.augment.draw import (
    FOUR,
    NINE,
    NONE,
    PASTE_ATTEMPTS,
    PASTE_ROUNDS,
    PLAIN,
    AugmentConfig,
    ClassAware,
    draw_training,
    pick,
)
from flatout.yolo.augment.layout import warp_matrices
from tests.yolo.augment.scenes import labels_of

NUM, IMAGES, SIZE = 40_000, 23, 64
CONFIG = AugmentConfig(
    degrees=7,
    translate=0.2,
    scale=0.4,
    shear=3,
    perspective=0.001,
    flipud=0.3,
    fliplr=0.6,
    mosaic=0.7,
    mixup=0.25,
    copy_paste=0.5,
    paste_in=0.1,
)


def drawn(config: AugmentConfig = CONFIG, *, num: int = NUM, seed: int = 5, epoch: int = 2) -> dict[str, np.ndarray]:
    positions = np.arange(num)
    return draw_training(
        config,
        num_images=IMAGES,
        size=SIZE,
        seed=seed,
        epoch=epoch,
        positions_M=positions,
        indices_M=positions % IMAGES,
    )


@pytest.fixture(scope="module")
def draws() -> dict[str, np.ndarray]:
    return drawn()


def assert_share(found: np.ndarray, expected: float) -> None:
    """A fraction of True within 4.5 standard deviations of the expected one (beyond it by chance: 1 in 150,000)."""
    deviation = np.sqrt(expected * (1 - expected) / found.size)
    assert abs(found.mean() - expected) <= 4.5 * deviation


def assert_uniform(values: np.ndarray, low: float, high: float) -> None:
    """Values within the range, uniformly distributed (Kolmogorov-Smirnov, 1 in 10,000)."""
    values = np.sort(values.reshape(-1))
    assert low <= values[0] and values[-1] <= high
    steps = np.arange(len(values) + 1) / len(values)
    expected = (values - low) / (high - low)
    assert max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max()) < 2.23 / np.sqrt(len(values))


def test_mosaics_are_drawn_with_their_probability_and_four_of_them_in_five_have_four_tiles(draws):
    own_M, second_M = draws["kind"].T
    assert set(np.unique(own_M)) == {PLAIN, FOUR, NINE}
    assert_share(own_M != PLAIN, 0.7)
    assert_share(own_M[own_M != PLAIN] == FOUR, 0.8)
    assert set(np.unique(second_M)) == {NONE, FOUR, NINE}
    assert (second_M[own_M == PLAIN] == NONE).all(), "mixup exists only on top of a mosaic"
    assert_share(second_M[own_M != PLAIN] != NONE, 0.25)
    assert_share(second_M[second_M != NONE] == FOUR, 0.8)


def test_the_first_tile_is_the_sample_and_its_partners_are_any_images(draws):
    own, second = draws["tiles"][:, 0], draws["tiles"][:, 1]
    np.testing.assert_array_equal(own[:, 0], np.arange(NUM) % IMAGES)
    for tiles, kind in ((own, draws["kind"][:, 0]), (second, draws["kind"][:, 1])):
        np.testing.assert_array_equal((tiles >= 0).sum(1), kind)
        assert (np.diff((tiles >= 0).astype(int), axis=1) <= 0).all(), "tiles come first, gaps after them"
    partners = np.concatenate((own[:, 1:].ravel(), second.ravel()))
    counts = np.bincount(partners[partners >= 0], minlength=IMAGES)
    expected = counts.sum() / IMAGES
    assert ((counts - expected) ** 2 / expected).sum() < 60  # chi-squared with 22 degrees of freedom, 1 in 40,000


def test_centres_of_four_lie_in_the_middle_half_and_windows_onto_nine_in_the_first_third(draws):
    four, nine = (draws["centre"][draws["kind"] == kind] for kind in (FOUR, NINE))
    for axis in range(2):
        assert_uniform(four[:, axis], SIZE / 2, 3 * SIZE / 2)
        assert_uniform(nine[:, axis], 0, SIZE)


@pytest.mark.parametrize(
    ("column", "low", "high"),
    [
        (0, -0.001, 0.001),
        (1, -0.001, 0.001),
        (2, -7, 7),
        (3, 0.6, 1.5),  # 1 - scale to 1.1 + scale
        (4, -3, 3),
        (5, -3, 3),
        (6, 0.3, 0.7),
        (7, 0.3, 0.7),
    ],
)
def test_warps_are_uniform_in_their_ranges(draws, column, low, high):
    for layer in range(2):
        assert_uniform(draws["warp"][:, layer, column], low, high)


def test_aspects_are_as_likely_wider_as_narrower_and_change_nothing_else(draws):
    stretched = drawn(replace(CONFIG, aspect=0.5))
    for layer in range(2):
        assert_uniform(np.log(stretched["aspect"][:, layer]), -np.log(1.5), np.log(1.5))
    assert (draws["aspect"] == 1).all()
    for name in draws.keys() - {"aspect"}:
        np.testing.assert_array_equal(stretched[name], draws[name], err_msg=name)


def test_exponents_of_brightness_are_as_likely_darker_as_brighter_and_change_nothing_else(draws):
    curved = drawn(replace(CONFIG, gamma=0.3))
    assert_uniform(np.log(curved["gamma"]), -0.3, 0.3)
    assert curved.keys() - draws.keys() == {"gamma"}
    for name in draws:
        np.testing.assert_array_equal(curved[name], draws[name], err_msg=name)


def test_an_aspect_multiplies_width_over_height_and_keeps_the_area():
    warp_18, canvas, output = np.array([[0, 0, 0, 0.8, 0, 0, 0.5, 0.5]]), np.array([[64, 64]]), np.array([[32, 32]])
    (stretched,) = warp_matrices(warp_18, np.array([1.44]), canvas, output)
    (plain,) = warp_matrices(warp_18, np.ones(1), canvas, output)
    np.testing.assert_allclose(stretched[:2, :2], np.diag([0.8 * 1.2, 0.8 / 1.2]), rtol=1e-12)
    np.testing.assert_allclose(np.linalg.det(stretched), np.linalg.det(plain), rtol=1e-12)
    middle = np.array([32, 32, 1])
    np.testing.assert_allclose(stretched @ middle, plain @ middle)


def test_colour_gains_are_uniform_around_one(draws):
    for column, reach in enumerate((CONFIG.hsv_h, CONFIG.hsv_s, CONFIG.hsv_v)):
        assert_uniform(draws["hsv"][:, column], 1 - reach, 1 + reach)


def test_flips_and_pasting_have_their_probabilities(draws):
    assert_share(draws["flip"][:, 0], 0.3)
    assert_share(draws["flip"][:, 1], 0.6)
    assert_share(draws["paste"], 0.1)


def test_the_weight_of_a_mixture_is_beta_8_8(draws):
    share = draws["mix"][draws["kind"][:, 1] != NONE]
    assert (draws["mix"][draws["kind"][:, 1] == NONE] == 1).all()
    # For Beta(a, a): mean 1/2, variance 1 / (4 (2 a + 1)), excess kurtosis -6 / (2 a + 3).
    variance = 1 / (4 * 17)
    kurtosis = 3 - 6 / 19
    assert abs(share.mean() - 0.5) < 4.5 * np.sqrt(variance / len(share))
    assert abs(share.var() - variance) < 4.5 * variance * np.sqrt((kurtosis - 1) / len(share))
    fourth = ((share - 0.5) ** 4).mean() / variance**2
    assert abs(fourth - kurtosis) < 0.15


def test_pasting_draws_its_own_tiles_centres_and_attempts_where_it_happens(draws):
    chosen = draws["paste"]
    assert draws["paste_tiles"].shape == (NUM, PASTE_ROUNDS, 4)
    assert draws["paste_tries"].shape == (NUM, PASTE_ATTEMPTS, 6)
    assert_uniform(draws["paste_tries"][chosen], 0, 1)
    for axis in range(2):
        assert_uniform(draws["paste_centre"][chosen][..., axis], SIZE / 2, 3 * SIZE / 2)
    counts = np.bincount(draws["paste_tiles"][chosen].ravel(), minlength=IMAGES)
    expected = counts.sum() / IMAGES
    assert len(counts) == IMAGES and ((counts - expected) ** 2 / expected).sum() < 60
    assert len(np.unique(draws["paste_key"][chosen])) == draws["paste_key"][chosen].size


def test_no_two_decisions_are_correlated(draws):
    """Two decisions that shared a random number would be."""
    four_M = draws["kind"][:, 0] == FOUR
    columns = [
        draws["paste"],
        draws["kind"][:, 1] != NONE,
        *draws["flip"].T,
        *draws["hsv"].T,
        *draws["warp"].reshape(NUM, 16).T,
        *draws["centre"][:, 0].T,
        *drawn(replace(CONFIG, aspect=0.5))["aspect"].T,
        drawn(replace(CONFIG, gamma=0.3))["gamma"],
        *draws["tiles"][:, 0, 1:4].T,
    ]
    correlation = np.corrcoef(np.array(columns, np.float64)[:, four_M])
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(four_M.sum())


def test_class_aware_mosaics_rotate_by_the_ranges_of_their_labels_heads():
    """Image 0 has three labels of head 0 and one of head 1, image 1 has none; the heads rotate by at most 1 and 9."""
    boxes = np.full((4, 5), 0.5, np.float32)
    boxes[:, 0] = 0, 1, 0, 2
    labels = labels_of([boxes, boxes[:0]])
    heads = ClassAware.of(labels, np.array([0, 0, 1]), np.array([1.0, 9.0]), np.array([0.5, 4.0]))
    np.testing.assert_array_equal(heads.count_NH, [[3, 1], [0, 0]])
    index = np.arange(NUM)
    arguments = {"size": SIZE, "seed": 0, "epoch": 0, "positions_M": index, "indices_M": index * 0}
    aware, plain = (draw_training(CONFIG, num_images=1, class_aware=choice, **arguments) for choice in (heads, None))
    four = aware["kind"] == FOUR
    np.testing.assert_array_equal(aware["warp"][~four], plain["warp"][~four])
    np.testing.assert_array_equal(aware["warp"][..., [0, 1, 3, 6, 7]], plain["warp"][..., [0, 1, 3, 6, 7]])
    # Eight in nine of the angles of head 1 are beyond the range of head 0.
    assert_share(np.abs(aware["warp"][four][:, 2]) > 1, 0.25 * 8 / 9)
    assert_share(np.abs(aware["warp"][four][:, 4]) > 0.5, 0.25 * 7 / 8)
    assert np.abs(aware["warp"][four][:, 2]).max() <= 9
    nothing = np.ones((NUM, 4), np.int64)
    ranges = heads.mosaic_ranges(nothing, np.linspace(0, 1, NUM, endpoint=False))
    assert_share(ranges[:, 0] == 9, 0.5)
    with pytest.raises(ConfigError, match="Give one of each for every head"):
        ClassAware.of(labels, np.array([0, 0, 2]), np.array([1.0, 9.0]), np.array([0.5, 4.0]))


@pytest.mark.parametrize("name", ["flipud", "fliplr", "mosaic", "mixup", "copy_paste", "paste_in"])
def test_probabilities_of_zero_and_one_mean_never_and_always(name):
    of = {"flipud": lambda d: d["flip"][:, 0], "fliplr": lambda d: d["flip"][:, 1], "paste_in": lambda d: d["paste"]}
    of |= {"mosaic": lambda d: d["kind"][:, 0] != PLAIN, "mixup": lambda d: d["kind"][:, 1] != NONE}
    for probability in (0, 1):
        draws = drawn(AugmentConfig(**{name: probability}), num=300)
        if name in of:
            assert (of[name](draws) == bool(probability)).all()


def test_a_row_follows_from_its_key_alone():
    config = replace(CONFIG, aspect=0.5, gamma=0.3)
    whole = drawn(config, num=50)
    some = np.array([41, 3, 17])
    part = draw_training(
        config, num_images=IMAGES, size=SIZE, seed=5, epoch=2, positions_M=some, indices_M=some % IMAGES
    )
    for name, array in part.items():
        np.testing.assert_array_equal(array, whole[name][some], err_msg=name)


@pytest.mark.parametrize("change", [{"seed": 6}, {"epoch": 3}])
def test_another_seed_or_epoch_gives_another_draw(change):
    config = replace(CONFIG, aspect=0.5, gamma=0.3)
    here, there = drawn(config, num=50), drawn(config, num=50, **change)
    for name in ("centre", "warp", "aspect", "hsv", "gamma", "copy_key"):
        assert (here[name] != there[name]).all(), name


def test_picks_are_distinct_and_come_in_every_order():
    picked = np.array([pick(key, 5, 3) for key in range(3000)])
    assert picked.shape == (3000, 3)
    assert all(len(set(row)) == 3 for row in picked.tolist())
    orders, counts = np.unique(picked, axis=0, return_counts=True)
    assert len(orders) == 60
    assert ((counts - 50) ** 2 / 50).sum() < 120  # chi-squared with 59 degrees of freedom
    assert len(pick(7, 5, 0)) == 0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"mosaic": 1.2}, "mosaic=1.2 must be a probability from 0 to 1"),
        ({"degrees": -1}, "degrees=-1 must be 0 or more"),
        ({"mixup": float("nan")}, "mixup=nan must be a probability"),
        ({"aspect": -0.1}, "aspect=-0.1 must be 0 or more"),
        ({"gamma": -0.1}, "gamma=-0.1 must be 0 or more"),
        ({"scale": 1.0}, "scale=1.0 must be below 1"),
    ],
)
def test_settings_without_meaning_are_refused(wrong, text):
    with pytest.raises(ConfigError, match=text):
        AugmentConfig(**wrong)
