"""Open the splits of a data set for training and evaluation: scanned, checked and counted.

Training is refused because of findings of `flatout yolo check`, made by the same functions: whatever training refuses,
the check reports as an error, in the same words.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from flatout.errors import DataError, counted
from flatout.findings import Finding
from flatout.yolo.data.check.facts import CHECKS, NOT_DECODED, SetFacts, SplitFacts
from flatout.yolo.data.check.run import by_severity, scan_findings
from flatout.yolo.data.data_yaml import SPLITS, DataSet, Split, refuse_missing
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.open_data import scan_entries
from flatout.yolo.data.scan import ScanConfig

logger = logging.getLogger(__name__)

WARNED = frozenset({"labels-none-val", "labels-often-dropped"})
"""Checks whose findings are logged as warnings at every start; findings about single files are only counted."""


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """How a split is opened."""

    scan: ScanConfig = field(default_factory=ScanConfig)
    cache_folder: Path | None = None
    """Folder for label caches; None: no cache. Commands use `label_cache.default_folder()`."""
    single_class: bool = False
    """Treat all classes as class 0."""
    needs_labels: bool = False
    """Refuse a train split without a single usable label; otherwise only warn."""
    allow_bad_labels: bool = False
    """Accept a split in which more than half of the labels are unusable."""
    silent: bool = False
    """Log neither counts nor warnings."""

    @property
    def waived(self) -> frozenset[str]:
        """Checks whose findings would prevent a start, but do not with this config."""
        waived = {
            "class-beyond-names": self.single_class,
            "labels-none": not self.needs_labels,
            "labels-mostly-dropped": self.allow_bad_labels,
        }
        return frozenset(check for check, is_waived in waived.items() if is_waived)


class _CheckedSplit(NamedTuple):
    """A split in which no check has found anything that must stop a start."""

    facts: SplitFacts
    findings: list[Finding]

    def opened(self, data: DataSet, config: SplitConfig) -> SplitFacts:
        """The split; logs its counts and warnings."""
        if not config.silent:
            _log_counts(data, self.facts)
            for finding in self.findings:
                if finding.topic != "class-beyond-names":  # waived only with a single class: numbers do not matter
                    advice = _sentence(finding.advice)
                    logger.warning("%s: %s. %s", _place(data, finding), finding.value, advice)
        return replace(self.facts, single_class=True) if config.single_class else self.facts


class _EarlyCheck(NamedTuple):
    """What `check_training_splits` has found."""

    data: DataSet
    config: SplitConfig
    at_s: float
    splits: list[_CheckedSplit]


TRAINING_SPLITS: tuple[Split, Split] = ("train", "val")
KEEP_S = 30.0
"""How long a training may use the scan of an early check: until torch is imported, and a run folder is found."""
_early: _EarlyCheck | None = None
"""The last early check, until it is used."""


def check_training_splits(data: DataSet, config: SplitConfig) -> None:
    """DataError if training must not start on this data. Logs nothing.

    `open_training_splits`, if called for the same within KEEP_S, uses this scan and does not look at the files again:
    for a set of COCO's size that takes seconds.
    """
    global _early
    splits = [_check(data, split, config) for split in TRAINING_SPLITS]
    _early = _EarlyCheck(data, config, time.monotonic(), splits)


def open_training_splits(data: DataSet, config: SplitConfig) -> tuple[ImageSet, ImageSet]:
    """The images to train on and those to validate on; DataError if training must not start on this data."""
    global _early
    early, _early = _early, None
    if early is not None and early[:2] == (data, config) and time.monotonic() - early.at_s < KEEP_S:
        train, val = (checked.opened(data, config) for checked in early.splits)
    else:
        train, val = (open_split(data, split, config) for split in TRAINING_SPLITS)
    return train.images, val.images


def open_split(data: DataSet, split: Split, config: SplitConfig) -> SplitFacts:
    """Open one split; DataError if it has no usable image, or if a check finds something that must stop a start."""
    return _check(data, split, config).opened(data, config)


def _check(data: DataSet, split: Split, config: SplitConfig) -> _CheckedSplit:
    scan = replace(config.scan, names=data.names)
    found, pairs, table = scan_entries(data.entries[split], scan, cache_folder=config.cache_folder)
    facts = SplitFacts(split, found, pairs, table, NOT_DECODED, data.names)
    if pairs and not table.used_N.any():
        raise DataError(
            f"{data.file}: {split}: none of the {counted(len(pairs), 'image')} can be used. "
            f"To see why, run: {data.check_command}"
        )
    findings = by_severity(_findings(data, facts, strict=scan.strict))
    if stopping := [finding for finding in findings if finding.topic not in config.waived | WARNED]:
        raise _refusal(data, stopping)
    return _CheckedSplit(facts, findings)


def _findings(data: DataSet, split: SplitFacts, *, strict: bool) -> Iterator[Finding]:
    """Findings of the checks that can stop a start, and of those in WARNED."""
    chosen = {check.id for check in CHECKS.values() if check.stops} | WARNED
    yield from (finding for finding in scan_findings(split, strict) if finding.topic in chosen)
    facts = SetFacts(data, [], {split.name: split})
    for check in CHECKS.values():
        if check.id in chosen:
            yield from check.findings(facts)


def _refusal(data: DataSet, findings: list[Finding]) -> DataError:
    """The error for the first finding, with the number of findings of the same check."""
    first = findings[0]
    if first.topic == "path-missing":
        return refuse_missing(data, first.where)
    others = sum(finding.topic == first.topic for finding in findings) - 1
    more = f" (and {others:,} more of this kind)" if others else ""
    advice = _sentence(first.advice)
    command = f"For a full report, run: {data.check_command}"
    return DataError(f"{_place(data, first)}: {first.value}{more}. {advice} {command}")


def _place(data: DataSet, finding: Finding) -> str:
    return f"{data.file}: {finding.where}" if finding.where in SPLITS else finding.where


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _log_counts(data: DataSet, split: SplitFacts) -> None:
    """Log the counts of the scan in one line, and in a second one its findings, if there are any."""
    counts = split.table.counts()
    logger.info("%s: %s", split.name, ", ".join(f"{count} {name}" for name, count in counts.items()))
    by_check = Counter(problem.check for problems in split.table.problems.values() for problem in problems)
    if by_check:
        listed = ", ".join(f"{count} {check}" for check, count in by_check.most_common(5))
        findings = counted(by_check.total(), "finding")
        logger.warning("%s: %s (%s). To list them, run: %s", split.name, findings, listed, data.check_command)
