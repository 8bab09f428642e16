"""Detections in the format of the COCO API, and AP as COCO computes it, by whichever evaluator is installed.

Dimension key:  D detections
"""

import contextlib
import importlib
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from flatout.errors import ConfigError, DataError
from flatout.yolo.nms.suppress import Detections

logger = logging.getLogger(__name__)

COCO_CATEGORY_IDS = (
    *range(1, 12),
    *range(13, 26),
    *range(27, 29),
    *range(31, 45),
    *range(46, 66),
    67,
    70,
    *range(72, 83),
    *range(84, 91),
)
"""Class 0..79 -> COCO's own number, which runs to 90 with gaps."""


def image_id_of(path: str | PurePath) -> int | str:
    """The number in a picture's name, else its name without ending."""
    stem = PurePath(path).stem
    return int(stem) if stem.isnumeric() else stem


class CocoPicture(NamedTuple):
    """A picture as an annotation file knows it."""

    image_id: int | str
    scale_x: float = 1.0
    """From pixels of the picture to pixels of the annotations: they differ for a copy of another size."""
    scale_y: float = 1.0


class CocoExport:
    """Collects detections batch by batch; the copy to the host happens at the end."""

    def __init__(
        self, category_ids: Sequence[int] | None = None, pictures: Mapping[str, CocoPicture] | None = None
    ) -> None:
        """`category_ids` translates classes (COCO_CATEGORY_IDS for COCO); without, a class is its own number.

        `pictures` says by path what an annotation file calls each picture; without, `image_id_of` its name does.
        """
        self._category_ids = category_ids
        self._known = pictures
        self._batches: list[Detections] = []
        self._pictures: list[CocoPicture] = []

    def add(self, found: Detections, paths: Sequence[str | PurePath]) -> None:
        """A batch of detections in picture pixels (as `Evaluator.update` returns them), and its pictures."""
        if len(paths) != found.num_images:
            raise DataError(f"{len(paths)} paths for {found.num_images} images: give the path of every image.")
        self._batches.append(found._replace(image_D=found.image_D + len(self._pictures)))
        self._pictures += [self._known[str(path)] if self._known else CocoPicture(image_id_of(path)) for path in paths]

    @property
    def image_ids(self) -> list[int | str]:
        """Of all pictures so far, also of those where nothing was found."""
        return [picture.image_id for picture in self._pictures]

    def records(self) -> list[Mapping[str, Any]]:
        """One {image_id, category_id, bbox, score} per detection; bbox is x, y, w, h to 3 decimals, score to 5."""
        image_D, category_D, box_D4, score_D = self._columns()
        image_ids = [self._pictures[number].image_id for number in image_D.tolist()]
        columns = zip(image_ids, category_D.tolist(), box_D4.tolist(), score_D.tolist(), strict=True)
        names = ("image_id", "category_id", "bbox", "score")
        return [dict(zip(names, column, strict=True)) for column in columns]

    def table(self) -> np.ndarray:
        """The same numbers as float64 [D, 7]: image_id, x, y, w, h, score, category_id, as evaluators take them."""
        image_D, category_D, box_D4, score_D = self._columns()
        names = sorted(name for name in self.image_ids if isinstance(name, str))
        if names:
            raise DataError(
                f'The picture "{names[0]}" has no number in its name, and evaluators know pictures by number: take the '
                "numbers from an annotation file that names it."
            )
        image_id_D = np.array(self.image_ids, np.float64)[image_D]
        return np.column_stack((image_id_D, box_D4, score_D, category_D))

    def write(self, path: Path) -> None:
        """The records as a JSON list."""
        path.write_text(json.dumps(self.records()))

    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Image number, category, box x y w h, score; rounded."""
        if not self._batches:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0)
        row_D6 = torch.cat([batch.row_D6 for batch in self._batches]).cpu().numpy()
        image_D = torch.cat([batch.image_D for batch in self._batches]).cpu().numpy()
        category_D = row_D6[:, 5].astype(np.int64)
        if self._category_ids is not None:
            category_D = np.array(self._category_ids)[category_D]
        box_D4 = np.concatenate((row_D6[:, :2], row_D6[:, 2:4] - row_D6[:, :2]), axis=1).astype(np.float64)
        scale_N2 = np.array([(picture.scale_x, picture.scale_y) for picture in self._pictures])
        box_D4 *= np.tile(scale_N2[image_D], 2)
        return image_D, category_D, box_D4.round(3), row_D6[:, 4].astype(np.float64).round(5)


# AP as COCO computes it, by whichever evaluator is installed: hotcoco, faster-coco-eval or pycocotools.
#
# The three have the same classes. Crowd annotations (`iscrowd`) are neither to be found nor a mistake to report. They
# differ in one thing: to pycocotools and faster-coco-eval a match with the annotation of id 0 is none, because there 0
# means "no match". What pycocotools says is what others report, so hotcoco's numbers are corrected to it for such a
# file.
#
# Dimension key:  T thresholds of IoU   R of recall   K categories   A ranges of area   M limits of detections
#                 D detections of one category, the surest first

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
