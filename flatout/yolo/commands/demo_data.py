"""`flatout yolo demo-data`: generate a small detection data set to experiment with."""

import re
from argparse import ArgumentTypeError
from pathlib import Path

from flatout.cli import parser_of, value

DESCRIPTION = """\
Generate a detection data set: rings, crosses, stars, triangles, balls and boxes of 16 to 160 pixels on cluttered
backgrounds, with labels and a data YAML. The same seed gives the same images; those for validation use different random
numbers. An existing demo data set is kept, and a folder with other files is never touched.
"""
EPILOG = """\
examples:
  flatout yolo demo-data                                      480 + 120 images of 320 x 240 px in demo-data/
  flatout yolo demo-data /data/shapes --images 5000 --size 640x480
  flatout yolo check demo-data/demo.yaml --preview sheet.png  plot some of the images

Exit codes: 0 done, 2 wrong arguments or a folder with other files, 5 not enough disk space.
"""


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise ArgumentTypeError(f"{text!r} is not a size: write WIDTHxHEIGHT, such as 320x240")
    return int(found[1]), int(found[2])


FLAGS = (
    value("folder", "folder to write to (default: %(default)s)", nargs="?", type=Path, default=Path("demo-data")),
    value("--images", "number of training images (default: %(default)s)", type=int, default=480, metavar="N"),
    value("--val", "number of validation images (default: %(default)s)", type=int, default=120, metavar="N"),
    value("--seed", "random seed (default: %(default)s)", type=int, default=0, metavar="S"),
    value(
        "--size",
        "width and height of the images in pixels (default: 320x240)",
        type=_size,
        default=(320, 240),
        metavar="WxH",
    ),
)


def main(argv: list[str]) -> int:
    """Generate a data set; returns the exit code."""
    args = parser_of("flatout yolo demo-data", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    # Imported late, so that help and usage errors do not wait for NumPy.
    from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data

    width, height = args.size
    config = DemoDataConfig(images=args.images, val=args.val, seed=args.seed, width=width, height=height)
    yaml = write_demo_data(args.folder, config, show_progress=True)
    print(f"{yaml}: {config.images} images for training, {config.val} for validation")
    return 0
