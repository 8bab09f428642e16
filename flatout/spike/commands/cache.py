"""flatout spike cache: write voxels as files."""

from pathlib import Path

from flatout.cli import parser_of, show_log, value
from flatout.spike.commands.arguments import CONFIG, writing_to

DESCRIPTION = """\
Write the voxels of every frame to the folder VOXEL_CACHE_DIRNAME of its sequence: uint8 counts at spike resolution,
1.15 MB per GoPro frame with 5 bins. Training does not need them, because computing voxels from the streams takes only
0.3 ms per frame; they are meant for other programs, or for a machine with a fast disk.
"""
EPILOG = """\
To train on them, set USE_PRECOMPUTED_VOXELS: true.
Exit code: 0, 2 wrong config, 3 unusable data, 5 the voxels cannot be written.
"""
FLAGS = (
    *CONFIG,
    value("--splits", "splits to write (default: TRAIN_SPLIT and the validation split)", nargs="+", metavar="SPLIT"),
)


def main(argv: list[str]) -> int:
    """Write voxels; returns the exit code."""
    args = parser_of("flatout spike cache", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.spike.config import load_config
    from flatout.spike.data.clip_set import validation_split
    from flatout.spike.data.precompute import write_voxels

    data = load_config(args.config, args.set).DATA
    for split in args.splits or filter(None, (data.TRAIN_SPLIT, validation_split(data))):
        with writing_to(Path(data.ROOT)):
            paths = list(write_voxels(data, split))
        size = sum(path.stat().st_size for path in paths)
        print(f"{split}: {len(paths)} voxels, {size / 1e6:.1f} MB")
    return 0
