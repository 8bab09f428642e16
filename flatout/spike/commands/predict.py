"""flatout spike predict: deblur a folder of frames."""

import argparse
from pathlib import Path

from flatout.cli import show_log
from flatout.spike.commands.arguments import add_config, add_device, parser

DESCRIPTION = """\
Deblur a folder of frames with a folder of spike files of the same names. Large frames are worked on in tiles that fade
into each other: no seams, no dark border.
"""
EPILOG = """\
examples:
  flatout spike predict --weights best.pt --input_blur clip/blur --input_spike clip/spike --output out --video

Exit code: 0, 2 wrong arguments, 3 data, 4 weights.
"""


def main(argv: list[str]) -> int:
    """Deblur; returns the exit code."""
    args = _parser().parse_args(argv)
    tiles = {"TILE_SIZE": 0 if args.disable_tiling else args.tile_size, "TILE_OVERLAP": args.tile_overlap}
    show_log()
    # Now, because help and mistakes are answered without torch.
    from flatout.spike.config import load_config
    from flatout.spike.predict import predict_folder, ready

    config = load_config(args.config, args.set) if args.config else None
    given = {key: value for key, value in tiles.items() if value is not None}
    network = ready(args.weights, args.device, config, tiles=given)
    done = predict_folder(
        network, args.input_blur, args.input_spike, args.output, video=args.video, compare=args.side_by_side
    )
    print(f"{done.frames} frames in {done.folder}, {done.frames / done.seconds:.2f} frames/s")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = parser("predict", DESCRIPTION, EPILOG)
    made.add_argument("--weights", type=Path, required=True, metavar="FILE", help="best.pt or last.pt of a training")
    made.add_argument("--input_blur", type=Path, required=True, metavar="DIR")
    made.add_argument(
        "--input_spike", type=Path, required=True, metavar="DIR", help="streams, or voxels if the config says so"
    )
    made.add_argument("--output", type=Path, required=True, metavar="DIR")
    add_config(made, required=False)
    add_device(made)
    made.add_argument(
        "--side_by_side", action="store_true", help="also write blurry and restored frames in one picture"
    )
    made.add_argument("--video", action="store_true", help="also write restored.avi")
    made.add_argument("--tile_size", type=int, metavar="PX", help="default: TEST.TILE_SIZE, 256")
    made.add_argument("--tile_overlap", type=int, metavar="PX", help="default: TEST.TILE_OVERLAP, 32")
    made.add_argument("--enable_tiling", action="store_true", help="accepted: tiling is automatic")
    made.add_argument("--disable_tiling", action="store_true", help="whole frames, whatever their size")
    return made
