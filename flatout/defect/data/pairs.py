"""Pairs of a template and an inspected image, as images of three planes.

P/temp/ID.*  P/test/ID.*             a folder each; optional: P/temp2/ID.* (second references), P/mask/ID.* and
                                     P/boxes/ID.txt (defects: `x1 y1 x2 y2 class` per line)
P/ID_temp.*  P/ID_test.*             one folder for all; optional: ID_temp2.*, ID_mask.* and ID.txt with boxes
pairs.csv                            columns template, test and optionally ref2, mask, boxes; paths relative to the file
P/test/ID.* or P/ID_test.*           one inspected image: that pair alone

Target is the inspected image, ref1 the template aligned to it; with one template, ref2 repeats ref1.

Dimension key:  C planes (target, ref1, ref2)   H W pixels   K boxes   5 (x1, y1, x2, y2, class)
"""

import csv
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.defect.compare.align import AlignConfig, align
from flatout.defect.data.decode import read_stored
from flatout.defect.data.find import GOOD, EvaluationImage
from flatout.defect.data.items import MAX_GREY, PAIR_ENDINGS, grey, image_files, size_text
from flatout.errors import DataError
from flatout.feed import DecodeError

TEMPLATE, TEST, SECOND, MASK, BOXES = "temp", "test", "temp2", "mask", "boxes"
COLUMNS = ("template", "test", "ref2", "mask", "boxes")
"""Columns of a CSV file of pairs; the first two are required."""


def holds_pairs(path: str | Path) -> bool:
    """Whether a path is named like a CSV file, is the inspected image of a pair, or is a folder with templates.

    Whether every template has its test image is checked when they are listed.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv":
        return True
    if not path.is_dir():
        return _folder_of_pair(path) is not None
    return (path / TEMPLATE).is_dir() or any(file.stem.endswith(f"_{TEMPLATE}") for file in image_files(path))


def list_pair_images(path: str | Path) -> list[EvaluationImage]:
    """The inspected images with their references and labels, sorted by name or in the order of the CSV file.

    Raises DataError that names an image without a partner.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv":
        return _from_csv(path)
    if (folder := _folder_of_pair(path)) is not None:
        return [image for image in list_pair_images(folder) if image.path == path]
    is_good = path.name == GOOD
    if (path / TEMPLATE).is_dir():
        found = {name: _by_stem(image_files(path / name)) for name in (TEMPLATE, TEST, SECOND, MASK)}
        found[BOXES] = _by_stem((path / BOXES).glob("*.txt"))
        _refuse_labels_of_nothing(found, path)
        return _matched(found, {name: str(path / name) for name in found}, is_good=is_good)
    files = list(image_files(path))
    found = {name: _by_stem(files, f"_{name}") for name in (TEMPLATE, TEST, SECOND, MASK)}
    found[BOXES] = _by_stem(path.glob("*.txt"))
    return _matched(found, {name: f"{path}/*_{name}.*" for name in found}, is_good=is_good)


def labels_without_image(path: str | Path, images: Iterable[EvaluationImage]) -> list[Path]:
    """Files in mask/ and boxes/ of a folder of pairs that belong to no inspected image, sorted."""
    folder, names = Path(path), {image.path.stem for image in images}
    if not (folder / TEMPLATE).is_dir():
        return []
    labels = [*image_files(folder / MASK), *(folder / BOXES).glob("*.txt")]
    return sorted(label for label in labels if label.stem not in names)


def unlabelled_among_labelled(images: Iterable[EvaluationImage]) -> list[Path]:
    """Images with neither a mask nor boxes that are not known to be good, if others are labelled; else none."""
    images = list(images)
    unlabelled = [image.path for image in images if not image.is_labelled and image.boxes is None]
    return unlabelled if len(unlabelled) < len(images) else []


UNLABELLED = (
    "neither a mask nor boxes: not scored, although other images are. A good image needs an empty mask or an empty "
    "file of boxes"
)
"""What is said of such images."""


def _folder_of_pair(path: Path) -> Path | None:
    """The folder of pairs that a file is an inspected image of, with a template; None if it is none."""
    if path.suffix.lower() not in PAIR_ENDINGS or not path.is_file():
        return None
    root = path.parent.parent
    if path.parent.name == TEST and path.stem in {file.stem for file in image_files(root / TEMPLATE)}:
        return root
    template = f"{path.stem.removesuffix(f'_{TEST}')}_{TEMPLATE}"
    is_pair = path.stem.endswith(f"_{TEST}") and template in {file.stem for file in image_files(path.parent)}
    return path.parent if is_pair else None


def _refuse_labels_of_nothing(found: Mapping[str, Mapping[str, Path]], folder: Path) -> None:
    """Raise DataError if there are masks, or boxes, but not one has the name of an inspected image."""
    for kind in (MASK, BOXES):
        labels = found[kind]
        if labels and found[TEST] and not labels.keys() & found[TEST].keys():
            raise DataError(
                f"{folder / kind}: no file in it has the name of an image in {folder / TEST}, so nothing would be "
                f"labelled; the first is {labels[min(labels)].name}. Rename them, without an ending such as _mask, or "
                "remove the folder."
            )


def _matched(
    found: Mapping[str, Mapping[str, Path]], places: Mapping[str, str], *, is_good: bool
) -> list[EvaluationImage]:
    tests, templates = found[TEST], found[TEMPLATE]
    if not tests:
        raise DataError(
            f"{places[TEST]}: there are no inspected images. File names must end in {', '.join(PAIR_ENDINGS)}."
        )
    for one, other, what in ((tests, templates, TEMPLATE), (templates, tests, TEST)):
        if unpaired := sorted(one.keys() - other.keys()):
            raise DataError(
                f"{one[unpaired[0]]}: it has no partner of the same name in {places[what]}"
                + (f", and {len(unpaired) - 1} more have none." if len(unpaired) > 1 else ".")
            )
    if found[SECOND] and (without := sorted(tests.keys() - found[SECOND].keys())):
        raise DataError(
            f"{tests[without[0]]}: it has no second reference in {places[SECOND]}. All images need one, or none."
        )
    return [
        _image(
            test=tests[name],
            references=[templates[name], *([found[SECOND][name]] if found[SECOND] else [])],
            mask=found[MASK].get(name),
            boxes=found[BOXES].get(name),
            is_good=is_good,
        )
        for name in sorted(tests)
    ]


def _from_csv(path: Path) -> list[EvaluationImage]:
    images, first_line = [], dict[Path, int]()
    for line, row in _csv_rows(path):
        given = {name: path.parent / text for name, text in row.items() if text}
        for name in COLUMNS[:2]:
            if name not in given:
                raise DataError(f"{path}:{line}: {name} is empty.")
        for name, file_path in given.items():
            if not file_path.is_file():
                raise DataError(f"{path}:{line}: {name}: {file_path} does not exist.")
        if (before := first_line.setdefault(given["test"], line)) != line:
            raise DataError(f"{path}:{line}: {given['test']} is also in line {before}. List every test image once.")
        references = [given["template"], *([given["ref2"]] if "ref2" in given else [])]
        images.append(
            _image(test=given["test"], references=references, mask=given.get("mask"), boxes=given.get("boxes"))
        )
    if not images:
        raise DataError(f"{path}: there are no pairs after the first line.")
    return images


def _csv_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows of a table of pairs with the numbers of their lines; blank lines are left out."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            # Spreadsheets write semicolons where the comma is the decimal sign.
            reader = csv.reader(file, delimiter=max(",;\t", key=first.count))
            names = [name.strip().lower() for name in next(reader, [])]
            rows = [(reader.line_num, [text.strip() for text in row]) for row in reader if row]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: it is not a CSV file in UTF-8: {error}.") from None
    if missing := [name for name in COLUMNS[:2] if name not in names]:
        raise DataError(
            f"{path}: the column {missing[0]} is missing. The first line must name the columns: {', '.join(COLUMNS)}; "
            "the last three are optional."
        )
    for number, name in enumerate(names):
        if name not in COLUMNS:
            raise DataError(f"{path}: unknown column {name!r}. Columns are {', '.join(COLUMNS)}.")
        if name in names[:number]:
            raise DataError(f"{path}: the column {name} is there twice.")
    for line, row in rows:
        if len(row) > len(names):
            raise DataError(
                f"{path}:{line}: it has {len(row)} fields, but the first line names {len(names)} columns. Put paths "
                "that contain the separator in quotes."
            )
    return [(line, dict(zip(names, row, strict=False))) for line, row in rows]


def _image(
    *, test: Path, references: list[Path], mask: Path | None, boxes: Path | None, is_good: bool = False
) -> EvaluationImage:
    """`is_good`: its folder says so; a label is believed more."""
    if mask is None and boxes is not None:
        # A file of boxes without a line is a statement: this image was looked at, and it is good.
        is_good = not boxes.read_bytes().removeprefix(BOM_UTF8).strip()
    return EvaluationImage(test, mask, is_good and mask is None, tuple(references), boxes)


class PairReader:
    """Reads inspected images by path, as planes with aligned references: float32 [3, H, W] in 0..255. Picklable."""

    def __init__(self, images: Iterable[EvaluationImage], align_config: AlignConfig | None) -> None:
        """`align_config`: None: references are used as they are."""
        self._images = {str(image.path): image for image in images}
        self._config = align_config

    def __call__(self, path: str | Path) -> np.ndarray:
        return three_planes(self.stored(path), self._config)

    def stored(self, path: str | Path) -> np.ndarray:
        """The planes as `read_pair` returns them, not aligned."""
        return read_pair(self._images[str(path)])

    def __repr__(self) -> str:
        """Part of the key under which stores keep the planes."""
        return f"pairs, {self._config}"


def read_planes(image: EvaluationImage) -> np.ndarray:
    """As `read_pair`, with three planes, float32."""
    return three_planes(read_pair(image))


def three_planes(planes_CHW: np.ndarray, align_config: AlignConfig | None = None) -> np.ndarray:
    """Planes of which ref2 may be missing, with ref2 and aligned references: float32 [3, H, W].

    `align_config`: None: references are used as they are.
    """
    planes_CHW = (planes_CHW if len(planes_CHW) == 3 else planes_CHW[[0, 1, 1]]).astype(np.float32, copy=False)
    return planes_CHW if align_config is None else aligned_planes(planes_CHW, align_config)


def read_pair(image: EvaluationImage) -> np.ndarray:
    """Target and references of a pair as they are, uint8 or float32 [2 or 3, H, W] in 0..255.

    Values outside of 0..255 are rescaled to it, in all planes together. Raises DecodeError that names a file.
    """
    files = (image.path, *image.references)
    planes = [_grey_plane(file) for file in files]
    for file, plane_HW in zip(files[1:], planes[1:], strict=True):
        if plane_HW.shape != planes[0].shape:
            raise DecodeError(
                f"{image.path}: it has {size_text(planes[0].shape)} pixels, but its reference {file} has "
                f"{size_text(plane_HW.shape)}. Crop or rescale one of them: both must show the same area at one scale."
            )
    if all(plane_HW.dtype == np.uint8 for plane_HW in planes):
        return np.stack(planes)
    planes_CHW = np.stack(planes).astype(np.float32)
    low, high = float(planes_CHW.min()), float(planes_CHW.max())
    if not np.isfinite(low) or not np.isfinite(high):
        raise DecodeError(f"{image.path}: it or its template has values that are not finite.")
    if low < 0 or high > MAX_GREY:
        for file, plane_HW in zip(files[1:], planes[1:], strict=True):
            if plane_HW.dtype != planes[0].dtype:
                raise DecodeError(
                    f"{image.path}: its values are {planes[0].dtype}, those of its reference {file} are "
                    f"{plane_HW.dtype}, and they exceed 0..255: their scales differ. Save both in the same format."
                )
        planes_CHW = (planes_CHW - low) * np.float32(MAX_GREY / max(high - low, 1e-12))
    return planes_CHW


def aligned_planes(planes_CHW: np.ndarray, config: AlignConfig | None = None) -> np.ndarray:
    """Planes with references aligned to target; equal references are aligned once."""
    target_HW, ref1_HW, ref2_HW = planes_CHW
    first_HW = align(target_HW, ref1_HW, config).reference_HW
    same = np.array_equal(ref1_HW, ref2_HW)
    second_HW = first_HW if same else align(target_HW, ref2_HW, config).reference_HW
    return np.stack((target_HW, first_HW, second_HW)).astype(planes_CHW.dtype, copy=False)


def read_template_planes(path: str | Path) -> np.ndarray:
    """A template in all three planes, float32 [3, H, W] in 0..255: what synthetic defects are painted on."""
    return read_planes(EvaluationImage(Path(path), None, is_good=True, references=(Path(path),)))


class Boxes(NamedTuple):
    """Labelled boxes of an image."""

    xyxy_K4: np.ndarray
    """float64, in pixels."""
    class_K: np.ndarray
    """int64; -1 if the file gives none."""


def read_boxes(path: str | Path) -> Boxes:
    """Read `x1 y1 x2 y2 [class]` per line, separated by spaces or commas; DataError that names the line."""
    boxes, classes = [], []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: it is not text in UTF-8. A line of boxes is `x1 y1 x2 y2 [class]`.") from None
    for number, line in enumerate(lines, start=1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        try:
            x1, y1, x2, y2 = map(float, words[:4])
            kind = int(words[4]) if len(words) == 5 else -1
        except ValueError:
            kind = -2
        if kind < -1 or len(words) > 5 or not (-np.inf < x1 < x2 < np.inf and -np.inf < y1 < y2 < np.inf):
            raise DataError(
                f"{path}:{number}: {line!r:.60} is not a box: `x1 y1 x2 y2 [class]` is expected, in pixels, and the "
                "class as a number from 0."
            )
        boxes.append((x1, y1, x2, y2))
        classes.append(kind)
    return Boxes(np.array(boxes, np.float64).reshape(-1, 4), np.array(classes, np.int64))


def _grey_plane(path: Path) -> np.ndarray:
    """One image of a pair as grey [H, W]; a file of three planes is refused, colours become brightness."""
    try:
        stored = read_stored(path, grey_is_plane=True)
        if stored.ndim == 3 and 1 in (stored.shape[0], stored.shape[2]):
            stored = stored.squeeze(0 if stored.shape[0] == 1 else 2)
        if stored.ndim == 3 and path.suffix.lower() in (".tif", ".tiff") and not _is_grey(stored):
            raise DecodeError(
                f"it has shape {stored.shape}, which looks like the planes target, ref1 and ref2 in one file. Images "
                "of a pair have one plane each; give files of three planes without pairs."
            )
        plane_HW = grey(stored)
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from None
    return plane_HW


def _is_grey(stored: np.ndarray) -> bool:
    return stored.shape[2] in (3, 4) and bool((stored[..., :3] == stored[..., :1]).all())


def _by_stem(files: Iterable[Path], ending: str = "") -> dict[str, Path]:
    """Files whose names have this ending, by the name without it; DataError if two have the same."""
    found: dict[str, Path] = {}
    for file in files:
        if file.stem.endswith(ending):
            name = file.stem.removesuffix(ending)
            if (other := found.setdefault(name, file)) is not file:
                one, two = sorted((other, file))
                raise DataError(f"{one}: {two.name} has the same name, so it is unclear which belongs to its partner.")
    return found
