"""`flatout yolo export` and export.py: export a network to ONNX and TorchScript."""

import sys
from pathlib import PurePath

from flatout.cli import show_log
from flatout.yolo.commands.flags import export_options, export_parser


def main(argv: list[str]) -> int:
    """Export a network; returns the exit code."""
    parser = export_parser("export.py" if PurePath(sys.argv[0]).name == "export.py" else "flatout yolo export")
    options = export_options(parser.parse_args(argv))
    show_log()
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.yolo.export.files import export

    print(export(options.weights, options).text())
    return 0
