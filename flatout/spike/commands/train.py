"""flatout spike train: train a deblurring network."""

import argparse
import os

from flatout.engine.log_lines import show_log
from flatout.errors import ConfigError
from flatout.spike.commands.arguments import add_config, add_device, parser

LOGGERS = ("tensorboard", "wandb", "mlflow", "none")
DESCRIPTION = """\
Train a deblurring network as a YAML says. Interrupted (Ctrl-C, SIGTERM) it saves, and the same command continues.
"""
EPILOG = """\
examples:
  flatout spike train --config data/spike/spike_mini.yaml
  flatout spike train --config my.yaml --set TRAIN.EPOCHS=3 --set MODEL.USE_SPIKE=false
  torchrun --nproc_per_node 3 -m flatout spike train --config my.yaml

Exit code: 0, 2 wrong config, 3 data, 4 checkpoint, 5 resources, 6 diverged, 75 interrupted and saved.
"""


def main(argv: list[str]) -> int:
    """Train; returns the exit code."""
    args = train_parser("flatout spike train").parse_args(argv)
    show_log()
    # Now, because help and mistakes are answered without torch.
    from flatout.engine.interrupts import StopSignals
    from flatout.engine.on_done import OnDone
    from flatout.engine.spending import Spending
    from flatout.engine.warnings_kept import KeepWarnings
    from flatout.spike.config import load_config
    from flatout.spike.train import TrainOptions, train

    options = TrainOptions(
        device=args.device,
        resume=args.resume,
        fresh=args.fresh,
        once=args.once,
        deterministic=args.deterministic,
        allow_data_change=args.allow_data_change,
        break_lock=args.break_lock,
        save_every_minutes=args.save_every_minutes,
        log_to=tuple(args.log_to),
        price=args.price,
        budget=args.budget,
        no_preflight=args.no_preflight,
        stop_after=_stop_after(os.environ.get("FLATOUT_STOP_AFTER")),
    )
    spending = Spending(options.price, options.budget)
    with StopSignals(), OnDone(args.on_done, spending) as done:
        train(load_config(args.config, args.set), options, [done, KeepWarnings()], spending=spending)
    return 0


def _stop_after(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"FLATOUT_STOP_AFTER={text!r} is no number of steps: use 1 or more.")
    return int(text)


def train_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of a training, for a command of that name."""
    made = parser("train", DESCRIPTION, EPILOG)
    made.prog = prog
    add_config(made)
    add_device(made)
    made.add_argument("--resume", metavar="PATH", help="continue this checkpoint or run folder")
    made.add_argument("--fresh", action="store_true", help="begin anew even if an unfinished run is there")
    made.add_argument("--once", action="store_true", help="exit with 0 if the run is complete, begin no other one")
    made.add_argument("--deterministic", action="store_true", help="the same bits every time, slower")
    made.add_argument("--allow-data-change", action="store_true", help="continue although the data has changed")
    made.add_argument("--break-lock", action="store_true", help="take a folder that another host had locked")
    made.add_argument("--save-every-minutes", type=float, default=10.0, metavar="M", help="default: %(default)s")
    made.add_argument("--log-to", nargs="+", default=(), choices=LOGGERS, help="where numbers go, besides the run")
    made.add_argument("--price", type=float, metavar="PER_HOUR", help="of this machine, in any currency")
    made.add_argument("--budget", default="", help="stop, saved, when this is spent: 5.00 (with --price) or 2h30m")
    made.add_argument("--on-done", default="", metavar="COMMAND", help="run it when all is over; see docs/costs.md")
    made.add_argument("--no-preflight", action="store_true", help="do not look at disk and GPU before training")
    return made
