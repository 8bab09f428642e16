"""What passes during a training saw of each label: `--audit` gathers it, `flatout yolo audit RUN` uses it.

    after every k-th epoch: moving average --a pass over the training images--> evidence --> running sums per label

A label that was confirmed early and stays so is good. One that the network confirms only late was learned by heart, and
one that comes and goes is doubtful; the last weights alone show neither.

Dimension key:  T labels
"""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import DataError
from flatout.safefiles import write_file
from flatout.yolo.label_audit.rank import Evidence
from flatout.yolo.label_audit.set_boxes import SetBoxes

FILE_NAME = "label_statistics.npz"
LEARNED = 0.25
"""A label counts as learned in a pass if its own class is found at its place with this confidence."""
_COLUMNS = ("own_T", "near_T", "other_T", "iou_T", "learned_T", "forgotten_T", "is_learned_T")


@dataclass(frozen=True, kw_only=True)
class LabelStatistics:
    """Sums over passes, one entry per label; float32. Evidence is weighted by how much the network knew by then."""

    num_passes: int
    weight: float
    """Sum of the weights of the passes, see `weight_of`."""
    fingerprint: str
    """Hash of the labels that were audited."""
    own_T: np.ndarray
    """Weighted sum of `Evidence.own_T`; likewise near and other."""
    near_T: np.ndarray
    other_T: np.ndarray
    iou_T: np.ndarray
    """Sum of the IoU with the assigned detection."""
    learned_T: np.ndarray
    """Passes in which the label was learned."""
    forgotten_T: np.ndarray
    """Times that a learned label was not learned in the next pass."""
    is_learned_T: np.ndarray
    """1 if it was learned in the last pass."""

    @classmethod
    def empty(cls, labels: SetBoxes) -> "LabelStatistics":
        columns: dict[str, Any] = {name: np.zeros(len(labels.class_D), np.float32) for name in _COLUMNS}
        return cls(num_passes=0, weight=0.0, fingerprint=fingerprint(labels), **columns)

    def add(self, evidence: Evidence) -> "LabelStatistics":
        """The statistics with one more pass."""
        weight = weight_of(evidence)
        is_learned_T = (evidence.own_T >= LEARNED).astype(np.float32)
        return replace(
            self,
            num_passes=self.num_passes + 1,
            weight=self.weight + weight,
            own_T=self.own_T + (weight * evidence.own_T).astype(np.float32),
            near_T=self.near_T + (weight * evidence.near_T).astype(np.float32),
            other_T=self.other_T + (weight * evidence.other_T).astype(np.float32),
            iou_T=self.iou_T + evidence.matched_iou_T.astype(np.float32),
            learned_T=self.learned_T + is_learned_T,
            forgotten_T=self.forgotten_T + self.is_learned_T * (1 - is_learned_T),
            is_learned_T=is_learned_T,
        )

    def as_plain(self) -> dict[str, Any]:
        """Everything by name: numbers, text and arrays."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return {"num_passes": self.num_passes, "weight": self.weight, "fingerprint": self.fingerprint, **columns}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "LabelStatistics":
        columns: dict[str, Any] = {name: np.asarray(plain[name], np.float32) for name in _COLUMNS}
        return cls(
            num_passes=int(plain["num_passes"]),
            weight=float(plain["weight"]),
            fingerprint=str(plain["fingerprint"]),
            **columns,
        )


def weight_of(evidence: Evidence) -> float:
    """How much a pass counts: the squared mean of `own_T`. An untrained network confirms nothing, and that says nothing
    about a label."""
    return float(evidence.own_T.mean()) ** 2 if len(evidence.own_T) else 0.0


def fingerprint(labels: SetBoxes) -> str:
    """A digest of the labels and their order."""
    digest = hashlib.sha256()
    for array in (labels.first_N, labels.box_D4, labels.class_D):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def with_history(evidence: Evidence, statistics: LabelStatistics) -> Evidence:
    """The evidence of the finished network, averaged with what passes during the training saw.

    Both count the same if the network knew as much in those passes as it does now, as in a long training. In a short
    one the passes were made by worse networks, and count less.
    """
    passes, now = statistics.weight / max(1, statistics.num_passes), weight_of(evidence)
    if min(passes, now) <= 0:
        return evidence
    share = min(1.0, passes / now) / 2

    def blend(now_T: np.ndarray, sum_T: np.ndarray) -> np.ndarray:
        return np.asarray((1 - share) * now_T + share * sum_T / statistics.weight)

    # Without a detection of another class now, there is no class to suggest.
    other_T = np.where(evidence.other_T > 0, blend(evidence.other_T, statistics.other_T), 0.0)
    return replace(
        evidence,
        own_T=blend(evidence.own_T, statistics.own_T),
        near_T=blend(evidence.near_T, statistics.near_T),
        other_T=other_T,
    )


# File


def write_statistics(path: Path, statistics: LabelStatistics) -> None:
    """Write an .npz file atomically."""
    sink = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in statistics.as_plain().items()}
    np.savez_compressed(sink, **arrays)
    write_file(path, sink.getvalue())


def read_statistics(path: Path) -> LabelStatistics | None:
    """The statistics of a run; None if it has none. DataError if the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return LabelStatistics.from_plain({name: file[name] for name in file.files})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"{path}: is damaged ({error}). Delete it to audit without the training's passes.") from None
