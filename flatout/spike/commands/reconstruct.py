"""flatout spike reconstruct: images from spikes alone."""

import argparse
from pathlib import Path

from flatout.cli import show_log
from flatout.spike.commands.arguments import add_range, add_stream, make_parser, stream_settings, view_settings

DESCRIPTION = """\
Reconstruct images from spikes alone, without a network: one image of the middle of every stream, images every N spike
frames, or videos.
"""
EPILOG = """\
examples:
  flatout spike reconstruct scene/spike out                             out/NAME.png for every stream
  flatout spike reconstruct camera.dat out --geometry 400x250 --method tfi --every 10    out/camera/000000.png ...
  flatout spike reconstruct camera.dat out --method tfp --window 32 --video              out/camera.mp4

Exit code: 0, 2 wrong arguments, 3 unusable streams, 5 a codec or package is missing.
"""


def main(argv: list[str]) -> int:
    """Reconstruct; returns the exit code."""
    args = _parser().parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.spike.view import reconstruct

    video = f".{args.video}" if args.video else ""
    done = reconstruct(args.source, args.output, view_settings(args), video=video, **stream_settings(args))
    print(f"{done.images} images in {done.path}, gain {done.gain:.2f}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("reconstruct", DESCRIPTION, EPILOG)
    parser.add_argument("source", type=Path, metavar="FILE|FOLDER", help="a spike stream, or a folder of streams")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write to")
    parser.add_argument(
        "--method", dest="show", choices=("tfp", "tfi"), default="tfp",
        help="texture from playback or from intervals (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--video", nargs="?", const="mp4", choices=("mp4", "avi", "gif"),
        help="write a video of each stream instead of images: mp4, avi or gif (without a value: mp4)",
    )  # fmt: skip
    add_range(parser)
    add_stream(parser)
    return parser
