"""What the steps of a training saw of each label: `--audit` gathers it, `flatout yolo audit RUN` uses it.

    in every step: the network's predictions for its targets (in_step.py) --after an epoch--> running sums per label

A label that was confirmed early and stays so is good. One that the network confirms only late was learned by heart, and
one that comes and goes is doubtful; the last weights alone show neither.

Dimension key:  T labels
"""

import hashlib
import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from flatout.errors import DataError
from flatout.safefiles import write_file
from flatout.yolo.label_audit.rank import Evidence
from flatout.yolo.label_audit.set_boxes import SetBoxes

FILE_NAME = "label_statistics.npz"
LEARNED = 0.25
"""A label counts as learned in an epoch if its own class is predicted at its place with this mean confidence."""
CLASS_BITS = 11
SCORE_UNITS = (1 << (31 - CLASS_BITS)) - 1
"""Bits of the class, and steps of the confidence, in an entry of `LabelStatistics.confused_T`."""
COLUMNS = ("seen", "own", "near", "other", "iou", "loss")
"""What steps sum up over the appearances of a label; see `in_step.TargetTerms`."""


@dataclass(frozen=True, kw_only=True)
class LabelStatistics:
    """Sums over epochs, one entry per label. Evidence is weighted by how much the network knew in that epoch."""

    fingerprint: str
    """Hash of the labels that were trained on."""
    num_epochs: int
    epochs_T: np.ndarray
    """float32: epochs in which the label was shown."""
    weight_T: np.ndarray
    """Sum of the weights of these epochs."""
    own_T: np.ndarray
    """Weighted sum over epochs of the mean over the label's appearances; likewise near and other."""
    near_T: np.ndarray
    other_T: np.ndarray
    iou_T: np.ndarray
    """Sum over epochs of the mean; likewise loss."""
    loss_T: np.ndarray
    learned_T: np.ndarray
    """Epochs in which the label was learned."""
    forgotten_T: np.ndarray
    """Times that a learned label was not learned when it was shown in the next epoch."""
    is_learned_T: np.ndarray
    """1 if it was learned when it was last shown."""
    confused_T: np.ndarray
    """int32: the most confident detection of another class at the label's place, see `unpack_confusion`."""

    @classmethod
    def empty(cls, num_labels: int, fingerprint: str) -> "LabelStatistics":
        columns: dict[str, Any] = {
            each.name: np.zeros(num_labels, np.int32 if each.name == "confused_T" else np.float32)
            for each in fields(cls)
            if each.name.endswith("_T")
        }
        return cls(fingerprint=fingerprint, num_epochs=0, **columns)

    def add(self, sums: Mapping[str, np.ndarray]) -> "LabelStatistics":
        """The statistics with one more epoch; `sums` as `LabelSums.read` returns them, added up over the ranks."""
        seen_T, own_T, near_T, other_T, iou_T, loss_T = np.asarray(sums["sum"], np.float32).T
        is_seen_T = (seen_T > 0).astype(np.float32)
        count_T = np.maximum(seen_T, 1)
        own_T = own_T / count_T
        weight = weight_of(own_T[seen_T > 0])
        is_learned_T = (own_T >= LEARNED).astype(np.float32)
        return replace(
            self,
            num_epochs=self.num_epochs + 1,
            epochs_T=self.epochs_T + is_seen_T,
            weight_T=self.weight_T + weight * is_seen_T,
            own_T=self.own_T + weight * own_T,
            near_T=self.near_T + weight * near_T / count_T,
            other_T=self.other_T + weight * other_T / count_T,
            iou_T=self.iou_T + iou_T / count_T,
            loss_T=self.loss_T + loss_T / count_T,
            learned_T=self.learned_T + is_learned_T,
            forgotten_T=self.forgotten_T + self.is_learned_T * is_seen_T * (1 - is_learned_T),
            is_learned_T=np.where(seen_T > 0, is_learned_T, self.is_learned_T),
            confused_T=np.maximum(self.confused_T, np.asarray(sums["confused"], np.int32)),
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "LabelStatistics":
        values: dict[str, Any] = {each.name: plain[each.name] for each in fields(cls)}
        values |= {name: np.asarray(value) for name, value in values.items() if name.endswith("_T")}
        values |= {"fingerprint": str(plain["fingerprint"]), "num_epochs": int(plain["num_epochs"])}
        return cls(**values)


def unpack_confusion(packed_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and class of each entry of `LabelStatistics.confused_T`; class -1 where there is none."""
    class_T = np.where(packed_T > 0, packed_T & ((1 << CLASS_BITS) - 1), -1)
    return (packed_T >> CLASS_BITS) / np.float32(SCORE_UNITS), class_T


def weight_of(own_T: np.ndarray) -> float:
    """How much an epoch counts: the squared mean of `own`.

    An untrained network confirms nothing, and that says nothing about a label.
    """
    return float(own_T.mean()) ** 2 if len(own_T) else 0.0


def fingerprint(labels: SetBoxes) -> str:
    """A digest of the labels and their order."""
    digest = hashlib.sha256()
    for array in (labels.first_N, labels.box_D4, labels.class_D):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def with_history(evidence: Evidence, statistics: LabelStatistics) -> Evidence:
    """The evidence of the finished network, averaged with what the steps of its training saw.

    Both count the same if the network knew as much in those epochs as it does now, as in a long training. In a short
    one most epochs were those of worse networks, and count less. Augmented images are harder: what the steps saw is
    scaled so that it has the mean of what the finished network says.
    """
    shown_T = statistics.weight_T > 0
    now, then = weight_of(evidence.own_T), float(statistics.weight_T.sum() / max(1.0, statistics.epochs_T.sum()))
    if min(now, then) <= 0:
        return evidence
    share = min(1.0, then / now) / 2

    def blend(now_T: np.ndarray, sum_T: np.ndarray, *, scaled: bool = True) -> np.ndarray:
        then_T = sum_T / np.where(shown_T, statistics.weight_T, 1)
        if scaled:
            then_T = np.clip(then_T * now_T[shown_T].mean() / max(float(then_T[shown_T].mean()), 1e-9), 0, 1)
        return np.where(shown_T, (1 - share) * now_T + share * then_T, now_T)

    # Without a detection of another class now, there is no class to suggest.
    other_T = np.where(evidence.other_T > 0, blend(evidence.other_T, statistics.other_T, scaled=False), 0.0)
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
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in vars(statistics).items()}
    np.savez_compressed(sink, **arrays)
    write_file(path, sink.getvalue())


def read_statistics(path: Path) -> LabelStatistics | None:
    """The statistics of a run; None if it has none, or those of an older version. DataError if the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            plain = {name: file[name] for name in file.files}
        return None if "num_passes" in plain else LabelStatistics.from_plain(plain)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile, zlib.error):
        raise DataError(f"{path}: is damaged or cannot be read. Delete it to audit the weights alone.") from None
