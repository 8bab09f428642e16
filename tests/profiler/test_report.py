"""A profile is saved completely, can be loaded again, and its page needs nothing from outside."""

import json
import os
import re
import shutil
import subprocess

import pytest

from flatout.clock.clock import Event
from flatout.errors import ConfigError
from flatout.profiler.measurement import Limits, WaitSite, make_ledger
from flatout.profiler.outcome import load_measurement, save_report
from flatout.profiler.report.page import colors_of, timeline_svg
from flatout.profiler.report.text import report_text
from flatout.profiler.verdict import diagnose
from tests.profiler.situations import RTX_5090, RTX_5090_WITH_WAITS, SITUATIONS, measured, network

TIMELINE = {
    "host": [Event("forward", 0, 40_000_000, 0), Event("backward", 40_000_000, 100_000_000, 0)],
    "worker 0": [Event("decode", 1_000_000, 30_000_000, 1), Event("read", 0, 60_000_000, 0)],
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_ledger_of_every_situation_sums_to_the_step(name):
    ledger = make_ledger(SITUATIONS[name].measurement)
    for place in ledger.places:
        assert sum(row.ms for row in ledger.lane(place)) == pytest.approx(ledger.step_ms)
        assert sum(row.share for row in ledger.lane(place)) == pytest.approx(1)


def test_worker_stages_cost_the_same_per_image_for_any_number_of_workers():
    few = make_ledger(measured(100, network(), num_workers=2, workers={"decode": 180}))
    many = make_ledger(measured(100, network(), num_workers=8, workers={"decode": 180}))
    costs = [next(row for row in ledger.lane("workers") if row.stage == "decode") for ledger in (few, many)]
    assert costs[0].us_per_image == costs[1].us_per_image == pytest.approx(1e3 * 180 / 64)
    assert costs[0].ms == 4 * costs[1].ms


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_saved_measurement_gives_the_same_verdict(name, tmp_path):
    situation = SITUATIONS[name]
    save_report(tmp_path, situation.measurement, diagnose(situation.measurement), TIMELINE)
    again = load_measurement(tmp_path / "profile.json")
    assert diagnose(again) == diagnose(situation.measurement)
    assert make_ledger(again).rows == make_ledger(situation.measurement).rows


def test_a_file_that_is_not_a_profile_is_refused(tmp_path):
    (tmp_path / "profile.json").write_text('{"measurement": {"lanes": 3}}')
    with pytest.raises(ConfigError, match="is not a profile"):
        load_measurement(tmp_path / "profile.json")


def test_the_page_is_self_contained_and_complete(tmp_path):
    path = save_report(tmp_path, RTX_5090_WITH_WAITS, diagnose(RTX_5090_WITH_WAITS), TIMELINE)
    html = path.read_text()
    assert not re.search(r"(src|href)\s*=|@import|url\(|<script|https?://", html)
    for text in (
        "assigner",
        "img/s",
        "loss.py:100",
        "unexplained",
        "main thread",
        "idle",
        "Timeline of the last 3,522 ms of steps",
    ):
        assert text in html


def test_a_main_thread_that_runs_ahead_is_shown_at_the_same_time_as_the_device():
    """It has queued its last step 60 ms before the device begins it; the window is three steps of 10 ms."""
    ms = 1_000_000
    ahead = {
        "host": [Event("forward", step * 10 * ms, (step * 10 + 4) * ms, 0) for step in range(10)],
        "device": [Event("backward", (60 + step * 10) * ms, (69 + step * 10) * ms, 0) for step in range(10)],
    }
    svg = timeline_svg(ahead, 30 * ms)
    assert svg.count("<title>forward") == 3 and svg.count("<title>backward") == 4


def test_a_stage_has_one_colour_whatever_else_takes_time():
    assert colors_of(["backward", "forward"]) == colors_of(["forward", "backward"])
    assert colors_of(["train.forward", "train.backward"])["train.forward"] == colors_of(["forward"])["forward"]


def test_hostile_texts_are_escaped(tmp_path):
    site = WaitSite(where="<script>.py:3", per_step=2, text="x = '<img onerror=1>'")
    hostile = measured(100, network(), waits=(site,), title="<b>bold</b>", limits=Limits(compute_ms=90))
    html = save_report(tmp_path, hostile, diagnose(hostile)).read_text()
    assert "<script>" not in html and "<img" not in html and "<b>bold" not in html


def test_the_trace_opens_in_perfetto(tmp_path):
    save_report(tmp_path, RTX_5090, diagnose(RTX_5090), TIMELINE)
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    assert (spans[0]["name"], spans[0]["ts"], spans[0]["dur"]) == ("forward", 0, 40_000)
    assert {entry["args"]["name"] for entry in trace["traceEvents"] if entry["ph"] == "M"} == {
        "main thread",
        "worker 0",
    }


def test_the_text_fits_a_terminal():
    for situation in SITUATIONS.values():
        text = report_text(make_ledger(situation.measurement), diagnose(situation.measurement), situation.measurement)
        assert max(map(len, text.splitlines())) <= 110


def browser():
    named = os.environ.get("FLATOUT_BROWSER")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium here (set FLATOUT_BROWSER to one)")
def test_a_real_browser_renders_the_page(tmp_path):
    path = save_report(tmp_path, RTX_5090, diagnose(RTX_5090), TIMELINE)
    screenshot = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1800"]
    done = subprocess.run(
        [browser(), *options, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert "Verdict: assigner" in done.stdout
    subprocess.run(
        [browser(), *options, f"--user-data-dir={tmp_path / 'browser'}", f"--screenshot={screenshot}", path.as_uri()],
        capture_output=True, timeout=90, check=True,
    )  # fmt: skip
    assert screenshot.stat().st_size > 30_000


@pytest.mark.parametrize("span_ms", [9519, 95.19, 30, 1003, 0.5])
def test_labels_of_a_timeline_end_before_it_does(span_ms):
    svg = timeline_svg({"host": [Event("forward", 0, int(span_ms * 1e6), 0)]}, int(span_ms * 1e6))
    labels = re.findall(r'<text x="([\d.]+)" y="11">([^<]+)<', svg)
    assert labels
    assert all(float(x) + 6.9 * len(label) < 1010 for x, label in labels)


def test_columns_of_very_slow_steps_do_not_touch():
    slow = measured(7127, {"forward": 1500.0, "backward": 2500.0}, images=1)
    text = report_text(make_ledger(slow), diagnose(slow), slow)
    assert re.search(r"backward +2,500\.00 +35\.1% +2,500,000\.0", text)


def test_the_old_name_of_diagnose_works_and_warns():
    import flatout.profiler

    with pytest.warns(DeprecationWarning, match=r"flatout\.profiler\.judge is now called diagnose"):
        assert flatout.profiler.judge is diagnose


def test_a_timeline_of_no_length_is_empty_instead_of_an_error():
    assert timeline_svg({"host": [Event("pause.validation", 0, 5_000_000, 0)]}, 0) == ""
