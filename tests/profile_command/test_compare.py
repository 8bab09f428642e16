"""Two saved profiles are compared stage by stage, and a slower one fails a build."""

import json

import pytest

from flatout.__main__ import main
from flatout.profile_command import fraction
from flatout.profile_command.compare import Comparison
from flatout.profiler.outcome import save_report
from flatout.profiler.verdict import diagnose
from tests.profiler.situations import measured, network


def saved(folder, measurement):
    save_report(folder, measurement, diagnose(measurement))
    return str(folder)


@pytest.fixture
def profiles(tmp_path):
    """A healthy step of 100 ms, and one with 12 ms of logging."""
    before, after = measured(100, network()), measured(112, {**network(), "log": 12})
    return saved(tmp_path / "before", before), saved(tmp_path / "after", after)


def test_stages_are_shown_side_by_side_and_changes_are_named(profiles, capsys):
    assert main(["profile", "--compare", *profiles]) == 0
    text = capsys.readouterr().out
    assert "B is 12.0% slower. What changed: logging (main thread) +12.0 ms." in text
    row = next(line for line in text.splitlines() if line.startswith("  backward"))
    assert row.split()[1:] == ["55.00", "55.00", "+0.00"]
    step = next(line for line in text.splitlines() if line.startswith("step "))
    assert step.split()[1:] == ["100.00", "112.00", "+12.00"]
    assert "Verdict: logging; before: nothing." in text


def test_idle_workers_are_not_named_as_what_changed():
    before = measured(100, network(), num_workers=1, workers={"decode": 50})
    after = measured(150, {**network(), "log": 50}, num_workers=1, workers={"decode": 50})
    text = Comparison(before, after).text(("a", "b"))
    assert "What changed: logging (main thread) +50.0 ms." in text


@pytest.mark.parametrize(("allowed", "code"), [("5%", 9), ("11.9", 9), ("12.1%", 0), ("50%", 0)])
def test_a_slower_profile_fails_only_above_the_limit(profiles, allowed, code, capsys):
    assert main(["profile", "--compare", *profiles, "--fail-if-slower", allowed]) == code
    message = capsys.readouterr().err
    assert ("is 12.0% slower than" in message) == (code == 9)


def test_a_faster_profile_never_fails(profiles, capsys):
    assert main(["profile", "--compare", *reversed(profiles), "--fail-if-slower", "0"]) == 0
    assert "B is 12.0% faster." in capsys.readouterr().out


def test_profiles_with_other_batch_sizes_compare_per_image():
    small, large = measured(100, network(), images=32), measured(200, network(2), images=64)
    assert Comparison(small, large).slower == pytest.approx(0)
    forward = next(change for change in Comparison(small, large).changes if change.stage == "forward")
    assert forward.added_ms == pytest.approx(0)


def test_files_may_be_named_instead_of_folders(profiles, tmp_path, capsys):
    files = [f"{folder}/profile.json" for folder in profiles]
    assert main(["profile", "--compare", *files]) == 0
    assert json.loads((tmp_path / "after" / "profile.json").read_text())["format"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--compare", "nowhere", "nowhere"],
            "nowhere is not a profile that this version can read: No such file or dir",
        ),
        (["--fail-if-slower", "5%"], "--fail-if-slower needs --compare A B"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_a_reason(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *words]) == 2
    assert message in capsys.readouterr().err


def test_percentages_are_read_with_and_without_a_sign():
    assert fraction("5%") == fraction("5") == pytest.approx(0.05)
    for wrong in ("fast", "-1%", "nan"):
        with pytest.raises(Exception, match="is not a percentage, such as 5%"):
            fraction(wrong)
