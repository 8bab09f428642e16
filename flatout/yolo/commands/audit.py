"""`flatout yolo audit`: find labels that are probably wrong, and write corrected copies of label files."""

import argparse
from pathlib import Path

from flatout.errors import ConfigError, counted

DESCRIPTION = """\
Find labels that are probably wrong: objects without a label, labels without an object, wrong classes, moved boxes,
second labels of the same object. Networks look at every image with a low threshold, and what they find is compared with
the labels. Writes a ranked list (audit.csv, audit.json) and a page with the 200 worst (audit.html), which works
offline: tick what should be fixed, save the fix list, and `--fix-list` writes corrected copies of those label files.
The data set is never changed. docs/audit.md explains the scores.
"""
EPILOG = """\
examples:
  flatout yolo audit runs/train/exp                                the training images of a run, with its weights
  flatout yolo audit --weights best.pt --data data/bolts.yaml      finished weights, without their training
  flatout yolo audit --weights a.pt b.pt --data data/bolts.yaml --split val
  flatout yolo audit --fix-list fix-list.json --out fixed          write corrected copies to fixed/labels/...

A training with `--audit` also looks at its training images while it learns; the audit of its run uses that too.

Exit codes: 0 done, 2 wrong arguments, 3 unusable data, 4 unusable weights, 5 not enough disk, memory or GPUs.
"""


def main(argv: list[str]) -> int:
    """Audit labels, or apply a fix list; returns the exit code."""
    args = _parser().parse_args(argv)
    if args.fix_list is not None:
        return _fix(args)
    from flatout.yolo.label_audit.config import AuditConfig

    config = AuditConfig(
        run=args.run,
        weights=tuple(args.weights),
        data=args.data,
        split=args.split,
        img_size=args.img_size,
        batch_size=args.batch_size,
        device=args.device,
        workers=args.workers,
        mirrored=args.mirrored,
        out=args.out,
    )
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.cli import show_log
    from flatout.yolo.label_audit.audit import audit

    show_log()
    print(audit(config))
    return 0


def _fix(args: argparse.Namespace) -> int:
    if args.out is None:
        raise ConfigError("--fix-list needs --out FOLDER: corrected copies are written there, never over your labels.")
    from flatout.yolo.label_audit.fixes import read_fix_list, write_fixed

    fixes = read_fix_list(args.fix_list)
    written = write_fixed(fixes, args.out)
    print(f"{counted(len(fixes), 'fix')}, {counted(len(written), 'corrected label file')} in {args.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout yolo audit",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="run folder: its data, weights and image size are used"
    )
    parser.add_argument(
        "--weights", nargs="+", default=[], metavar="FILE", help="weights (default: best.pt and last.pt of the run)"
    )
    parser.add_argument("--data", default="", help="data YAML (default: that of the run)")
    parser.add_argument(
        "--split", choices=("train", "val", "test"), default="train", help="images to audit (default: %(default)s)"
    )
    parser.add_argument(
        "--img-size",
        type=int,
        default=0,
        metavar="PX",
        help="longer side of the input (default: that of the run, or 640)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="images per step (default: %(default)s)"
    )
    parser.add_argument("--device", default="", help="cpu, or the number of a GPU (default: a GPU if there is one)")
    parser.add_argument(
        "--workers",
        type=int,
        default=8,
        metavar="N",
        help="most worker processes that read images (default: %(default)s)",
    )
    parser.add_argument(
        "--mirrored",
        action="store_true",
        help="also look at mirrored images: twice the time, hardly better in our tests",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the files (default: RUN/audit, or runs/audit/exp); with --fix-list: for the corrected copies",
    )
    parser.add_argument(
        "--fix-list", type=Path, metavar="FILE", help="write corrected copies of label files from this list, then stop"
    )
    return parser
