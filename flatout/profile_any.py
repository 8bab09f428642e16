"""`python -m flatout.profile_any train.py ARGS`: watches a training script that nobody edited.

The script runs as `python train.py ARGS` would run it and computes the same numbers. Its training loop is found through
DataLoader, optimizer.step() and the modules that are called. The report goes to standard error: where the time of a
step goes, why, and what each remedy would gain.
"""

import argparse
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from flatout.cli import Flag, parser_of, switch, value
from flatout.errors import CTRL_C_CODE, ConfigError, FlatoutError, MissingFileError
from flatout.ranks import is_first_rank

if TYPE_CHECKING:
    from flatout.profiler import Profile

EPILOG = """examples:
  python -m flatout.profile_any train.py --epochs 1
  python -m flatout.profile_any --steps 50 train.py --epochs 90     report after 50 timed steps, then train on
  python -m flatout.profile_any --steps 50 --stop train.py          report after 50 timed steps, and end there
  python -m flatout.profile_any -m my_package.train --epochs 1

The report comes when the script ends, after --steps, or on Ctrl-C. Files written to --out: profile.html (open it in a
browser), profile.json (the numbers; compare two with `flatout profile --compare A B`) and trace.json. Exit code: that
of the script; 0 with --stop; 2 for wrong arguments; 130 after Ctrl-C. Of several ranks, the first is watched."""

USAGE = "python -m flatout.profile_any [--steps N [--stop]] [--out FOLDER] [-m] SCRIPT [ARGUMENT ...]"
FLAGS = (
    value("script", "the training script, or with -m the module, to run"),
    value("arguments", "its own arguments, passed on as they are", nargs=argparse.REMAINDER),
    Flag("-m", "SCRIPT is a module, as in `python -m SCRIPT`", {"dest": "module", "action": "store_true"}),
    value("--steps", "steps to time, 3 or more (default: all of them)", type=int),
    switch("--stop", "end the script after --steps instead of training on"),
    value("--out", "folder to write to (default: %(default)s)", type=Path, default=Path("profile")),
)


class _Stopped(BaseException):
    """Ends the script after its report; no `except Exception` of the script may catch it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script under a watch; returns its exit code."""
    args = parser_of("python -m flatout.profile_any", __doc__, EPILOG, FLAGS, usage=USAGE).parse_args(argv)
    try:
        _check(args)
    except FlatoutError as error:
        print(f"flatout: {error}", file=sys.stderr)
        return error.exit_code
    words = [args.script, *args.arguments]
    if not is_first_rank():
        return _run(words, is_module=args.module)
    return _watched(words, args)


def _watched(words: Sequence[str], args: argparse.Namespace) -> int:
    from flatout.profiler import watch_any

    def report(profile: "Profile") -> None:
        page = profile.save(args.out)
        print(f"\n{profile.text()}\n\nSaved as a page: {page}", file=sys.stderr, flush=True)
        if args.stop and args.steps is not None:
            raise _Stopped

    code = 0
    try:
        with watch_any(num_steps=args.steps, title=Path(args.script).name, on_complete=report) as profile:
            code = _run(words, is_module=args.module)
    except _Stopped:
        return 0
    try:
        profile.measurement  # noqa: B018 - asked for its error
    except ConfigError as error:
        print(f"\nflatout: no profile: {error}", file=sys.stderr)
    return code


def _run(words: Sequence[str], *, is_module: bool) -> int:
    """Run a script or a module as `python` would; returns the exit code that Python would end with."""
    script, *_ = words
    sys.argv[:] = words
    if not is_module:
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return _code_of(end)
    except KeyboardInterrupt:
        print("flatout: interrupted", file=sys.stderr)
        return CTRL_C_CODE
    except Exception as error:  # the script's own: shown as Python shows it, without the frames that started the script
        error.__traceback__ = _inside(error.__traceback__)
        traceback.print_exception(error)
        return 1
    return 0


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _inside(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first line on."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _check(args: argparse.Namespace) -> None:
    if args.steps is not None and args.steps < 3:
        raise ConfigError(f"profile_any: --steps {args.steps} is too few for a conclusion. Use --steps 3 or more.")
    if args.stop and args.steps is None:
        raise ConfigError("profile_any: --stop needs --steps: the number of timed steps after which the script ends.")
    if not args.module and not Path(args.script).is_file():
        raise MissingFileError(f"profile_any: there is no script {args.script}. Options of profile_any come before it.")


if __name__ == "__main__":
    sys.exit(main())
