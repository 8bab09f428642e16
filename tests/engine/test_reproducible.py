"""Versions and hardware that results may depend on are recorded, and a change of them is logged (G4, F32)."""

import json

import numpy as np
import pytest
import torch

from flatout.clock.machine import Cores, busy_cores, fitting_threads
from flatout.engine.reproducible import differences, environment, warn_of_waiting_threads


def test_everything_that_rounds_is_recorded():
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["numpy"] == np.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert {"opencv", "gpu", "cuda", "world_size", "deterministic", "python"} <= found.keys()
    assert json.loads(json.dumps(found)) == found


def test_the_same_environment_has_no_differences():
    assert differences(environment(), environment()) == []


def test_each_difference_is_one_line_that_says_what_it_means():
    here = environment()
    there = here | {"threads": 64, "world_size": 4, "python": "3.99", "torch": "9.0"}
    assert differences(here, there) == [
        f"threads {here['threads']} -> 64: sums round differently from here on; samples and schedule stay the same.",
        f"torch {torch.__version__} -> 9.0: kernels may round differently from here on; "
        "samples and schedule stay the same.",
        "world_size 1 -> 4: samples and their order per step stay the same; sums over ranks round differently.",
    ]


def test_what_an_older_file_did_not_record_is_shown_as_unknown():
    assert differences({"new_thing": None}, {"new_thing": 3}) == [
        "new_thing None -> 3: results may differ from here on."
    ]


def test_another_number_of_ranks_is_named():
    (line,) = differences(environment(2), environment(3))
    assert line.startswith("world_size 2 -> 3: ")


@pytest.mark.parametrize(
    ("threads", "free", "fitting"),
    [(2, 2.0, None), (2, 1.6, None), (2, 1.0, 1), (2, 0.0, 1), (1, 0.0, None), (64, 2.0, 2), (8, 5.2, 5)],
)
def test_threads_fit_as_far_as_cores_are_free_and_one_always_does(threads, free, fitting):
    assert fitting_threads(threads, free) == fitting


@pytest.mark.parametrize(
    ("load", "running", "busy"),
    [("1.90", 3, 1.9), ("3.10", 2, 1.0), ("0.05", 9, 0.05), ("1.90", 1, 0.0), ("0.00", 1, 0.0)],
)
def test_a_core_is_busy_if_it_was_before_and_still_is(tmp_path, load, running, busy):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text(f"{load} 0.5 0.4 2/100 77\n")
    (tmp_path / "proc/stat").write_text(f"cpu 1 2 3\nprocesses 7\nprocs_running {running}\nprocs_blocked 0\n")
    assert busy_cores(pause_s=0, root=tmp_path) == pytest.approx(busy)


def test_a_system_that_does_not_say_is_taken_for_idle(tmp_path):
    assert busy_cores(pause_s=0, root=tmp_path) == 0


@pytest.mark.parametrize(
    ("cores", "busy", "advice"),
    [
        (Cores(machine=2, affinity=2, quota=None, usable=2), 1.0, "OMP_NUM_THREADS=1"),
        (Cores(machine=64, affinity=64, quota=1.0, usable=1), 0.0, "OMP_NUM_THREADS=1"),
        (Cores(machine=64, affinity=64, quota=None, usable=64), 9.0, None),
        (Cores(machine=2, affinity=2, quota=None, usable=2), 0.0, None),
    ],
    ids=["another program", "a cgroup quota", "room enough", "nobody else"],
)
def test_too_many_threads_cause_a_warning_and_are_left_alone(monkeypatch, caplog, cores, busy, advice):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr("flatout.clock.machine.cores", lambda: cores)
    monkeypatch.setattr("flatout.engine.reproducible.busy_cores", lambda: busy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: pytest.fail("results depend on it"))
    warn_of_waiting_threads(torch.device("cpu"))
    assert [advice in text for text in caplog.messages] == ([True] if advice else [])
    caplog.clear()
    warn_of_waiting_threads(torch.device("cuda"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    warn_of_waiting_threads(torch.device("cpu"))
    assert caplog.messages == [], "on a GPU it does not matter, and what was set is respected"
