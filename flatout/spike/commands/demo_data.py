"""flatout spike demo-data: simulate a small data set to try things on."""

from pathlib import Path

from flatout.cli import parser_of, value

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
FLAGS = (
    value("folder", "folder to write to (default: %(default)s)", type=Path, nargs="?", default=Path("demo-spike")),
    value("--train", "training sequences (default: %(default)s)", type=int, default=6, metavar="N"),
    value("--test", "test sequences (default: %(default)s)", type=int, default=2, metavar="N"),
    value("--frames", "frames per sequence (default: %(default)s)", type=int, default=10, metavar="N"),
    value(
        "--width",
        "width of frames in pixels, a multiple of 16 (default: %(default)s)",
        type=int,
        default=128,
        metavar="N",
    ),
    value(
        "--height",
        "height of frames in pixels, an even number (default: %(default)s)",
        type=int,
        default=96,
        metavar="N",
    ),
    value("--seed", "seed of the simulation (default: %(default)s)", type=int, default=0, metavar="N"),
)


def main(argv: list[str]) -> int:
    """Simulate a data set; returns the exit code."""
    args = parser_of("flatout spike demo-data", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.spike.demo_data import DemoConfig, write_demo_data

    config = DemoConfig(**{key: value for key, value in vars(args).items() if key != "folder"})
    path = write_demo_data(args.folder, config)
    print(f"{path}: {config.train} sequences for training, {config.test} for testing, {config.frames} frames each")
    return 0
