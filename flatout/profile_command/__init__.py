"""`flatout profile JOB ...`: where the time of a training goes, why, and how fast each remedy would make it.

It runs the training that `flatout JOB train` with the same flags would start, for a few dozen steps, in a temporary
folder. With --apply it also switches the best remedy on and measures again. `flatout profile --compare A B` compares
two saved profiles instead; `flatout profile --run FOLDER` shows where the seconds of a finished run went, from the
command to its weights; `python -m flatout.profile_any train.py` profiles a script that is not flatout's.

Files:

    apply    Switch the best remedy on, measure again, and compare with the prediction
    compare  Two saved profiles side by side: what changed, and whether the second is slower than allowed
    table    Ledger and verdict in colour, for a terminal
"""

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

from flatout.cli import JOBS, parser_of, switch, value
from flatout.errors import ConfigError, Interrupted
from flatout.runs import TrainCommand

MIN_STEPS = 3
"""Equal to flatout.profiler.observe.observation.MIN_TIMED_STEPS; repeated here so that --help does not load it."""

COMPARE_USAGE = "flatout profile --compare A B [--fail-if-slower PERCENT]"
RUN_USAGE = "flatout profile --run FOLDER"
USAGE = f"""\
flatout profile JOB [--steps N] [--apply] [--quick] [--out FOLDER] [FLAGS OF flatout JOB train ...]
       {COMPARE_USAGE}
       {RUN_USAGE}"""

EPILOG = """examples:
  flatout profile yolo --data demo-data/demo.yaml --cfg cfg/training/yolov7-tiny.yaml --img 320 --batch 16
  flatout profile yolo --apply --steps 40 --data ... --cfg ...      switch the best remedy on and measure again
  flatout profile defect --training_dataset_path R/train/good --num_workers 1
  flatout profile spike --config data/spike/spike_mini.yaml --set DATALOADER.TOTAL_WORKERS=1
  flatout profile --compare profile-before profile-after --fail-if-slower 5%
  flatout profile --run runs/train/exp                              what a run cost besides its steps

All other flags are those of `flatout JOB train`. Files written to --out: profile.html (open it in a browser),
profile.json (the numbers) and trace.json (open it at https://ui.perfetto.dev). Exit code: 0; 2 for wrong arguments;
9 if --fail-if-slower finds B slower; otherwise that of the training."""


def fraction(text: str) -> float:
    """'5%' or '5' as 0.05."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage, such as 5%")
    return share


FLAGS = (
    value("job", f"the training to profile: {', '.join(JOBS)}"),
    value("--steps", "steps to time, 3 or more (default: %(default)s)", type=int, default=20, metavar="N"),
    switch("--apply", "switch the best remedy on, measure again, keep or revert"),
    switch("--quick", "skip the short runs that measure limits and try flags"),
    value("--out", "folder to write to (default: %(default)s)", type=Path, default=Path("profile"), metavar="FOLDER"),
)
COMPARE_FLAGS = (
    value(
        "--compare",
        "compare two saved profiles (folders or profile.json files) instead of measuring",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
    ),
    value(
        "--fail-if-slower",
        "with --compare: exit code 9 if B takes more than PERCENT longer per image than A, such as 5%%",
        type=fraction,
        metavar="PERCENT",
    ),
)
RUN_FLAGS = (
    value(
        "--run",
        "show where the wall time of a run went, from the command to finished weights, instead of measuring",
        type=Path,
        metavar="FOLDER",
    ),
)


def main(argv: list[str]) -> int:
    """Profile a training; returns the exit code."""
    names, wants_help = {word.split("=")[0] for word in argv}, bool({"-h", "--help"} & {*argv})
    if "--run" in names and not wants_help:
        return _show_run(argv)
    if names & {"--compare", "--fail-if-slower"} and not wants_help:
        return _compare(argv)
    about, flags = __doc__.partition("\n\nFiles:")[0], (*FLAGS, *COMPARE_FLAGS, *RUN_FLAGS)
    args, rest = parser_of("flatout profile", about, EPILOG, flags, usage=USAGE).parse_known_args(argv)
    if args.steps < MIN_STEPS:
        raise ConfigError(
            f"flatout profile: --steps {args.steps} is too few for a conclusion. Use --steps {MIN_STEPS} or more."
        )
    if args.job not in JOBS:
        raise ConfigError(
            f"flatout profile: unknown job {args.job!r}. Use one of: {', '.join(JOBS)}. For a script of your own: "
            "python -m flatout.profile_any train.py"
        )
    _refuse_unwritable(args.out)
    try:
        return _profile(args, rest)
    except Interrupted as error:
        raise Interrupted(
            "flatout profile: interrupted before the profile was complete. Nothing of the training is kept."
        ) from error


def _show_run(argv: list[str]) -> int:
    args = parser_of("flatout profile", "", "", RUN_FLAGS, usage=RUN_USAGE).parse_args(argv)
    from flatout.runs import ledger_lines, read_times

    print("\n".join(ledger_lines(read_times(args.run))))
    return 0


def _compare(argv: list[str]) -> int:
    args = parser_of("flatout profile", "", "", COMPARE_FLAGS, usage=COMPARE_USAGE).parse_args(argv)
    if args.compare is None:
        raise ConfigError("flatout profile: --fail-if-slower needs --compare A B, the two profiles to compare.")
    from flatout.profile_command.compare import compare

    return compare(*args.compare, allowed=args.fail_if_slower)


def _profile(args: argparse.Namespace, flags: list[str]) -> int:
    from flatout.clock import spans

    times = spans.begin_command()
    # Imported here: help and wrong arguments must not have to load torch.
    from flatout.profile_command.apply import apply_best
    from flatout.profile_command.table import show

    began_s = time.monotonic()

    def progress(activity: str) -> None:
        """Print what is being done, with the seconds since the start, to stderr: the result goes to stdout."""
        print(f"{time.monotonic() - began_s:4.0f} s  {activity}", file=sys.stderr, flush=True)

    command: TrainCommand = import_module(JOBS[args.job]).COMMAND
    kind = resolve_name(command.profile or "flatout.runs.profiled:ProfiledTraining")
    training = kind.from_flags(command, flags, num_steps=args.steps)
    times.name_all_so_far("imports")
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
    # os.path: Path.exists() raises an error below a folder that may not be entered.
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder} cannot be written: {existing} is not a writable folder. Choose another one.")
