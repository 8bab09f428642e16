"""flatout spike demo-data: simulate a small data set to try things on."""

import argparse
from pathlib import Path

from flatout.spike.commands.arguments import make_parser

DESCRIPTION = """\
Simulate a small data set: moving shapes, filmed by a slow camera and by a spike camera. Also writes demo.yaml, with
which to train on it.
"""
EPILOG = """\
examples:
  flatout spike demo-data demo-spike
  flatout spike check --config demo-spike/demo.yaml
  flatout spike train --config demo-spike/demo.yaml

Exit code: 0, 2 wrong arguments or a folder with other files.
"""


def main(argv: list[str]) -> int:
    """Simulate a data set; returns the exit code."""
    args = _parser().parse_args(argv)
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.spike.demo_data import DemoConfig, write_demo_data

    config = DemoConfig(
        train=args.train, test=args.test, frames=args.frames, width=args.width, height=args.height, seed=args.seed
    )
    path = write_demo_data(args.folder, config)
    print(f"{path}: {config.train} sequences for training, {config.test} for testing, {config.frames} frames each")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("demo-data", DESCRIPTION, EPILOG)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("demo-spike"), help="folder to write to (default: %(default)s)"
    )
    for name, default, help_text in (
        ("train", 6, "training sequences"),
        ("test", 2, "test sequences"),
        ("frames", 10, "frames per sequence"),
        ("width", 128, "width of frames in pixels, a multiple of 16"),
        ("height", 96, "height of frames in pixels, an even number"),
        ("seed", 0, "seed of the simulation"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{help_text} (default: %(default)s)"
        )
    return parser
