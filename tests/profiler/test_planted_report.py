"""The report on foreign scripts with planted causes leaves nothing out, and misses are counted as such."""

import argparse
import json

import pytest

from bench import profiler_planted
from bench.profiler_planted import FAILED, Round, Row, observe, per_sample_ms, result_name, table_of

CAUSE = "too_small_batch"  # its right verdict is "small batches"


def round_of(verdict="small batches", predicted=1.1, fixed=1.0):
    return Round(verdict, "Batches are small.", "batch 4 -> 32", 2.0, 2.1, predicted, fixed)


def rows_of(*rounds):
    return [Row(f"{number}.py", CAUSE, list(each)) for number, each in enumerate(rounds)]


def test_a_set_that_is_right_and_accurate_meets_the_limits():
    lines, is_met = table_of(rows_of(*[[round_of()]] * 8), 1, 100)
    assert is_met and "right verdicts: 8 of 8 (at least 7 wanted)" in lines
    assert "median error of all predictions: 10% (at most 15% wanted); of those with a right verdict: 10%" in lines


@pytest.mark.parametrize(
    "bad", [round_of("decode"), round_of(predicted=None), round_of(predicted=2.0), Round(FAILED, "exit code 1")]
)
def test_misses_are_not_left_out_of_the_median(bad):
    lines, is_met = table_of(rows_of(*[[round_of()]] * 3, *[[bad]] * 5), 1, 100)
    assert not is_met and "MISSED" in lines
    assert sum(line.startswith(tuple(f"{number}.py  " for number in range(8))) for line in lines) == 8, "every row"


def test_a_verdict_is_right_only_if_most_rounds_are():
    (half,) = rows_of([round_of(), round_of("decode")])
    (most,) = rows_of([round_of(), round_of("decode"), round_of()])
    assert (half.is_right, most.is_right) == (False, True)
    assert "1/2 WRONG" in half.line() and "2/3 right" in most.line()
    assert len(half.details()) == 3, "the planted cause, and both of the things that were said"


@pytest.mark.parametrize("name", ["first", "second"])
def test_every_planted_cause_has_its_right_verdicts(name):
    """Otherwise the first run of a set, which cannot be repeated, would end in the middle."""
    folder = profiler_planted.SCRIPTS / name
    key = json.loads((folder / "answers.json").read_text())
    # Only counts are compared, so that a failure does not show the key.
    assert sum(each["cause"] in profiler_planted.CLASSES for each in key) == len(key) == 8
    assert sum((folder / each["script"]).is_file() for each in key) == 8


def test_a_script_that_fails_is_a_row_of_the_table(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    found = observe(script, 5)
    assert found.verdict == FAILED and "exit status 3" in found.sentence and found.error is None


def test_a_scripts_own_clock_is_read_per_sample():
    assert per_sample_ms("ms_per_step: 50.0\n", 8) == 6.25
    assert per_sample_ms("ms_per_step: 50.0\nms_per_sample: 3.5\n", 8) == 3.5
    assert per_sample_ms("nothing\n", 8) is None


def test_the_report_of_the_first_run_is_never_written_over(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler_planted, "RESULTS", tmp_path)
    second = argparse.Namespace(set="second", machine="m")
    assert result_name(second) == "profiler_planted_second"
    (tmp_path / "profiler_planted_second_m_202611.md").touch()
    assert result_name(second) == "profiler_planted_second_again"
    assert result_name(argparse.Namespace(set="first", machine="m")) == "profiler_planted_first"
