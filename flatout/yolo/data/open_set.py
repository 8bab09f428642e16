"""From a data YAML to the pictures of a split, checked and counted: the way every command opens a data set.

What stops a start are findings of `flatout yolo check`, made by the same functions: whatever training refuses, the
check calls an error, and in the same words.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from flatout.errors import DataError, counted
from flatout.findings import Finding
from flatout.yolo.data.check.facts import CHECKS, SetFacts, SplitFacts
from flatout.yolo.data.check.run import by_severity, scan_findings
from flatout.yolo.data.data_yaml import SPLITS, DataSet, Split, refuse_missing
from flatout.yolo.data.find import Pair
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.open_data import gather
from flatout.yolo.data.scan import ScanConfig, ScanTable, image_set

logger = logging.getLogger(__name__)

WARNED = frozenset({"labels-none-val", "labels-often-dropped"})
"""Checks that are worth a warning at every start; the remarks about single files are only counted."""


class OpenedSplit(NamedTuple):
    """The pictures that can be used, and the table of all that were looked at."""

    images: ImageSet
    pairs: list[Pair]
    table: ScanTable


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """How a split is opened."""

    scan: ScanConfig = field(default_factory=ScanConfig)
    cache_folder: Path | None = None
    """Where label caches are kept; None: nowhere. `label_cache.default_folder()` is the usual place."""
    single_class: bool = False
    needs_labels: bool = False
    """Refuse a train split without a label that can be used; else that is a warning."""
    allow_bad_labels: bool = False
    """Use a split of whose labels more than half are dropped."""
    silent: bool = False
    """Log neither counts nor warnings."""

    @property
    def waived(self) -> frozenset[str]:
        """Checks that do not stop the start, though they find something."""
        waived = {
            "class-beyond-names": self.single_class,
            "labels-none": not self.needs_labels,
            "labels-mostly-dropped": self.allow_bad_labels,
        }
        return frozenset(check for check, is_waived in waived.items() if is_waived)


def open_training_splits(
    data: DataSet, *, strict: bool, single_class: bool, allow_bad_labels: bool, silent: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Pictures to train on and to validate on; DataError for whatever stops a training."""
    config = SplitConfig(
        scan=ScanConfig(strict=strict),
        cache_folder=default_folder(),
        single_class=single_class,
        needs_labels=True,
        allow_bad_labels=allow_bad_labels,
        silent=silent,
    )
    return open_split(data, "train", config).images, open_split(data, "val", config).images


def open_split(data: DataSet, split: Split, config: SplitConfig) -> OpenedSplit:
    """The pictures of a split; DataError where there are none, or where a check that stops a start finds something."""
    scan = replace(config.scan, names=data.names)
    found, pairs, table = gather(data.entries[split], scan, cache_folder=config.cache_folder)
    facts = SplitFacts(split, found, pairs, table, None, data.names)
    if pairs and not table.used_N.any():
        raise DataError(
            f"{data.file}: {split}: none of {counted(len(pairs), 'picture')} can be used. "
            f"See: flatout yolo check {data.file}"
        )
    findings = by_severity(_findings(data, facts, strict=scan.strict))
    if stopping := [finding for finding in findings if finding.topic not in config.waived | WARNED]:
        raise _refusal(data, stopping)
    if not config.silent:
        _log_counts(data, facts)
        for finding in findings:
            if finding.topic != "class-beyond-names":  # one class for all: their numbers do not matter
                advice = _sentence(finding.advice)
                logger.warning("%s: %s. %s", _place(data, finding), finding.value, advice)
    paths = [pair.image for pair in pairs]
    images = image_set(table, paths, data.names, single_class=True) if config.single_class else facts.images
    return OpenedSplit(images, pairs, table)


def _findings(data: DataSet, split: SplitFacts, *, strict: bool) -> Iterator[Finding]:
    """What the checks find that can stop a start or that are worth a warning."""
    chosen = {check.id for check in CHECKS.values() if check.stops} | WARNED
    yield from (finding for finding in scan_findings(split, strict) if finding.topic in chosen)
    facts = SetFacts(data, [], {split.name: split})
    for check in CHECKS.values():
        if check.id in chosen and check.look is not None:
            yield from check.look(facts)


def _refusal(data: DataSet, findings: list[Finding]) -> DataError:
    """The error for the first of them, and how many there are of its kind."""
    first = findings[0]
    if first.topic == "path-missing":
        return refuse_missing(data, first.where)
    others = sum(finding.topic == first.topic for finding in findings) - 1
    more = f" (and {others:,} more of this kind)" if others else ""
    advice = _sentence(first.advice)
    listed = f"List everything with: flatout yolo check {data.file}"
    return DataError(f"{_place(data, first)}: {first.value}{more}. {advice} {listed}")


def _place(data: DataSet, finding: Finding) -> str:
    return f"{data.file}: {finding.where}" if finding.where in SPLITS else finding.where


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _log_counts(data: DataSet, split: SplitFacts) -> None:
    """One line with the counts, and one if anything was dropped."""
    counts = split.table.counts()
    logger.info("%s: %s", split.name, ", ".join(f"{count} {name}" for name, count in counts.items()))
    told = Counter(problem.check for listed in split.table.problems.values() for problem in listed)
    if told:
        listed = ", ".join(f"{count} {check}" for check, count in told.most_common(5))
        remarks = counted(told.total(), "remark")
        logger.warning("%s: %s (%s). List them with: flatout yolo check %s", split.name, remarks, listed, data.file)
