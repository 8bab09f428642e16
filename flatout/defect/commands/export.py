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

Exit code: 0, 2 wrong arguments or a package is missing, 4 weights that cannot be read.
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
    parser.add_argument("--model_path", required=True, metavar="FILE", help="weights: best.pt, or an old .pth")
    parser.add_argument("--size", type=int, nargs=2, default=(976, 176), metavar=("H", "W"), help="default: 976 176")
    parser.add_argument("--patch_size", type=int, metavar="PX", help="default: as in training")
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
    print(f"{done.path}: {done.path.stat().st_size / 2**20:.1f} MiB, {checked}")
    return 0
