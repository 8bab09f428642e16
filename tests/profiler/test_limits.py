"""The three short runs find which part limits the speed."""

import time

import numpy as np
import pytest

from flatout.profiler import find_limits
from flatout.profiler.observe.limits import Budget
from flatout.profiler.observe.speed_of_light import decode_mpx_s, measure_machine

pytestmark = pytest.mark.timing


class Batches:
    """Batches that take `make_s` each, in memory that is reused."""

    def __init__(self, make_s: float) -> None:
        self.make_s = make_s
        self.reused = np.zeros(3)

    def __call__(self):
        for number in range(6):
            time.sleep(self.make_s)
            self.reused[:] = number
            yield self.reused


def test_each_limit_leaves_the_other_parts_out():
    seen = []

    def step(batch):
        seen.append(float(batch[0]))
        time.sleep(0.006 if batch is ready else 0.010)  # 4 ms for the copy

    ready = np.full(3, -1.0)
    limits = find_limits(
        step, Batches(0.020), keep=np.copy, to_device=lambda batch: ready, budget=Budget(steps=8, warm_up=1)
    )
    assert limits.compute_ms == pytest.approx(6, rel=0.5)
    assert limits.transfer_ms == pytest.approx(10, rel=0.5)
    assert limits.input_ms == pytest.approx(20, rel=0.5)
    assert limits.compute_ms < limits.transfer_ms < limits.input_ms
    # Batches were copied before they were overwritten.
    assert set(seen) == {-1.0, 0.0, 1.0, 2.0, 3.0}


def test_the_budget_ends_a_slow_run():
    began = time.perf_counter()
    budget = Budget(steps=1000, warm_up=0, seconds=0.1)
    find_limits(lambda batch: time.sleep(0.01), Batches(0.001), keep=np.copy, budget=budget)
    assert time.perf_counter() - began < 3


def test_the_machine_has_a_speed():
    speed = measure_machine()
    assert 0.1 < speed.host_copy_gb_s < 1000
    assert "host memory" in speed.lines()[0]
    rate = decode_mpx_s(lambda sample: sample, [np.zeros((1000, 1000, 3), np.uint8)], seconds=0.01)
    assert rate > 1
