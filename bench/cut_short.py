"""Benchmarks that are interrupted report what they have measured so far. Shared by those that train."""

import signal

NOTE = "CUT SHORT: what is missing was not measured, and is not evaluated."


def heed_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt from now on: Ctrl-C, `timeout` and `timeout -s INT`.

    Python does that for SIGINT only, and not at all in a background job of a shell.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
