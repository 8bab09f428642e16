"""`python test.py ...`: YOLOv7's command line, run by flatout."""

import sys

from flatout.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["yolo", "test", *sys.argv[1:]]))
