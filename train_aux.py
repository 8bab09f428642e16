"""`python train_aux.py ...`: YOLOv7's command line, run by flatout."""

import sys

from flatout.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["yolo", "train", *sys.argv[1:]]))
