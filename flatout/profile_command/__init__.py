"""`flatout profile JOB ...`: where the time of a training goes, why, and how fast each remedy would make it.

It runs the training that `flatout JOB train` with the same flags would start, for a few dozen steps, in a temporary
folder. With --apply it also switches the best remedy on and measures again.

Files:

    apply  Switch the best remedy on, measure again, and compare with the prediction
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

MIN_STEPS = 3
"""Equal to flatout.profiler.observe.observation.MIN_TIMED_STEPS; repeated here so that --help does not load it."""

EPILOG = """examples:
  flatout profile yolo --data demo-data/demo.yaml --cfg cfg/training/yolov7-tiny.yaml --img 320 --batch 16
  flatout profile yolo --apply --steps 40 --data ... --cfg ...      switch the best remedy on and measure again
  flatout profile defect --training_dataset_path R/train/good --num_workers 1
  flatout profile spike --config data/spike/spike_mini.yaml --set DATALOADER.TOTAL_WORKERS=1

All other flags are those of `flatout JOB train`. Files written to --out: profile.html (open it in a browser),
profile.json (the numbers) and trace.json (open it at https://ui.perfetto.dev). Exit code: 0; 2 for wrong arguments;
otherwise that of the training."""


def main(argv: list[str]) -> int:
    """Profile a training; returns the exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.steps < MIN_STEPS:
        raise ConfigError(
            f"flatout profile: --steps {args.steps} is too few for a conclusion. Use --steps {MIN_STEPS} or more."
        )
    if args.job not in JOBS:
        raise ConfigError(f"flatout profile: unknown job {args.job!r}. Use one of: {', '.join(JOBS)}.")
    _refuse_unwritable(args.out)
    try:
        return _profile(args, rest)
    except Interrupted as error:
        raise Interrupted(
            "flatout profile: interrupted before the profile was complete. Nothing of the training is kept."
        ) from error


def _profile(args: argparse.Namespace, flags: list[str]) -> int:
    # Imported here: help and wrong arguments must not have to load torch.
    from flatout.profile_command.apply import apply_best
    from flatout.profile_command.table import show

    progress = _Progress()
    command: TrainCommand = import_module(JOBS[args.job]).COMMAND
    module, _, name = (command.profile or "flatout.runs.profiled:ProfiledTraining").partition(":")
    training = getattr(import_module(module), name).from_flags(command, flags, num_steps=args.steps)
    progress(f"Timing {args.steps} steps of the training as it is ...")
    profile = training.observe()
    if not args.quick:
        progress("Measuring limits: network, copy and input, each by itself ...")
        profile.limits, profile.light = training.limits(), training.speed_of_light()
        profile.trials += training.trials(profile.limits, progress)
        profile.end_to_end_trials += training.end_to_end_trials(progress)
    show(profile)
    page = profile.save(args.out)
    print(f"\nSaved as a page: {page}")
    if args.apply:
        progress("Applying the best remedy that is a flag, and measuring again ...")
        print(apply_best(training, profile).text())
    return 0


def _refuse_unwritable(folder: Path) -> None:
    """ConfigError if `folder` cannot be written to: before minutes of measuring, and without creating it yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder} cannot be written: {existing} is not a writable folder. Choose another one.")


class _Progress:
    """Prints what is being done, with the seconds since the start, to stderr: the result goes to stdout."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self, activity: str) -> None:
        print(f"{time.monotonic() - self._began_s:4.0f} s  {activity}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout profile",
        usage="flatout profile JOB [--steps N] [--apply] [--quick] [--out FOLDER] [FLAGS OF flatout JOB train ...]",
        description=__doc__.partition("\n\nFiles:")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("job", help=f"the training to profile: {', '.join(JOBS)}")
    parser.add_argument("--steps", type=int, default=20, help="steps to time, 3 or more (default: %(default)s)")
    parser.add_argument("--apply", action="store_true", help="switch the best remedy on, measure again, keep or revert")
    parser.add_argument("--quick", action="store_true", help="skip the short runs that measure limits and try flags")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder to write to (default: %(default)s)")
    return parser
