"""flatout yolo detect and detect.py: find objects in pictures, videos and streams."""

import os
import sys
from pathlib import PurePath

from flatout.cli import show_log
from flatout.yolo.commands.flags import detect_options, detect_parser

INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Detect; returns the exit code."""
    parser = detect_parser("detect.py" if PurePath(sys.argv[0]).name == "detect.py" else "flatout yolo detect")
    options = detect_options(parser.parse_args(argv))
    show_log()
    # Before torch is loaded, which reads it then: threads that wait for each other sleep instead of spinning, and leave
    # the cores to those that read and draw. On a busy machine of two cores a picture took 0.2 s this way, not 5.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # OpenCV and FFmpeg complain about damaged videos and missing cameras in words of their own, in the middle of ours.
    os.environ.setdefault("OPENCV_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    # Now, because help and mistakes are answered without torch.
    from flatout.yolo.predict.detect import detect

    result = detect(options)
    print(result)
    return INTERRUPTED if result.interrupted else 0
