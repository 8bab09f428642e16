"""What users see stays as it is written down: help, callbacks, run folders, checkpoints, exit codes, closing lines.

The files were written by `python -m tests.frozen.write`. Known faults are in them, such as these:
a mirror skips all subfolders of a run but that of the weights (spike's metrics/ would be lost, had spike a mirror);
the best score is `best_fitness` in yolo's files and `best_score` in those of the others.
"""

import difflib
from pathlib import Path
from unittest.mock import Mock

import pytest

from flatout.engine.epoch_keeper import EpochKeeper
from tests.frozen.helps import help_of
from tests.frozen.write import COMMAND, JOBS, file_of, seen_runs
from tests.yolo.train.test_metric_collapse import best_epoch_in, trained

MARK = "==== "


@pytest.fixture(scope="session")
def seen() -> dict[str, str]:
    """One training of every job, for all tests."""
    return seen_runs()


def changes(before: str, now: str) -> str:
    """The parts of two texts that differ, as diffs; empty if none does."""
    old, new = _parts(before), _parts(now)
    titles = [title for title in {**old, **new} if old.get(title) != new.get(title)]
    return "\n".join(f"{MARK}{title}\n{_diff(old.get(title, ''), new.get(title, ''))}" for title in titles)


def _parts(text: str) -> dict[str, str]:
    """By their titles."""
    return dict(part.partition("\n")[::2] for part in text.split(MARK)[1:])


def _diff(before: str, now: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "written down", "now", lineterm="", n=2)
    return "\n".join(lines)


def check_is_as_written_down(job: str, kind: str, now: str) -> None:
    found = changes(file_of(job, kind).read_text(), now)
    if found:
        pytest.fail(
            "what users see has changed; if that is meant, rewrite the file with "
            f"`{COMMAND} {job}` and say so in CHANGELOG.md\n{found}",
            pytrace=False,
        )


@pytest.mark.parametrize("job", JOBS)
def test_help_is_as_it_was(job: str):
    check_is_as_written_down(job, "help", help_of(job))


@pytest.mark.parametrize("job", JOBS)
def test_a_training_is_as_it_was(job: str, seen: dict[str, str]):
    check_is_as_written_down(job, "run", seen[job])


def test_of_equally_good_epochs_yolo_keeps_the_newest_as_best_and_the_other_jobs_keep_the_first(tmp_path: Path):
    """A difference that nobody sees until there is one class, or a score that cannot rise any more."""
    scores = [0.4, 0.6, 0.6, 0.5]
    trained(scores, tmp_path)
    assert best_epoch_in(tmp_path) == 2
    keeper = EpochKeeper(records=None, files=Mock(), run={})
    assert [keeper.takes(epoch, score) for epoch, score in enumerate([0.4, 0.6, 0.6, 0.5])] == [
        True,
        True,
        False,
        False,
    ]


def test_a_change_is_shown_with_the_part_it_is_in():
    before = "==== one\nsame\n\n==== two\nold line\nsame\n"
    found = changes(before, before.replace("old", "new"))
    assert found.startswith("==== two\n") and "-old line\n+new line" in found and "one" not in found
    assert changes(before, before) == ""
    assert "==== three" in changes(before, before + "\n==== three\nmore\n")
