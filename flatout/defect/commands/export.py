"""flatout defect export: export a network for whole images as an ONNX file."""

import argparse
from pathlib import Path

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


def main(argv: list[str]) -> int:
    """Export; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="flatout defect export",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model_path", type=Path, required=True, metavar="FILE", help="weights: best.pt, or a file of an older trainer"
    )
    parser.add_argument(
        "--size", type=int, nargs=2, default=(976, 176), metavar=("H", "W"),
        help="height and width of the images (default: 976 176)",
    )  # fmt: skip
    parser.add_argument(
        "--patch_size", type=int, metavar="PX", help="side of a patch in pixels (default: as in training)"
    )
    parser.add_argument(
        "--precision", choices=("float32", "float16", "int8"), default="float32",
        help="float16 and int8 also write a smaller file of that precision beside it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate", type=Path, metavar="FOLDER",
        help="with int8, required: images, or pairs, from which value ranges are taken",
    )  # fmt: skip
    parser.add_argument(
        "--img_format", default="tiff", choices=("tiff", "png_jpg"),
        help="file format of the calibration images (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--openvino", action="store_true",
        help="also write an OpenVINO model, in a folder beside the ONNX file, after a comparison with the network",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FILE.onnx", help="file to write (default: beside the weights, as .onnx)"
    )
    args = parser.parse_args(argv)
    # Imported here so that help and argument errors do not load torch.
    from flatout.defect.export import export_file

    done = export_file(
        args.model_path,
        tuple(args.size),
        patch_size=args.patch_size,
        output=args.output,
        precision=args.precision,
        calibrate=args.calibrate,
        img_format=args.img_format,
        openvino=args.openvino,
    )
    checked = (
        "not verified" if done.largest_difference is None else f"within {done.largest_difference:.1e} of the network"
    )
    if done.openvino is not None:
        print(f"{done.openvino}: OpenVINO, within {done.openvino_difference:.1e} of the network")
    if done.smaller is not None:
        print(f"{done.smaller}: smaller, but its results differ: compare its heat maps before you use it")
    print(f"{done.path}: {done.path.stat().st_size / 2**20:.1f} MiB, {checked}")
    return 0
