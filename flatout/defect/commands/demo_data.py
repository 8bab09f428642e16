"""flatout defect demo-data: generate a small data set to try things on."""

from pathlib import Path

from flatout.cli import parser_of, value

DESCRIPTION = """\
Generate strips with a sine texture, each as three noisy planes: defect-free strips for training, good and defective
ones with masks for validation and test. The same command generates the same strips; an existing set is kept.
"""
EPILOG = """\
examples:
  flatout defect demo-data                          24 strips of 976 x 176 for training, into defect-demo/
  flatout defect demo-data /data/strips --images 518

Exit code: 0, 2 wrong arguments or a folder with other files, 5 the disk is full.
"""
FLAGS = (
    value("folder", "folder to write to (default: %(default)s)", type=Path, nargs="?", default=Path("defect-demo")),
    value("--images", "strips for training (default: %(default)s)", type=int, default=24, metavar="N"),
    value(
        "--valid",
        "good strips for validation, and as many defective ones (default: %(default)s)",
        type=int,
        default=4,
        metavar="N",
    ),
    value(
        "--test",
        "good strips for testing, and as many defective ones (default: %(default)s)",
        type=int,
        default=4,
        metavar="N",
    ),
)


def main(argv: list[str]) -> int:
    """Generate a data set; returns the exit code."""
    args = parser_of("flatout defect demo-data", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.defect.demo_data import DemoDataConfig, write_demo_data

    config = DemoDataConfig(images=args.images, valid=args.valid, test=args.test)
    folder = write_demo_data(args.folder, config)
    print(f"{folder}: {config.images} strips. Train with: flatout defect train --training_dataset_path {args.folder}")
    return 0
