"""python train.py ... : the YOLOv7 command line, answered by flatout."""

import sys
from pathlib import PurePath

from flatout.__main__ import main

if __name__ == "__main__":
    if PurePath(globals().get("__file__", "")).name != "train.py":
        # Another program runs the text of this file until there is a parser, and goes on by itself (docs/migrate.md).
        from flatout.yolo.commands.flags import train_parser

        parser = train_parser("train.py")
        opt = parser.parse_args()
    sys.exit(main(["yolo", "train", *sys.argv[1:]]))
