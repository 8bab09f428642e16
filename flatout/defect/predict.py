"""Heat maps, detections and tables for a folder of images, with scores where labels exist.

network, images -> per image: heat map (float32 TIFF), plot; over all: detections.csv, images.csv, results.json

Dimension key:  C planes   H W image   K dead pixels
"""

import csv
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from flatout.defect.data.find import EvaluationImage, list_images, list_split
from flatout.defect.data.items import are_equal, read_canonical
from flatout.defect.evaluate.evaluate import EvaluatedImage, HeatMapper, evaluate_images
from flatout.defect.evaluate.scores import DefectEvaluation
from flatout.defect.options import PATCH_OF_TYPE, TestOptions
from flatout.defect.patches import Grid
from flatout.defect.plots import result_png
from flatout.defect.weights import DefectWeights, load_network
from flatout.errors import ConfigError, DataError, ResourceError, counted
from flatout.feed import DecodeError
from flatout.ranks import choose_device

logger = logging.getLogger(__name__)


def predict(options: TestOptions) -> DefectEvaluation:
    """Process every image of `test_path` and write the results to `output_dir`; images with a label are evaluated."""
    if not options.model_path or not options.test_path:
        raise ConfigError("--model_path and --test_path are both required: a weights file, and a folder with images.")
    network, weights = load_network(options.model_path)
    images = list_test_images(options)
    device = choose_device(options.resolved_device)
    grid = grid_for(options, weights, images[0].path)
    network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    mapper = HeatMapper(network, grid, device, untiled=options.untiled)
    writer = _Writer(options, root=_common_folder(images))
    result = evaluate_images(
        mapper,
        images,
        use_masks=options.use_ground_truth_mask,
        dead_xy_K2=read_dead_pixels(options.dead_pixels) if options.dead_pixels else None,
        threshold=options.threshold if options.threshold is not None else weights.threshold,
        observers=[writer, _EqualPlanes()],
    )
    writer.finish(result)
    rate = len(images) / max(result.seconds, 1e-9)
    logger.info(
        "%s, %.1f per second with reading and writing: %s", counted(len(images), "image"), rate, options.output_dir
    )
    return result


def list_test_images(options: TestOptions) -> list[EvaluationImage]:
    """The test split of a data set, given its root or its test/ folder; else all images of a folder, without labels."""
    path = Path(options.test_path)
    root = path.parent if path.name == "test" else path
    if images := list_split(root, "test", options.img_format):
        return images
    return [EvaluationImage(image, None, is_good=False) for image in list_images(path, options.img_format)]


def grid_for(options: TestOptions, weights: DefectWeights, first: Path) -> Grid:
    """The patch grid as in training, for images of the size of the first."""
    patch = options.patch_size or weights.patch or PATCH_OF_TYPE[options.image_type or "strip"]
    try:
        _, height, width = read_canonical(first).shape
    except (OSError, DecodeError) as error:
        raise DataError(str(error)) from None
    return Grid.over((height, width), patch, options.min_patches)


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

    def __init__(self, options: TestOptions, *, root: Path) -> None:
        self._options, self._root = options, root
        self._folder = Path(options.output_dir)
        self._names: list[str] = []
        self._detections: list[tuple[str, int, int, float]] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"{self._folder}: cannot be created: {error.strerror}. Choose another --output_dir."
            ) from None

    def __call__(self, evaluated: EvaluatedImage) -> None:
        relative = evaluated.image.path.relative_to(self._root)
        stem = self._folder / relative.with_suffix("")
        stem.parent.mkdir(parents=True, exist_ok=True)
        self._names.append(str(relative))
        self._detections += [(str(relative), each.y, each.x, each.score) for each in evaluated.detections]
        if self._options.save_maps:
            import tifffile

            tifffile.imwrite(stem.with_name(f"{stem.name}_heat.tiff"), evaluated.heat_HW)
        if self._options.save_pictures:
            plot = stem.with_name(f"{stem.name}_result.png")
            result_png(evaluated.planes_CHW, evaluated.heat_HW, evaluated.mask_HW, plot)

    def finish(self, result: DefectEvaluation) -> None:
        ranked = sorted(self._detections, key=lambda row: -row[3])
        if not self._options.all_detections:
            ranked = [row for row in ranked if row[3] >= result.threshold]
        _write_table(self._folder / "detections.csv", ("image", "y", "x", "score"), ranked)
        # Relative paths, as in detections.csv, because good and defective images may have the same file name.
        rows = [asdict(row) | {"name": name} for row, name in zip(result.rows, self._names, strict=True)]
        _write_table(self._folder / "images.csv", tuple(rows[0]), [tuple(row.values()) for row in rows])
        scores = result.scores() | {f"recall@{num}": value for num, value in result.recalls().items()}
        (self._folder / "results.json").write_text(json.dumps(scores, indent=1) + "\n")


class _EqualPlanes:
    """Warns once of images in which nothing can be found, because target is the same as both references."""

    def __init__(self) -> None:
        self._has_warned = False

    def __call__(self, evaluated: EvaluatedImage) -> None:
        if not self._has_warned and are_equal(evaluated.planes_CHW):
            self._has_warned = True
            logger.warning(
                "%s: its three planes are equal (a grey file fills all three), so target is the same as both "
                "references, and no defect can be found. Give files of three planes: target, ref1 and ref2. "
                "`flatout defect check` lists all such files.",
                evaluated.image.path,
            )


def _write_table(path: Path, names: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)


def _common_folder(images: list[EvaluationImage]) -> Path:
    """The folder relative to which the names of images are unique."""
    folders = {image.path.parent for image in images}
    return folders.pop() if len(folders) == 1 else images[0].path.parent.parent
