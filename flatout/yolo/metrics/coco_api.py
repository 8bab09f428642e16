"""AP as COCO computes it, by whichever evaluator is installed: hotcoco, faster-coco-eval or pycocotools.

The three have the same classes. Crowd annotations (`iscrowd`) are neither to be found nor a mistake to report. They
differ in one thing: to pycocotools and faster-coco-eval a match with the annotation of id 0 is none, because there 0
means "no match". What pycocotools says is what others report, so hotcoco's numbers are corrected to it for such a file.

Dimension key:  T thresholds of IoU   R of recall   K categories   A ranges of area   M limits of detections
                D detections of one category, the surest first
"""

import contextlib
import importlib
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

EVALUATORS = (
    ("hotcoco", "hotcoco", "COCO", "hotcoco", "COCOeval"),
    ("faster-coco-eval", "faster_coco_eval", "COCO", "faster_coco_eval", "COCOeval_faster"),
    ("pycocotools", "pycocotools.coco", "COCO", "pycocotools.cocoeval", "COCOeval"),
)
"""Package, then module and name of the annotations' class and of the evaluation's; the fastest first."""


class CocoScores(NamedTuple):
    """The twelve numbers of the COCO challenge; -1 where no object of that size exists."""

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    ar1: float
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float


def coco_scores(
    annotations: Path | Mapping[str, Any],
    table_D7: np.ndarray,
    image_ids: Sequence[int | str] | None = None,
    category_ids: Sequence[int] | None = None,
) -> CocoScores:
    """Compare detections (`CocoExport.table()`) with an annotation file, on `image_ids` or on all its pictures.

    `category_ids` are those that count; without, all of the file.
    """
    package, coco_class, eval_class = _evaluator()
    said = io.StringIO()
    # The evaluators print; a library does not.
    with contextlib.redirect_stdout(said):
        truth = _open(coco_class, annotations)
        wanted = _known_ids(truth, image_ids)
        if not len(table_D7):
            return CocoScores(*[0.0] * len(CocoScores._fields))
        evaluation = eval_class(truth, truth.loadRes(np.ascontiguousarray(table_D7)), "bbox")
        evaluation.params.imgIds = wanted
        if category_ids is not None:
            evaluation.params.catIds = sorted(category_ids)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    logger.debug("%s", said.getvalue())
    if _counts_id_zero(truth, evaluation.params):
        logger.warning(
            "An annotation has the id 0, and by the rules of pycocotools such an object is never found: AP is a little "
            "lower than it should be. Number annotations from 1."
        )
        if package == "hotcoco":
            return _with_id_zero_missed(evaluation, truth)
    return CocoScores(*map(float, evaluation.stats[: len(CocoScores._fields)]))


def _counts_id_zero(truth: Any, params: Any) -> bool:
    """Whether an object that is to be found has the id 0."""
    return any(
        each["id"] == 0
        and not each.get("iscrowd")
        and each["image_id"] in params.imgIds
        and each["category_id"] in params.catIds
        for each in (truth.loadAnns([0]) if 0 in truth.getAnnIds() else ())
    )


def _with_id_zero_missed(evaluation: Any, truth: Any) -> CocoScores:
    """The scores after another count of the category of annotation 0: what was matched with it is a false detection."""
    category = truth.loadAnns([0])[0]["category_id"]
    params, place = evaluation.params, list(evaluation.params.catIds).index(category)
    precision_TRKAM, recall_TKAM = (np.array(evaluation.eval[name]) for name in ("precision", "recall"))
    of_category = [each for each in evaluation.evalImgs if each is not None and each["category_id"] == category]
    for a, area in enumerate(params.areaRng):
        in_range = [each for each in of_category if list(each["aRng"]) == list(area)]
        for m, most in enumerate(params.maxDets):
            counted = _count(in_range, evaluation.cocoDt, params.recThrs, most)
            if counted is not None:
                precision_TRKAM[:, :, place, a, m], recall_TKAM[:, place, a, m] = counted
    return _summary(precision_TRKAM, recall_TKAM, params)


def _count(
    images: Sequence[Mapping[str, Any]], found: Any, recall_R: Sequence[float], most: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Precision [T, R] and recall [T] of one category and range, as pycocotools counts; None without an object."""
    num_objects = sum(not ignored for each in images for ignored in each["gtIgnore"])
    if not num_objects:
        return None
    score_D = np.concatenate([each["dtScores"][:most] for each in images])
    order_D = np.argsort(-score_D, kind="stable")
    right, ignored = [], []
    for each in images:
        match_TD, is_matched_TD = (np.array(each[name])[:, :most] for name in ("dtMatches", "dtMatched"))
        low, high = each["aRng"]
        area_D = np.array([box["area"] for box in found.loadAnns(each["dtIds"][:most])])
        by_zero_TD = is_matched_TD.astype(bool) & (match_TD == 0)
        right.append(is_matched_TD.astype(bool) & ~by_zero_TD)
        ignored.append(
            np.array(each["dtIgnore"])[:, :most].astype(bool) | (by_zero_TD & ((area_D < low) | (area_D > high)))
        )
    right_TD, counts_TD = np.concatenate(right, 1)[:, order_D], ~np.concatenate(ignored, 1)[:, order_D]
    true_TD = np.cumsum(right_TD & counts_TD, 1).astype(float)
    false_TD = np.cumsum(~right_TD & counts_TD, 1).astype(float)
    precision_TR = np.zeros((len(true_TD), len(recall_R)))
    if not len(order_D):
        return precision_TR, np.zeros(len(true_TD))
    recall_TD = true_TD / num_objects
    precision_TD = true_TD / (true_TD + false_TD + np.spacing(1))
    envelope_TD = np.maximum.accumulate(precision_TD[:, ::-1], 1)[:, ::-1]
    for t, recall_D in enumerate(recall_TD):
        at_R = np.searchsorted(recall_D, recall_R, side="left")
        reached_R = at_R < len(recall_D)
        precision_TR[t, reached_R] = envelope_TD[t, at_R[reached_R]]
    return precision_TR, recall_TD[:, -1]


def _summary(precision_TRKAM: np.ndarray, recall_TKAM: np.ndarray, params: Any) -> CocoScores:
    """The twelve means; -1 where there is nothing to take the mean of."""

    def mean(values: np.ndarray) -> float:
        return float(values[values > -1].mean()) if (values > -1).any() else -1.0

    at_50, at_75 = (int(np.argmin(np.abs(np.array(params.iouThrs) - threshold))) for threshold in (0.5, 0.75))
    return CocoScores(
        mean(precision_TRKAM[..., 0, -1]),
        mean(precision_TRKAM[at_50, ..., 0, -1]),
        mean(precision_TRKAM[at_75, ..., 0, -1]),
        *(mean(precision_TRKAM[..., area, -1]) for area in (1, 2, 3)),
        *(mean(recall_TKAM[..., 0, limit]) for limit in (0, 1, 2)),
        *(mean(recall_TKAM[..., area, -1]) for area in (1, 2, 3)),
    )


def _evaluator() -> tuple[str, Any, Any]:
    """Package and classes of the first evaluator that is installed."""
    for package, coco_module, coco_name, eval_module, eval_name in EVALUATORS:
        with contextlib.suppress(ModuleNotFoundError):
            coco, evaluation = importlib.import_module(coco_module), importlib.import_module(eval_module)
            return package, getattr(coco, coco_name), getattr(evaluation, eval_name)
    raise ConfigError("COCO AP needs an evaluator, and none is installed: pip install hotcoco.")


def _open(coco_class: Any, annotations: Path | Mapping[str, Any]) -> Any:
    if isinstance(annotations, Path):
        if not annotations.is_file():
            raise DataError(f"{annotations}: no such annotation file, so COCO AP cannot be computed.")
        return coco_class(str(annotations))
    truth = coco_class()
    truth.dataset = dict(annotations)
    truth.createIndex()
    return truth


def _known_ids(truth: Any, image_ids: Sequence[int | str] | None) -> list[int]:
    known = sorted(truth.getImgIds())
    if image_ids is None:
        return known
    unknown = sorted(map(str, set(image_ids) - set(known)))
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(image_ids)} pictures are not in the annotation file, such as {unknown[0]}: "
            "it belongs to another data set."
        )
    return sorted(int(image_id) for image_id in set(image_ids))
