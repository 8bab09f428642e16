"""flatout defect export: export a network for whole images as an ONNX file."""

from pathlib import Path

from flatout.cli import parser_of, switch, value

DESCRIPTION = """\
Write a network as an ONNX file that takes whole images of one size, with values in 0..255, and returns probabilities:
cropping of patches and stitching are part of the model. If ONNX Runtime is installed, the file is compared with the
network before it is written.
"""
EPILOG = """\
example:
  flatout defect export --model_path runs/defect/exp/weights/best.pt --size 976 176 --output strip.onnx

Exit code: 0, 2 wrong arguments or a missing package, 3 unreadable images, 4 unreadable weights, 8 the exported model
differs from the network.
"""
FLAGS = (
    value("--model_path", "weights: best.pt, or a file of an older trainer", type=Path, required=True, metavar="FILE"),
    value(
        "--size",
        "height and width of the images (default: 976 176)",
        type=int,
        nargs=2,
        default=(976, 176),
        metavar=("H", "W"),
    ),
    value("--patch_size", "side of a patch in pixels (default: as in training)", type=int, metavar="PX"),
    value(
        "--precision",
        "float16 and int8 also write a smaller file of that precision beside it (default: %(default)s)",
        default="float32",
        choices=("float32", "float16", "int8"),
    ),
    value(
        "--calibrate",
        "with int8, required: images, or pairs, from which value ranges are taken",
        type=Path,
        metavar="FOLDER",
    ),
    value(
        "--img_format",
        "file format of the calibration images (default: %(default)s)",
        default="tiff",
        choices=("tiff", "png_jpg"),
    ),
    switch(
        "--openvino",
        "also write an OpenVINO model, in a folder beside the ONNX file, after a comparison with the network",
    ),
    value("--output", "file to write (default: beside the weights, as .onnx)", type=Path, metavar="FILE.onnx"),
)


def main(argv: list[str]) -> int:
    """Export; returns the exit code."""
    given = vars(parser_of("flatout defect export", DESCRIPTION, EPILOG, FLAGS).parse_args(argv))
    # Imported here so that help and argument errors do not load torch.
    from flatout.defect.data.items import size_text
    from flatout.defect.export import export_file

    size_hw = tuple(given.pop("size"))
    print(export_file(given.pop("model_path"), size_hw, **given))
    print(f"It takes images of {size_text(size_hw)} px (width x height). Choose another size with --size H W.")
    return 0
