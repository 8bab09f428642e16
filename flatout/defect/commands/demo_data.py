"""flatout defect demo-data: generate a small data set to try things on."""

import argparse
from pathlib import Path

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


def main(argv: list[str]) -> int:
    """Generate a data set; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="flatout defect demo-data",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("defect-demo"), help="folder to write to (default: %(default)s)"
    )
    parser.add_argument(
        "--images", type=int, default=24, metavar="N", help="strips for training (default: %(default)s)"
    )
    parser.add_argument(
        "--valid", type=int, default=4, metavar="N",
        help="good strips for validation, and as many defective ones (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--test", type=int, default=4, metavar="N",
        help="good strips for testing, and as many defective ones (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.defect.demo_data import DemoDataConfig, write_demo_data

    config = DemoDataConfig(images=args.images, valid=args.valid, test=args.test)
    folder = write_demo_data(args.folder, config)
    print(f"{folder}: {config.images} strips. Train with: flatout defect train --training_dataset_path {args.folder}")
    return 0
