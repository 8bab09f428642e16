"""Pairs of a template and an inspected image, as images of three planes.

P/temp/ID.*  P/test/ID.*             a folder each; optional: P/temp2/ID.* (second references), P/mask/ID.* and
                                     P/boxes/ID.txt (defects: `x1 y1 x2 y2 class` per line)
P/ID_temp.*  P/ID_test.*             one folder for all; optional: ID_temp2.*, ID_mask.* and ID.txt with boxes
pairs.csv                            columns template, test and optionally ref2, mask, boxes; paths relative to the file

Target is the inspected image, ref1 the template aligned to it; with one template, ref2 repeats ref1.

Dimension key:  C planes (target, ref1, ref2)   H W pixels   K boxes   5 (x1, y1, x2, y2, class)
"""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.defect.compare.align import AlignConfig, align
from flatout.defect.data.decode import read_stored
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.items import MAX_GREY, grey, image_files, size_text
from flatout.errors import DataError
from flatout.feed import DecodeError

TEMPLATE, TEST, SECOND, MASK, BOXES = "temp", "test", "temp2", "mask", "boxes"
COLUMNS = ("template", "test", "ref2", "mask", "boxes")
"""Columns of a CSV file of pairs; the first two are required."""


def holds_pairs(path: str | Path) -> bool:
    """Whether a path is named like a CSV file, or is a folder with templates in either of the two layouts above.

    Whether every template has its test image is checked when they are listed.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv":
        return True
    if not path.is_dir():
        return False
    return (path / TEMPLATE).is_dir() or any(file.stem.endswith(f"_{TEMPLATE}") for file in image_files(path))


def list_pair_images(path: str | Path) -> list[EvaluationImage]:
    """The inspected images with their references and labels, sorted by name or in the order of the CSV file.

    Raises DataError that names an image without a partner.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv":
        return _from_csv(path)
    if (path / TEMPLATE).is_dir():
        found = {name: _by_stem(image_files(path / name)) for name in (TEMPLATE, TEST, SECOND, MASK)}
        found[BOXES] = _by_stem((path / BOXES).glob("*.txt"))
        return _matched(found, {name: str(path / name) for name in found})
    files = list(image_files(path))
    found = {name: _by_stem(files, f"_{name}") for name in (TEMPLATE, TEST, SECOND, MASK)}
    found[BOXES] = _by_stem(path.glob("*.txt"))
    return _matched(found, {name: f"{path}/*_{name}.*" for name in found})


def _matched(found: Mapping[str, Mapping[str, Path]], places: Mapping[str, str]) -> list[EvaluationImage]:
    tests, templates = found[TEST], found[TEMPLATE]
    if not tests:
        raise DataError(f"{places[TEST]}: there are no inspected images.")
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
        )
        for name in sorted(tests)
    ]


def _from_csv(path: Path) -> list[EvaluationImage]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = tuple(reader.fieldnames or ())
            rows = list(reader)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: it is not a CSV file in UTF-8: {error}.") from None
    if missing := [name for name in COLUMNS[:2] if name not in names]:
        raise DataError(
            f"{path}: the column {missing[0]} is missing. The first line must name the columns: {', '.join(COLUMNS)}; "
            "the last three are optional."
        )
    if unknown := [name for name in names if name not in COLUMNS]:
        raise DataError(f"{path}: unknown column {unknown[0]}. Columns are {', '.join(COLUMNS)}.")
    if not rows:
        raise DataError(f"{path}: there are no pairs after the first line.")
    images, first_line = [], dict[Path, int]()
    for line, row in enumerate(rows, start=2):
        given = {name: path.parent / text for name in COLUMNS if (text := (row.get(name) or "").strip())}
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
    return images


def _image(*, test: Path, references: list[Path], mask: Path | None, boxes: Path | None) -> EvaluationImage:
    # A file of boxes without a line is a statement: this image was looked at, and it is good.
    is_good = mask is None and boxes is not None and not boxes.read_text().strip()
    return EvaluationImage(test, mask, is_good, tuple(references), boxes)


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
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}.") from None
    for number, line in enumerate(lines, start=1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        try:
            x1, y1, x2, y2 = map(float, words[:4])
            kind = int(words[4]) if len(words) == 5 else -1
        except ValueError:
            kind = -2
        if kind == -2 or len(words) > 5 or not (x1 < x2 and y1 < y2):
            raise DataError(f"{path}:{number}: {line!r:.60} is not a box: `x1 y1 x2 y2 [class]` in pixels is expected.")
        boxes.append((x1, y1, x2, y2))
        classes.append(kind)
    return Boxes(np.array(boxes, np.float64).reshape(-1, 4), np.array(classes, np.int64))


def _grey_plane(path: Path) -> np.ndarray:
    """One image of a pair as grey [H, W]; a file of three planes is refused, colours become brightness."""
    try:
        stored = read_stored(path, grey_is_plane=True)
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
    return {file.stem.removesuffix(ending): file for file in files if file.stem.endswith(ending)}
