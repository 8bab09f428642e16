"""flatout defect export: a network for whole images as an ONNX file."""

import argparse
from pathlib import Path

DESCRIPTION = """\
Write a network as an ONNX file that takes whole images of one size in 0..255 and gives probabilities: cutting into
patches and stitching is inside. The file is compared with ONNX Runtime where that is installed.
"""
EPILOG = """\
example:
  flatout defect export --model_path runs/defect/exp/weights/best.pt --size 976 176 --output strip.onnx

Exit code: 0, 2 wrong arguments or a package is missing, 3 images that cannot be read, 4 weights that cannot, 8 the file
is not the network.
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
    parser.add_argument("--model_path", type=Path, required=True, metavar="FILE", help="weights: best.pt, or old.pth")
    parser.add_argument("--size", type=int, nargs=2, default=(976, 176), metavar=("H", "W"), help="default: 976 176")
    parser.add_argument("--patch_size", type=int, metavar="PX", help="default: as in training")
    parser.add_argument(
        "--precision", choices=("float32", "float16", "int8"), default="float32",
        help="also write a smaller file beside it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--calibrate", type=Path, metavar="FOLDER", help="images to take the ranges of int8 from")
    parser.add_argument("--img_format", default="tiff", choices=("tiff", "png_jpg"), help="of these images")
    parser.add_argument("--output", type=Path, metavar="FILE.onnx", help="default: beside the weights")
    args = parser.parse_args(argv)
    # Now, because help and mistakes are answered without torch.
    from flatout.defect.export import export_file

    done = export_file(
        args.model_path,
        tuple(args.size),
        patch_size=args.patch_size,
        output=args.output,
        precision=args.precision,
        calibrate=args.calibrate,
        img_format=args.img_format,
    )
    checked = (
        "not verified" if done.largest_difference is None else f"within {done.largest_difference:.1e} of the network"
    )
    if done.smaller is not None:
        print(f"{done.smaller}: smaller, and not the same: compare their heat maps")
    print(f"{done.path}: {done.path.stat().st_size / 2**20:.1f} MiB, {checked}")
    return 0
