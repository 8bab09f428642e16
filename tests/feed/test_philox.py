"""Keyed random numbers equal the published Philox, and are a pure function of their key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.feed.plan import Purpose, keyed_bits, keyed_generator, keyed_uniform, philox4x32
from tests.reference.plain_philox import plain_philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers published with the Random123 library
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_ten_rounds_give_the_published_answers(counter, key, expected):
    assert tuple(philox4x32(np.array(counter, np.uint64), key).tolist()) == expected
    assert tuple(plain_philox(list(counter), list(key))) == expected


@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**32 - 1),
    positions=st.lists(st.integers(0, 2**48 - 1), min_size=1, max_size=9),
    num=st.integers(1, 9),
)
def test_a_row_depends_on_its_own_position_only(seed, epoch, positions, num):
    together = keyed_bits(seed, epoch, np.array(positions), num)
    alone = [keyed_bits(seed, epoch, np.array([position]), num)[0] for position in positions]
    np.testing.assert_array_equal(together, alone)


def test_a_longer_row_begins_with_the_shorter_one():
    few, many = (keyed_bits(1, 2, np.arange(5), num) for num in (3, 40))
    np.testing.assert_array_equal(many[:, :3], few)


def test_every_part_of_the_key_matters():
    base = (7, 3, 11)
    rows = [
        keyed_bits(seed, epoch, np.array([position]), 4, purpose=purpose).tolist()
        for seed, epoch, position, purpose in [
            (*base, Purpose.SAMPLE),
            (8, *base[1:], Purpose.SAMPLE),
            (7 + 2**32, *base[1:], Purpose.SAMPLE),
            (7, 4, 11, Purpose.SAMPLE),
            (7, 3, 12, Purpose.SAMPLE),
            (7, 3, 11 + 2**32, Purpose.SAMPLE),
            (*base, Purpose.ORDER),
        ]
    ]
    assert len({str(row) for row in rows}) == len(rows)


def test_uniform_numbers_fill_the_unit_interval_evenly():
    numbers = keyed_uniform(0, 0, np.arange(20_000), 8)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
    expected = numbers.size / 64
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 120  # 63 degrees of freedom: 1 in 10,000 above 117
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.03


def test_a_generator_is_new_for_each_key_and_repeats_for_the_same():
    bits = keyed_bits(1, 1, np.arange(2), 2)
    first, again, other = keyed_generator(bits[0]), keyed_generator(bits[0]), keyed_generator(bits[1])
    drawn = first.random(4)
    np.testing.assert_array_equal(drawn, again.random(4))
    assert not np.array_equal(drawn, other.random(4))


def test_skipped_numbers_change_none_of_the_others():
    many = keyed_bits(1, 2, np.arange(5), 40)
    np.testing.assert_array_equal(keyed_bits(1, 2, np.arange(5), 9, skip=24), many[:, 24:33])
