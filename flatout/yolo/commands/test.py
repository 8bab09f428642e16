"""`flatout yolo test` and test.py: evaluate weights."""

import sys
from pathlib import PurePath

from flatout.cli import show_log
from flatout.yolo.commands.flags import test_options, test_parser


def main(argv: list[str]) -> int:
    """Evaluate weights; returns the exit code."""
    parser = test_parser("test.py" if PurePath(sys.argv[0]).name == "test.py" else "flatout yolo test")
    options = test_options(parser.parse_args(argv))
    show_log()
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.yolo.evaluate import test

    print(test(options))
    return 0
