"""flatout yolo check: look at every file of a data set and say what would spoil a training."""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import ConfigError, DataError, ResourceError, counted
from flatout.findings import Finding, is_bad, places, summary

if TYPE_CHECKING:
    import numpy as np

DESCRIPTION = """\
Look at every picture and every label of a data set and say what would spoil a training: files that are missing,
damaged or not what they seem, labels that make no sense, pictures of the validation that were trained on, classes
without examples, boxes too small to find. Nothing in the data set is changed. The list of checks is in docs/data.md.
"""
EPILOG = """\
examples:
  flatout yolo check data/bolts.yaml                       everything; decodes every picture once
  flatout yolo check data/bolts.yaml --preview sheet.png   and draw some pictures with their boxes
  flatout yolo check data/bolts.yaml --quick               headers and labels only
  flatout yolo check data/bolts.yaml --img-size 320 --json    for a script, boxes judged at 320 px

Exit code: 0 (also with warnings), 2 for a YAML that cannot be read, 3 as soon as there is an error.
"""
PLACES_SHOWN = 5
PLACES_IN_JSON = 1000


def main(argv: list[str]) -> int:
    """Check a data set; returns the exit code."""
    args = _parser().parse_args(argv)
    if args.preview and args.preview.suffix.lower() != ".png":
        raise ConfigError(f"--preview {args.preview}: the name must end in .png.")
    # Now, because help and mistakes are answered without NumPy.
    from flatout.yolo.data.check.run import CheckConfig, as_plain, check_data_set
    from flatout.yolo.data.label_cache import default_folder

    config = CheckConfig(
        img_size=args.img_size,
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
        from flatout.yolo.preview import sheet

        pictures = next((split.images for split in report.facts.splits.values() if len(split.images)), None)
        if pictures is not None:
            with decoder_messages():  # the report has them
                drawn = sheet(pictures)
            write_png(args.preview, drawn)
            plain["preview"] = str(args.preview)
    print(json.dumps(plain, indent=2) if args.json else as_text(plain, report.findings, most))
    return int(plain["exit_code"])


def as_text(plain: dict[str, Any], findings: Sequence[Finding], most: int) -> str:
    """What is in the splits, then one paragraph per check that found something."""
    lines = [f"{plain['file']}: {counted(len(plain['names']), 'class')}"]
    for split, counts in plain["splits"].items():
        lines.append(f"  {split:<6} {counted(counts['total'], 'picture')}: " + _counts(counts))
    for check, entry in plain["findings"].items():
        lines += ["", f"{entry['severity']:<8} {check}: {entry['count']} x {entry['looks_for']}"]
        own = [finding for finding in findings if finding.topic == check]
        lines += places(own, most, hint=" (--all shows them)")
        lines.append(f"         {entry['advice']}")
    if "preview" in plain:
        lines += ["", f"pictures with their boxes: {plain['preview']}"]
    return "\n".join([*lines, "", summary(findings, plain["checks_made"])])


def write_png(path: Path, image: "np.ndarray") -> None:
    """Whole or not at all."""
    import cv2

    content = cv2.imencode(".png", image)[1].tobytes()
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        raise ResourceError(f"{path}: the preview cannot be written: {error.strerror}. Choose another place.") from None


def _counts(counts: dict[str, int]) -> str:
    with_labels = counts["found"] - counts["empty"]
    return (
        f"{with_labels} with labels, {counts['empty']} with an empty file, {counts['missing']} without one, "
        f"{counts['corrupt']} cannot be used"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout yolo check",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("data", metavar="DATA.yaml", help="data YAML, COCO .json file or Pascal VOC folder")
    parser.add_argument("--img-size", type=int, default=640, metavar="PX", help="training size (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="do not decode the pictures")
    parser.add_argument("--strict-labels", action="store_true", help="obey all label rules of YOLOv7")
    parser.add_argument("--preview", type=Path, metavar="FILE.png", help="draw some pictures with their boxes")
    parser.add_argument("--all", action="store_true", help="show every place, not only the first of each check")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--workers", default="cpu*1.0", help="processes that look at pictures (default: %(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="neither read nor write the label cache")
    return parser
