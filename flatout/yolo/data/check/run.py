"""Run every check on a data set."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import DataError
from flatout.feed import SampleError
from flatout.findings import SEVERITIES, Finding
from flatout.images import most_pixels
from flatout.yolo.data.check import files, images, labels
from flatout.yolo.data.check.facts import CHECKS, NOT_DECODED, SetFacts, SplitFacts, check_decoding, finding_at
from flatout.yolo.data.data_yaml import SPLITS, DataSet, Split, yaml_problems
from flatout.yolo.data.find import FoundImages, Pair
from flatout.yolo.data.label_text import Problem, drops_a_label
from flatout.yolo.data.open_data import open_data_set, scan_entries
from flatout.yolo.data.scan import REASONS, ScanConfig, table_of

REGISTERED_IN = (files, labels, images)
"""Modules that register checks when they are imported."""
YAML_ENDINGS = (".yaml", ".yml")
DEFAULT_ANCHORS = (12, 16, 19, 36, 40, 28, 36, 75, 76, 55, 72, 146, 142, 110, 192, 243, 459, 401)
"""Anchors of YOLOv7 in pixels: width, height, width, height, ..."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """How a data set is checked."""

    img_size: int = 640
    """Training size in pixels at which boxes and anchors are judged."""
    tiles: int | None = None
    """Side of the tiles that are trained on; images of more than 100 megapixels are then usable, but not decoded."""
    quick: bool = False
    """Do not decode the images. Damaged pixels, wrong headers and leaks by content then go unnoticed."""
    strict: bool = False
    """Apply all label rules of YOLOv7."""
    workers: int | str = "cpu*1.0"
    progress: bool = True
    cache_folder: Path | None = None
    anchors_px: tuple[float, ...] = DEFAULT_ANCHORS


@dataclass(frozen=True)
class CheckReport:
    """The result of a check: facts, findings (errors first) and counts."""

    facts: SetFacts
    findings: list[Finding]
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Split -> number of label files found, missing and empty, of corrupt images, and of images in total."""


def check_data_set(path: str | Path, config: CheckConfig) -> CheckReport:
    """Check the data set of a data YAML, annotation file or folder; ConfigError or DataError if it cannot be opened."""
    facts = collect_facts(open_data_set(path), config)
    findings = [finding for split in facts.splits.values() for finding in scan_findings(split, config.strict)]
    for check in CHECKS.values():
        findings += check.findings(facts)
    return CheckReport(
        facts, by_severity(findings), {name: split.table.counts() for name, split in facts.splits.items()}
    )


def collect_facts(data: DataSet, config: CheckConfig) -> SetFacts:
    """Find, scan and decode all files of the data set, each once."""
    splits = {split: _split(data, split, config) for split in SPLITS if data.entries[split]}
    return SetFacts(
        data,
        list(yaml_problems(data.written)) if data.file.suffix in YAML_ENDINGS else [],
        {str(split): facts for split, facts in splits.items()},
        config.img_size,
        config.tiles,
        np.array(config.anchors_px, float).reshape(-1, 2),
        _label_names(pair for facts in splits.values() for pair in facts.pairs),
    )


def scan_findings(split: SplitFacts, strict: bool) -> Iterable[Finding]:
    """The findings of the scan, file by file; a strict scan gives only one reason per file."""
    for row, problems in sorted(split.table.problems.items()):
        pair = split.pairs[row]
        for problem in problems:
            yield finding_at(problem.check, *_place_and_text(pair, problem))
    if strict:
        yield from _strict_findings(split)


def _place_and_text(pair: Pair, problem: Problem) -> tuple[str, str]:
    """Where a problem is: a line or a file; and its text, with the annotation file where that is another one."""
    if problem.line:
        return f"{pair.label}:{problem.line}", problem.text
    if not (problem.check.startswith("label-") or drops_a_label(problem)):
        return pair.image, problem.text
    inside = "" if pair.has_own_label_file else f" (in {pair.label})"
    return pair.label_place, f"{problem.text}{inside}"


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The findings sorted by severity, then by check in the order of the registry."""
    order = {check: (SEVERITIES.index(entry.severity), number) for number, (check, entry) in enumerate(CHECKS.items())}
    return sorted(findings, key=lambda finding: order[finding.topic])


def _split(data: DataSet, split: Split, config: CheckConfig) -> SplitFacts:
    scan_config = ScanConfig(
        strict=config.strict,
        workers=config.workers,
        progress=config.progress,
        names=data.names,
        large=config.tiles is not None,
    )
    try:
        found, pairs, table = scan_entries(data.entries[split], scan_config, cache_folder=config.cache_folder)
    except SampleError:  # a bug in flatout, not a fault of the data
        raise
    except DataError as error:
        return SplitFacts(split, FoundImages([], [], [], [], []), [], table_of([]), NOT_DECODED, data.names, str(error))
    decoded = NOT_DECODED
    if not config.quick:
        # Decoding a larger one takes gigabytes, and there are as many workers as CPUs.
        num_pixels_N = table.image_N["width"].astype(np.int64) * table.image_N["height"]
        limit_N = np.array([most_pixels(bits) for bits in table.image_N["bits"].tolist()], np.int64)
        rows = np.flatnonzero(table.used_N & (num_pixels_N <= limit_N))
        decoded = check_decoding([pair.image for pair in pairs], rows, workers=config.workers, shown=config.progress)
    return SplitFacts(split, found, pairs, table, decoded, data.names)


def _label_names(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for folder in {os.path.dirname(pair.label) for pair in pairs}:
        try:
            names[folder] = sorted(os.listdir(folder or "."))
        except OSError:
            names[folder] = []
    return names


_STRICT: dict[str, str] = {  # reason of a strict scan -> check
    "ragged_rows": "label-columns",
    "column_count": "label-columns",
    "not_a_number": "label-not-a-number",
    "odd_coordinate_count": "label-polygon-odd",
    "negative_or_nan": "label-negative",
    "above_one": "label-above-one",
    "duplicate_row": "label-duplicate",
    "unreadable_label": "label-unreadable",
}


def _strict_findings(split: SplitFacts) -> Iterable[Finding]:
    for row in np.flatnonzero(~split.table.used_N).tolist():
        reason = REASONS[split.table.image_N["reason"][row]]
        if reason in _STRICT:
            yield finding_at(
                _STRICT[reason], split.pairs[row].label, f"YOLOv7 drops the image: {reason.replace('_', ' ')}"
            )


def as_plain(report: CheckReport, *, most: int) -> dict[str, Any]:
    """The report as values for JSON, with at most `most` places per check."""
    checks: dict[str, Any] = {}
    for finding in report.findings:
        check = CHECKS[finding.topic]
        about = {"severity": check.severity, "looks_for": check.looks_for, "advice": check.advice}
        entry = checks.setdefault(check.id, {**about, "count": 0, "places": []})
        entry["count"] += 1
        if len(entry["places"]) < most:
            entry["places"].append({"where": finding.where, "text": finding.value})
    return {
        "file": str(report.facts.data.file),
        "names": list(report.facts.data.names),
        "img_size": report.facts.img_size,
        "splits": report.counts,
        "checks_made": len(CHECKS),
        "findings": checks,
    }
