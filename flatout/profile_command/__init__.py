"""`flatout profile JOB ...`: where does a training's time go, what would remedies be worth, does the best one hold?

The training is the one that `flatout JOB train` with the same flags would begin; it runs for a few dozen steps in a
folder of its own, which is removed again.

Files:

    apply  Switch the best remedy on, measure again, keep or revert, and say how good the prediction was
    table  Ledger and verdict in colour, for a terminal
"""

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path

from flatout.cli import JOBS
from flatout.errors import ConfigError, Interrupted
from flatout.runs import TrainCommand

FEWEST_STEPS = 3
"""As an observation needs (flatout.profiler.observe.observation.MIN_TIMED_STEPS); said here without loading it."""

EPILOG = """examples:
  flatout profile yolo --data demo-data/demo.yaml --cfg cfg/training/yolov7-tiny.yaml --img 320 --batch 16
  flatout profile yolo --apply --steps 40 --data ... --cfg ...      switch the best remedy on and measure again
  flatout profile defect --training_dataset_path R/train/good --num_workers 1
  flatout profile spike --config data/spike/spike_mini.yaml --set DATALOADER.TOTAL_WORKERS=1

Every other flag is one of `flatout JOB train`. Written: profile.json, profile.html (open it in a browser) and
trace.json (https://ui.perfetto.dev opens it). Exit code: 0, 2 wrong arguments, otherwise that of the training."""


def main(argv: list[str]) -> int:
    """Profile a training; returns the exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.steps < FEWEST_STEPS:
        raise ConfigError(
            f"flatout profile: --steps {args.steps} is too few to conclude anything from. Use --steps {FEWEST_STEPS} "
            "or more."
        )
    if args.job not in JOBS:
        raise ConfigError(f"flatout profile: unknown job {args.job!r}; known: {', '.join(JOBS)}.")
    _refuse_unwritable(args.out)
    try:
        return _profile(args, rest)
    except Interrupted as error:
        raise Interrupted(
            "flatout profile: ended before it was done. Nothing is kept of the training that was looked at."
        ) from error


def _profile(args: argparse.Namespace, flags: list[str]) -> int:
    # Now, because help and mistakes are answered without torch.
    from flatout.profile_command.apply import apply_best
    from flatout.profile_command.table import show

    tell = _Teller()
    command: TrainCommand = import_module(JOBS[args.job]).COMMAND
    module, _, name = (command.profile or "flatout.runs.profiled:ProfiledTraining").partition(":")
    training = getattr(import_module(module), name).from_flags(command, flags, num_steps=args.steps)
    tell(f"Looking at {args.steps} steps of the training as it is ...")
    profile = training.observe()
    if not args.quick:
        tell("Limits: network, copy and input, each by itself ...")
        profile.limits, profile.light = training.limits(), training.speed_of_light()
        profile.trials += training.trials(profile.limits, tell)
        profile.end_to_end_trials += training.wholes(tell)
    show(profile)
    page = profile.save(args.out)
    print(f"\nThe same as a page: {page}")
    if args.apply:
        tell("The best remedy that a flag switches on ...")
        print(apply_best(training, profile).text())
    return 0


def _refuse_unwritable(folder: Path) -> None:
    """Now: after minutes of looking it would be too late. Nothing is made yet, for the training may be refused."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"flatout profile: --out {folder}: {there} is not a folder that can be written to.")


class _Teller:
    """A look takes a while: says what is going on and how long it took, without mixing that into the answer."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self, what: str) -> None:
        print(f"{time.monotonic() - self._began_s:4.0f} s  {what}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout profile",
        usage="flatout profile JOB [--steps N] [--apply] [--quick] [--out FOLDER] [FLAG OF THE JOB'S TRAINING ...]",
        description=__doc__.partition("\n\nFiles:")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("job", help=f"what is trained: {', '.join(JOBS)}")
    parser.add_argument("--steps", type=int, default=20, help="steps to time, 3 or more (default: %(default)s)")
    parser.add_argument("--apply", action="store_true", help="switch the best remedy on, measure again, keep or revert")
    parser.add_argument("--quick", action="store_true", help="leave out the short runs that tell limits and trials")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder to write to (default: %(default)s)")
    return parser
