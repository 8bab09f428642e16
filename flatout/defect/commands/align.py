"""flatout defect align: align a reference to an image and show the shifts that were found."""

import argparse
from pathlib import Path

DESCRIPTION = """\
Align image B to image A, block by block and to a fraction of a pixel. Writes B as it fits A, and a plot: both images,
the shifts as arrows, their confidence, and the difference before and after.
"""
EPILOG = """\
example:
  flatout defect align board.png template.png --out aligned

Exit code: 0, 2 wrong arguments, 3 unreadable images or images of different sizes, 5 the files cannot be written.
"""


def main(argv: list[str]) -> int:
    """Align; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="flatout defect align",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="A", type=Path, help="image to align to, such as the inspected one")
    parser.add_argument("reference", metavar="B", type=Path, help="image that is moved, such as its template")
    parser.add_argument(
        "--out", type=Path, default=Path("aligned"), metavar="FOLDER", help="folder to write to (default: %(default)s)"
    )
    parser.add_argument(
        "--align_px", type=int, default=12, metavar="PX",
        help="largest shift that is looked for, in pixels (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.defect.compare.align import AlignConfig
    from flatout.defect.compare.align_files import align_files

    found = align_files(args.target, args.reference, args.out, AlignConfig(reach_px=args.align_px))
    print("\n".join(found.lines()))
    return 0
