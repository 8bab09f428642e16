"""flatout spike predict: deblur a folder of frames."""

import argparse
from pathlib import Path

from flatout.cli import show_log
from flatout.spike.commands.arguments import add_config, add_device, make_parser

DESCRIPTION = """\
Deblur a folder of frames with a folder of spike files of the same names. Large frames are processed in overlapping
tiles that are blended, so that there are no seams.
"""
EPILOG = """\
examples:
  flatout spike predict --weights best.pt --input_blur clip/blur --input_spike clip/spike --output out --video --page

Exit code: 0, 2 wrong arguments, 3 unusable data, 4 unusable weights.
"""


def main(argv: list[str]) -> int:
    """Deblur; returns the exit code."""
    args = _parser().parse_args(argv)
    tiles = {"TILE_SIZE": 0 if args.disable_tiling else args.tile_size, "TILE_OVERLAP": args.tile_overlap}
    show_log()
    # Imported here so that help and argument errors do not load torch.
    from flatout.spike.config import load_config
    from flatout.spike.data.geometry import parse_geometry
    from flatout.spike.predict import load_predictor, predict_folder

    height, width = parse_geometry(args.geometry) if args.geometry else (None, None)
    overrides = [*args.set, *([f"DATA.SPIKE_H={height}", f"DATA.SPIKE_W={width}"] if args.geometry else [])]
    config = load_config(args.config, overrides) if args.config else None
    given = {key: value for key, value in tiles.items() if value is not None}
    predictor = load_predictor(args.weights, args.device, config, overrides=overrides, tiles=given)
    done = predict_folder(
        predictor, args.input_blur, args.input_spike, args.output,
        video=args.video, compare=args.side_by_side, page=args.page,
    )  # fmt: skip
    if done.page is not None:
        print(f"{done.page}: open it in a browser")
    print(f"{done.frames} frames in {done.folder}, {done.frames / done.seconds:.2f} frames/s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("predict", DESCRIPTION, EPILOG)
    parser.add_argument(
        "--weights", type=Path, required=True, metavar="FILE", help="weights: best.pt or last.pt of a training"
    )
    parser.add_argument("--input_blur", type=Path, required=True, metavar="DIR", help="folder of blurry frames")
    parser.add_argument(
        "--input_spike", type=Path, required=True, metavar="DIR",
        help="folder of spike streams (.dat, .npz, .npy, .h5), or of precomputed voxels if the config has "
        "USE_PRECOMPUTED_VOXELS: true",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write sharp frames to")
    parser.add_argument(
        "--geometry", default="", metavar="WxH",
        help="width and height of spike frames, as in 400x250 (default: from the config, else from config.yaml beside "
        "the spikes, else 640x360)",
    )  # fmt: skip
    add_config(parser, required=False)
    add_device(parser)
    parser.add_argument(
        "--side_by_side", action="store_true", help="also write images with the blurry and the restored frame"
    )
    parser.add_argument("--video", action="store_true", help="also write the restored frames as a video, restored.avi")
    parser.add_argument(
        "--page", action="store_true",
        help="also write before_after.html, one file with a slider between blurry and restored frames, which works "
        "offline",
    )  # fmt: skip
    parser.add_argument(
        "--tile_size", type=int, metavar="PX", help="side of a tile in pixels (default: TEST.TILE_SIZE, which is 256)"
    )
    parser.add_argument(
        "--tile_overlap", type=int, metavar="PX",
        help="pixels that neighbouring tiles share (default: TEST.TILE_OVERLAP, which is 32)",
    )  # fmt: skip
    parser.add_argument(
        "--enable_tiling", action="store_true",
        help="accepted, but has no effect: frames larger than a tile are always tiled",
    )  # fmt: skip
    parser.add_argument(
        "--disable_tiling", action="store_true", help="process whole frames in one pass, whatever their size"
    )
    return parser
