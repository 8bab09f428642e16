"""What checks look at: the data set, and for each split the files, the scan and the decoded pictures.

Dimension key:  N pictures   T labels of all pictures
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flatout.findings import LEVEL_OF, Finding, Severity
from flatout.yolo.data.anchors import boxes_at_size
from flatout.yolo.data.check.decode_check import DeepTable
from flatout.yolo.data.data_yaml import Complaint, DataSet
from flatout.yolo.data.find import Found, Pair
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.scan import LABEL_FILES, ScanTable, image_set


@dataclass(frozen=True)
class SplitFacts:
    """One split: train, val or test."""

    name: str
    found: Found
    pairs: list[Pair]
    table: ScanTable
    deep: DeepTable | None
    """Of the pictures that are decoded; None for a quick check."""
    class_names: tuple[str, ...] = ()
    trouble: str = ""
    """Why nothing could be read at all."""

    @cached_property
    def images(self) -> ImageSet:
        """The pictures that training would use."""
        return image_set(self.table, [pair.image for pair in self.pairs], self.class_names)

    @cached_property
    def picture_T(self) -> np.ndarray:
        """Number of each label's picture among `images`."""
        return np.repeat(np.arange(len(self.images)), np.diff(self.images.labels.first_N))

    @cached_property
    def used_rows(self) -> list[int]:
        """Position of each of `images` among the pairs."""
        return np.flatnonzero(self.table.used_N).tolist()

    @property
    def num_dropped(self) -> int:
        """Labels that cannot be used."""
        return int(self.table.picture_N["num_dropped"].sum())

    @property
    def dropped_share(self) -> float:
        """Share of all labels that cannot be used."""
        return self.num_dropped / max(1, self.num_dropped + len(self.table.class_box_T5))

    def label_place(self, picture: int) -> str:
        """The label file of one of `images`."""
        return self.pairs[self.used_rows[picture]].label_place

    def box_px(self, img_size: int) -> np.ndarray:
        """Width and height of each label at a training size, float64 [T, 2]."""
        size_T2 = self.images.size_wh_N2[self.picture_T].astype(np.float64)
        return boxes_at_size(size_T2, self.images.labels.class_box_T5[:, 3:], img_size)

    def label_files(self, state: str) -> Iterator[Pair]:
        """The pictures whose label file is in this state."""
        for row in np.flatnonzero(self.table.picture_N["label_file"] == LABEL_FILES.index(state)).tolist():
            yield self.pairs[row]


@dataclass(frozen=True)
class SetFacts:
    """A whole data set."""

    data: DataSet
    complaints: list[Complaint]
    splits: dict[str, SplitFacts]
    img_size: int = 640
    anchor_wh_A2: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """Anchors to judge, in pixels."""
    label_names: dict[str, list[str]] = field(default_factory=dict)
    """Folder of labels -> names of the files in it."""

    @property
    def num_classes(self) -> int:
        return len(self.data.names)


# Every check there is: what it looks for, how serious it is, and what to do about it.
#
# A check is found either while files are scanned (the scan names it in a Problem) or by a function over the finished
# scan, which `looking_for` puts here. docs/data.md publishes this table.

Look = Callable[["SetFacts"], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One entry of the published list."""

    id: str
    severity: Severity
    looks_for: str
    advice: str
    look: Look | None = None
    """None: the scan finds it on its way."""
    stops: bool = False
    """Whether a training on such data does not start; see `open_set.py`."""


CHECKS: dict[str, Check] = {}


def looking_for(
    id: str, severity: Severity, looks_for: str, advice: str, *, stops: bool = False
) -> Callable[[Look], Look]:
    """Register a function as a check."""

    def register(look: Look) -> Look:
        add(Check(id, severity, looks_for, advice, look, stops))
        return look

    return register


def add(check: Check) -> None:
    assert check.id not in CHECKS, f"two checks are called {check.id}"
    CHECKS[check.id] = check


def found_at(check: str, where: str, text: str) -> Finding:
    """One place where a check found what it looks for."""
    entry = CHECKS[check]
    return Finding(check, text, LEVEL_OF[entry.severity], entry.advice, where)
