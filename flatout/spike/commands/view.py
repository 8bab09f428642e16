"""flatout spike view: show a spike stream as a sheet of images or as a video."""

import argparse
from pathlib import Path

from flatout.cli import show_log
from flatout.spike.commands.arguments import add_range, add_stream, make_parser, stream_settings, view_settings

DESCRIPTION = """\
Show a spike stream: as a sheet of images, or as a video. Streams are .dat files, and arrays of spikes
[frames, height, width] in .npz, .npy and .h5 files.
"""
EPILOG = """\
examples:
  flatout spike view 000001.dat                                           a sheet of short exposures
  flatout spike view 000001.dat --as tfi --from 100 --to 200 --out a.mp4  a video of a part
  flatout spike view camera.dat --geometry 400x250 --as raw --out a.gif   single spikes

  tfp    share of the spike frames of a window in which a pixel fired (texture from playback)
  tfi    1 / distance between the spikes before and after a moment (texture from intervals)
  raw    single spike frames
  voxel  what a network gets: the range divided into --bins parts

Exit code: 0, 2 wrong arguments, 3 a stream that does not fit its geometry, 5 a codec or package is missing.
"""


def main(argv: list[str]) -> int:
    """Show a stream; returns the exit code."""
    args = _parser().parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.spike.data.stream_files import open_stream
    from flatout.spike.view import view_stream

    stream = open_stream(args.file, **stream_settings(args))
    print(stream)
    done = view_stream(stream, args.out or Path(f"{args.file.stem}_{args.show}.png"), view_settings(args))
    print(f"{done.path}: {done.images} images, gain {done.gain:.2f}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("view", DESCRIPTION, EPILOG)
    parser.add_argument("file", type=Path, metavar="FILE", help="spike stream: .dat, .npz, .npy or .h5")
    parser.add_argument(
        "--as", dest="show", choices=("tfp", "tfi", "raw", "voxel"), default="tfp",
        help="what to show (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="file to write: .png or .jpg is a sheet; .mp4, .avi or .gif a video (default: NAME_AS.png, here)",
    )  # fmt: skip
    add_range(parser)
    parser.add_argument(
        "--bins", type=int, default=8, metavar="N", help="parts of the range for --as voxel (default: %(default)s)"
    )
    add_stream(parser)
    return parser
