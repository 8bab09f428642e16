"""Scores of an evaluation: pixel and image ranking, detections, recall.

Dimension key:  V bins of rising score   N scores or pixels   n pixels of defects   H W image
                K dead pixels, or labelled defects
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import dist
from typing import NamedTuple

import numpy as np
import torch

# Ranking: AUROC, average precision, AU-PRO and best F1, over millions of pixels in constant memory.
#
# Scores are counted per class in bins, and every value here is computed from the counts. One bin per distinct score
# gives exact values. Pixels of whole data sets are binned by the upper half of their float32 bit pattern, which is
# monotonic with a resolution of 0.8 %; scores in the same bin count as ties.

_DROPPED_BITS = 16
NUM_BINS = (0x3F800000 >> _DROPPED_BITS) + 1
"""Number of truncated bit patterns from 0.0 to 1.0."""
PRO_MAX_FPR = 0.3
"""False positive rate of pixels up to which AU-PRO is integrated, as usual in the literature."""


@dataclass(frozen=True)
class Ranking:
    """Number of positives and negatives per bin of rising score."""

    positive_V: np.ndarray
    negative_V: np.ndarray
    score_V: np.ndarray
    """Lowest score of each bin."""
    overlap_V: np.ndarray | None = None
    """Share of a labelled defect's pixels per bin, averaged over all defects; None if there are none."""

    @property
    def auroc(self) -> float | None:
        """Probability that a positive outranks a negative, ties counting half; None if one class is missing."""
        positives, negatives = int(self.positive_V.sum()), int(self.negative_V.sum())
        if not positives or not negatives:
            return None
        below_V = np.cumsum(self.negative_V) - self.negative_V
        wins = (self.positive_V * (below_V + self.negative_V / 2)).sum()
        return float(wins / (positives * negatives))

    @property
    def average_precision(self) -> float | None:
        """Area under the precision-recall curve as a step function; None without positives."""
        hit_V, precision_V = self._curve()
        if hit_V[-1] == 0:
            return None
        gained_V = np.diff(hit_V, prepend=0)
        return float((gained_V * precision_V).sum() / hit_V[-1])

    def au_pro(self, max_fpr: float = PRO_MAX_FPR) -> float | None:
        """Area under the per-region overlap over the false positive rate up to `max_fpr`, divided by `max_fpr`.

        Every defect counts equally, however large it is. Linear between bins; None without defects or good pixels.
        """
        negatives = int(self.negative_V.sum())
        if self.overlap_V is None or not negatives:
            return None
        fpr_V = np.concatenate(([0.0], np.cumsum(self.negative_V[::-1]) / negatives))
        pro_V = np.concatenate(([0.0], np.cumsum(self.overlap_V[::-1])))
        width_V, rise_V = np.diff(fpr_V), np.diff(pro_V)
        # The share of each step that lies below the limit; a step straight up has no area.
        inside_V = np.clip((max_fpr - fpr_V[:-1]) / np.maximum(width_V, 1e-300), 0, 1)
        area = (width_V * inside_V * (pro_V[:-1] + rise_V * inside_V / 2)).sum()
        return float(area / max_fpr)

    def best_f1(self) -> tuple[float, float] | None:
        """The best F1 and the threshold that gives it; None without positives."""
        hit_V, precision_V = self._curve()
        if hit_V[-1] == 0:
            return None
        recall_V = hit_V / hit_V[-1]
        f1_V = 2 * precision_V * recall_V / np.maximum(precision_V + recall_V, 1e-12)
        best = int(np.argmax(f1_V))
        return float(f1_V[best]), float(self.score_V[::-1][best])

    def iou_at(self, threshold: float) -> float | None:
        """Intersection over union of label and score >= threshold, exact to one bin; None if both are empty."""
        above_V = self.score_V >= threshold
        hits, false = self.positive_V[above_V].sum(), self.negative_V[above_V].sum()
        union = self.positive_V.sum() + false
        return float(hits / union) if union else None

    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """True positives and precision at falling thresholds, [V] each."""
        hit_V = np.cumsum(self.positive_V[::-1])
        predicted_V = hit_V + np.cumsum(self.negative_V[::-1])
        return hit_V, hit_V / np.maximum(predicted_V, 1)


def rank_scores(labels_N: np.ndarray, scores_N: np.ndarray) -> Ranking:
    """Exact ranking: one bin per distinct score."""
    score_V, bin_N = np.unique(np.asarray(scores_N), return_inverse=True)
    is_positive_N = np.asarray(labels_N, np.bool_).reshape(-1)
    positive_V = np.bincount(bin_N.reshape(-1)[is_positive_N], minlength=len(score_V))
    negative_V = np.bincount(bin_N.reshape(-1)[~is_positive_N], minlength=len(score_V))
    return Ranking(positive_V, negative_V, score_V)


class PixelCounts:
    """Accumulates the probabilities of any number of pixels in bins, on a device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        # A stream of its own, because it waits for its results, and must not wait for what a network has to do.
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with torch.cuda.stream(self._stream):
            self._all_V, self._positive_V = torch.zeros((2, NUM_BINS), dtype=torch.int64, device=self._device)
            self._overlap_V = torch.zeros(NUM_BINS, dtype=torch.float64, device=self._device)
        self._num_defects = 0

    def add(self, is_defect_HW: np.ndarray, probability_HW: np.ndarray) -> None:
        import cv2

        count, number_HW = cv2.connectedComponents(is_defect_HW.astype(np.uint8), connectivity=8)
        with torch.cuda.stream(self._stream):
            self._count(np.asarray(number_HW), count, np.ascontiguousarray(probability_HW, np.float32))

    def _count(self, number_HW: np.ndarray, count: int, probability_HW: np.ndarray) -> None:
        """Count the pixels of an image whose defects are numbered from 1, below `count`."""
        if self._stream is None:
            found = _counts_on_host(number_HW.reshape(-1), count, probability_HW.reshape(-1))
            all_V, positive_V, overlap_V = map(torch.from_numpy, found)
        else:
            number_N, probability_N = (
                torch.from_numpy(each_HW).to(self._device).view(-1) for each_HW in (number_HW, probability_HW)
            )
            bin_N = (probability_N.view(torch.int32) >> _DROPPED_BITS).clamp_(max=NUM_BINS - 1)
            pixels = number_N.nonzero()[:, 0]
            number_n, bin_n = number_N[pixels].long(), bin_N[pixels].long()
            # The pixels of a defect have weights that sum to 1.
            weight_K = 1 / torch.bincount(number_n, minlength=count).double()
            all_V = torch.bincount(bin_N.long(), minlength=NUM_BINS)
            positive_V = torch.bincount(bin_n, minlength=NUM_BINS)
            overlap_V = torch.bincount(bin_n, weight_K[number_n], minlength=NUM_BINS)
        self._all_V += all_V
        self._positive_V += positive_V
        self._overlap_V += overlap_V
        self._num_defects += count - 1

    def ranking(self) -> Ranking:
        score_V = (np.arange(NUM_BINS, dtype=np.uint32) << _DROPPED_BITS).view(np.float32)
        with torch.cuda.stream(self._stream):
            overlap_V = self._overlap_V.cpu().numpy() / self._num_defects if self._num_defects else None
            positive_V, all_V = self._positive_V.cpu().numpy(), self._all_V.cpu().numpy()
        return Ranking(positive_V, all_V - positive_V, score_V, overlap_V)


def _counts_on_host(
    number_N: np.ndarray, count: int, probability_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels, pixels of defects and overlap per bin. By NumPy: torch's threads wait for those that read images."""
    above_0 = probability_N[probability_N > 0]  # of drawn heat maps few
    all_V = np.bincount(_bins(above_0), minlength=NUM_BINS)
    all_V[0] += len(probability_N) - len(above_0)
    pixels = np.flatnonzero(number_N > 0)
    number_n, bin_n = number_N[pixels], _bins(probability_N[pixels])
    # The pixels of a defect have weights that sum to 1.
    weight_K = 1 / np.maximum(np.bincount(number_n, minlength=count), 1)
    overlap_V = np.bincount(bin_n, weight_K[number_n], minlength=NUM_BINS)
    return all_V, np.bincount(bin_n, minlength=NUM_BINS), overlap_V


def _bins(probability_N: np.ndarray) -> np.ndarray:
    return np.asarray(np.minimum(probability_N.view(np.int32) >> _DROPPED_BITS, NUM_BINS - 1))


# Detections: local maxima of a heat map, and how many true defects are among the best of them.


class Detection(NamedTuple):
    """A pixel position and its score."""

    y: int
    x: int
    score: float


class DetectConfig(NamedTuple):
    """How detections are found in a heat map."""

    top_pct: float = 0.01
    """Share of the pixels, those of highest probability, that may be the centre of a detection."""
    mask_radius: int = 20
    """Minimum distance of two detections, in pixels."""
    score_window: int = 2
    """Half side of the window from which the score is computed."""
    score_topk: int = 3
    """The score is the mean of this many largest values in the window."""
    max_per_image: int = 5


DEAD_BEFORE, DEAD_AFTER = 5, 5
"""Pixels before and after a dead pixel, along each axis, that are set to 0."""


def detect(heat_HW: np.ndarray, config: DetectConfig | None = None) -> list[Detection]:
    """Take the highest pixels greedily, each away from the ones before it; of equal ones, the first in row order."""
    config = config or DetectConfig()
    allowed_HW = heat_HW >= np.percentile(heat_HW, 100 * (1 - config.top_pct))
    y_H, x_W = np.ogrid[: heat_HW.shape[0], : heat_HW.shape[1]]
    found: list[Detection] = []
    while len(found) < config.max_per_image and allowed_HW.any():
        y, x = divmod(int(np.argmax(np.where(allowed_HW, heat_HW, -np.inf))), heat_HW.shape[1])
        found.append(Detection(y, x, score_at(heat_HW, y, x, config)))
        allowed_HW &= (y_H - y) ** 2 + (x_W - x) ** 2 > config.mask_radius**2
    return found


def detect_components(heat_HW: np.ndarray) -> list[Detection]:
    """One detection per connected component that is not 0: its highest heat, at the pixel nearest to its centre.

    For heat maps that are 0 outside of components, where local maxima would find a long component several times.
    """
    import cv2

    count, number_HW, _, center_N2 = cv2.connectedComponentsWithStats((heat_HW > 0).astype(np.uint8), connectivity=8)
    y_M, x_M = np.nonzero(number_HW)
    number_M, heat_M = number_HW[y_M, x_M].astype(np.int64), heat_HW[y_M, x_M]
    highest_N = np.zeros(count)
    np.maximum.at(highest_N, number_M, heat_M)
    distance_M = np.hypot(x_M - center_N2[number_M, 0], y_M - center_N2[number_M, 1])
    order = np.lexsort((distance_M, number_M))
    firsts = order[np.searchsorted(number_M[order], np.arange(1, count))]
    found = [
        Detection(int(y), int(x), float(highest_N[number]))
        for number, (y, x) in enumerate(zip(y_M[firsts], x_M[firsts], strict=True), start=1)
    ]
    return sorted(found, key=lambda each: -each.score)


def score_at(heat_HW: np.ndarray, y: int, x: int, config: DetectConfig) -> float:
    """Mean of the `score_topk` largest values around a pixel, computed in float64."""
    reach = config.score_window
    window = heat_HW[max(y - reach, 0) : y + reach + 1, max(x - reach, 0) : x + reach + 1]
    return float(np.sort(window, axis=None)[-config.score_topk :].astype(np.float64).mean())


class ImageDetections(NamedTuple):
    """The detections of an image, and the position of its one defect if the file name gives it."""

    detections: Sequence[Detection]
    truth_xy: tuple[float, float] | None


def recall_at(
    images: Sequence[ImageDetections], nums: Sequence[int], *, match_radius: float = 3.0
) -> Mapping[int, float]:
    """Recall among the K best detections of all images, by K; empty if no image has a known defect."""
    num_defects = sum(image.truth_xy is not None for image in images)
    if not num_defects:
        return {}
    pooled = [
        (found.score, number, image.truth_xy is not None and dist(image.truth_xy, (found.x, found.y)) <= match_radius)
        for number, image in enumerate(images)
        for found in image.detections
    ]
    pooled.sort(key=lambda entry: -entry[0])  # stable: equal scores stay in the order of the images
    return {num: len({number for _, number, hit in pooled[:num] if hit}) / num_defects for num in nums}


def truth_in_name(stem: str) -> tuple[float, float] | None:
    """The position (x, y) of a defect at the end of a file stem like `strip_17#88,412`; None if there is none."""
    found = re.search(r"#\s*(\d+)\s*,\s*(\d+)\s*$", stem)
    return None if found is None else (float(found[1]), float(found[2]))


def zero_dead_pixels(heat_HW: np.ndarray, dead_xy_K2: np.ndarray) -> None:
    """Set a 10 x 10 box around each dead pixel to 0, in place."""
    for x, y in dead_xy_K2.tolist():
        heat_HW[max(y - DEAD_BEFORE, 0) : max(y + DEAD_AFTER, 0), max(x - DEAD_BEFORE, 0) : max(x + DEAD_AFTER, 0)] = 0


def recall_at_false_positives(
    hits: Sequence[tuple[float, Hashable | None]], *, num_defects: int, num_images: int, per_image: float
) -> float | None:
    """Recall of defects at a maximum of `per_image` false detections per image; None without defects.

    `hits`: the score of each detection, and the defect that it hits or None.
    """
    if not num_defects:
        return None
    found: set[Hashable] = set()
    false = 0
    for _, defect in sorted(hits, key=lambda entry: -entry[0]):
        if defect is None:
            false += 1
            if false > per_image * num_images:
                break
        else:
            found.add(defect)
    return len(found) / num_defects


# The result of an evaluation

RECALL_AT = (30, 50, 150, 500)
"""Numbers of detections at which recall@K is reported."""
FALSE_POSITIVES = (0.1, 1.0)
"""False detections per image at which the recall of defects is reported."""
DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True)
class ImageRow:
    """One row of images.csv; the field names are its columns."""

    name: str
    is_defective: bool | None
    """None: not labelled."""
    peak: float
    """Largest probability, which is the score of the image."""
    num_defects: int
    num_found: int
    """Number of its defects that a detection at or above the threshold hits."""
    num_detections: int
    """Number of detections at or above the threshold."""
    verdict: str | None = None
    """"fail" if any pixel reaches the threshold, else "pass". None, like the next three: blobs were not looked for."""
    num_blobs: int | None = None
    """Number of connected components at or above the threshold."""
    num_false_blobs: int | None = None
    """Number of those that hit no labelled defect; None if the image is not labelled."""
    area_px: int | None = None
    """Number of pixels at or above the threshold."""


@dataclass(frozen=True)
class DefectEvaluation:
    """The scores over all images; a score that cannot be computed because labels are missing is None."""

    pixels: Ranking
    images: Ranking
    rows: list[ImageRow]
    image_detections: list[ImageDetections] = field(default_factory=list)
    hits: list[tuple[float, tuple[int, int] | None]] = field(default_factory=list)
    """All detections on labelled images: score, and the numbers of image and defect that are hit, or None."""
    num_labelled: int = 0
    """Images with a mask or boxes, or known to be good."""
    seconds: float = 0.0
    chosen_threshold: float | None = None
    """A threshold set beforehand; None: the one with the best F1 on these images."""
    at_threshold: Mapping[str, float | None] = field(default_factory=dict)
    """Further scores at the threshold, by name, if blobs were compared (`blobs.blob_scores`)."""

    @property
    def num_defects(self) -> int:
        return sum(row.num_defects for row in self.rows)

    @property
    def fitness(self) -> float:
        """Pixel average precision; AUROC is close to 1 for any network, because one pixel in 2000 is positive."""
        return self.pixels.average_precision or 0.0

    @property
    def threshold(self) -> float:
        if self.chosen_threshold is not None:
            return self.chosen_threshold
        best = self.pixels.best_f1()
        return DEFAULT_THRESHOLD if best is None else best[1]

    def scores(self) -> dict[str, float | None]:
        best = self.pixels.best_f1()
        scores: dict[str, float | None] = {
            "pixel_AUROC": self.pixels.auroc,
            "pixel_AP": self.pixels.average_precision,
            "pixel_AUPRO": self.pixels.au_pro(),
            "pixel_best_F1": None if best is None else best[0],
            "pixel_IoU": self.pixels.iou_at(self.threshold) if best is not None else None,
            "threshold": self.threshold,
            "image_AUROC": self.images.auroc,
        }
        for per_image in FALSE_POSITIVES:
            scores[f"recall@{per_image:g}FP"] = recall_at_false_positives(
                self.hits, num_defects=self.num_defects, num_images=self.num_labelled, per_image=per_image
            )
        return scores | dict(self.at_threshold)

    def recalls(self) -> Mapping[int, float]:
        """Recall@K over the good images and those whose name gives the position of their defect."""
        return recall_at(self.image_detections, RECALL_AT)

    def __str__(self) -> str:
        texts = [f"{name} {'n/a' if value is None else f'{value:.4f}'}" for name, value in self.scores().items()]
        texts += [f"recall@{num} {value:.3f}" for num, value in self.recalls().items()]
        return "  ".join(texts)
