"""flatout spike test: score weights on a split."""

import argparse
from pathlib import Path

from flatout.cli import show_log
from flatout.spike.commands.arguments import add_config, add_device, make_parser

DESCRIPTION = """\
Score weights on a split: PSNR and SSIM per frame, computed as in papers, every frame once, together with the scores of
the blurry input.
"""
EPILOG = """\
examples:
  flatout spike test --weights runs/spike/exp/ckpts/best.pt
  flatout spike test --weights best.pt --config my.yaml --split test --output runs/spike/test
  flatout spike test --weights best.pt --lpips lpips_alex.pth

Exit code: 0, 2 wrong config, 3 unusable data, 4 unusable weights.
"""


def main(argv: list[str]) -> int:
    """Score weights; returns the exit code."""
    args = _parser().parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load torch.
    from flatout.spike.config import load_config
    from flatout.spike.predict import load_predictor, score_split

    config = load_config(args.config, args.set) if args.config else None
    predictor = load_predictor(args.weights, args.device, config, overrides=args.set)
    found = score_split(predictor, args.split, args.output, lpips=args.lpips)
    print(found)
    print(
        f"As defined by the early S-VRT code (not comparable with papers): psnr_rgb {found.ref_psnr_rgb:.2f}, "
        f"psnr_y {found.ref_psnr_y:.2f}, ssim_y {found.ref_ssim_y:.4f}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("test", DESCRIPTION, EPILOG)
    parser.add_argument(
        "--weights", type=Path, required=True, metavar="FILE", help="weights: best.pt or last.pt of a training"
    )
    add_config(parser, required=False)
    add_device(parser)
    parser.add_argument("--split", help="split to score (default: the validation split)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR",
        help="folder to write the scores to, and images of blurry, restored and true frames side by side",
    )  # fmt: skip
    parser.add_argument(
        "--lpips", type=Path, metavar="FILE",
        help="also compute LPIPS, with the weights in this file, which the package lpips writes: "
        "torch.save(lpips.LPIPS(net='alex').state_dict(), FILE). Nothing is downloaded (default: no LPIPS)",
    )  # fmt: skip
    return parser
