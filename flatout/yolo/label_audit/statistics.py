"""What a training saw of each label: `--audit` gathers it, `flatout yolo audit RUN` uses it.

    after every k-th epoch: moving average --a pass over the training images--> evidence --> PassStatistics
    in every step: the network's predictions for its targets (in_step.py) --after an epoch--> StepStatistics

A label that was confirmed early and stays so is good. One that the network confirms only late was learned by heart, and
one that comes and goes is doubtful; the last weights alone show neither.

Dimension key:  T labels
"""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import DataError
from flatout.safefiles import write_file
from flatout.yolo.label_audit.rank import Evidence
from flatout.yolo.label_audit.set_boxes import SetBoxes

FILE_NAME = "label_statistics.npz"
LEARNED = 0.25
"""A label counts as learned in a pass, or an epoch, if its own class is found at its place with this confidence."""
CLASS_BITS = 11
SCORE_UNITS = (1 << (31 - CLASS_BITS)) - 1
"""Bits of the class, and steps of the confidence, in an entry of `StepStatistics.confused_T`."""
COLUMNS = ("seen", "own", "near", "other", "iou", "loss")
"""What steps sum up over the appearances of a label; see `in_step.TargetTerms`."""
_COLUMNS = ("own_T", "near_T", "other_T", "iou_T", "learned_T", "forgotten_T", "is_learned_T")


@dataclass(frozen=True, kw_only=True)
class PassStatistics:
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
    def empty(cls, labels: SetBoxes) -> "PassStatistics":
        columns: dict[str, Any] = {name: np.zeros(len(labels.class_D), np.float32) for name in _COLUMNS}
        return cls(num_passes=0, weight=0.0, fingerprint=fingerprint(labels), **columns)

    def add(self, evidence: Evidence) -> "PassStatistics":
        """The statistics with one more pass."""
        weight = weight_of(evidence.own_T)
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
    def from_plain(cls, plain: Mapping[str, Any]) -> "PassStatistics":
        columns: dict[str, Any] = {name: np.asarray(plain[name], np.float32) for name in _COLUMNS}
        return cls(
            num_passes=int(plain["num_passes"]),
            weight=float(plain["weight"]),
            fingerprint=str(plain["fingerprint"]),
            **columns,
        )


@dataclass(frozen=True, kw_only=True)
class StepStatistics:
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
    def empty(cls, num_labels: int, fingerprint: str) -> "StepStatistics":
        columns: dict[str, Any] = {
            each.name: np.zeros(num_labels, np.int32 if each.name == "confused_T" else np.float32)
            for each in fields(cls)
            if each.name.endswith("_T")
        }
        return cls(fingerprint=fingerprint, num_epochs=0, **columns)

    def add(self, sums: Mapping[str, np.ndarray]) -> "StepStatistics":
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
    def from_plain(cls, plain: Mapping[str, Any]) -> "StepStatistics":
        values: dict[str, Any] = {each.name: plain[each.name] for each in fields(cls)}
        values |= {name: np.asarray(value) for name, value in values.items() if name.endswith("_T")}
        values |= {"fingerprint": str(plain["fingerprint"]), "num_epochs": int(plain["num_epochs"])}
        return cls(**values)


def unpack_confusion(packed_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and class of each entry of `StepStatistics.confused_T`; class -1 where there is none."""
    class_T = np.where(packed_T > 0, packed_T & ((1 << CLASS_BITS) - 1), -1)
    return (packed_T >> CLASS_BITS) / np.float32(SCORE_UNITS), class_T


def weight_of(own_T: np.ndarray) -> float:
    """How much an epoch or a pass counts: the squared mean of `own`.

    An untrained network confirms nothing, and that says nothing about a label.
    """
    return float(own_T.mean()) ** 2 if len(own_T) else 0.0


def fingerprint(labels: SetBoxes) -> str:
    """A digest of the labels and their order."""
    digest = hashlib.sha256()
    for array in (labels.first_N, labels.box_D4, labels.class_D):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class LabelHistory:
    """What a training saw of its labels."""

    passes: PassStatistics | None = None
    steps: StepStatistics | None = None

    @property
    def fingerprint(self) -> str:
        """Hash of the labels; "" if nothing was gathered."""
        parts = [part for part in (self.passes, self.steps) if part is not None]
        return parts[0].fingerprint if parts else ""


def with_history(evidence: Evidence, history: LabelHistory) -> Evidence:
    """The evidence of the finished network, averaged with what the training saw.

    Both count the same if the network knew as much in those passes as it does now, as in a long training. In a short
    one the passes were made by worse networks, and count less.
    """
    statistics = history.passes
    if statistics is None:
        return evidence
    passes, now = statistics.weight / max(1, statistics.num_passes), weight_of(evidence.own_T)
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

STEPS = "steps."
"""What the names of step statistics begin with in the file; those of passes have no prefix."""


def write_history(path: Path, history: LabelHistory) -> None:
    """Write an .npz file atomically."""
    sink = io.BytesIO()
    passes = {} if history.passes is None else history.passes.as_plain()
    steps = {} if history.steps is None else {f"{STEPS}{name}": each for name, each in vars(history.steps).items()}
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in (passes | steps).items()}
    np.savez_compressed(sink, **arrays)
    write_file(path, sink.getvalue())


def read_history(path: Path) -> LabelHistory | None:
    """The history of a run; None if it has none. DataError if the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            plain = {name: file[name] for name in file.files}
        steps = {name.removeprefix(STEPS): each for name, each in plain.items() if name.startswith(STEPS)}
        return LabelHistory(
            passes=PassStatistics.from_plain(plain) if "num_passes" in plain else None,
            steps=StepStatistics.from_plain(steps) if steps else None,
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"{path}: is damaged ({error}). Delete it to audit without the training's history.") from None
