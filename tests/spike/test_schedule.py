"""Steps per epoch and learning rates match stored values."""

import pytest

from flatout.errors import ConfigError
from flatout.spike.step import SpikeSchedule, learning_rate, plan_steps
from tests.golden_cases import golden_cases


@pytest.mark.parametrize("case", golden_cases("spike/train_steps.json"))
def test_steps_match_the_golden_table(case):
    given, expect = case["input"], case["expect"]
    if expect["steps_per_epoch"] == 0:
        with pytest.raises(ConfigError, match="but one step takes"):
            plan_steps(given["samples"], world=given["world"], batch=given["batch"], accumulation=given["accum"])
        return
    plan = plan_steps(given["samples"], world=given["world"], batch=given["batch"], accumulation=given["accum"])
    found = {
        "samples_per_rank": plan.samples_per_rank,
        "micro_batches": plan.micro_batches,
        "steps_per_epoch": plan.steps_per_epoch,
        "leftover_micro_batches": plan.leftover,
        "total_steps": plan.steps_per_epoch * given["epochs"],
        "effective_batch": plan.samples_per_step,
    }
    assert found == expect


@pytest.mark.parametrize("case", golden_cases("spike/lr_schedule.json"))
def test_learning_rates_match_the_golden_ones(case):
    for step, rate in case["lr"]:
        found = learning_rate(case["LR"], step, warmup=case["warmup"], total=case["total"])
        assert found == pytest.approx(rate, rel=1e-6, abs=1e-18)


def test_the_optimizer_steps_where_a_window_ends_and_the_rate_changes_only_there():
    plan = plan_steps(20, world=1, batch=2, accumulation=3)
    assert (plan.steps_per_epoch, plan.leftover) == (3, 1)
    schedule = SpikeSchedule(1.0, plan=plan, epochs=2, warmup=2)
    settings = [schedule(epoch, step) for epoch in range(2) for step in range(plan.trained_micro_batches)]
    assert [each.step_optimizer for each in settings] == [False, False, True] * 6
    assert [each.lrs[0] for each in settings[::3]] == [learning_rate(1.0, k, warmup=2, total=6) for k in range(6)]
    assert all(settings[i].lrs == settings[i - i % 3].lrs for i in range(len(settings)))
