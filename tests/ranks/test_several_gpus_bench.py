"""The simulation of bench/several_gpus.py: what it must give where the answer follows from arithmetic."""

import random

import pytest
import torch
import torch.distributed as dist

from bench.several_gpus import FIRST_BUCKET, Link, Sharing, bucket_ends, simulate

READY = [0.2, 0.5, 0.6, 1.0]
SIZES = [2**20, 3 * 2**20, 2**20, 2**20]


def seconds(nbytes: float) -> float:
    """1 MiB in a tenth of a second."""
    return nbytes / 2**20 / 10


@pytest.mark.parametrize("cap", [2**20, 4 * 2**20, 25 * 2**20])
@pytest.mark.parametrize("seed", range(3))
def test_buckets_are_those_of_torch(cap: int, seed: int) -> None:
    rng = random.Random(seed)
    tensors = [torch.empty(rng.randint(1, 2**19)) for _ in range(60)]
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    expected, _ = assign(tensors, [FIRST_BUCKET, cap])
    ends = bucket_ends([4 * each.numel() for each in tensors], cap)
    assert [list(range(begin, end)) for begin, end in zip([0, *ends[:-1]], ends, strict=True)] == expected


def test_one_bucket_is_summed_after_backward_and_many_during_it() -> None:
    # The first bucket is closed at 1 MiB, so only the rest waits for the last gradient.
    assert simulate(READY, SIZES, 1.0, cap=25 * 2**20, all_reduce_s=seconds) == pytest.approx(1.0 + 0.5)
    # Ready at 0.2, 0.5, 0.6 and 1.0; summed until 0.3, 0.8, 0.9 and 1.1.
    assert simulate(READY, SIZES, 1.0, cap=2**20, all_reduce_s=seconds) == pytest.approx(1.1)


def test_sums_that_take_no_time_add_nothing_and_long_ones_follow_each_other() -> None:
    assert simulate(READY, SIZES, 1.0, cap=2**20, all_reduce_s=lambda nbytes: 0.0) == pytest.approx(1.0)
    assert simulate(READY, SIZES, 1.0, cap=2**20, all_reduce_s=lambda nbytes: 5.0) == pytest.approx(0.2 + 4 * 5)


def test_what_shares_a_core_takes_as_long_as_one_after_the_other() -> None:
    half = Sharing(0.5, 0.5)
    total = sum(map(seconds, SIZES))
    for cap in (2**20, 25 * 2**20):
        found = simulate(READY, SIZES, 1.0, cap=cap, all_reduce_s=seconds, sharing=half)
        assert found == pytest.approx(1.0 + total) if cap > 2**20 else 1.0 < found <= 1.0 + total + 1e-9


def test_a_ring_sends_almost_twice_the_bytes_however_many_ranks_there_are() -> None:
    link = Link("", 1e9, 0.0)
    assert link.all_reduce_s(1e9, 2) == pytest.approx(1.0)
    assert link.all_reduce_s(1e9, 8) == pytest.approx(1.75)
    assert Link("", 1e9, 1e-3).all_reduce_s(0, 4) == pytest.approx(6e-3)
