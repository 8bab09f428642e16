"""`flatout yolo group`: assign the classes of a data set to several heads."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import ConfigError, ResourceError, counted

if TYPE_CHECKING:
    from flatout.yolo.multihead.grouping.choose import GroupingResult

DESCRIPTION = """\
Assign the classes of a data set to the heads of a multi-head network (1B4H). Writes the head configuration for
`train.py --head-config`, and a plot of the grouping. SOURCE is a data YAML (with YOLO, COCO or Pascal VOC labels), a
COCO annotation file without its images, or a confusion matrix (.csv, .npz, .json).

methods:
  standard        COCO: four heads by topic; other data sets: blocks of consecutive classes
  geometry        classes with boxes of similar aspect ratio share a head
  hybrid          classes with similar aspect ratios that occur together share a head (spectral clustering)
  anticonfusion   classes that are mistaken for each other go to different heads
"""
EPILOG = """\
examples:
  flatout yolo group data/bolts.yaml --method geometry --heads 3
  flatout yolo group instances_train2017.json --method hybrid --balance --out data/hybrid.yaml
  flatout yolo group data/bolts.yaml --method anticonfusion --confusion runs/test/exp/confusion_matrix.csv
  train.py --heads 3 --head-config heads.geometry.yaml --data data/bolts.yaml --cfg yolov7-tiny-1b4h ...

Exit codes: 0 done, 2 wrong arguments, 3 unusable data, 5 not enough disk space.
"""
METHODS = ("standard", "geometry", "hybrid", "anticonfusion")


def main(argv: list[str]) -> int:
    """Group classes; returns the exit code."""
    args = _parser().parse_args(argv)
    out = args.out or Path(f"heads.{args.method}.yaml")
    plot = args.picture or out.with_suffix(".png")
    _check_names(out, plot)
    # Imported late, so that help and usage errors do not wait for NumPy and OpenCV.
    from flatout.cli import show_log
    from flatout.yolo.multihead.grouping.chart import plot_grouping
    from flatout.yolo.multihead.grouping.choose import (
        GroupConfig,
        group_classes,
        open_source,
        with_confusion,
        write_grouping,
    )
    from flatout.yolo.multihead.grouping.methods import HybridConfig

    show_log()
    hybrid = HybridConfig(alpha=args.alpha, beta=args.beta, balance=args.balance, seed=args.seed)
    config = GroupConfig(method=args.method, heads=args.heads, hybrid=hybrid, confused_from=args.confused_from)
    source = open_source(args.source, split=args.split)
    # After SOURCE was found, because a mistake there is more important, and before its labels are read.
    if not args.force:
        _refuse_to_overwrite(out, plot)
    if args.confusion is not None:
        source = with_confusion(source, args.confusion)
    grouped = group_classes(source, config)
    write_grouping(grouped.grouping, out, generated_by=f"flatout yolo group --method {args.method}")
    print(as_text(grouped))
    print(f"heads: {out}")
    try:
        plot_grouping(grouped, plot)
    except OSError as error:
        raise ResourceError(
            f"{plot}: cannot be written: {error.strerror}. Choose another path with --picture."
        ) from None
    print(f"plot: {plot}")
    return 0


def as_text(grouped: "GroupingResult") -> str:
    """The grouping as text, one line per head."""
    config = grouped.grouping.config
    lines = [f"{counted(config.nc, 'class')} in {counted(config.num_heads, 'head')}: {config.grouping}"]
    for number, (head, comment) in enumerate(zip(config.heads, grouped.grouping.comments, strict=True)):
        about = ", ".join(part for part in (head.name, comment) if part)
        classes = "class, " if len(head.classes) == 1 else "classes,"
        lines.append(f"  head {number:<3}{len(head.classes):>4} {classes} weight {head.weight:g}: {about}")
    return "\n".join(lines)


def _check_names(out: Path, plot: Path) -> None:
    """ConfigError for output paths that cannot work; needs no labels."""
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {out}: the name must end in .yaml.")
    if plot.suffix != ".png":
        raise ConfigError(f"--picture {plot}: the name must end in .png.")
    for path in (out, plot):
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist. Create it first, or choose another one.")


def _refuse_to_overwrite(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} already exists. Choose another name with --out, or overwrite it with --force.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout yolo group",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="data YAML, Pascal VOC folder, COCO file or confusion matrix")
    parser.add_argument("--method", choices=METHODS, required=True, help="how to group the classes, see above")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="number of heads (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="head configuration to write (default: heads.METHOD.yaml)"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="plot to write (default: the name of OUT, ending in .png)"
    )
    parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        default="train",
        help="split whose labels are used (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    hybrid = parser.add_argument_group("for --method hybrid")
    hybrid.add_argument(
        "--alpha", type=float, default=0.5, metavar="W", help="weight of similar aspect ratios (default: %(default)s)"
    )
    hybrid.add_argument(
        "--beta", type=float, default=0.5, metavar="W", help="weight of occurring together (default: %(default)s)"
    )
    hybrid.add_argument("--balance", action="store_true", help="move classes until all heads have about the same size")
    hybrid.add_argument("--seed", type=int, default=42, metavar="S", help="random seed (default: %(default)s)")
    apart = parser.add_argument_group("for --method anticonfusion")
    apart.add_argument(
        "--confusion", type=Path, metavar="FILE", help="confusion matrix (default: pairs that are known from COCO)"
    )
    apart.add_argument(
        "--confused-from", type=float, default=0.02, metavar="SHARE",
        help="two classes count as confused if this share of one is taken for the other (default: %(default)s)",
    )  # fmt: skip
    return parser
