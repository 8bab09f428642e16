"""flatout yolo group: share the classes of a data set out to several heads."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import ConfigError, ResourceError, counted

if TYPE_CHECKING:
    from flatout.yolo.multihead.grouping.choose import Grouped

DESCRIPTION = """\
Share the classes of a data set out to the heads of a network with several (1B4H), and write the head configuration
that `train.py --head-config` takes, with a picture that shows what was grouped. SOURCE is a data YAML (labels as text,
COCO or Pascal VOC), a COCO annotation file without its pictures, or a confusion matrix (.csv, .npz, .json).

methods:
  standard        COCO's classes by kind of thing (four heads); other data sets in blocks of neighbours
  geometry        boxes of like proportions share a head
  hybrid          like proportions and occurring together, by spectral clustering
  anticonfusion   classes that are mistaken for each other go to different heads
"""
EPILOG = """\
examples:
  flatout yolo group data/bolts.yaml --method geometry --heads 3
  flatout yolo group instances_train2017.json --method hybrid --balance --out data/hybrid.yaml
  flatout yolo group data/bolts.yaml --method anticonfusion --confusion runs/test/exp/confusion_matrix.csv
  train.py --heads 3 --head-config heads.geometry.yaml --data data/bolts.yaml --cfg yolov7-tiny-1b4h ...

Exit code: 0, 2 wrong arguments, 3 data that cannot be used, 5 no room.
"""
METHODS = ("standard", "geometry", "hybrid", "anticonfusion")


def main(argv: list[str]) -> int:
    """Group classes; returns the exit code."""
    args = _parser().parse_args(argv)
    out = args.out or Path(f"heads.{args.method}.yaml")
    picture = args.picture or out.with_suffix(".png")
    _check_names(out, picture)
    # Now, because help and mistakes are answered without NumPy and OpenCV.
    from flatout.cli import show_log
    from flatout.yolo.multihead.grouping.chart import draw_grouping
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
    # After SOURCE was found, because a mistake there matters more, and before its labels are read.
    if not args.force:
        _refuse_to_overwrite(out, picture)
    if args.confusion is not None:
        source = with_confusion(source, args.confusion)
    grouped = group_classes(source, config)
    write_grouping(grouped.grouping, out, generated_by=f"flatout yolo group --method {args.method}")
    print(as_text(grouped))
    print(f"heads: {out}")
    try:
        draw_grouping(grouped, picture)
    except OSError as error:
        raise ResourceError(f"{picture}: cannot be written: {error.strerror}. Choose another place.") from None
    print(f"picture: {picture}")
    return 0


def as_text(grouped: "Grouped") -> str:
    """A line per head."""
    config = grouped.grouping.config
    lines = [f"{counted(config.nc, 'class')} in {counted(config.num_heads, 'head')}: {config.grouping}"]
    for number, (head, comment) in enumerate(zip(config.heads, grouped.grouping.comments, strict=True)):
        about = ", ".join(part for part in (head.name, comment) if part)
        classes = "class, " if len(head.classes) == 1 else "classes,"
        lines.append(f"  head {number:<3}{len(head.classes):>4} {classes} weight {head.weight:g}: {about}")
    return "\n".join(lines)


def _check_names(out: Path, picture: Path) -> None:
    """What can be known before labels are read."""
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {out}: the name must end in .yaml.")
    if picture.suffix != ".png":
        raise ConfigError(f"--picture {picture}: the name must end in .png.")
    for path in (out, picture):
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist. Make it first, or choose another one.")


def _refuse_to_overwrite(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path}: exists already. Choose another name with --out, or overwrite it with --force.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout yolo group",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="data YAML, Pascal VOC folder, COCO file or confusion matrix")
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: heads.METHOD.yaml, here")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="default: OUT with .png at its end")
    parser.add_argument("--split", choices=("train", "val", "test"), default="train", help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    hybrid = parser.add_argument_group("for --method hybrid")
    hybrid.add_argument("--alpha", type=float, default=0.5, metavar="W", help="weight of shape (default: %(default)s)")
    hybrid.add_argument(
        "--beta", type=float, default=0.5, metavar="W", help="weight of occurring together (default: %(default)s)"
    )
    hybrid.add_argument("--balance", action="store_true", help="move classes until heads are about equally large")
    hybrid.add_argument("--seed", type=int, default=42, metavar="S", help="default: %(default)s")
    apart = parser.add_argument_group("for --method anticonfusion")
    apart.add_argument("--confusion", type=Path, metavar="FILE", help="confusion matrix; else pairs known from COCO")
    apart.add_argument(
        "--confused-from", type=float, default=0.02, metavar="SHARE",
        help="share of a class that must be taken for another (default: %(default)s)",
    )  # fmt: skip
    return parser
