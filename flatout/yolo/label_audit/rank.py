"""From labels and detections to a ranked list of labels that are probably wrong.

    labels, detections of all images -> evidence for and against each label -> probabilities by kind -> one list

Five kinds of findings: an object without a label (missing), a label without an object (spurious), a wrong class, a box
that was moved, and a second label of the same object (duplicate). Each kind has its own evidence. To rank them in one
list, evidence becomes a probability by comparing two counts of this very data set: how many errors of this kind would
show at least this much evidence, if RATE of all labels had one, and how many labels do. Where the network is often
unsure (tiny objects, classes that look alike), many good labels show the same evidence, and the probability is low.

Pure NumPy: same arguments, same list.

Dimension key:  T labels   D detections   N images   n labels of one image   m its detections   P pairs of them
                K errors that are learned from a label   X labels or detections
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np

from flatout.yolo.label_audit.set_boxes import SetBoxes, overlaps

Kind = Literal["missing", "spurious", "wrong class", "moved box", "duplicate"]
KINDS: tuple[Kind, ...] = ("missing", "spurious", "wrong class", "moved box", "duplicate")

RATE = 0.02
"""Assumed share of labels with an error of a given kind; it only decides how kinds and classes are mixed."""
RATE_OF_MISSING = 0.04
"""The same for objects without a label, which people overlook more often than they draw a wrong label."""
WEAK = 0.1
MIN_SCORE = 0.1
"""Findings with a lower score are left out."""
NONE = -1


class Ramp(NamedTuple):
    """0 up to `low`, 1 from `high` on, linear in between."""

    low: float
    high: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.clip((x - self.low) / (self.high - self.low), 0, 1))


SAME_PLACE = Ramp(0.5, 0.75)
"""How much a detection of this IoU confirms the place of a label."""
SAME_OBJECT = Ramp(0.1, 0.3)
"""How much a detection of this IoU may be about the same object as a label."""
COVERED = Ramp(0.25, 0.5)
"""How much a detection of this IoU with a label is explained by that label."""
PAIR = Ramp(0.65, 0.9)
"""How much two labels of this IoU are about the same object."""
MATCH_IOU = 0.15
"""Smallest IoU of a label and the detection that is assigned to it."""
CLASS_IOU = 0.45
"""Smallest IoU of a label and a detection of another class that speaks about the label."""


@dataclass(frozen=True)
class Evidence:
    """What the detections say about every label, and the labels about every detection."""

    own_T: np.ndarray
    """Confidence that there is an object of the label's class at its place."""
    near_T: np.ndarray
    """Confidence that there is any object near the label."""
    matched_T: np.ndarray
    """Detection of the same class that is assigned to the label, or NONE."""
    matched_iou_T: np.ndarray
    matched_score_T: np.ndarray
    other_T: np.ndarray
    """Confidence of the best detection of another class at the label's place that no label of that class claims."""
    other_detection_T: np.ndarray
    """That detection, or NONE."""
    twin_T: np.ndarray
    """IoU with a label that is better confirmed, or confirmed as well and comes earlier; 0 without one."""
    twin_label_T: np.ndarray
    free_D: np.ndarray
    """Share of a detection's confidence that no label and no better detection explains."""

    @classmethod
    def empty(cls, num_labels: int, num_detections: int) -> "Evidence":
        numbers = ("matched_T", "other_detection_T", "twin_label_T")
        of_labels = [each.name for each in fields(cls) if each.name != "free_D"]
        columns = {name: np.full(num_labels, NONE) if name in numbers else np.zeros(num_labels) for name in of_labels}
        return cls(**columns, free_D=np.ones(num_detections))


def gather_evidence(labels: SetBoxes, found: SetBoxes) -> Evidence:
    """Compare the labels of every image with its detections."""
    evidence = Evidence.empty(len(labels.class_D), len(found.class_D))
    for image in range(labels.num_images):
        _compare(labels, found, labels.rows(image), found.rows(image), evidence)
    return evidence


def _compare(labels: SetBoxes, found: SetBoxes, own: slice, of: slice, evidence: Evidence) -> None:
    """Fill in the evidence of one image."""
    n_P, m_P, iou_P = overlaps(labels.box_D4[own], found.box_D4[of])
    is_same_P = labels.class_D[own][n_P] == found.class_D[of][m_P]
    score_P = found.score_D[of].astype(np.float64)[m_P]
    np.maximum.at(evidence.own_T[own], n_P, is_same_P * SAME_PLACE(iou_P) * score_P)
    np.maximum.at(evidence.near_T[own], n_P, SAME_OBJECT(iou_P) * score_P)
    chosen = assign(n_P, m_P, np.where(is_same_P & (iou_P >= MATCH_IOU), iou_P * score_P, 0.0))
    has, by = n_P[chosen], m_P[chosen]
    evidence.matched_T[own][has] = by + of.start
    evidence.matched_iou_T[own][has] = iou_P[chosen]
    evidence.matched_score_T[own][has] = score_P[chosen]
    is_left_m = np.ones(of.stop - of.start, bool)
    # A detection that confirms another label of its own class says nothing about this one.
    is_left_m[by[iou_P[chosen] >= SAME_PLACE.low]] = False
    others = best_of_each(n_P, np.where(~is_same_P & is_left_m[m_P] & (iou_P >= CLASS_IOU), score_P, 0.0))
    evidence.other_T[own][n_P[others]] = score_P[others]
    evidence.other_detection_T[own][n_P[others]] = m_P[others] + of.start
    np.minimum.at(evidence.free_D[of], m_P, 1 - COVERED(iou_P))
    evidence.free_D[of][by] = 0
    _free_of_better(found, of, evidence)
    _find_twins(labels, own, evidence)


def assign(n_P: np.ndarray, m_P: np.ndarray, weight_P: np.ndarray) -> np.ndarray:
    """Pairs in which everything occurs once, chosen by the largest weight first, while it is above 0; positions."""
    is_free_n, is_free_m = (np.ones(each_P.max(initial=-1) + 1, bool) for each_P in (n_P, m_P))
    chosen = []
    for pair in np.argsort(-weight_P, kind="stable")[: np.count_nonzero(weight_P > 0)].tolist():
        if is_free_n[n_P[pair]] and is_free_m[m_P[pair]]:
            is_free_n[n_P[pair]] = is_free_m[m_P[pair]] = False
            chosen.append(pair)
    return np.array(chosen, np.int64)


def best_of_each(n_P: np.ndarray, value_P: np.ndarray) -> np.ndarray:
    """For every n with a value above 0, the position of its largest value, the first of equal ones."""
    order_P = np.lexsort((-value_P, n_P))
    order_P = order_P[value_P[order_P] > 0]
    return order_P[np.unique(n_P[order_P], return_index=True)[1]]


def _free_of_better(found: SetBoxes, of: slice, evidence: Evidence) -> None:
    """Only the most confident of several detections of one object may be an object without a label."""
    score_m = found.score_D[of]
    order = np.lexsort((np.arange(len(score_m)), -score_m))
    rank_m = np.empty(len(score_m), np.int64)
    rank_m[order] = np.arange(len(score_m))
    m_P, other_P, iou_P = overlaps(found.box_D4[of], found.box_D4[of])
    covered_m = np.zeros(len(score_m), np.float32)
    np.maximum.at(covered_m, m_P, COVERED(iou_P) * (rank_m[other_P] < rank_m[m_P]))
    evidence.free_D[of] *= 1 - covered_m


def _find_twins(labels: SetBoxes, own: slice, evidence: Evidence) -> None:
    support_n = evidence.own_T[own]
    n_P, other_P, iou_P = overlaps(labels.box_D4[own], labels.box_D4[own])
    comes_first_P = (support_n[other_P] > support_n[n_P]) | ((support_n[other_P] == support_n[n_P]) & (other_P < n_P))
    best = best_of_each(n_P, np.where(comes_first_P, iou_P, 0.0))
    evidence.twin_T[own][n_P[best]] = iou_P[best]
    evidence.twin_label_T[own][n_P[best]] = other_P[best] + own.start


# Probabilities


def probability(evidence: np.ndarray, of_errors: np.ndarray, *, num_errors: float) -> np.ndarray:
    """Probability of an error for each entry of `evidence`, given the evidence that errors of this kind would show.

    At a threshold, `num_errors` times the share of `of_errors` at or above it are expected to be errors, among all
    entries at or above it. Where even the weakest tenth of errors would show more, the probability falls with the
    evidence. It never falls when the evidence rises.
    """
    if not len(evidence):
        return np.zeros(0)
    if not len(of_errors):
        return np.asarray(evidence, np.float64)
    order = np.argsort(evidence, kind="stable")
    at = evidence[order]
    num_seen = len(at) - np.searchsorted(at, at, "left")
    expected = num_errors * (1 - np.searchsorted(np.sort(of_errors), at, "left") / len(of_errors))
    share = np.maximum.accumulate(np.minimum(1.0, expected / num_seen))
    share *= np.minimum(1.0, at / max(float(np.quantile(of_errors, WEAK)), 1e-6))
    result = np.empty(len(evidence))
    result[order] = share
    return result


class Finding(NamedTuple):
    """One entry of the list."""

    kind: Kind
    score: float
    """Estimated probability of an error, 0 to 1; entries are ranked by it."""
    image: int
    label: int
    """Index among all labels; NONE for a missing one."""
    detection: int
    """The detection that contradicts the label, or NONE."""
    twin: int = NONE
    """The other label of a duplicate."""


def rank(labels: SetBoxes, found: SetBoxes, evidence: Evidence) -> list[Finding]:
    """All findings with a score of at least MIN_SCORE, most probable first; a label has at most one."""
    score_TK = np.stack(
        [
            _spurious(labels, found, evidence),
            _wrong_class(labels, found, evidence),
            _moved(labels, evidence),
            _duplicate(labels, evidence),
        ],
        1,
    )
    image_T, image_D = labels.image_D, found.image_D
    detections = (None, evidence.other_detection_T, evidence.matched_T, None)
    kind_T = score_TK.argmax(1) if len(score_TK) else np.zeros(0, np.int64)
    findings = []
    for label in np.flatnonzero(score_TK.max(1, initial=0) >= MIN_SCORE).tolist():
        number = int(kind_T[label])
        speaks = detections[number]
        detection = NONE if speaks is None else int(speaks[label])
        kind = KINDS[1 + number]
        twin = int(evidence.twin_label_T[label]) if kind == "duplicate" else NONE
        findings.append(Finding(kind, float(score_TK[label, number]), int(image_T[label]), label, detection, twin))
    score_D = _missing(labels, found, evidence)
    findings += [
        Finding("missing", float(score_D[detection]), int(image_D[detection]), NONE, detection)
        for detection in np.flatnonzero(score_D >= MIN_SCORE).tolist()
    ]
    return sorted(findings, key=lambda each: (-each.score, each.image, each.label, each.detection))


def _scored(probability: np.ndarray, evidence: np.ndarray) -> np.ndarray:
    """Probabilities of many findings are 1 by the counts; their evidence then decides."""
    return np.asarray(probability * (0.5 + 0.5 * evidence))


def _scored_by_class(
    seen_X: np.ndarray, class_X: np.ndarray, errors_TK: np.ndarray, labels: SetBoxes, *, rate: float = RATE
) -> np.ndarray:
    """The score of each label or detection, compared with those of its class only; 0 for the class NONE.

    `errors_TK`: the evidence that an error would show, learned from each label; NaN where a label tells nothing of it.
    """
    score_X = np.zeros(len(class_X))
    for number in np.unique(class_X[class_X != NONE]):
        own_X, is_class_T = class_X == number, labels.class_D == number
        of_errors = errors_TK[is_class_T]
        of_errors = of_errors[~np.isnan(of_errors)]
        share_X = probability(seen_X[own_X], of_errors, num_errors=rate * is_class_T.sum())
        score_X[own_X] = _scored(share_X, seen_X[own_X])
    return score_X


def _score_if_confirmed(evidence: Evidence) -> np.ndarray:
    """The score of the detection that confirms a label; NaN without one."""
    return np.where(evidence.matched_iou_T >= SAME_PLACE.low, evidence.matched_score_T, np.nan)


def _missing(labels: SetBoxes, found: SetBoxes, evidence: Evidence) -> np.ndarray:
    """Per detection: that it is an object without a label. Such objects look like those that have one."""
    seen_D = found.score_D * evidence.free_D
    class_D = np.where(seen_D > 0, found.class_D, NONE)
    return _scored_by_class(seen_D, class_D, _score_if_confirmed(evidence), labels, rate=RATE_OF_MISSING)


def _spurious(labels: SetBoxes, found: SetBoxes, evidence: Evidence) -> np.ndarray:
    """Per label: that there is nothing. Such labels show what boxes at arbitrary places show."""
    background_T = background_evidence(labels, found)
    # If no box of a class has a free place in another image: assume that nothing is there.
    num_free_C = np.bincount(labels.class_D, ~np.isnan(background_T))
    errors_T = np.where(num_free_C[labels.class_D] > 0, 1 - background_T, 1.0)
    return _scored_by_class(1 - evidence.near_T, labels.class_D, errors_T, labels)


def background_evidence(labels: SetBoxes, found: SetBoxes) -> np.ndarray:
    """What `near_T` would be if each label was in the next image instead; NaN where a label is there already."""
    near_T = np.full(len(labels.class_D), np.nan)
    for image in range(labels.num_images):
        there = (image + 1) % labels.num_images
        own, other, of = labels.rows(image), labels.rows(there), found.rows(there)
        box_n4 = labels.box_D4[own]
        near_n, covered_n = np.zeros((2, len(box_n4)), np.float32)
        n_P, m_P, iou_P = overlaps(box_n4, found.box_D4[of])
        np.maximum.at(near_n, n_P, SAME_OBJECT(iou_P) * found.score_D[of][m_P])
        n_P, _, iou_P = overlaps(box_n4, labels.box_D4[other])
        np.maximum.at(covered_n, n_P, iou_P)
        near_T[own] = np.where(covered_n < SAME_OBJECT.low, near_n, np.nan)
    return near_T


def _wrong_class(labels: SetBoxes, found: SetBoxes, evidence: Evidence) -> np.ndarray:
    """Per label: that the object has the class of a detection. Such labels show what labels of that class show."""
    speaks_T = evidence.other_detection_T != NONE
    class_T = np.where(speaks_T, found.class_D[evidence.other_detection_T] if len(found.class_D) else NONE, NONE)
    margin_T = np.clip(evidence.other_T - evidence.own_T, 0, None)
    return _scored_by_class(margin_T, class_T, evidence.own_T, labels)


MOVED = Ramp(0.4, 0.8)
MOVED_IOUS = np.linspace(0.3, 0.6, 7)
"""IoU of boxes that are placed carelessly with the object, for the comparison with errors."""


def _moved(labels: SetBoxes, evidence: Evidence) -> np.ndarray:
    """Per label: that its box misses its object. Such labels show a confident detection beside the label."""
    beside_T = evidence.matched_score_T * (1 - MOVED(evidence.matched_iou_T))
    beside_T = np.clip(beside_T - evidence.own_T * (evidence.matched_iou_T < SAME_PLACE.low), 0, None)
    errors_TK = np.outer(_score_if_confirmed(evidence), 1 - MOVED(MOVED_IOUS))
    return _scored_by_class(beside_T, labels.class_D, errors_TK, labels)


def _duplicate(labels: SetBoxes, evidence: Evidence) -> np.ndarray:
    """Per label: that it is a second label of an object. It has no detection of its own."""
    alone_T = evidence.matched_score_T * (evidence.matched_iou_T >= SAME_PLACE.low)
    twin_T = PAIR(evidence.twin_T) * (1 - alone_T)
    share_T = probability(twin_T, np.ones(1), num_errors=RATE * len(twin_T)) * (twin_T > 0)
    return _scored(np.minimum(share_T, twin_T), twin_T)
