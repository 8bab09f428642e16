"""Visible behaviour is unchanged: help, callbacks, run folders, checkpoints, exit codes, closing lines.

The files with the expected texts are written by `python -m tests.frozen.write`.
"""

import difflib

import pytest

from tests.frozen.helps import help_of
from tests.frozen.write import COMMAND, JOBS, file_of, seen_runs

MARK = "==== "


@pytest.fixture(scope="session")
def seen() -> dict[str, str]:
    """One training of every job, for all tests."""
    return seen_runs()


def changes(before: str, now: str) -> str:
    """Diffs of the parts of two texts that differ; empty if none does."""
    old, new = _parts(before), _parts(now)
    titles = [title for title in {**old, **new} if old.get(title) != new.get(title)]
    return "\n".join(f"{MARK}{title}\n{_diff(old.get(title, ''), new.get(title, ''))}" for title in titles)


def _parts(text: str) -> dict[str, str]:
    """The parts of a text, by title."""
    return dict(part.partition("\n")[::2] for part in text.split(MARK)[1:])


def _diff(before: str, now: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "expected", "now", lineterm="", n=2)
    return "\n".join(lines)


def check_is_unchanged(job: str, kind: str, now: str) -> None:
    found = changes(file_of(job, kind).read_text(), now)
    if found:
        pytest.fail(
            "visible behaviour has changed; if that is intended, update the file with "
            f"`{COMMAND} {job}` and mention it in CHANGELOG.md\n{found}",
            pytrace=False,
        )


@pytest.mark.parametrize("job", JOBS)
def test_help_is_unchanged(job: str):
    check_is_unchanged(job, "help", help_of(job))


@pytest.mark.parametrize("job", JOBS)
def test_a_training_is_unchanged(job: str, seen: dict[str, str]):
    check_is_unchanged(job, "run", seen[job])


def test_a_change_is_shown_with_the_part_it_is_in():
    before = "==== one\nsame\n\n==== two\nold line\nsame\n"
    found = changes(before, before.replace("old", "new"))
    assert found.startswith("==== two\n") and "-old line\n+new line" in found and "one" not in found
    assert changes(before, before) == ""
    assert "==== three" in changes(before, before + "\n==== three\nmore\n")
