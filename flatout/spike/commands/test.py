"""flatout spike test: score weights."""

import argparse
from pathlib import Path

from flatout.cli import show_log
from flatout.spike.commands.arguments import add_config, add_device, parser

DESCRIPTION = """\
Score weights on a split: PSNR and SSIM per frame as papers compute them, every frame once, beside the blurry input's.
"""
EPILOG = """\
examples:
  flatout spike test --weights runs/spike/exp/ckpts/best.pt
  flatout spike test --weights best.pt --config my.yaml --split test --output runs/spike/test

Without --config the weights' own is used. Exit code: 0, 2 wrong config, 3 data, 4 weights.
"""


def main(argv: list[str]) -> int:
    """Score; returns the exit code."""
    args = _parser().parse_args(argv)
    show_log()
    # Now, because help and mistakes are answered without torch.
    from flatout.spike.config import load_config
    from flatout.spike.predict import ready, score_split

    config = load_config(args.config, args.set) if args.config else None
    found = score_split(ready(args.weights, args.device, config), args.split, args.output)
    print(found)
    print(
        f"As the early S-VRT code counts (not comparable with papers): psnr_rgb {found.ref_psnr_rgb:.2f}, "
        f"psnr_y {found.ref_psnr_y:.2f}, ssim_y {found.ref_ssim_y:.4f}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    made = parser("test", DESCRIPTION, EPILOG)
    made.add_argument("--weights", type=Path, required=True, metavar="FILE", help="best.pt or last.pt of a training")
    add_config(made, required=False)
    add_device(made)
    made.add_argument("--split", help="default: the validation's")
    made.add_argument("--output", type=Path, metavar="DIR", help="write scores and before/after/truth pictures")
    return made
