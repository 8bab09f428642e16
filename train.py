"""`python train.py ...`: YOLOv7's command line, run by flatout."""

import sys
from pathlib import PurePath

from flatout.__main__ import main

if __name__ == "__main__":
    if PurePath(globals().get("__file__", "")).name != "train.py":
        # Some programs execute the text of this file up to the parser and then use `opt` themselves (docs/migrate.md).
        from flatout.yolo.commands.flags import train_parser

        parser = train_parser("train.py")
        opt = parser.parse_args()
    sys.exit(main(["yolo", "train", *sys.argv[1:]]))
