"""AP as COCO counts it, for `test.py`: which annotation file, whether it fits the data set, and what is printed.

The annotation file decides: its categories are found by the names of the classes, its pictures by their file names. One
that does not fit gives no AP but the reason why.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from flatout.errors import DataError, FlatoutError, counted
from flatout.yolo.data.coco import annotation_candidates, annotation_file, categories_by_id, listed, load_json
from flatout.yolo.data.data_yaml import DataSet, Split, open_data_yaml
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.metrics.coco import COCO_CATEGORY_IDS, CocoExport, CocoPicture, CocoScores, coco_scores

logger = logging.getLogger(__name__)

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
    pictures: dict[str, CocoPicture]
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


def _pictures(file: Path, content: dict[str, Any], images: ImageSet) -> dict[str, CocoPicture]:
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


def _picture(file: Path, image: dict[str, Any], size_wh: Sequence[int]) -> CocoPicture:
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
    return CocoPicture(image_id, float(scale_x), float(scale_y))
