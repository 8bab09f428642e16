"""Marks do nothing when recording is off, and measure correctly when it is on."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from flatout.clock import clock


def test_nothing_is_recorded_while_off():
    with clock.recording() as totals:
        pass
    with clock.stage("outside"):
        pass
    assert totals.read() == {}


def test_stages_can_be_nested_and_each_is_recorded_with_its_whole_time():
    with clock.recording() as totals, clock.stage("outer"):
        for _ in range(2):
            with clock.stage("inner"):
                time.sleep(0.005)
    times = totals.read()
    assert list(times) == ["inner", "outer"]
    assert times["inner"].runs == 2
    assert times["outer"].total_ns >= times["inner"].total_ns >= 10e6


def test_a_stage_that_raises_is_recorded_too():
    with clock.recording() as totals, pytest.raises(KeyError), clock.stage("failing"):
        raise KeyError
    assert totals.read()["failing"].runs == 1


def test_each_thread_has_its_own_recorder():
    seen = {}

    def work():
        with clock.stage("elsewhere"):
            seen["ran"] = True

    with clock.recording() as totals:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen["ran"]
    assert totals.read() == {}


def test_a_full_table_loses_names_but_no_time():
    totals = clock.Totals(capacity=3)
    for name in ("a", "b", "c", "d", "c"):
        totals.add(name, 10)
    times = totals.read()
    assert list(times) == ["a", "b", "(other stages)"]
    assert times["(other stages)"] == clock.StageTime(3, 30)


def test_a_table_may_be_in_shared_memory():
    table = np.zeros(4, clock.STAGE_DTYPE)
    clock.Totals(table).add("read", 7)
    assert clock.read_totals(table) == {"read": clock.StageTime(1, 7)}


def test_a_new_recorder_keeps_the_names_in_an_existing_table():
    table = np.zeros(4, clock.STAGE_DTYPE)
    clock.Totals(table).add("draw", 1)
    clock.Totals(table).add("read", 2)
    clock.Totals(table).add("draw", 3)
    assert clock.read_totals(table) == {"draw": clock.StageTime(2, 4), "read": clock.StageTime(1, 2)}


def test_the_clock_does_not_import_torch():
    code = "import sys, flatout.clock.clock; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
