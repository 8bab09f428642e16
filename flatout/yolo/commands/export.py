"""flatout yolo export and export.py: a network as a file for other programs."""

import sys
from pathlib import PurePath

from flatout.cli import show_log
from flatout.yolo.commands.flags import export_options, export_parser


def main(argv: list[str]) -> int:
    """Export; returns the exit code."""
    parser = export_parser("export.py" if PurePath(sys.argv[0]).name == "export.py" else "flatout yolo export")
    options = export_options(parser.parse_args(argv))
    show_log()
    # Now, because help and mistakes are answered without torch.
    from flatout.yolo.export.files import export

    print(export(options.weights, options).text())
    return 0
