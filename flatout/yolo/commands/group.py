"""`flatout yolo group`: assign the classes of a data set to several heads."""

from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli import parser_of, show_log, switch, value
from flatout.errors import ConfigError, ResourceError, counted

if TYPE_CHECKING:
    from flatout.yolo.multihead.grouping.choose import GroupingResult

DESCRIPTION = """\
Assign the classes of a data set to the heads of a multi-head network (1B4H). Writes the head configuration for
`train.py --head-config`, and a plot of the grouping. SOURCE is a data YAML (with labels in any format), a
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
FLAGS = (
    value("source", "data YAML, Pascal VOC folder, COCO file or confusion matrix", metavar="SOURCE"),
    value("--method", "how to group the classes, see above", choices=METHODS, required=True),
    value("--heads", "number of heads (default: %(default)s)", type=int, default=4, metavar="N"),
    value("--out", "head configuration to write (default: heads.METHOD.yaml)", type=Path, metavar="FILE"),
    value("--picture", "plot to write (default: the name of OUT, ending in .png)", type=Path, metavar="FILE"),
    value(
        "--split",
        "split whose labels are used (default: %(default)s)",
        choices=("train", "val", "test"),
        default="train",
    ),
    switch("--force", "overwrite existing files"),
)
HYBRID = (
    value("--alpha", "weight of similar aspect ratios (default: %(default)s)", type=float, default=0.5, metavar="W"),
    value("--beta", "weight of occurring together (default: %(default)s)", type=float, default=0.5, metavar="W"),
    switch("--balance", "move classes until all heads have about the same size"),
    value("--seed", "random seed (default: %(default)s)", type=int, default=42, metavar="S"),
)
ANTICONFUSION = (
    value("--confusion", "confusion matrix (default: pairs that are known from COCO)", type=Path, metavar="FILE"),
    value(
        "--confused-from",
        "two classes count as confused if this share of one is taken for the other (default: %(default)s)",
        type=float,
        default=0.02,
        metavar="SHARE",
    ),
)
GROUPS = {"for --method hybrid": HYBRID, "for --method anticonfusion": ANTICONFUSION}


def main(argv: list[str]) -> int:
    """Group classes; returns the exit code."""
    args = parser_of("flatout yolo group", DESCRIPTION, EPILOG, FLAGS, GROUPS).parse_args(argv)
    out = args.out or Path(f"heads.{args.method}.yaml")
    plot = args.picture or out.with_suffix(".png")
    _check_names(out, plot)
    # Imported late, so that help and usage errors do not wait for NumPy and OpenCV.
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
