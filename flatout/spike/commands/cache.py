"""flatout spike cache: voxels as files."""

import argparse

from flatout.cli import show_log
from flatout.spike.commands.arguments import add_config, parser

DESCRIPTION = """\
Write the voxels of every frame into VOXEL_CACHE_DIRNAME of its sequence: uint8 counts at spike resolution, 1.15 MB per
GoPro frame at 5 bins. Only for other programs, or a disk that is faster than it is large: made live they cost 0.3 ms.
"""
EPILOG = """\
Then train with USE_PRECOMPUTED_VOXELS: true. Exit code: 0, 2 wrong config, 3 data.
"""


def main(argv: list[str]) -> int:
    """Write voxels; returns the exit code."""
    args = _parser().parse_args(argv)
    show_log()
    # Now, because help and mistakes are answered without NumPy.
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
    made = parser("cache", DESCRIPTION, EPILOG)
    add_config(made)
    made.add_argument("--splits", nargs="+", metavar="SPLIT", help="default: those of the config")
    return made
