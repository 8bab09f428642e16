"""The command line: `flatout COMMAND ...`. Finds the command, runs it, turns errors into exit codes.

A command is a module with `main(argv) -> exit code`, imported only once it has been chosen:
help and mistyped commands answer at once, without torch, numpy or OpenCV.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from flatout import __version__
from flatout.door import Command, answer, listing
from flatout.engine.interrupts import watched
from flatout.errors import FlatoutError

COMMANDS = {
    "bootstrap": Command("print a script that makes a rented machine train and go on", "flatout.bootstrap"),
    "defect": Command("defects between dies: what is in target and in neither reference", "flatout.defect.cli"),
    "demo": Command("see flatout at work on a small made-up data set", "flatout.demo"),
    "doctor": Command("look at this machine and say what would slow training down", "flatout.doctor"),
    "monitor": Command("curves and state of a run in a browser, also after a crash", "flatout.monitor"),
    "profile": Command("where a training's time goes, and what each remedy is worth", "flatout.profile_cli"),
    "spike": Command("video deblurring with a spike camera: prepare, check, train, test, predict", "flatout.spike.cli"),
    "yolo": Command("detection: train, test and detect with YOLOv7's networks and commands", "flatout.yolo.cli"),
}

TRAININGS = {
    ("demo",),
    ("yolo", "train"),
    ("yolo", "stages"),
    ("defect", "train"),
    ("defect", "demo"),
    ("spike", "train"),
    ("spike", "demo"),
}
"""Commands that answer signals from their first moment on, before anything heavy is imported."""

INTERNAL_ERROR = 70
INTERRUPTED = 130
READER_LEFT = 141
"""What a shell reports for a command whose output nobody reads any more (SIGPIPE)."""

_REPORTED_VERSIONS = ("torch", "numpy", "opencv-python-headless", "pydantic", "PyYAML")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (docs/exit-codes.md)."""
    words, debug = take_debug(sys.argv[1:] if argv is None else argv)
    debug = debug or os.environ.get("FLATOUT_DEBUG", "0") not in ("", "0")
    try:
        with watched() if trains(words) else nullcontext():
            code = run(words)
        # Here, because at interpreter exit a reader who left would be reported as an error.
        sys.stdout.flush()
        return code
    except FlatoutError as error:
        if debug:
            print_traceback()
        print(f"flatout: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("flatout: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_left():
            return READER_LEFT
        if debug:
            print_traceback()
        print(f"flatout: internal error: {one_line(error)} ({write_report(words)})", file=sys.stderr)
        return INTERNAL_ERROR


def trains(words: Sequence[str]) -> bool:
    """Whether the words name a command that trains."""
    _, command = split_at_command(words)
    return any(tuple(command[: len(training)]) == training for training in TRAININGS)


def run(words: Sequence[str]) -> int:
    """Obey flatout's own options, or hand over to the command that is named."""
    own, rest = split_at_command(words)
    parser = build_parser()
    parser.parse_args(own)
    if not rest:
        parser.print_help()
        return 0
    return answer(rest, COMMANDS, door="flatout")


def build_parser() -> argparse.ArgumentParser:
    """Parser of the options before the command; its help lists the commands."""
    parser = argparse.ArgumentParser(
        prog="flatout",
        usage="flatout [-h] [--version] [--debug] COMMAND [ARGUMENT ...]",
        description="Vision training that keeps the GPU busy and proves where the time goes.",
        epilog=f"{listing(COMMANDS)}\n\n`flatout COMMAND --help` explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flatout {__version__}")
    # Taken out beforehand, as it may stand anywhere; declared for the help.
    parser.add_argument("--debug", action="store_true", help="show tracebacks (so does FLATOUT_DEBUG=1)")
    return parser


def take_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words without `--debug`, and whether it was there; what follows a bare `--` is left alone."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    return [*kept, *words[end:]], len(kept) < end


def split_at_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """flatout's own options, then the command with everything that belongs to it."""
    first = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    return list(words[:first]), list(words[first:])


def print_traceback() -> None:
    import traceback  # seldom wanted, and a training should hear signals early

    traceback.print_exc()


def reader_left() -> bool:
    """Is stdout a pipe that nobody reads any more? If so, what is still buffered goes nowhere."""
    import select

    stdout = 1
    poll = select.poll()
    poll.register(stdout, select.POLLERR)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def write_report(words: Sequence[str]) -> str:
    """Put the current exception and all versions into a temporary file; says where it is."""
    import platform
    import tempfile
    import traceback

    lines = [
        f"flatout {__version__}, Python {platform.python_version()}, {platform.platform()}",
        *(f"{name} {installed_version(name)}" for name in _REPORTED_VERSIONS),
        f"command: flatout {' '.join(words)}",
        "",
        traceback.format_exc(),
    ]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="flatout-report-", suffix=".txt", encoding="utf-8", errors="backslashreplace", delete=False
        ) as file:
            file.write("\n".join(lines))
    except OSError:
        return "no report could be written; run it again with --debug"
    return f"report: {file.name}"


def installed_version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "is not installed"


if __name__ == "__main__":
    sys.exit(main())
