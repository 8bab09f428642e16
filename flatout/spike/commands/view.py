"""flatout spike view: show a spike stream as a sheet of images or as a video."""

from pathlib import Path

from flatout.cli import parser_of, show_log, value
from flatout.errors import counted
from flatout.spike.commands.arguments import RANGE, STREAM, stream_settings, view_settings, writing_to

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

Exit code: 0, 2 wrong arguments, 3 a stream that does not fit its geometry, 5 a codec or package is
missing, or the output cannot be written.
"""
FLAGS = (
    value("file", "spike stream: .dat, .npz, .npy or .h5", type=Path, metavar="FILE"),
    value(
        "--as",
        "what to show (default: %(default)s)",
        default="tfp",
        dest="show",
        choices=("tfp", "tfi", "raw", "voxel"),
    ),
    value(
        "--out",
        "file to write: .png or .jpg is a sheet; .mp4, .avi or .gif a video (default: NAME_AS.png, here)",
        type=Path,
        metavar="FILE",
    ),
    *RANGE,
    value("--bins", "parts of the range for --as voxel (default: %(default)s)", type=int, default=8, metavar="N"),
    *STREAM,
)


def main(argv: list[str]) -> int:
    """Show a stream; returns the exit code."""
    args = parser_of("flatout spike view", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.spike.data.stream_files import open_stream
    from flatout.spike.view import view_stream

    stream = open_stream(args.file, **stream_settings(args))
    print(stream)
    out = args.out or Path(f"{args.file.stem}_{args.show}.png")
    with writing_to(out):
        done = view_stream(stream, out, view_settings(args))
    print(f"{done.path}: {counted(done.images, 'image')}, gain {done.gain:.2f}")
    return 0
