"""flatout spike cache: write voxels as files."""

import argparse

from flatout.cli import show_log
from flatout.spike.commands.arguments import add_config, make_parser

DESCRIPTION = """\
Write the voxels of every frame to the folder VOXEL_CACHE_DIRNAME of its sequence: uint8 counts at spike resolution,
1.15 MB per GoPro frame with 5 bins. Training does not need them, because computing voxels from the streams takes only
0.3 ms per frame; they are meant for other programs, or for a machine with a fast disk.
"""
EPILOG = """\
To train on them, set USE_PRECOMPUTED_VOXELS: true.
Exit code: 0, 2 wrong config, 3 unusable data.
"""


def main(argv: list[str]) -> int:
    """Write voxels; returns the exit code."""
    args = _parser().parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.spike.config import load_config
    from flatout.spike.data.clip_set import validation_split
    from flatout.spike.data.precompute import write_voxels

    data = load_config(args.config, args.set).DATA
    for split in args.splits or filter(None, (data.TRAIN_SPLIT, validation_split(data))):
        paths = list(write_voxels(data, split))
        size = sum(path.stat().st_size for path in paths)
        print(f"{split}: {len(paths)} voxels, {size / 1e6:.1f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("cache", DESCRIPTION, EPILOG)
    add_config(parser)
    parser.add_argument(
        "--splits", nargs="+", metavar="SPLIT", help="splits to write (default: TRAIN_SPLIT and the validation split)"
    )
    return parser
