"""Detections in the format of the COCO API, and AP as COCO computes it, by whichever evaluator is installed.

Dimension key:  D detections

AP as COCO counts it, for `test.py`: which annotation file, whether it fits the data set, and what is printed.

The annotation file decides: its categories are found by the names of the classes, its pictures by their file names. One
that does not fit gives no AP but the reason why.
"""

import contextlib
import importlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from flatout.errors import ConfigError, DataError, FlatoutError, counted
from flatout.yolo.data.coco import annotation_candidates, annotation_file, categories_by_id, listed, load_json
from flatout.yolo.data.data_yaml import DataSet, Split, open_data_yaml
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.find_file import shipped_folder
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


class CocoImage(NamedTuple):
    """A picture as an annotation file knows it."""

    image_id: int | str
    scale_x: float = 1.0
    """From pixels of the picture to pixels of the annotations: they differ for a copy of another size."""
    scale_y: float = 1.0


class CocoExport:
    """Collects detections batch by batch; the copy to the host happens at the end."""

    def __init__(
        self, category_ids: Sequence[int] | None = None, pictures: Mapping[str, CocoImage] | None = None
    ) -> None:
        """`category_ids` translates classes (COCO_CATEGORY_IDS for COCO); without, a class is its own number.

        `pictures` says by path what an annotation file calls each picture; without, `image_id_of` its name does.
        """
        self._category_ids = category_ids
        self._known = pictures
        self._batches: list[Detections] = []
        self._pictures: list[CocoImage] = []

    def add(self, found: Detections, paths: Sequence[str | PurePath]) -> None:
        """A batch of detections in picture pixels (as `Evaluator.update` returns them), and its pictures."""
        if len(paths) != found.num_images:
            raise DataError(f"{len(paths)} paths for {found.num_images} images: give the path of every image.")
        self._batches.append(found._replace(image_D=found.image_D + len(self._pictures)))
        self._pictures += [self._known[str(path)] if self._known else CocoImage(image_id_of(path)) for path in paths]

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


MOST_NAMED = 5

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


class Truth(NamedTuple):
    """An annotation file that fits the classes and pictures of a split."""

    file: Path
    category_ids: tuple[int, ...]
    """Category id of each class."""
    pictures: dict[str, CocoImage]
    """By path."""
    remarks: tuple[str, ...] = ()
    """To be printed with the scores."""


class Refused(NamedTuple):
    """Why there is no AP by COCO's rules: a sentence to print. That never ends an evaluation."""

    text: str


def is_asked_for(data: DataSet) -> bool:
    """Whether a data file asks for COCO's AP: by its key `annotations`, or by YOLOv7's rule, a name in coco.yaml."""
    return bool(data.annotations) or data.file.name.endswith("coco.yaml")


def find_truth(data: DataSet, split: Split, names: Sequence[str], images: ImageSet) -> Truth | Refused:
    """The annotations of a split, if there are some that fit; looked at before anything long begins."""
    file = annotation_file(data, split)
    if file is None:
        looked = ", ".join(map(str, annotation_candidates(data, split)))
        return Refused(
            f"COCO AP was not computed: there is no annotation file ({looked}). Name yours in {data.file}: "
            "annotations: FILE.json"
        )
    try:
        return fit(file, load_json(str(file)), names, images)
    except DataError as error:
        return Refused(f"COCO AP was not computed: {error}")


def fit(file: Path, content: dict[str, Any], names: Sequence[str], images: ImageSet) -> Truth:
    """Classes and pictures of a split in an annotation file; DataError with the reason where they are not all in it."""
    category_ids, left_out = _categories(file, content, names)
    pictures = _pictures(file, content, images)
    known, chosen = {picture.image_id for picture in pictures.values()}, set(category_ids)
    if not any(
        each.get("image_id") in known and each.get("category_id") in chosen and not each.get("iscrowd")
        for each in listed(content, "annotations")
    ):
        raise DataError(f"{file}: it has no object of these classes for any of {counted(len(images), 'picture')}.")
    remarks = [f"COCO AP, with the annotations of {file}:"]
    if left_out:
        some = ", ".join(left_out[:MOST_NAMED]) + (", ..." if len(left_out) > MOST_NAMED else "")
        remarks.append(f"Not among the classes, so left out: {some}.")
    return Truth(file, category_ids, pictures, tuple(remarks))


def export_for(truth: Truth | Refused, names: Sequence[str]) -> CocoExport:
    """Collects detections under the numbers of the annotation file; without one, under COCO's own for its own names."""
    if isinstance(truth, Truth):
        return CocoExport(truth.category_ids, truth.pictures)
    coco = open_data_yaml(shipped_folder("data") / "coco.yaml").names
    return CocoExport(COCO_CATEGORY_IDS if tuple(map(_folded, names)) == coco else None)


def score(export: CocoExport, truth: Truth | Refused) -> CocoScores | Refused:
    """The scores over the pictures that were looked at and the classes of the data set."""
    if isinstance(truth, Refused):
        return truth
    try:
        return coco_scores(truth.file, export.table(), export.image_ids, truth.category_ids)
    except (FlatoutError, OSError, ValueError, KeyError, TypeError) as error:
        logger.debug("COCO AP", exc_info=True)
        return Refused(f"COCO AP was not computed: {error}")


def lines(scores: CocoScores) -> Iterator[str]:
    """The twelve lines that COCO's own tool prints."""
    for (kind, overlap, area, most), value in zip(_LINES, scores, strict=True):
        title = "Average Precision" if kind == "AP" else "Average Recall"
        yield f" {title:<18} ({kind}) @[ IoU={overlap:<9} | area={area:>6} | maxDets={most:>3} ] = {value:0.3f}"


def _folded(name: object) -> str:
    return str(name).strip().lower()


def _categories(file: Path, content: dict[str, Any], names: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
    """The id of each class's category, and the names of the categories that are no class."""
    ids: dict[str, int] = {}
    for category in categories_by_id(content):
        if ids.setdefault(_folded(category["name"]), category["id"]) != category["id"]:
            raise DataError(
                f"{file}: two categories are called {category['name']!r}, so classes are not known by name."
            )
    absent = [name for name in names if _folded(name) not in ids]
    if absent:
        theirs = ", ".join(list(ids)[:MOST_NAMED]) + (", ..." if len(ids) > MOST_NAMED else "")
        raise DataError(
            f"{file}: it has no category for {len(absent)} of {counted(len(names), 'class')}, such as {absent[0]!r}; "
            f"its categories are {theirs}. Use the same names, or the annotation file of this data set."
        )
    classes = {_folded(name) for name in names}
    if len(classes) < len(names):
        raise DataError(f"{file}: two classes of the data set have the same name, so its categories do not fit them.")
    return tuple(ids[_folded(name)] for name in names), [name for name in ids if name not in classes]


def _pictures(file: Path, content: dict[str, Any], images: ImageSet) -> dict[str, CocoImage]:
    by_stem: dict[str, list[dict[str, Any]]] = {}
    for image in listed(content, "images"):
        by_stem.setdefault(PurePath(str(image.get("file_name"))).stem, []).append(image)
    size_of = dict(zip(images.paths, images.size_wh_N2.tolist(), strict=True))
    found = {path: _of_picture(by_stem.get(PurePath(path).stem, []), path) for path in size_of}
    absent = [path for path, image in found.items() if image is None]
    if absent:
        raise DataError(
            f"{file}: {len(absent)} of {counted(len(found), 'picture')} are not in it by their file name, such as "
            f"{absent[0]}: it belongs to another data set or split."
        )
    pictures = {path: _picture(file, image, size_of[path]) for path, image in found.items() if image is not None}
    if len({picture.image_id for picture in pictures.values()}) < len(pictures):
        raise DataError(f"{file}: several pictures have one id in it: their file names do not tell them apart.")
    return pictures


def _of_picture(same_stem: list[dict[str, Any]], path: str) -> dict[str, Any] | None:
    """The one among images of one name; where there are several, the one whose whole `file_name` ends the path."""
    if len(same_stem) == 1:
        return same_stem[0]
    parts = PurePath(path).parts
    exact = [
        image
        for image in same_stem
        if (names := PurePath(str(image.get("file_name"))).parts) and parts[-len(names) :] == names
    ]
    return exact[0] if len(exact) == 1 else None


def _picture(file: Path, image: dict[str, Any], size_wh: Sequence[int]) -> CocoImage:
    """Id and scale of a picture; copies of another size are fine as long as the proportions are the same."""
    name, image_id = image.get("file_name"), image.get("id")
    if not isinstance(image_id, int) or isinstance(image_id, bool):
        raise DataError(f"{file}: the id of {name} is {image_id!r}: evaluators take whole numbers only.")
    annotated = [image.get("width"), image.get("height")]
    if not all(isinstance(side, int | float) and side > 0 for side in annotated):
        raise DataError(f"{file}: {name} has no width and height.")
    scale_x, scale_y = np.array(annotated, float) / size_wh
    # Each side of a copy was rounded to whole pixels.
    if abs(scale_x / scale_y - 1) > 1 / size_wh[0] + 1 / size_wh[1]:
        sizes = f"{size_wh[0]} x {size_wh[1]} px, but {annotated[0]} x {annotated[1]} in the file"
        raise DataError(f"{file}: {name} is {sizes}: another picture, or one that was cut or turned.")
    return CocoImage(image_id, float(scale_x), float(scale_y))
