"""AP as COCO computes it, by whichever evaluator is installed: hotcoco, faster-coco-eval or pycocotools.

The three have the same classes. Crowd annotations (`iscrowd`) are neither to be found nor a mistake to report.
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
    coco_class, eval_class = _evaluator()
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
    return CocoScores(*map(float, evaluation.stats[: len(CocoScores._fields)]))


def _evaluator() -> tuple[Any, Any]:
    """The classes of the first evaluator that is installed."""
    for _, coco_module, coco_name, eval_module, eval_name in EVALUATORS:
        with contextlib.suppress(ModuleNotFoundError):
            coco, evaluation = importlib.import_module(coco_module), importlib.import_module(eval_module)
            return getattr(coco, coco_name), getattr(evaluation, eval_name)
    raise ConfigError('COCO AP needs an evaluator, and none is installed: pip install "flatout[eval]".')


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
