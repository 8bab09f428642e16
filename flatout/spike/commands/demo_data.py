"""flatout spike demo-data: simulate a small data set."""

import argparse
from pathlib import Path

from flatout.spike.commands.arguments import parser

DESCRIPTION = """\
Simulate a small data set: shapes that move, filmed by a slow camera and by a spike camera; with a YAML to train on it.
"""
EPILOG = """\
examples:
  flatout spike demo-data demo-spike
  flatout spike check --config demo-spike/demo.yaml
  flatout spike train --config demo-spike/demo.yaml

Exit code: 0, 2 wrong arguments or a folder with other files.
"""


def main(argv: list[str]) -> int:
    """Simulate; returns the exit code."""
    args = _parser().parse_args(argv)
    # Now, because help and mistakes are answered without NumPy.
    from flatout.spike.demo_data import DemoConfig, write_demo_data

    config = DemoConfig(
        train=args.train, test=args.test, frames=args.frames, width=args.width, height=args.height, seed=args.seed
    )
    path = write_demo_data(args.folder, config)
    print(f"{path}: {config.train} sequences for training, {config.test} for testing, {config.frames} frames each")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = parser("demo-data", DESCRIPTION, EPILOG)
    made.add_argument("folder", nargs="?", type=Path, default=Path("demo-spike"), help="default: %(default)s")
    for name, default in (("train", 6), ("test", 2), ("frames", 10), ("width", 128), ("height", 96), ("seed", 0)):
        made.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    return made
