"""COCO AP: detections in the format of the COCO API, the evaluators, and the annotation file of a split.

    find_truth --> CocoTruth --export_for--> CocoExport --score--> CocoScores --lines--> COCO's twelve lines
               --> CocoUnavailable: why COCO AP is not computed

An annotation file is matched with a data set by names: its categories by the names of the classes, its images by their
file names. If it does not fit, there is no AP, and the reason is reported.

Dimension key:  D detections (in `_count`: of one category, by descending score)   N images   T thresholds of IoU
                R thresholds of recall   K categories   A ranges of area   M limits of detections
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
from flatout.safefiles import write_file
from flatout.yolo.data.coco import (
    annotation_candidates,
    annotation_file,
    categories_by_id,
    coco_entry,
    listed,
    load_json,
)
from flatout.yolo.data.data_yaml import DataSet, Split, open_data_yaml
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.nms.suppress import Detections

logger = logging.getLogger(__name__)

# Detections in the format of the COCO API

COCO_CATEGORY_IDS = tuple(sorted(set(range(1, 91)) - {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}))
"""Class 0..79 -> category id of COCO, 1 to 90 with gaps."""


def image_id_of(path: str | PurePath) -> int | str:
    """The file name without extension, as a number if it is one."""
    stem = PurePath(path).stem
    return int(stem) if stem.isdecimal() else stem


class CocoImage(NamedTuple):
    """Id and scale of an image in an annotation file."""

    image_id: int | str
    scale_x: float = 1.0
    """From pixels of the image to pixels of the annotations; not 1 for a copy at another size."""
    scale_y: float = 1.0


class CocoExport:
    """Collects detections batch by batch; they are copied to the host at the end."""

    def __init__(
        self, category_ids: Sequence[int] | None = None, images: Mapping[str, CocoImage] | None = None
    ) -> None:
        """`category_ids` has the category id of each class (COCO_CATEGORY_IDS for COCO); by default the class number.

        `images` has the id and scale of each image by path; by default the id is that of `image_id_of`.
        """
        self._category_ids = category_ids
        self._known = images
        self._batches: list[Detections] = []
        self._images: list[CocoImage] = []

    def add(self, found: Detections, paths: Sequence[str | PurePath]) -> None:
        """Add a batch of detections in pixels of the original images (as from `Evaluator.update`), and its images."""
        if len(paths) != found.num_images:
            raise DataError(f"{len(paths)} paths for {found.num_images} images. Pass the path of every image.")
        self._batches.append(found._replace(image_D=found.image_D + len(self._images)))
        self._images += [self._known[str(path)] if self._known else CocoImage(image_id_of(path)) for path in paths]

    @property
    def image_ids(self) -> list[int | str]:
        """Ids of all images so far, including those without detections."""
        return [image.image_id for image in self._images]

    def records(self) -> list[Mapping[str, Any]]:
        """One {image_id, category_id, bbox, score} per detection; bbox is x, y, w, h to 3 decimals, score to 5."""
        image_D, category_D, box_D4, score_D = self._columns()
        image_ids = [self._images[number].image_id for number in image_D.tolist()]
        columns = zip(image_ids, category_D.tolist(), box_D4.tolist(), score_D.tolist(), strict=True)
        names = ("image_id", "category_id", "bbox", "score")
        return [dict(zip(names, column, strict=True)) for column in columns]

    def table(self) -> np.ndarray:
        """The records as float64 [D, 7]: image_id, x, y, w, h, score, category_id, the input of the evaluators.

        DataError if the id of an image is not a number.
        """
        image_D, category_D, box_D4, score_D = self._columns()
        names = sorted(name for name in self.image_ids if isinstance(name, str))
        if names:
            raise DataError(
                f'The name of image "{names[0]}" is not a number, and evaluators need numeric ids. Use an annotation '
                "file that contains this image."
            )
        image_id_D = np.array(self.image_ids, np.float64)[image_D]
        return np.column_stack((image_id_D, box_D4, score_D, category_D))

    def write(self, path: Path) -> None:
        """Write the records as a JSON list; ResourceError if there is no room, with an earlier file unchanged."""
        write_file(path, json.dumps(self.records()))

    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Image number, category, box (x, y, w, h) and score, rounded."""
        if not self._batches:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0)
        row_D6 = torch.cat([batch.row_D6 for batch in self._batches]).cpu().numpy()
        image_D = torch.cat([batch.image_D for batch in self._batches]).cpu().numpy()
        category_D = row_D6[:, 5].astype(np.int64)
        if self._category_ids is not None:
            category_D = np.array(self._category_ids)[category_D]
        box_D4 = np.concatenate((row_D6[:, :2], row_D6[:, 2:4] - row_D6[:, :2]), axis=1).astype(np.float64)
        scale_N2 = np.array([(image.scale_x, image.scale_y) for image in self._images])
        box_D4 *= np.tile(scale_N2[image_D], 2)
        return image_D, category_D, box_D4.round(3), row_D6[:, 4].astype(np.float64).round(5)


# AP by the first evaluator that is installed: hotcoco, faster-coco-eval or pycocotools
#
# The three have the same classes. Crowd annotations (`iscrowd`) count neither as missed objects nor as false
# detections. They differ in one case: in pycocotools and faster-coco-eval a match with the annotation of id 0 does not
# count, because 0 means "no match" there. Published numbers come from pycocotools, so hotcoco's are corrected for such
# a file.

EVALUATORS = (
    ("hotcoco", "hotcoco", "COCO", "hotcoco", "COCOeval"),
    ("faster-coco-eval", "faster_coco_eval", "COCO", "faster_coco_eval", "COCOeval_faster"),
    ("pycocotools", "pycocotools.coco", "COCO", "pycocotools.cocoeval", "COCOeval"),
)
"""Package, module and name of the annotation class, module and name of the evaluation class; the fastest first."""


_AREAS_PX = ((0, 32**2), (32**2, 96**2), (96**2, 1e10))
"""Areas of small, medium and large objects, as COCO defines them."""


class CocoScores(NamedTuple):
    """The twelve numbers of the COCO challenge; -1 if there is no object of that size."""

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
    """Scores of detections (`CocoExport.table()`) against an annotation file, on `image_ids` or on all its images.

    `category_ids` restricts the categories; by default all of the file count. ConfigError if no evaluator is
    installed, DataError if the file does not exist or lacks one of the images.
    """
    package, coco_class, eval_class = _evaluator()
    printed = io.StringIO()
    # The evaluators print to stdout, which a library must not do.
    with contextlib.redirect_stdout(printed):
        truth = _open(coco_class, annotations)
        wanted = _evaluated_ids(truth, image_ids)
        if not len(table_D7):
            return _scores_of_nothing(truth, wanted, category_ids)
        evaluation = eval_class(truth, truth.loadRes(np.ascontiguousarray(table_D7)), "bbox")
        evaluation.params.imgIds = wanted
        if category_ids is not None:
            evaluation.params.catIds = sorted(category_ids)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    logger.debug("%s", printed.getvalue())
    if _counts_id_zero(truth, evaluation.params):
        logger.warning(
            "An annotation has the id 0. By the rules of pycocotools such an object is never found, so AP is slightly "
            "too low. Number annotations from 1."
        )
        if package == "hotcoco":
            return _with_id_zero_missed(evaluation, truth)
    return CocoScores(*map(float, evaluation.stats[: len(CocoScores._fields)]))


def _scores_of_nothing(truth: Any, image_ids: Sequence[int], category_ids: Sequence[int] | None) -> CocoScores:
    """The scores without any detection, which the evaluators do not accept: 0, or -1 where there are no objects."""
    area_px = [
        each["area"]
        for each in truth.loadAnns(truth.getAnnIds())
        if not each.get("iscrowd")
        and each["image_id"] in image_ids
        and (category_ids is None or each["category_id"] in category_ids)
    ]
    by_size = [0.0 if any(low <= area <= high for area in area_px) else -1.0 for low, high in _AREAS_PX]
    overall = 0.0 if area_px else -1.0
    return CocoScores(*[overall] * 3, *by_size, *[overall] * 3, *by_size)


def _counts_id_zero(truth: Any, params: Any) -> bool:
    """Whether one of the evaluated objects has the id 0."""
    return any(
        each["id"] == 0
        and not each.get("iscrowd")
        and each["image_id"] in params.imgIds
        and each["category_id"] in params.catIds
        for each in (truth.loadAnns([0]) if 0 in truth.getAnnIds() else ())
    )


def _with_id_zero_missed(evaluation: Any, truth: Any) -> CocoScores:
    """The scores with the category of annotation 0 counted again: a detection matched with it is a false detection."""
    category = truth.loadAnns([0])[0]["category_id"]
    params, index = evaluation.params, list(evaluation.params.catIds).index(category)
    precision_TRKAM, recall_TKAM = (np.array(evaluation.eval[name]) for name in ("precision", "recall"))
    of_category = [each for each in evaluation.evalImgs if each is not None and each["category_id"] == category]
    for a, area in enumerate(params.areaRng):
        in_range = [each for each in of_category if list(each["aRng"]) == list(area)]
        for m, most in enumerate(params.maxDets):
            counted = _count(in_range, evaluation.cocoDt, params.recThrs, most)
            if counted is not None:
                precision_TRKAM[:, :, index, a, m], recall_TKAM[:, index, a, m] = counted
    return _summary(precision_TRKAM, recall_TKAM, params)


def _count(
    images: Sequence[Mapping[str, Any]], found: Any, recall_R: Sequence[float], most: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Precision [T, R] and recall [T] of one category and area range, as in pycocotools; None without objects."""
    num_objects = sum(not ignored for each in images for ignored in each["gtIgnore"])
    if not num_objects:
        return None
    score_D = np.concatenate([each["dtScores"][:most] for each in images])
    order_D = np.argsort(-score_D, kind="stable")
    correct, ignored = [], []
    for each in images:
        match_TD, is_matched_TD = (np.array(each[name])[:, :most] for name in ("dtMatches", "dtMatched"))
        low, high = each["aRng"]
        area_D = np.array([box["area"] for box in found.loadAnns(each["dtIds"][:most])])
        by_zero_TD = is_matched_TD.astype(bool) & (match_TD == 0)
        correct.append(is_matched_TD.astype(bool) & ~by_zero_TD)
        ignored.append(
            np.array(each["dtIgnore"])[:, :most].astype(bool) | (by_zero_TD & ((area_D < low) | (area_D > high)))
        )
    correct_TD, counts_TD = np.concatenate(correct, 1)[:, order_D], ~np.concatenate(ignored, 1)[:, order_D]
    true_TD = np.cumsum(correct_TD & counts_TD, 1).astype(float)
    false_TD = np.cumsum(~correct_TD & counts_TD, 1).astype(float)
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
    """The twelve means; -1 for a mean over nothing."""

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
    """Package name and classes of the first evaluator that is installed."""
    for package, coco_module, coco_name, eval_module, eval_name in EVALUATORS:
        with contextlib.suppress(ModuleNotFoundError):
            coco, evaluation = importlib.import_module(coco_module), importlib.import_module(eval_module)
            return package, getattr(coco, coco_name), getattr(evaluation, eval_name)
    raise ConfigError("COCO AP needs an evaluator, and none is installed. Run `pip install hotcoco`.")


def _open(coco_class: Any, annotations: Path | Mapping[str, Any]) -> Any:
    if isinstance(annotations, Path):
        if not annotations.is_file():
            raise DataError(f"{annotations}: no such annotation file, so COCO AP cannot be computed. Check the path.")
        return coco_class(str(annotations))
    truth = coco_class()
    truth.dataset = dict(annotations)
    truth.createIndex()
    return truth


def _evaluated_ids(truth: Any, image_ids: Sequence[int | str] | None) -> list[int]:
    known = sorted(truth.getImgIds())
    if image_ids is None:
        return known
    unknown = sorted(map(str, set(image_ids) - set(known)))
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(image_ids)} images are not in the annotation file, such as {unknown[0]}. "
            "It belongs to another data set: give the one of these images."
        )
    return sorted(int(image_id) for image_id in set(image_ids))


# The annotation file of a split

MAX_NAMED = 5

_ALL, _AREAS = "0.50:0.95", ("small", "medium", "large")
_LINES = (
    *(("AP", overlap, "all", 100) for overlap in (_ALL, "0.50", "0.75")),
    *(("AP", _ALL, area, 100) for area in _AREAS),
    *(("AR", _ALL, "all", most) for most in (1, 10, 100)),
    *(("AR", _ALL, area, 100) for area in _AREAS),
)


class CocoTruth(NamedTuple):
    """An annotation file that fits the classes and images of a split."""

    file: Path
    category_ids: tuple[int, ...]
    """Category id of each class."""
    images: dict[str, CocoImage]
    """Images by path."""
    remarks: tuple[str, ...] = ()
    """Lines to print with the scores."""


class CocoUnavailable(NamedTuple):
    """Why COCO AP is not computed: a sentence to print. The evaluation continues."""

    text: str


def is_requested(data: DataSet, split: Split = "val") -> bool:
    """Whether a data set requests COCO AP for a split.

    It does by its key `annotations`, by a split that is one COCO file, or by a name that ends in coco.yaml (YOLOv7).
    """
    is_coco_file = len(data.entries[split]) == 1 and coco_entry(data, split) is not None
    return bool(data.annotations) or is_coco_file or data.file.name.endswith("coco.yaml")


def find_truth(data: DataSet, split: Split, names: Sequence[str], images: ImageSet) -> CocoTruth | CocoUnavailable:
    """The annotation file of a split, or the reason why none fits; called before anything that takes long."""
    file = annotation_file(data, split)
    if file is None:
        searched = ", ".join(map(str, annotation_candidates(data, split)))
        return CocoUnavailable(
            f"COCO AP was not computed: there is no annotation file ({searched}). Name yours in {data.file}: "
            "annotations: FILE.json"
        )
    try:
        return fit(file, load_json(str(file)), names, images)
    except DataError as error:
        return CocoUnavailable(f"COCO AP was not computed: {error}")


def fit(file: Path, content: dict[str, Any], names: Sequence[str], images: ImageSet) -> CocoTruth:
    """Classes and images of a split in an annotation file; DataError with the reason if one of them is not in it."""
    category_ids, left_out = _categories(file, content, names)
    coco_images = _coco_images(file, content, images)
    known, chosen = {image.image_id for image in coco_images.values()}, set(category_ids)
    if not any(
        each.get("image_id") in known and each.get("category_id") in chosen and not each.get("iscrowd")
        for each in listed(content, "annotations", str(file))
    ):
        raise DataError(
            f"{file}: it has no object of these classes in any of {counted(len(images), 'image')}. Use the annotation "
            "file of this split."
        )
    remarks = [f"COCO AP, with the annotations of {file}:"]
    if left_out:
        some = ", ".join(left_out[:MAX_NAMED]) + (", ..." if len(left_out) > MAX_NAMED else "")
        remarks.append(f"Categories that are not classes of the data set are left out: {some}.")
    return CocoTruth(file, category_ids, coco_images, tuple(remarks))


def export_for(truth: CocoTruth | CocoUnavailable, names: Sequence[str]) -> CocoExport:
    """A CocoExport with the ids of the annotation file; without one, with COCO's category ids for COCO's names."""
    if isinstance(truth, CocoTruth):
        return CocoExport(truth.category_ids, truth.images)
    coco = open_data_yaml(shipped_folder("data") / "coco.yaml").names
    return CocoExport(COCO_CATEGORY_IDS if tuple(map(_normalised, names)) == coco else None)


def score(export: CocoExport, truth: CocoTruth | CocoUnavailable) -> CocoScores | CocoUnavailable:
    """The scores over the evaluated images and the classes of the data set, or the reason why there are none."""
    if isinstance(truth, CocoUnavailable):
        return truth
    try:
        return coco_scores(truth.file, export.table(), export.image_ids, truth.category_ids)
    except (FlatoutError, OSError, ValueError, KeyError, TypeError) as error:
        logger.debug("COCO AP", exc_info=True)
        return CocoUnavailable(f"COCO AP was not computed: {error}")


def lines(scores: CocoScores) -> Iterator[str]:
    """The twelve lines that COCO's own tool prints."""
    for (metric, overlap, area, most), value in zip(_LINES, scores, strict=True):
        title = "Average Precision" if metric == "AP" else "Average Recall"
        yield f" {title:<18} ({metric}) @[ IoU={overlap:<9} | area={area:>6} | maxDets={most:>3} ] = {value:0.3f}"


def _normalised(name: object) -> str:
    return str(name).strip().lower()


def _categories(file: Path, content: dict[str, Any], names: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
    """The category id of each class, and the names of the categories that are not classes."""
    ids: dict[str, int] = {}
    for category in categories_by_id(content, str(file)):
        if ids.setdefault(_normalised(category["name"]), category["id"]) != category["id"]:
            raise DataError(
                f"{file}: two categories are named {category['name']!r}, so classes cannot be identified by name. "
                "Rename one of them."
            )
    absent = [name for name in names if _normalised(name) not in ids]
    if absent:
        theirs = ", ".join(list(ids)[:MAX_NAMED]) + (", ..." if len(ids) > MAX_NAMED else "")
        raise DataError(
            f"{file}: it has no category for {len(absent)} of {counted(len(names), 'class')}, such as {absent[0]!r}; "
            f"its categories are {theirs}. Use the same names, or the annotation file of this data set."
        )
    classes = {_normalised(name): name for name in names}
    if twice := [name for name in names if classes[_normalised(name)] != name or names.count(name) > 1]:
        raise DataError(
            f"Two classes of the data set have the same name, {twice[0]!r} (case and spaces are ignored), so they "
            f"cannot be matched with the categories of {file}. Rename one in the data YAML."
        )
    return tuple(ids[_normalised(name)] for name in names), [name for name in ids if name not in classes]


def _coco_images(file: Path, content: dict[str, Any], images: ImageSet) -> dict[str, CocoImage]:
    by_stem: dict[str, list[dict[str, Any]]] = {}
    for image in listed(content, "images", str(file)):
        by_stem.setdefault(PurePath(str(image.get("file_name"))).stem, []).append(image)
    size_of = dict(zip(images.paths, images.size_wh_N2.tolist(), strict=True))
    found = {path: _matching_image(by_stem.get(PurePath(path).stem, []), path) for path in size_of}
    absent = [path for path, image in found.items() if image is None]
    if absent:
        raise DataError(
            f"{file}: it does not contain {len(absent)} of {counted(len(found), 'image')} by file name, such as "
            f"{absent[0]}. It belongs to another data set or split: use the annotation file of this one."
        )
    coco_images = {path: _coco_image(file, image, size_of[path]) for path, image in found.items() if image is not None}
    if len({image.image_id for image in coco_images.values()}) < len(coco_images):
        raise DataError(
            f"{file}: several images have the same id in it, because their file names are not unique. Give file_name "
            "with its folder."
        )
    return coco_images


def _matching_image(same_stem: list[dict[str, Any]], path: str) -> dict[str, Any] | None:
    """The image for a path among those of the same name; of several, the one whose whole `file_name` ends the path."""
    if len(same_stem) == 1:
        return same_stem[0]
    parts = PurePath(path).parts
    exact = [
        image
        for image in same_stem
        if (names := PurePath(str(image.get("file_name"))).parts) and parts[-len(names) :] == names
    ]
    return exact[0] if len(exact) == 1 else None


def _coco_image(file: Path, image: dict[str, Any], size_wh: Sequence[int]) -> CocoImage:
    """Id and scale of an image; copies at another size are allowed if the aspect ratio is the same."""
    name, image_id = image.get("file_name"), image.get("id")
    if not isinstance(image_id, int) or isinstance(image_id, bool):
        raise DataError(
            f"{file}: the id of {name} is {image_id!r}; evaluators need whole numbers. Renumber the images."
        )
    annotated = [image.get("width"), image.get("height")]
    if not all(isinstance(side, int | float) and side > 0 for side in annotated):
        raise DataError(f"{file}: {name} has no width and height. Write the file again with them.")
    scale_x, scale_y = np.array(annotated, float) / size_wh
    # The sides of a copy are rounded to whole pixels.
    if abs(scale_x / scale_y - 1) > 1 / size_wh[0] + 1 / size_wh[1]:
        sizes = f"{size_wh[0]} x {size_wh[1]} px, but {annotated[0]} x {annotated[1]} in the file"
        raise DataError(
            f"{file}: {name} is {sizes}. It is a different image, or it was cropped or rotated: use the original."
        )
    return CocoImage(image_id, float(scale_x), float(scale_y))
