"""The ways out: heat maps, detections and tables of images, judged where something is known about them.

network, images -> heat map (float32 TIFF), picture, detections.csv, images.csv, results.json
"""

import csv
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from flatout.defect.data.find import Judged, list_images, list_judged
from flatout.defect.data.items import read_canonical
from flatout.defect.evaluate.evaluate import HeatMapper, Seen, judge
from flatout.defect.evaluate.scores import Outcome
from flatout.defect.options import PATCH_OF_TYPE, TestOptions
from flatout.defect.patches import Grid
from flatout.defect.pictures import result_png
from flatout.defect.weights import Weights, load_network
from flatout.errors import ConfigError, DataError, ResourceError
from flatout.feed import DecodeError
from flatout.ranks import choose_device

logger = logging.getLogger(__name__)


def predict(options: TestOptions) -> Outcome:
    """Look at every image of `test_path` and write what is found to `output_dir`; judge it where masks are there."""
    if not options.model_path or not options.test_path:
        raise ConfigError("--model_path and --test_path are missing: a file of weights, and a folder with images.")
    network, weights = load_network(options.model_path)
    images = images_of(options)
    device = choose_device(options.where)
    grid = grid_for(options, weights, images[0].path)
    network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    mapper = HeatMapper(network, grid, device, untiled=options.untiled)
    writer = _Writer(options, root=_common_folder(images))
    outcome = judge(
        mapper,
        images,
        use_masks=options.use_ground_truth_mask,
        dead_xy_K2=read_dead_pixels(options.dead_pixels) if options.dead_pixels else None,
        threshold=options.threshold if options.threshold is not None else weights.threshold,
        watchers=[writer],
    )
    writer.finish(outcome)
    rate = len(images) / max(outcome.seconds, 1e-9)
    logger.info("%d images, %.1f per second with reading and writing: %s", len(images), rate, options.output_dir)
    return outcome


def images_of(options: TestOptions) -> list[Judged]:
    """The test split of a data set's root, or of a path to it; else all images of a folder, about which nothing is
    known."""
    path = Path(options.test_path)
    root = path.parent if path.name == "test" else path
    if judged := list_judged(root, "test", options.img_format):
        return judged
    return [Judged(image, None, is_good=False) for image in list_images(path, options.img_format)]


def grid_for(options: TestOptions, weights: Weights, first: Path) -> Grid:
    """Patches as in training, over images of the size of the first."""
    patch = options.patch_size or weights.patch or PATCH_OF_TYPE[options.image_type or "strip"]
    try:
        _, height, width = read_canonical(first).shape
    except (OSError, DecodeError) as error:
        raise DataError(str(error)) from None
    return Grid.over((height, width), patch, options.min_patches)


def read_dead_pixels(path: str) -> np.ndarray:
    """Pixels (x, y) of a CSV with the columns dead_x and dead_y, int64 [K, 2]."""
    try:
        with open(path, newline="") as file:
            rows = [(int(row["dead_x"]), int(row["dead_y"])) for row in csv.DictReader(file)]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from None
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}: wanted is a CSV with whole numbers in columns dead_x and dead_y.") from None
    return np.array(rows, np.int64).reshape(-1, 2)


class _Writer:
    """Writes files of each image as it comes, tables at the end."""

    def __init__(self, options: TestOptions, *, root: Path) -> None:
        self._options, self._root = options, root
        self._folder = Path(options.output_dir)
        self._names: list[str] = []
        self._detections: list[tuple[str, int, int, float]] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"{self._folder}: cannot be made: {error.strerror}. Choose another --output_dir."
            ) from None

    def __call__(self, seen: Seen) -> None:
        inside = seen.judged.path.relative_to(self._root)
        stem = self._folder / inside.with_suffix("")
        stem.parent.mkdir(parents=True, exist_ok=True)
        self._names.append(str(inside))
        self._detections += [(str(inside), each.y, each.x, each.score) for each in seen.detections]
        if self._options.save_maps:
            import tifffile

            tifffile.imwrite(stem.with_name(f"{stem.name}_heat.tiff"), seen.heat_HW)
        if self._options.save_pictures:
            picture = stem.with_name(f"{stem.name}_result.png")
            result_png(seen.planes_CHW, seen.heat_HW, seen.mask_HW, picture)

    def finish(self, outcome: Outcome) -> None:
        ranked = sorted(self._detections, key=lambda row: -row[3])
        _write_table(self._folder / "detections.csv", ("image", "y", "x", "score"), ranked)
        # As among detections: good and defective images may share a file name.
        rows = [asdict(row) | {"name": name} for row, name in zip(outcome.rows, self._names, strict=True)]
        _write_table(self._folder / "images.csv", tuple(rows[0]), [tuple(row.values()) for row in rows])
        found = outcome.scores() | {f"recall@{num}": value for num, value in outcome.recalls().items()}
        (self._folder / "results.json").write_text(json.dumps(found, indent=1) + "\n")


def _write_table(path: Path, names: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)


def _common_folder(images: list[Judged]) -> Path:
    """The folder below which names tell images apart."""
    folders = {image.path.parent for image in images}
    return folders.pop() if len(folders) == 1 else images[0].path.parent.parent
