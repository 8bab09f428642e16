"""flatout spike reconstruct: images from spikes alone."""

from pathlib import Path

from flatout.cli import parser_of, show_log, value
from flatout.errors import counted
from flatout.spike.commands.arguments import RANGE, STREAM, stream_settings, view_settings, writing_to

DESCRIPTION = """\
Reconstruct images from spikes alone, without a network: one image of the middle of every stream, images every N spike
frames, or videos.
"""
EPILOG = """\
examples:
  flatout spike reconstruct scene/spike out                             out/NAME.png for every stream
  flatout spike reconstruct camera.dat out --geometry 400x250 --method tfi --every 10    out/camera/000000.png ...
  flatout spike reconstruct camera.dat out --method tfp --window 32 --video              out/camera.mp4

Exit code: 0, 2 wrong arguments, 3 unusable streams, 5 a codec or package is missing, or the output
cannot be written.
"""
FLAGS = (
    value("source", "a spike stream, or a folder of streams", type=Path, metavar="FILE|FOLDER"),
    value("output", "folder to write to", type=Path, metavar="OUT"),
    value(
        "--method",
        "texture from playback or from intervals (default: %(default)s)",
        default="tfp",
        dest="show",
        choices=("tfp", "tfi"),
    ),
    value(
        "--video",
        "write a video of each stream instead of images: mp4, avi or gif (without a value: mp4)",
        nargs="?",
        choices=("mp4", "avi", "gif"),
        const="mp4",
    ),
    *RANGE,
    *STREAM,
)


def main(argv: list[str]) -> int:
    """Reconstruct; returns the exit code."""
    args = parser_of("flatout spike reconstruct", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.spike.view import reconstruct

    video = f".{args.video}" if args.video else ""
    with writing_to(args.output):
        done = reconstruct(args.source, args.output, view_settings(args), video=video, **stream_settings(args))
    print(f"{counted(done.images, 'image')} in {done.path}, gain {done.gain:.2f}")
    return 0
