"""`flatout yolo audit`: find labels that are probably wrong, and write corrected copies of label files."""

from pathlib import Path

from flatout.cli import defaults_of, flags_of, parser_of, show_log, value
from flatout.errors import ConfigError, counted
from flatout.yolo.label_audit.config import AuditConfig

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

A training with `--audit` also sums up how each label is learned; the audit of its run uses that, too.

Exit codes: 0 done, 2 wrong arguments, 3 unusable data, 4 unusable weights, 5 not enough disk, memory or GPUs.
"""
FLAGS = (
    value("run", "run folder: its data, weights and image size are used", nargs="?", type=Path, metavar="RUN"),
    *flags_of(AuditConfig),
    value("--fix-list", "write corrected copies of label files from this list, then stop", type=Path, metavar="FILE"),
)


def main(argv: list[str]) -> int:
    """Audit labels, or apply a fix list; returns the exit code."""
    parser = parser_of("flatout yolo audit", DESCRIPTION, EPILOG, FLAGS, shortened=True)
    parser.set_defaults(**defaults_of(AuditConfig))
    given = vars(parser.parse_args(argv))
    if (fix_list := given.pop("fix_list")) is not None:
        if given != defaults_of(AuditConfig) | {"out": given["out"]}:
            raise ConfigError("--fix-list applies a list that was saved and audits nothing: give it with --out alone.")
        return _fix(fix_list, given["out"])
    config = AuditConfig(**given | {"weights": tuple(given["weights"])})
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.yolo.label_audit.audit import audit

    show_log()
    print(audit(config))
    return 0


def _fix(fix_list: Path, out: Path | None) -> int:
    if out is None:
        raise ConfigError("--fix-list needs --out FOLDER: corrected copies are written there, never over your labels.")
    from flatout.yolo.label_audit.fixes import read_fix_list, write_fixed

    fixes = read_fix_list(fix_list)
    written = write_fixed(fixes, out)
    print(f"{counted(len(fixes), 'fix')}, {counted(len(written), 'corrected label file')} in {out}")
    return 0
