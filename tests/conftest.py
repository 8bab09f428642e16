"""Setup of all tests: hides GPUs, restores signals, and counts golden cases per group at the end."""

import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OUTCOMES = ("passed", "failed", "skipped")


def pytest_configure(config: Any) -> None:
    """Hide GPUs unless `-m gpu` selects the tests that need one, since trainings would use them by default.

    Also restore signals, which tests started in the background or by nohup would ignore.
    """
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per golden group, e.g. `spike  70 passed`; nothing when no golden test was collected."""
    groups: dict[str, Counter[str]] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            if "golden" in report.keywords:
                group = report.nodeid.partition("[")[2].partition("/")[0]
                groups.setdefault(group, Counter())[outcome] += 1
    if groups:
        terminalreporter.section("golden cases")
    for group, counts in sorted(groups.items()):
        text = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        terminalreporter.write_line(f"{group:<16} {text}")


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    """Commands set the level of the log, for all tests after them in the same process."""
    logger = logging.getLogger("flatout")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread, for small tensors: more gain nothing there, and on a busy machine wait for each other."""
    with in_one_thread():
        yield


@pytest.fixture(scope="module")
def module_in_one_thread() -> Iterator[None]:
    """As `one_thread`, for a whole module and its own fixtures, which may train."""
    with in_one_thread():
        yield


@contextmanager
def in_one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
