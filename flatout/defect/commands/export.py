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

Exit code: 0, 2 wrong arguments or a package is missing, 4 weights that cannot be read, 8 the file is not the network.
"""
CALIBRATED = 32


def main(argv: list[str]) -> int:
    """Export; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="flatout defect export",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model_path", required=True, metavar="FILE", help="weights: best.pt, or an old .pth")
    parser.add_argument("--size", type=int, nargs=2, default=(976, 176), metavar=("H", "W"), help="default: 976 176")
    parser.add_argument("--patch_size", type=int, metavar="PX", help="default: as in training")
    parser.add_argument(
        "--precision", choices=("float32", "float16", "int8"), default="float32",
        help="also write a smaller file beside it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--calibrate", type=Path, metavar="FOLDER", help="TIFF images to take the ranges of int8 from")
    parser.add_argument("--output", type=Path, metavar="FILE.onnx", help="default: beside the weights")
    args = parser.parse_args(argv)
    # Now, because help and mistakes are answered without torch.
    from flatout.defect.export import export_onnx
    from flatout.defect.patches import Grid
    from flatout.defect.weights import load_network

    network, weights = load_network(args.model_path)
    grid = Grid.over(tuple(args.size), args.patch_size or weights.patch or 128)
    done = export_onnx(network, grid, args.output or Path(args.model_path).with_suffix(".onnx"))
    checked = (
        "not verified" if done.largest_difference is None else f"within {done.largest_difference:.1e} of the network"
    )
    if args.precision != "float32":
        print(
            f"{_reduced(done.path, args.precision, args.calibrate)}: smaller, and not the same: compare their heat maps"
        )
    print(f"{done.path}: {done.path.stat().st_size / 2**20:.1f} MiB, {checked}")
    return 0


def _reduced(path: Path, precision: str, folder: Path | None) -> Path:
    """Write the smaller file; at most so many images are looked at for its ranges."""
    from flatout.defect.export import reduce_precision
    from flatout.defect.strips.find import list_images
    from flatout.defect.strips.items import read_canonical
    from flatout.errors import ConfigError

    if precision == "int8" and folder is None:
        raise ConfigError("--precision int8 needs --calibrate FOLDER: images to take the ranges of values from.")
    images = [] if folder is None else [read_canonical(file) for file in list_images(folder, "tiff")[:CALIBRATED]]
    out = path.with_suffix(f".{precision}.onnx")
    reduce_precision(path, out, precision, images)  # type: ignore[arg-type]
    return out
