"""The entry point of the command line, `flatout COMMAND ...`: finds and runs the command, turns errors into exit codes.

A command is a module with `main(argv) -> exit code`, imported only when it is chosen: help and mistyped commands are
answered immediately, without torch, numpy or OpenCV.
"""

from __future__ import annotations  # so that a Python that is too old gets as far as the message that says so

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path

from flatout import __version__
from flatout.cli import JOBS, WITH_FLAG, Command, dispatch, known_as, listing
from flatout.errors import CTRL_C_CODE, INTERNAL_ERROR_CODE, ConfigError, FlatoutError, ResourceError, one_line

COMMANDS = {
    "bootstrap": Command("print an on-start script for training on a rented machine", "flatout.bootstrap"),
    "defect": Command("defects between dies: what is in target and in neither reference", "flatout.defect.cli"),
    "demo": Command("a short training on a small generated data set", "flatout.yolo.commands.demo"),
    "doctor": Command("check this machine for anything that would slow training down", "flatout.doctor"),
    "launch": Command("print a manifest for SkyPilot, Kubernetes, SLURM, Ray or Modal", "flatout.bootstrap.launch"),
    "monitor": Command("curves and state of a run in a browser, also after a crash", "flatout.monitor"),
    "profile": Command("where the time of a training goes, and what each remedy would gain", "flatout.profile_command"),
    "spike": Command("video deblurring with a spike camera: prepare, check, train, test, predict", "flatout.spike.cli"),
    "weights": Command("download weights by name or URL, list them, upload them", "flatout.hub"),
    "yolo": Command("detection: train, test and detect with YOLOv7's networks and commands", "flatout.yolo.cli"),
}

TRAININGS = {("demo",), ("yolo", "stages"), *((job, command) for job in JOBS for command in ("train", "demo"))}
"""Commands that handle signals from the start, before anything large is imported."""

READER_LEFT = 141
"""The exit code that a shell reports for a command killed by SIGPIPE."""

OLDEST_PYTHON = (3, 11)
_SAME_NAME = ("filelock", "numpy", "psutil", "pydantic", "rich", "safetensors", "simplejpeg", "tifffile", "torch")
PACKAGES = {
    **{name: name for name in _SAME_NAME},
    "cv2": "opencv-python-headless",
    "pynvml": "nvidia-ml-py",
    "yaml": "PyYAML",
}
"""Required packages (`dependencies` in pyproject.toml): import name -> name to install."""

_REPORTED_VERSIONS = ("torch", "numpy", "opencv-python-headless", "pydantic", "PyYAML")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (docs/exit-codes.md)."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A name that the terminal or log file cannot show must not end a command.
        sys.stdout.reconfigure(errors="backslashreplace")
    words, debug = take_debug(sys.argv[1:] if argv is None else argv)
    debug = debug or os.environ.get("FLATOUT_DEBUG", "0") not in ("", "0")
    try:
        if sys.version_info < OLDEST_PYTHON:
            raise ResourceError(wrong_python(f"is {sys.version.split()[0]}, and flatout needs 3.11 or newer", ""))
        with _watched() if trains(words) else nullcontext():
            code = run(words)
        # Here, because at interpreter exit a closed pipe would be reported as an error.
        sys.stdout.flush()
        return code
    except FlatoutError as error:
        if debug:
            print_traceback()
        print(f"flatout: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("flatout: interrupted", file=sys.stderr)
        return CTRL_C_CODE
    except Exception as error:  # anything else is a bug: reported in a file, with exit code 70
        if isinstance(error, BrokenPipeError) and reader_left():
            return READER_LEFT
        if debug:
            print_traceback()
        if isinstance(error, ModuleNotFoundError) and (package := PACKAGES.get((error.name or "").partition(".")[0])):
            print(f"flatout: {wrong_python(f'lacks {package}, which flatout needs', package)}", file=sys.stderr)
            return ResourceError.exit_code
        print(f"flatout: internal error: {one_line(error)} ({write_report(words)})", file=sys.stderr)
        return INTERNAL_ERROR_CODE


def wrong_python(fault: str, package: str) -> str:
    """The message about an unsuitable Python, and which one to use: in a checkout, that of its environment."""
    checkout = Path(__file__).absolute().parent.parent
    environment = checkout / ".venv"
    python = f"{environment}/bin/python {program()} ..."
    if (environment / "bin/python").exists() and Path(sys.prefix) != environment:
        advice = f"Use the environment of ./run: {python}, or activate it: . {environment}/bin/activate"
    elif (checkout / "run").exists():
        advice = f"Create an environment with {checkout}/run demo, then: {python}"
    else:
        advice = f"{sys.executable} -m pip install {package}" if package else "Install a newer Python."
    return f"this Python ({sys.executable}) {fault}. {advice}"


def program() -> str:
    """The program that was started, as it is typed after `python`."""
    name = Path(sys.argv[0]).name
    return "-m flatout" if name in ("__main__.py", "flatout") else name


def _watched() -> AbstractContextManager[None]:
    from flatout.ranks import watched

    return watched()


def trains(words: Sequence[str]) -> bool:
    """Whether the command line names a command that trains."""
    _, command = split_at_command(words)
    return any(tuple(command[: len(training)]) == training for training in TRAININGS)


def run(words: Sequence[str]) -> int:
    """Handle flatout's own options, then run the command."""
    own, rest = split_at_command(words)
    if rest[:1] == ["help"]:
        rest = [*rest[1:], "--help"] if rest[1:] else []
    elif rest == ["version"]:
        own, rest = ["--version"], []
    parser = build_parser()
    parser.parse_args(own)
    if not rest:
        parser.print_help()
        return 0
    if rest[0] not in COMMANDS and (meant := commands_of_jobs(rest[0])):
        raise ConfigError(f"{rest[0]!r} is a command of a job: {which_one(meant, rest[1:])}")
    if rest[0] not in COMMANDS and (near := _near_commands(rest[0])):
        raise ConfigError(f"unknown command {rest[0]!r}; did you mean {near}?")
    return dispatch(rest, COMMANDS, prog="flatout")


def commands_of_jobs(name: str) -> list[str]:
    """The commands of all jobs that are known by this name, such as `flatout yolo train`.

    If a single job calls a command so, that one is meant: `detect`, though a detection is `predict` in other jobs.
    """
    found = {job: known_as(name, import_module(f"flatout.{job}.cli").COMMANDS) for job in JOBS}
    exact = [job for job, command in found.items() if command == name]
    return [
        f"flatout {job} {command}" for job, command in found.items() if command and (len(exact) != 1 or job in exact)
    ]


def _near_commands(typed: str) -> str:
    """Commands of jobs that are spelled similarly, or that do what another program calls so; "" if there are none."""
    if typed in WITH_FLAG:
        return f"`flatout yolo {WITH_FLAG[typed]}`"
    known = {name for job in JOBS for name in import_module(f"flatout.{job}.cli").COMMANDS}
    close = difflib.get_close_matches(typed, [*COMMANDS, *known], n=1)
    return _either(commands_of_jobs(close[0])) if close and close[0] in known else ""


def which_one(commands: Sequence[str], words: Sequence[str]) -> str:
    """Names the command to use, with the words of the user, or asks which of several."""
    if len(commands) == 1:
        return f"run `{' '.join([commands[0], *words])}`."
    return f"which job? {_either(commands)}."


def _either(commands: Sequence[str]) -> str:
    *others, last = (f"`{command}`" for command in commands)
    return f"{', '.join(others)} or {last}" if others else last


HINTS = """\
`flatout COMMAND --help` shows the help of a command. Most work is done by commands of a job: `flatout yolo train`,
`flatout yolo test` (or val), `flatout yolo detect` (or predict), `flatout yolo export`."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the options before the command; its help lists the commands."""
    parser = argparse.ArgumentParser(
        prog="flatout",
        usage="flatout [-h] [--version] [--debug] COMMAND [ARGUMENT ...]",
        description="Vision training that keeps the GPU busy and proves where the time goes.",
        epilog=f"{listing(COMMANDS)}\n\n{HINTS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flatout {__version__}")
    # Removed from the words beforehand, as it may be anywhere; declared for the help.
    parser.add_argument("--debug", action="store_true", help="show tracebacks (so does FLATOUT_DEBUG=1)")
    return parser


def take_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words without `--debug`, and whether it was there; words after a bare `--` are left alone."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    return [*kept, *words[end:]], len(kept) < end


def split_at_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """flatout's own options, and the command with its arguments."""
    first = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    return list(words[:first]), list(words[first:])


def print_traceback() -> None:
    import traceback  # rarely needed, and a training should handle signals early

    traceback.print_exc()


def reader_left() -> bool:
    """Whether stdout is a pipe whose reader has closed it; if so, the rest of the output is discarded."""
    import select

    stdout = 1
    poll = select.poll()
    poll.register(stdout, select.POLLERR)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True


def write_report(words: Sequence[str]) -> str:
    """Write the current exception and all versions to a temporary file; returns a remark with its path."""
    import platform
    import tempfile
    import traceback

    from flatout.clock import machine

    lines = [
        f"flatout {__version__}, Python {platform.python_version()}, {platform.platform()}",
        *(f"{name} {machine.package_version(name) or 'is not installed'}" for name in _REPORTED_VERSIONS),
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
        return "no report could be written; run the command again with --debug"
    return f"report: {file.name}"


if __name__ == "__main__":
    sys.exit(main())
