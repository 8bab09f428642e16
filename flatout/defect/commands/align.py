"""flatout defect align: align a reference to an image and show the shifts that were found."""

from pathlib import Path

from flatout.cli import parser_of, value

DESCRIPTION = """\
Align image B to image A, block by block and to a fraction of a pixel. Writes B as it fits A, and a plot: both images,
the shifts as arrows, their confidence, and the difference before and after.
"""
EPILOG = """\
example:
  flatout defect align board.png template.png --out aligned

Exit code: 0, 2 wrong arguments, 3 unreadable images or images of different sizes, 5 the files cannot be written.
"""
FLAGS = (
    value("target", "image to align to, such as the inspected one", type=Path, metavar="A"),
    value("reference", "image that is moved, such as its template", type=Path, metavar="B"),
    value("--out", "folder to write to (default: %(default)s)", type=Path, default=Path("aligned"), metavar="FOLDER"),
    value(
        "--align_px",
        "largest shift that is looked for, in pixels (default: %(default)s)",
        type=int,
        default=12,
        metavar="PX",
    ),
)


def main(argv: list[str]) -> int:
    """Align; returns the exit code."""
    args = parser_of("flatout defect align", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.defect.compare.align import AlignConfig
    from flatout.defect.compare.align_files import align_files

    found = align_files(args.target, args.reference, args.out, AlignConfig(reach_px=args.align_px))
    print("\n".join(found.lines()))
    return 0
