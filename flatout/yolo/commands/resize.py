"""flatout yolo resize: a copy of a data set with smaller pictures."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.yolo import ResizedSet

DESCRIPTION = """\
Make a copy of a data set with smaller pictures. Training at 320 px on pictures of 640 px reads and decodes four times
the pixels that it uses, in every epoch; a copy is made once. The longer side of every picture becomes --size and the
shape stays; smaller pictures are copied as they are. Labels are relative to the picture, so they are copied unchanged.
Boxes and masks of COCO annotation files are scaled. The source is only read.
"""
EPILOG = """\
examples:
  flatout yolo resize coco.yaml --size 320 --out coco320           COCO at 320 px; coco/ is in this folder
  flatout yolo train --data coco320/coco320.yaml --img 320 ...     train on it
  flatout yolo resize bolts.yaml --size 640 --out /fast/bolts640 --quality 90
  flatout yolo resize bolts.yaml --size 256 --out bolts256 --stretch    squares; test and detect with --img 256 too

what is written into OUT:
  images and labels    under the names they have; PNG stays PNG, JPEG stays JPEG, upright where EXIF turns them
  annotations, lists   COCO files beside the pictures, scaled; .txt lists with the pictures of the copy
  the data YAML        named like the folder, last; it works from anywhere, also after the folder was moved
  resize.json          how the copy was made, and the pictures that could not be read

Stopped, by Ctrl-C or a full disk? The same command does what is missing. So it does after pictures or labels were added
or changed. Other settings need another folder.

Exit code: 0; 2 wrong arguments or a folder with other files; 3 more than 1 % of the pictures cannot be read (up to that
they are named and left out, as training would do); 5 no room; 75 interrupted.
"""


def main(argv: list[str]) -> int:
    """Resize a data set; returns the exit code."""
    args = _parser().parse_args(argv)
    from flatout.cli import show_log

    # Now, because help and mistakes are answered without NumPy.
    from flatout.yolo import resize

    show_log()
    done = resize(
        args.data,
        args.out,
        size=args.size,
        stretch=args.stretch,
        enlarge=args.enlarge,
        quality=args.quality,
        workers=args.workers,
        progress=True,
    )
    print(as_text(done))
    return 0


def as_text(done: "ResizedSet") -> str:
    """One line: where it is, and what was done."""
    parts = [f"{done.num_resized} resized", f"{done.num_copied} copied", f"{done.num_kept} there already"]
    left_out = f", {len(done.skipped)} left out" if done.skipped else ""
    written = f", {done.num_bytes / 1e6:.1f} MB written" if done.num_bytes else ""
    return f"{done.data}: {done.num_images} pictures ({', '.join(parts)}{left_out}){written}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout yolo resize",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("data", metavar="DATA.yaml", help="data YAML, or a COCO .json file")
    parser.add_argument("--size", type=int, required=True, metavar="PX", help="longer side of the pictures")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder, or one to go on with")
    parser.add_argument("--stretch", action="store_true", help="squares of exactly PX x PX, shapes not kept")
    parser.add_argument("--enlarge", action="store_true", help="enlarge smaller pictures too")
    parser.add_argument(
        "--quality", type=int, default=95, metavar="Q", help="of JPEG and lossy WebP, 1 to 100 (default: %(default)s)"
    )
    parser.add_argument("--workers", default="cpu*1.0", help="processes at work (default: %(default)s)")
    return parser
