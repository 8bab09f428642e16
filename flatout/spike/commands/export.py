"""flatout spike export: export a network for whole frames as an ONNX file."""

import argparse
from pathlib import Path

from flatout.cli import parser_of, show_log, switch, value

DESCRIPTION = """\
Write a deblurring network as an ONNX file for whole frames of one size: blurry frames and spikes in, sharp frames out.
If ONNX Runtime is installed, the file is compared with the network before it is written.
"""
EPILOG = """\
example:
  flatout spike export --weights runs/spike/exp/ckpts/best.pt --size 720 1280 --output deblur.onnx

Exit code: 0, 2 wrong arguments or a missing package, 4 unusable weights, 8 the exported model differs from the network.
"""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


FLAGS = (
    value("--weights", "weights: best.pt or last.pt of a training", type=Path, required=True, metavar="FILE"),
    value("--size", "height and width of the frames", type=_positive, nargs=2, required=True, metavar=("H", "W")),
    value(
        "--length",
        "frames of a clip (default: 1; with MODEL.TEMPORAL the CLIP_LEN of the training)",
        type=_positive,
        metavar="N",
    ),
    value("--output", "file to write (default: beside the weights, as .onnx)", type=Path, metavar="FILE.onnx"),
    switch(
        "--openvino",
        "also write an OpenVINO model, in a folder beside the ONNX file, after a comparison with the network",
    ),
)


def main(argv: list[str]) -> int:
    """Export; returns the exit code."""
    args = parser_of("flatout spike export", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load torch.
    from flatout.spike.export import export_file

    print(export_file(args.weights, tuple(args.size), length=args.length, output=args.output, openvino=args.openvino))
    return 0
