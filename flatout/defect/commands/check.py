"""flatout defect check: look at every file of a data set and say what would spoil a training."""

import argparse

DESCRIPTION = """\
Look at every image and mask of a data set and say what would spoil a training: files that cannot be read, other sizes,
values that are no numbers, planes without content, references that do not lie on target, masks that are missing.
Nothing is changed.
"""
EPILOG = """\
examples:
  flatout defect check R/train/good
  flatout defect check R --img_format png_jpg --all

Exit code: 0 (also with warnings), 3 as soon as there is an error.
"""


def main(argv: list[str]) -> int:
    """Check a data set; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="flatout defect check",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("data", help="R/train/good, or the root R")
    parser.add_argument("--img_format", default="tiff", choices=("tiff", "png_jpg"))
    parser.add_argument("--patch_size", type=int, default=128, metavar="PX", help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="show every place, not only the first of each kind")
    args = parser.parse_args(argv)
    # Now, because help and mistakes are answered without NumPy.
    from flatout.defect.check import check_data_set, refuse_bad

    report = check_data_set(args.data, args.img_format, patch=args.patch_size)
    print("\n".join(report.lines(most=10**9 if args.all else 5)))
    return refuse_bad(report)
