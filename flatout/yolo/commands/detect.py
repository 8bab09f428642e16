"""`flatout yolo detect` and detect.py: detect objects in images, videos and streams."""

import os
import sys
from pathlib import PurePath

from flatout.cli import show_log
from flatout.errors import CTRL_C_CODE
from flatout.yolo.commands.flags import detect_options, detect_parser


def main(argv: list[str]) -> int:
    """Detect objects; returns the exit code."""
    parser = detect_parser("detect.py" if PurePath(sys.argv[0]).name == "detect.py" else "flatout yolo detect")
    options = detect_options(parser.parse_args(argv))
    show_log()
    # Set before torch is imported, which reads it: waiting threads sleep instead of spinning, and leave the cores to
    # threads that read and plot. On a busy machine with two cores an image then takes 0.2 s instead of 5 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Keeps messages of OpenCV and FFmpeg about damaged videos and missing cameras out of the output.
    os.environ.setdefault("OPENCV_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.yolo.predict.detect import detect

    result = detect(options)
    print(result)
    return CTRL_C_CODE if result.interrupted else 0
