"""`flatout yolo check`: examine every file of a data set and report what would spoil a training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli import parser_of, switch, value
from flatout.errors import ConfigError, DataError, counted
from flatout.findings import Finding, is_bad, places, summary
from flatout.runs import too_small
from flatout.safefiles import write_file
from flatout.yolo.predict.options import tile_problems

if TYPE_CHECKING:
    import numpy as np

DESCRIPTION = """\
Examine every image and every label of a data set, and report what would spoil a training: files that are missing,
damaged or mislabelled, labels that make no sense, validation images that are also in train, classes without examples,
boxes that are too small to find. Nothing in the data set is changed. docs/data.md lists all checks.
"""
EPILOG = """\
examples:
  flatout yolo check data/bolts.yaml                        everything; decodes every image once
  flatout yolo check data/bolts.yaml --preview sheet.png    also plot some images with their boxes
  flatout yolo check data/bolts.yaml --quick                only file headers and labels
  flatout yolo check data/bolts.yaml --img-size 320 --json  for scripts; boxes are judged at 320 px

Exit codes: 0 no errors (warnings are allowed), 2 the YAML cannot be read, 3 at least one error.
"""
PLACES_SHOWN = 5
PLACES_IN_JSON = 1000
FLAGS = (
    value("data", "data YAML, annotation file or folder (see docs/data.md)", metavar="DATA.yaml"),
    value(
        "--img-size",
        "training size at which boxes and anchors are judged (default: %(default)s)",
        type=int,
        default=640,
        metavar="PX",
    ),
    value(
        "--tiles",
        "the training will use tiles of this size: judge boxes in them, and accept images of any size",
        type=int,
        metavar="PX",
    ),
    switch("--quick", "do not decode the images"),
    switch("--strict-labels", "apply all label rules of YOLOv7: one bad line drops the image"),
    value("--preview", "also plot some images with their boxes into this file", type=Path, metavar="FILE.png"),
    switch("--all", f"list all places of each finding, not only the first {PLACES_SHOWN}"),
    switch("--json", "print one JSON document instead of text"),
    value(
        "--workers",
        "number of worker processes, or cpu*F for F times the number of CPUs (default: %(default)s)",
        default="cpu*1.0",
    ),
    switch("--no-cache", "neither read nor write the label cache"),
)


def main(argv: list[str]) -> int:
    """Check a data set; returns the exit code."""
    args = parser_of("flatout yolo check", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    if args.preview and args.preview.suffix.lower() != ".png":
        raise ConfigError(f"--preview {args.preview}: the name must end in .png.")
    if problems := [*too_small(args, 1, "img_size"), *tile_problems(args.tiles, 0.0)]:
        raise ConfigError("; ".join(problems) + ".")
    # Imported late, so that help and usage errors do not wait for NumPy.
    from flatout.yolo.data.check.run import CheckConfig, as_plain, check_data_set
    from flatout.yolo.data.label_cache import default_folder

    config = CheckConfig(
        img_size=args.img_size,
        tiles=args.tiles,
        quick=args.quick,
        strict=args.strict_labels,
        workers=args.workers,
        progress=not args.json,
        cache_folder=None if args.no_cache else default_folder(),
    )
    report = check_data_set(args.data, config)
    most = PLACES_IN_JSON if args.json or args.all else PLACES_SHOWN
    plain = as_plain(report, most=most)
    plain["exit_code"] = DataError.exit_code if is_bad(report.findings) else 0
    if args.preview:
        from flatout.images import decoder_messages
        from flatout.yolo.preview import preview_sheet

        images = next((split.images for split in report.facts.splits.values() if len(split.images)), None)
        if images is not None:
            with decoder_messages():  # the report already contains them
                sheet = preview_sheet(images)
            write_png(args.preview, sheet)
            plain["preview"] = str(args.preview)
    print(json.dumps(plain, indent=2) if args.json else as_text(plain, report.findings, most))
    return int(plain["exit_code"])


def as_text(plain: dict[str, Any], findings: Sequence[Finding], most: int) -> str:
    """The report as text: a line per split, then a paragraph for each check with findings."""
    lines = [f"{plain['file']}: {counted(len(plain['names']), 'class')}"]
    for split, counts in plain["splits"].items():
        lines.append(f"  {split:<6} {counted(counts['total'], 'image')}: " + _counts(counts))
    for check, entry in plain["findings"].items():
        lines += ["", f"{entry['severity']:<8} {check} ({entry['count']}): {entry['looks_for']}"]
        own = [finding for finding in findings if finding.topic == check]
        lines += places(own, most, hint=" (--all shows them)")
        lines.append(f"         {entry['advice']}")
    if "preview" in plain:
        lines += ["", f"images with their boxes: {plain['preview']}"]
    return "\n".join([*lines, "", summary(findings, plain["checks_made"])])


def write_png(path: Path, image: "np.ndarray") -> None:
    """Write a PNG file atomically; ResourceError if that fails."""
    import cv2

    write_file(path, cv2.imencode(".png", image)[1].tobytes())


def _counts(counts: dict[str, int]) -> str:
    with_labels = counts["found"] - counts["empty"]
    return (
        f"{with_labels} with labels, {counts['empty']} with an empty label file, {counts['missing']} without one, "
        f"{counts['corrupt']} unusable"
    )
