"""flatout defect demo-data: draw a small data set to try things on."""

import argparse
from pathlib import Path

DESCRIPTION = """\
Draw strips with a sine texture, seen three times with noise: defect-free ones for training, good and defective ones
with masks for validation and test. The same command draws the same strips; a set that is there already is kept.
"""
EPILOG = """\
examples:
  flatout defect demo-data                          24 strips of 976 x 176 for training, into defect-demo/
  flatout defect demo-data /data/strips --images 518

Exit code: 0, 2 wrong arguments or a folder with other files, 5 no room.
"""


def main(argv: list[str]) -> int:
    """Draw a data set; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="flatout defect demo-data",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("defect-demo"), help="default: %(default)s")
    parser.add_argument("--images", type=int, default=24, metavar="N", help="for training (default: %(default)s)")
    parser.add_argument("--valid", type=int, default=4, metavar="N", help="of each kind (default: %(default)s)")
    parser.add_argument("--test", type=int, default=4, metavar="N", help="of each kind (default: %(default)s)")
    args = parser.parse_args(argv)
    # Now, because help and mistakes are answered without NumPy.
    from flatout.defect.demo_data import DemoDataConfig, write_demo_data

    config = DemoDataConfig(images=args.images, valid=args.valid, test=args.test)
    folder = write_demo_data(args.folder, config)
    print(f"{folder}: {config.images} strips. Train with: flatout defect train --training_dataset_path {args.folder}")
    return 0
