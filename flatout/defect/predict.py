"""Heat maps, detections and tables for a folder of images, with scores where labels exist.

method, images or pairs -> per image: heat map (float32 TIFF), plot, binary mask (PNG)
                           over all: detections.csv, blobs.csv, images.csv, results.json, report.html

Dimension key:  C planes   H W image   K dead pixels
"""

import csv
import io
import json
import logging
import os
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from flatout.defect.compare.align import AlignConfig
from flatout.defect.compare.calibrate import (
    ANY_HEAT,
    LOWEST,
    Settings,
    choose_settings,
    heat_blobs,
    lowest_for,
    read_settings,
    response,
)
from flatout.defect.data.find import GOOD, SPLITS, EvaluationImage, list_images, list_split
from flatout.defect.data.items import MAX_GREY, BlindnessWarning, read_canonical
from flatout.defect.data.pairs import (
    UNLABELLED,
    PairReader,
    holds_pairs,
    list_pair_images,
    read_boxes,
    unlabelled_among_labelled,
)
from flatout.defect.evaluate.blobs import BlobImage, blob_scores, inspect_blobs
from flatout.defect.evaluate.evaluate import EvaluatedImage, FindDetections, evaluate_images
from flatout.defect.evaluate.maps import (
    HeatMapper,
    MapMaker,
    ReadImage,
    choose_map_maker,
    map_images,
    open_mapper,
)
from flatout.defect.evaluate.scores import DEFAULT_THRESHOLD, DefectEvaluation, ImageRow, detect_components
from flatout.defect.options import PATCH_OF_TYPE, CalibrateOptions, Method, TestOptions
from flatout.defect.patches import Grid, GridOver
from flatout.defect.plots import grey_png, result_png, write_result
from flatout.defect.report import Report
from flatout.defect.weights import DefectWeights, load_network
from flatout.engine import DTYPES
from flatout.errors import ConfigError, DataError, ResourceError, counted
from flatout.ranks import choose_device
from flatout.safefiles import csv_text

logger = logging.getLogger(__name__)

MAX_HEAT = 1.001
"""Highest threshold that is accepted; `calibrate` chooses one just above 1 if false blobs have a heat of 1."""


def predict(options: TestOptions) -> DefectEvaluation:
    """Process every image of `test_path` and write the results to `output_dir`; images with a label are evaluated."""
    way = open_inspection(options)
    images = way.images
    threshold = DEFAULT_THRESHOLD if way.threshold is None else way.threshold
    if way.threshold is None:
        logger.warning(
            "%s holds no threshold, so %g is used, which may be far from a good one. Choose one on other images than "
            "these: flatout defect calibrate --model_path %s --test_path FOLDER --settings FILE",
            options.model_path, threshold, options.model_path,
        )  # fmt: skip
    if images[0].references and options.use_ground_truth_mask and (unlabelled := unlabelled_among_labelled(images)):
        logger.warning(
            "%d of %s, such as %s, have %s.", len(unlabelled), counted(len(images), "image"), unlabelled[0], UNLABELLED
        )
    writer = _Writer(options, images, threshold=threshold, ranks_all=way.find is not None)
    result = evaluate_images(
        way.maker,
        images,
        read=BlindnessWarning(way.read, are_pairs=bool(images[0].references)),
        use_masks=options.use_ground_truth_mask,
        dead_xy_K2=read_dead_pixels(options.dead_pixels) if options.dead_pixels else None,
        threshold=threshold,
        find=way.find,
        device=way.device,
        observers=[writer],
        in_threads=writer.write,
    )
    result = writer.finish(result)
    rate = len(images) / max(result.seconds, 1e-9)
    logger.info(
        "%s, %.1f per second with reading and writing: %s", counted(len(images), "image"), rate, options.output_dir
    )
    return result


def calibrate(options: CalibrateOptions) -> Settings:
    """Choose a threshold on labelled or good images, and write it to the settings file."""
    if not options.settings:
        raise ConfigError("--settings is missing: the file to write the threshold to.")
    if options.false_blobs < 0:
        raise ConfigError(f"--false_blobs {options.false_blobs} must be 0 or more.")
    way = open_inspection(replace(options, settings=""))
    lowest = LOWEST
    if way.method == "network":
        lowest = lowest_for(way.threshold, partial(response, way.images, way.read, way.maker))
    settings = choose_settings(
        map_images(
            way.images, way.read, way.maker, lambda image, mapped: heat_blobs(mapped.heat_HW, image, least=lowest / 2)
        ),
        method=way.method,
        false_blobs=options.false_blobs,
        chosen_on=options.test_path,
        lowest=lowest,
    )
    write_result(Path(options.settings), settings.as_yaml())
    return settings


class Inspection(NamedTuple):
    """Everything that turns files into heat maps: which images, how they are read, by which method."""

    method: Method
    images: list[EvaluationImage]
    read: ReadImage
    align: AlignConfig | None
    """How references are aligned; None: they are used as they are."""
    mapper: HeatMapper | None
    """The network; None: the classical method."""
    maker: MapMaker
    threshold: float | None
    """From the flag, the settings file or the weights; None: none was chosen."""
    find: FindDetections | None
    """How detections are found; None: as local maxima."""
    device: torch.device


def open_inspection(options: TestOptions) -> Inspection:
    """List the images and open the method; ConfigError if the options do not go together."""
    if not options.test_path:
        raise ConfigError("--test_path is missing: a folder with images, or pairs.")
    settings = read_settings(options.settings) if options.settings else None
    if not Path(options.test_path).exists():
        raise DataError(f"{options.test_path}: no such file or folder.")
    are_pairs = holds_pairs(options.test_path)
    method = options.method or ("network" if options.model_path or not are_pairs else "classical")
    if method == "network" and not options.model_path:
        without = (
            "omit --method network: pairs need none."
            if are_pairs
            else f"{options.test_path} must hold pairs: a folder with temp/ and test/, or a CSV file; or use --method "
            "classical for images of three planes."
        )
        raise ConfigError(f"--model_path is missing: the weights of a network. Without weights, {without}")
    if options.sweep and method == "classical":
        raise ConfigError("--sweep paints defects for a network: give its weights with --model_path, or omit --sweep.")
    if settings is not None and settings.method != method:
        advice = "Give its weights with --model_path" if method == "classical" else "Use --method classical"
        raise ConfigError(
            f"{options.settings}: its threshold was chosen for the {settings.method} method, not for {method}. "
            f"{advice}, or choose another threshold with: flatout defect calibrate"
        )
    chosen = settings.threshold if settings is not None else None
    images = list_test_images(options)
    aligns = options.align == "on" or (options.align == "auto" and are_pairs)
    align = AlignConfig(reach_px=options.align_px) if aligns else None
    refines = options.refine == "on" or (options.refine == "auto" and are_pairs)
    device = choose_device(options.resolved_device)
    mapper: HeatMapper | None = None
    own: float | None = DEFAULT_THRESHOLD
    if method == "network":
        network, weights = load_network(options.model_path)
        mapper = open_mapper(
            network, grids_for(options, weights), device, dtype=DTYPES[options.amp], untiled=options.untiled
        )
        own = weights.threshold
    threshold = next((each for each in (options.threshold, chosen, own) if each is not None), None)
    if threshold is not None and not 0 <= threshold <= MAX_HEAT:
        raise ConfigError(f"The threshold {threshold:g} is outside of 0..1, where all heat is.")
    find = detect_components if method == "classical" or refines else None
    maker = choose_map_maker(mapper, device, align=align, refines=refines)
    read = PairReader(images, None).stored if are_pairs else read_canonical
    return Inspection(method, images, read, align, mapper, maker, threshold, find, device)


def list_test_images(options: TestOptions) -> list[EvaluationImage]:
    """Pairs; or a split of a data set, given its root or the folder of the split; or a folder of images, or one image.

    The root stands for its test split, and in a calibration for its valid split: a threshold is not chosen on the
    images that it is tested on. Images of a folder named `good` are good, as in a split.
    """
    if holds_pairs(options.test_path):
        return list_pair_images(options.test_path)
    path = Path(options.test_path)
    if path.is_file():
        return [EvaluationImage(path, None, is_good=path.parent.name == GOOD)]
    named = [(path.parent, split) for split in SPLITS if path.name == split]
    of_root = [(path, split) for split in (SPLITS[::-1] if isinstance(options, CalibrateOptions) else SPLITS[:1])]
    for root, split in named or of_root:
        if images := list_split(root, split, options.img_format):
            return images
    is_good = path.name == GOOD
    return [EvaluationImage(image, None, is_good=is_good) for image in list_images(path, options.img_format)]


def grids_for(options: TestOptions, weights: DefectWeights) -> GridOver:
    """Patch grids as in training, for images of any size."""
    patch = options.patch_size or weights.patch or PATCH_OF_TYPE[options.image_type or "strip"]
    return partial(Grid.over, patch=patch, min_patches=options.min_patches)


def read_dead_pixels(path: str) -> np.ndarray:
    """Read dead pixels (x, y) from a CSV file with the columns dead_x and dead_y, int64 [K, 2]."""
    try:
        with open(path, newline="") as file:
            rows = [(int(row["dead_x"]), int(row["dead_y"])) for row in csv.DictReader(file)]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from None
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}: expected a CSV file with whole numbers in the columns dead_x and dead_y.") from None
    return np.array(rows, np.int64).reshape(-1, 2)


class _Writer:
    """Writes the files of every image as it is processed, and the tables at the end."""

    def __init__(
        self, options: TestOptions, images: list[EvaluationImage], *, threshold: float, ranks_all: bool = False
    ) -> None:
        """`ranks_all`: heat maps are 0 outside of components, so those below the threshold can be ranked, too."""
        self._options, self._images, self._threshold, self._ranks_all = options, images, threshold, ranks_all
        self._root = Path(os.path.commonpath([os.path.abspath(image.path.parent) for image in images]))
        """The folder that holds all images, relative to which their names are unique."""
        stems = Counter(image.path.with_suffix("") for image in images)
        self._shared_stems = {stem for stem, num in stems.items() if num > 1}
        """Paths without their endings that several images have, such as a.png and a.jpg."""
        self._folder = Path(options.output_dir)
        self._detections: list[tuple[str, int, int, float]] = []
        self._blobs: dict[Path, BlobImage] = {}
        """The blobs of images at the threshold."""
        self._ranked: dict[Path, BlobImage] = {}
        """All of them, if they can be ranked and the image is labelled."""
        self._report = Report(threshold) if options.report else None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"{self._folder}: cannot be created: {error.strerror}. Choose another --output_dir."
            ) from None

    def write(self, evaluated: EvaluatedImage) -> None:
        """Write the files of an image and find its blobs; in any thread, images in any order."""
        heat_HW, mask_HW = evaluated.heat_HW, evaluated.mask_HW
        image = evaluated.image
        name = self._name(image)
        is_shared = image.path.with_suffix("") in self._shared_stems
        stem = self._folder / (name if is_shared else name.with_suffix(""))
        if self._options.save_maps:
            import tifffile

            tiff = io.BytesIO()
            tifffile.imwrite(tiff, heat_HW)
            write_result(stem.with_name(f"{stem.name}_heat.tiff"), tiff.getvalue())
        if self._options.save_pictures:
            path = stem.with_name(f"{stem.name}_result.png")
            result_png(evaluated.planes_CHW, heat_HW, mask_HW, path, threshold=self._threshold)
        if self._options.save_masks:
            grey_png((heat_HW >= self._threshold) * MAX_GREY, stem.with_name(f"{stem.name}_mask.png"))
        boxes = read_boxes(image.boxes) if image.boxes is not None and self._options.use_ground_truth_mask else None
        found = self._blobs[image.path] = inspect_blobs(heat_HW, self._threshold, mask_HW, boxes)
        if self._ranks_all and found.is_labelled:
            self._ranked[image.path] = inspect_blobs(heat_HW, ANY_HEAT, mask_HW, boxes)

    def __call__(self, evaluated: EvaluatedImage) -> None:
        """Note the results of an image that was written, in the order of the images."""
        name = str(self._name(evaluated.image))
        self._detections += [(name, each.y, each.x, each.score) for each in evaluated.detections]
        if self._report is not None:
            self._report.add(name, evaluated, self._blobs[evaluated.image.path])

    def _name(self, image: EvaluationImage) -> Path:
        # Without the ".." of a table of pairs, which would lead out of the output folder.
        return Path(os.path.abspath(image.path)).relative_to(self._root)

    def finish(self, result: DefectEvaluation) -> DefectEvaluation:
        """Write the tables and the report; returns the result with the scores of blobs."""
        names = [str(self._name(image)) for image in self._images]
        blobs = [self._blobs[image.path] for image in self._images]
        all_blobs = [self._ranked[image.path] for image in self._images if image.path in self._ranked]
        rows = [_with_blobs(row, found) for row, found in zip(result.rows, blobs, strict=True)]
        result = replace(result, rows=rows, at_threshold=blob_scores(blobs, all_blobs))
        ranked = sorted(self._detections, key=lambda row: -row[3])
        if not self._options.all_detections:
            ranked = [row for row in ranked if row[3] >= self._threshold]
        write_result(self._folder / "detections.csv", csv_text([("image", "y", "x", "score"), *ranked]))
        pairs = [(blob, name, found) for name, found in zip(names, blobs, strict=True) for blob in found.blobs]
        boxes = [
            (name, *blob[:6], bool(blob.hits) if found.is_labelled else None)
            for blob, name, found in sorted(pairs, key=lambda pair: -pair[0].score)
        ]
        columns = ("image", "x1", "y1", "x2", "y2", "area_px", "score", "is_hit")
        write_result(self._folder / "blobs.csv", csv_text([columns, *boxes]))
        # Relative paths, as in detections.csv, because good and defective images may have the same file name.
        images = [asdict(row) | {"name": name} for row, name in zip(rows, names, strict=True)]
        write_result(self._folder / "images.csv", csv_text([images[0], *(row.values() for row in images)]))
        scores = result.scores() | {f"recall@{num}": value for num, value in result.recalls().items()}
        write_result(self._folder / "results.json", json.dumps(scores, indent=1) + "\n")
        if self._report is not None:
            page = self._report.page(scores, title=f"Defects in {self._options.test_path}")
            write_result(self._folder / "report.html", page)
        return result


def _with_blobs(row: ImageRow, found: BlobImage) -> ImageRow:
    return replace(
        row,
        verdict=found.verdict,
        num_blobs=len(found.blobs),
        num_false_blobs=len(found.false_blobs) if found.is_labelled else None,
        area_px=sum(blob.area_px for blob in found.blobs),
    )
