"""Worker plans: the golden table, and one clear message for each invalid argument."""

import dataclasses
from typing import Any

import pytest

from flatout.clock import machine
from flatout.errors import ConfigError
from flatout.feed.config import WorkerPlan, plan_workers
from tests.golden_cases import golden_cases

INPUTS = {"cores", "gpus", "total", "train", "val"}
OUTPUTS = {field.name for field in dataclasses.fields(WorkerPlan)}


@pytest.mark.parametrize("case", golden_cases("spike/workers.json"))
def test_plans_match_the_golden_table(case: dict[str, Any]):
    unknown = (case["input"].keys() - INPUTS) | (case["expect"].keys() - OUTPUTS)
    assert not unknown, f"the case has fields this test does not know: {sorted(unknown)}"
    plan = plan_workers(**case["input"])
    assert {name: getattr(plan, name) for name in case["expect"]} == case["expect"]


@pytest.mark.parametrize("cores", [1, 2, 7, 40, 128])
@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
def test_every_gpu_has_a_worker_and_the_plan_fits_the_cores_or_has_one_per_gpu(cores: int, gpus: int):
    plan = plan_workers("cpu*1.0", cores=cores, gpus=gpus)
    assert plan.train >= 1
    assert plan.val >= 1
    assert plan.train_sum <= max(cores, gpus)


@pytest.mark.parametrize("total", [" auto ", "AUTO", "cpu*0.8", "CPU * .8", "cpu*8e-1", "32", 32, 32.0])
def test_a_total_may_be_spelled_in_several_ways(total: Any):
    assert plan_workers(total, cores=40).total == 32


def test_numeric_strings_are_accepted_for_train_and_val_too():
    plan = plan_workers(cores=40, train="6", val="2")
    assert (plan.train, plan.val) == (6, 2)


def test_without_a_core_count_the_plan_uses_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch):
    facts = machine.Cores(machine=64, affinity=32, quota=10.5, usable=10)
    monkeypatch.setattr(machine, "cores", lambda: facts)
    plan = plan_workers()
    assert plan.total == 8
    assert "10 usable: 64 in the machine, 32 by affinity, cgroup quota 10.5" in str(plan)


def test_the_text_of_a_plan_is_one_line():
    assert str(plan_workers(cores=40, gpus=3)) == (
        "workers: 10 per GPU (30 on 3 GPUs) for training, 5 for validation (total auto = 32; cores: 40, as given)"
    )
    assert str(plan_workers(12, cores=40)) == (
        "workers: 12 for training, 6 for validation (total 12; cores: 40, as given)"
    )


TOTALS = [
    -1, "-1", 1025, 10**30, "9" * 5000, True, False, None, 2.5, float("nan"), float("inf"), "", "many", "auto*2",
    "12.0", "cpu", "cpu*", "cpu*-1", "cpu*nan", "cpu*inf", "cpu*1e9", "cpu*two", [4],
]  # fmt: skip


@pytest.mark.parametrize("total", TOTALS, ids=[repr(total)[:20] for total in TOTALS])
def test_an_invalid_total_raises_one_clear_message(total: Any):
    with pytest.raises(ConfigError) as caught:
        plan_workers(total, cores=8)
    assert str(caught.value) == (
        f"workers={total!r:.60} is not valid. "
        'Use "auto", "cpu*0.9" or a whole number from 0 to 1024.'
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": -1}, 'train=-1 is not valid. Use "auto" or a whole number from 0 to 512.'),
        ({"train": True}, 'train=True is not valid. Use "auto" or a whole number from 0 to 512.'),
        ({"val": 513}, 'val=513 is not valid. Use "auto" or a whole number from 0 to 512.'),
        ({"val": "cpu*0.5"}, "val='cpu*0.5' is not valid. Use \"auto\" or a whole number from 0 to 512."),
        ({"gpus": -1}, "gpus=-1 is not valid. Use a whole number from 0 to 1024."),
        ({"cores": 0}, "cores=0 is not valid. Use a whole number from 1 to 8192."),
        ({"cores": True}, "cores=True is not valid. Use a whole number from 1 to 8192."),
        ({"cores": 10**6}, "cores=1000000 is not valid. Use a whole number from 1 to 8192."),
    ],
)
def test_other_invalid_arguments_are_named(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        plan_workers(**{"cores": 8, "gpus": 2} | arguments)
    assert str(caught.value) == message


def test_the_upper_limit_grows_with_the_machine():
    assert plan_workers(4096, cores=128).total == 4096
    with pytest.raises(ConfigError, match="from 0 to 4096"):
        plan_workers(4097, cores=128)
