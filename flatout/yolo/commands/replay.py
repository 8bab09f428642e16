"""`flatout yolo replay`: show what the network saw in any step of a run."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli import parser_of, show_log, switch, value
from flatout.errors import ConfigError, counted

if TYPE_CHECKING:
    from flatout.yolo import Appearance
    from flatout.yolo.replays.step import Sample

DESCRIPTION = """\
Show what the network saw in any step of a run: every image of the batch with its boxes, the files it was made of, and
the cells that each box was assigned to. A training draws all random numbers as functions of seed, epoch and position,
so a step is made again by itself, without the steps before it. A run records a hash of every batch; the replay says
whether it is identical, bit for bit.

With --file, the other way round: in which steps a file was shown, and in which role.
"""
EPILOG = """\
examples:
  flatout yolo replay runs/train/exp --epoch 3 --step 12                the whole batch, with matches and losses
  flatout yolo replay runs/train/exp --epoch 3 --step 12 --sample 5     one sample, large, and its source images
  flatout yolo replay runs/train/exp --epoch 3 --step 12 --weights best.pt
  flatout yolo replay runs/train/exp --file bolts/0139.jpg              when and how this file was shown
  flatout yolo replay runs/train/exp --file 0139.jpg --epochs 5         the same, in the first five epochs

files in --out:
  sheet.jpg      the batch with its boxes; with --sample that sample, the matched cells as circles, its source images
  batch.npz      `images` and `targets` as arrays, as the network got them
  samples.json   files, roles and drawn parameters of every sample
  matches.csv    which cell and anchor must predict which target, with overlap and cost
  losses.json    the losses, and the weights they belong to

Matches and losses are exact only for the weights with which the step was trained; the output says which ones were used.

Exit codes: 0 done, whether identical or not; 2 wrong arguments, or no such run or step; 3 images or labels have changed
since the training; 4 unusable weights; 5 not enough disk space.
"""
FLAGS = (value("run", "run folder, such as runs/train/exp, or a weights file in it", metavar="RUN"),)
STEP = (
    value("--epoch", "epoch, from 0, as in the log and in results.csv", type=int, metavar="E"),
    value("--step", "step in the epoch, from 0", type=int, metavar="S"),
    value("--sample", "show sample I of the step, from 0, with its sources", type=int, metavar="I"),
    value("--file", "list the steps that show this training image instead", metavar="IMAGE"),
    value("--epochs", "with --file: only the first N epochs (default: all of the run)", type=int, metavar="N"),
)
MADE = (
    value(
        "--weights",
        "weights for matches and losses: a path, or a name in RUN/weights (default: the state saved nearest)",
        default="",
        metavar="FILE",
    ),
    switch("--no-losses", "only images and targets; needs no weights and is faster"),
    value(
        "--data", "data YAML, if it is not where the run had it (default: as in the run)", default="", metavar="FILE"
    ),
    value("--device", "cpu, or the number of a GPU (default: a GPU if the run used one, else cpu)", default=""),
    switch("--allow-data-change", "go on although images or labels have changed since; shows what they would give now"),
    value("--out", "folder for the files (default: runs/replay/RUN_eEEE_sSSSS)", type=Path, metavar="FOLDER"),
)
GROUPS = {"which step": STEP, "how it is made": MADE}


def main(argv: list[str]) -> int:
    """Replay a step, or list where a file was shown; returns the exit code."""
    args = parser_of("flatout yolo replay", DESCRIPTION, EPILOG, FLAGS, GROUPS).parse_args(argv)
    _check(args)
    show_log(only_warnings=True)
    return _list_file(args) if args.file is not None else _replay(args)


def _check(args: argparse.Namespace) -> None:
    if args.file is not None:
        if args.step is not None or args.sample is not None:
            raise ConfigError("--file lists steps: leave out --step and --sample.")
        if args.epoch is not None and args.epochs is not None:
            raise ConfigError("--epoch E means one epoch, --epochs N the first N: use one of them.")
        if args.epochs is not None and args.epochs < 1:
            raise ConfigError(f"--epochs {args.epochs}: give the number of epochs to search, 1 or more.")
        return
    if args.epoch is None or args.step is None:
        raise ConfigError("Give --epoch E and --step S, both counted from 0, or --file to search for a file.")
    if args.epochs is not None:
        raise ConfigError("--epochs limits the search of --file; for a step use --epoch.")


def _replay(args: argparse.Namespace) -> int:
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.yolo import replay

    replayed = replay(
        args.run,
        epoch=args.epoch,
        step=args.step,
        losses=not args.no_losses,
        weights=args.weights,
        data=args.data,
        device=args.device,
        allow_data_change=args.allow_data_change,
    )
    if args.sample is not None:
        replayed.sample_of(args.sample)  # before anything is written
    out = args.out or Path("runs/replay") / f"{replayed.run.resolve().name}_e{args.epoch:03d}_s{args.step:04d}"
    written = replayed.save(out, sample=args.sample)  # before the text, of which `| head` reads only the beginning
    print(replayed)
    if args.sample is not None:
        print(sample_text(replayed.sample_of(args.sample)))
    print(f"written  {out}: {', '.join(path.name for path in written)}")
    return 0


def sample_text(sample: "Sample") -> str:
    """Files, roles and drawn numbers of a sample, a line each."""
    lines = [f"\nsample {sample.number}, position {sample.position} of the epoch: {sample.kind}"]
    lines += [f"  {file.role:<9} {file}{'' if file.visible else '  (not visible)'}" for file in sample.files]
    parameters = dict(sample.parameters)
    canvases = parameters.pop("canvases")
    lines.append("  " + "  ".join(f"{name} {_number(value)}" for name, value in parameters.items()))
    for number, canvas in enumerate(canvases):
        lines.append(f"  canvas {number}  " + "  ".join(f"{name} {_number(value)}" for name, value in canvas.items()))
    return "\n".join(lines)


def _number(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower()


def _list_file(args: argparse.Namespace) -> int:
    from flatout.yolo import appearances

    epochs = None
    if args.epoch is not None:
        epochs = range(args.epoch, args.epoch + 1)
    elif args.epochs is not None:
        epochs = range(args.epochs)
    found = appearances(
        args.run,
        args.file,
        epochs=epochs,
        data=args.data,
        allow_data_change=args.allow_data_change,
        progress=True,
    )
    print(appearances_text(found))
    return 0


def appearances_text(found: "list[Appearance]") -> str:
    """A table of the steps in which a file was shown, and a line that counts them."""
    from flatout.yolo.replays.step import where_in

    lines = [f"{'epoch':>5} {'step':>6} {'sample':>6} {'position':>8}  role"]
    for each in found:
        notes = [f"tile{where_in(each.window)}"] if each.window else []
        notes += [*([] if each.visible else ["not visible"]), *([] if each.recorded else ["not recorded as trained"])]
        about = f"  ({', '.join(notes)})" if notes else ""
        lines.append(f"{each.epoch:>5} {each.step:>6} {each.sample:>6} {each.position:>8}  {each.role}{about}")
    steps = len({(each.epoch, each.step) for each in found})
    roles = {role: sum(each.role == role for each in found) for role in dict.fromkeys(each.role for each in found)}
    parts = ", ".join(f"{count} as {role}" for role, count in roles.items())
    return "\n".join(
        [*lines, f"{counted(len(found), 'time')} in {counted(steps, 'step')}{': ' if parts else ''}{parts}"]
    )
