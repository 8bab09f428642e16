"""AP as COCO counts it, for `test.py`: which annotation file, and what is printed."""

import logging
from collections.abc import Iterator

from flatout.errors import FlatoutError
from flatout.yolo.data.coco_json import annotation_file
from flatout.yolo.data.data_yaml import DataSet, Split
from flatout.yolo.metrics.coco import CocoExport
from flatout.yolo.metrics.coco_api import CocoScores, coco_scores

logger = logging.getLogger(__name__)

_LINES = (
    ("AP", "0.50:0.95", "all", 100),
    ("AP", "0.50", "all", 100),
    ("AP", "0.75", "all", 100),
    ("AP", "0.50:0.95", "small", 100),
    ("AP", "0.50:0.95", "medium", 100),
    ("AP", "0.50:0.95", "large", 100),
    ("AR", "0.50:0.95", "all", 1),
    ("AR", "0.50:0.95", "all", 10),
    ("AR", "0.50:0.95", "all", 100),
    ("AR", "0.50:0.95", "small", 100),
    ("AR", "0.50:0.95", "medium", 100),
    ("AR", "0.50:0.95", "large", 100),
)


def judge(export: CocoExport, data: DataSet, split: Split, *, only_shown: bool) -> CocoScores | str:
    """The scores, or a sentence that says why there are none: that never ends an evaluation.

    `only_shown` leaves out pictures of the annotation file that were not looked at.
    """
    annotations = annotation_file(data, split)
    try:
        return coco_scores(annotations, export.table(), export.image_ids if only_shown else None)
    except (FlatoutError, OSError, ValueError, KeyError, TypeError) as error:
        logger.debug("COCO AP", exc_info=True)
        return f"COCO AP was not computed: {error}"


def lines(scores: CocoScores) -> Iterator[str]:
    """The twelve lines that COCO's own tool prints."""
    for (kind, overlap, area, most), score in zip(_LINES, scores, strict=True):
        title = "Average Precision" if kind == "AP" else "Average Recall"
        yield f" {title:<18} ({kind}) @[ IoU={overlap:<9} | area={area:>6} | maxDets={most:>3} ] = {score:0.3f}"
