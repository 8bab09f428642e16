"""flatout defect check: check every file of a data set before training."""

from flatout.cli import parser_of, switch, value
from flatout.errors import DataError

DESCRIPTION = """\
Check every image and mask of a data set for problems that would spoil a training: unreadable files, differing sizes,
values that are not finite, planes without content, references that are not aligned with target, missing masks. No file
is changed.
"""
EPILOG = """\
examples:
  flatout defect check R/train/good
  flatout defect check R --img_format png_jpg --all
  flatout defect check boards             pairs: boards/temp and boards/test, or a CSV file

Exit code: 0 without errors (warnings are allowed), 3 with at least one error.
"""
FLAGS = (
    value("data", "folder of the training images, R/train/good, the root R of a data set, or pairs (docs/defect.md)"),
    value(
        "--img_format", "file format of the images (default: %(default)s)", default="tiff", choices=("tiff", "png_jpg")
    ),
    value(
        "--patch_size",
        "side of the patches that will be trained on; images must not be smaller (default: %(default)s)",
        type=int,
        default=128,
        metavar="PX",
    ),
    switch("--all", "list every finding, not only the first five of each kind"),
)


def main(argv: list[str]) -> int:
    """Check a data set; returns the exit code."""
    args = parser_of("flatout defect check", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.defect.check import check_data_set

    report = check_data_set(args.data, args.img_format, patch=args.patch_size)
    print("\n".join(report.lines(most=10**9 if args.all else 5)))
    return DataError.exit_code if report.is_bad else 0
