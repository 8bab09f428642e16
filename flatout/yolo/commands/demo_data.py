"""flatout yolo demo-data: draw a small detection data set to try things on."""

import argparse
import re
from pathlib import Path

DESCRIPTION = """\
Draw a detection data set: rings, crosses, stars, triangles, balls and boxes of 16 to 160 pixels before cluttered
grounds, with labels and a data YAML. The same seed draws the same pictures; those for validation come from other random
numbers. A set that is there already is kept, files that are not of a demo set are left alone.
"""
EPILOG = """\
examples:
  flatout yolo demo-data                                    480 + 120 pictures of 320 x 240 into demo-data/
  flatout yolo demo-data /data/shapes --images 5000 --size 640x480
  flatout yolo check demo-data/demo.yaml --preview sheet.png    look at it

Exit code: 0, 2 wrong arguments or a folder with other files, 5 no room.
"""


def main(argv: list[str]) -> int:
    """Draw a data set; returns the exit code."""
    args = _parser().parse_args(argv)
    # Now, because help and mistakes are answered without NumPy.
    from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data

    width, height = args.size
    config = DemoDataConfig(images=args.images, val=args.val, seed=args.seed, width=width, height=height)
    yaml = write_demo_data(args.folder, config, show_progress=True)
    print(f"{yaml}: {config.images} pictures for training, {config.val} for validation")
    return 0


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write WIDTHxHEIGHT, as in 320x240")
    return int(found[1]), int(found[2])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout yolo demo-data",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("demo-data"), help="default: %(default)s")
    parser.add_argument("--images", type=int, default=480, metavar="N", help="for training (default: %(default)s)")
    parser.add_argument("--val", type=int, default=120, metavar="N", help="for validation (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    parser.add_argument("--size", type=_size, default=(320, 240), metavar="WxH", help="in pixels (default: 320x240)")
    return parser
