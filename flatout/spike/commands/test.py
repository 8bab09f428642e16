"""flatout spike test: score weights on a split."""

from contextlib import nullcontext
from pathlib import Path

from flatout.cli import parser_of, show_log, value
from flatout.spike.commands.arguments import DEVICE, OTHER_CONFIG, writing_to

DESCRIPTION = """\
Score weights on a split: PSNR and SSIM per frame, computed as in papers, every frame once, together with the scores of
the blurry input.
"""
EPILOG = """\
examples:
  flatout spike test --weights runs/spike/exp/ckpts/best.pt
  flatout spike test --weights best.pt --config my.yaml --split test --output runs/spike/test
  flatout spike test --weights best.pt --lpips lpips_alex.pth

Exit code: 0, 2 wrong config, 3 unusable data, 4 unusable weights, 5 the output cannot be written.
"""
FLAGS = (
    value("--weights", "weights: best.pt or last.pt of a training", type=Path, required=True, metavar="FILE"),
    *OTHER_CONFIG,
    DEVICE,
    value("--split", "split to score (default: the validation split)"),
    value(
        "--output",
        "folder to write the scores to, and images of blurry, restored and true frames side by side",
        type=Path,
        metavar="DIR",
    ),
    value(
        "--lpips",
        "also compute LPIPS, with the weights in this file, which the package lpips writes: "
        "torch.save(lpips.LPIPS(net='alex').state_dict(), FILE). Nothing is downloaded (default: no LPIPS)",
        type=Path,
        metavar="FILE",
    ),
)


def main(argv: list[str]) -> int:
    """Score weights; returns the exit code."""
    args = parser_of("flatout spike test", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load torch.
    from flatout.spike.config import load_config
    from flatout.spike.predict import load_predictor, score_split

    config = load_config(args.config, args.set) if args.config else None
    predictor = load_predictor(args.weights, args.device, config, overrides=args.set)
    with writing_to(args.output) if args.output is not None else nullcontext():
        found = score_split(predictor, args.split, args.output, lpips=args.lpips)
    print(found)
    print(
        f"As defined by the early S-VRT code (not comparable with papers): psnr_rgb {found.ref_psnr_rgb:.2f}, "
        f"psnr_y {found.ref_psnr_y:.2f}, ssim_y {found.ref_ssim_y:.4f}"
    )
    return 0
