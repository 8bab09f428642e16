"""Defect detection in Python: train, evaluate, predict and export as methods of one object.

Dimension key:  C planes: target, ref1, ref2   H W image
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import torch

from flatout.config import build_config
from flatout.defect.compare.align import AlignConfig
from flatout.defect.compare.classical import refined
from flatout.defect.data.find import EXTENSIONS
from flatout.defect.data.items import read_canonical
from flatout.defect.data.pairs import PairReader, holds_pairs, list_pair_images
from flatout.defect.demo_data import STRIP_HW
from flatout.defect.evaluate.evaluate import FINE, ReadImage
from flatout.defect.evaluate.maps import HeatMapper
from flatout.defect.evaluate.scores import DEFAULT_THRESHOLD, Detection, detect, detect_components
from flatout.defect.options import CPU, PATCH_OF_TYPE, Network, TestOptions, TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.plots import overlay
from flatout.defect.weights import load_network
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.feed import DecodeError
from flatout.ranks import choose_device

if TYPE_CHECKING:
    from flatout.defect.evaluate.scores import DefectEvaluation
    from flatout.defect.train import TrainResult
    from flatout.engine import Callback
    from flatout.export import Exported

Given = str | Path | np.ndarray
"""A file, a folder, a CSV file of pairs, or planes [3, H, W] in 0..255."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inspected:
    """The result for one image. The caller owns the arrays."""

    heat: np.ndarray
    """float32 [H, W]: probability of a defect."""
    detections: tuple[Detection, ...]
    """(y, x, score) each, at or above the threshold, highest first: local maxima of the heat map; of a pair, its
    components."""
    planes: np.ndarray = field(repr=False)
    """[3, H, W] in 0..255: target, ref1, ref2."""
    path: str = ""
    """File of the image; "" for an array."""

    def draw(self) -> np.ndarray:
        """The target with the heat map in colour over it: uint8 [H, W, 3], BGR."""
        return overlay(self.planes[0], self.heat, None)


class Inspector:
    """A trained network, or the name of one to be trained. Methods take the flags of the commands as keywords."""

    def __init__(self, path_or_network: str | Path, *, device: str = "") -> None:
        """See `flatout.defect.load`."""
        self._device = device
        self._mapper: HeatMapper | None = None
        self._threshold = DEFAULT_THRESHOLD
        self._fresh = {"network": str(path_or_network)} if str(path_or_network) in get_args(Network) else {}
        self.weights = None if self._fresh else Path(path_or_network)
        """The weights file; after `train`, the best weights of the run. None for an untrained network."""
        if self.weights is not None and not self.weights.is_file():
            raise CheckpointError(
                f"{path_or_network}: no such weights file, and not the name of a network: those are v1 and v2."
            )

    def __repr__(self) -> str:
        return f"Inspector({str(self.weights or self._fresh['network'])!r})"

    def train(self, data: str | Path, *, callbacks: Iterable["Callback"] = (), **options: Any) -> "TrainResult":
        """Train on the defect-free images of a data set; `options` are flags of `flatout defect train`, like epochs=3.

        An inspector that has weights starts from them. Afterwards it uses the best weights of the run. `callbacks` are
        notified of the training's events (docs/callbacks.md).
        """
        from flatout.defect.train import train
        from flatout.runs import OnDone, Spending

        start = self._fresh or self._start_options()
        values = {"training_dataset_path": str(data), "gpu_id": self._gpu_id(), **start, **options}
        train_options = build_config(values, TrainOptions, where="train()")
        spending = Spending(train_options.price, train_options.budget)
        with OnDone(train_options.on_done, spending) as done:
            result = train(train_options, [*callbacks, done], spending=spending)
        self.weights, self._fresh = result.folder / "weights/best.pt", {}
        self._mapper = None
        return result

    def evaluate(self, data: str | Path, **options: Any) -> "DefectEvaluation":
        """Evaluate on test images; `options` are flags of `flatout defect test`, like output_dir="found"."""
        from flatout.defect.predict import predict

        values = {"model_path": str(self._with_weights()), "test_path": str(data), "gpu_id": self._gpu_id(), **options}
        return predict(build_config(values, TestOptions, where="evaluate()"))

    def predict(self, images: Given | Sequence[Given], *, threshold: float | None = None) -> list[Inspected]:
        """Heat maps and detections of a file, of all images of a folder, of planes, or of a sequence of these.

        Pairs, in a folder or a CSV file, are aligned, and their heat maps drawn by the difference to the template, as
        `flatout defect predict` does. `threshold`: lowest score of a detection; None: the one in the weights, or 0.5 if
        they have none.
        """
        self._with_weights()  # fail before any image is read
        several = [images] if isinstance(images, str | Path | np.ndarray) else list(images)
        return [self._inspect(opened, threshold) for each in several for opened in _opened(each)]

    def export(self, size_hw: tuple[int, int] = STRIP_HW, **options: Any) -> "Exported":
        """Export as an ONNX file for images of a size; `options` are those of `flatout.defect.export.export_file`."""
        from flatout.defect.export import export_file

        return export_file(self._with_weights(), size_hw, **options)

    def _inspect(self, opened: "_Opened", threshold: float | None) -> Inspected:
        planes_CHW = opened.planes_CHW
        if self._mapper is None:
            self._mapper = self._open_mapper()
        heat_HW = self._mapper(planes_CHW)
        least = self._threshold if threshold is None else threshold
        if opened.is_pair:
            heat_HW = refined(heat_HW, planes_CHW)
        everything = detect_components(heat_HW) if opened.is_pair else detect(heat_HW, FINE)
        found = tuple(each for each in everything if each.score >= least)
        return Inspected(heat=heat_HW, detections=found, planes=planes_CHW, path=opened.path)

    def _open_mapper(self) -> HeatMapper:
        network, weights = load_network(self._with_weights())
        self._threshold = DEFAULT_THRESHOLD if weights.threshold is None else weights.threshold
        device = choose_device(self._device)
        network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return HeatMapper(network, partial(Grid.over, patch=weights.patch or PATCH_OF_TYPE["strip"]), device)

    def _start_options(self) -> dict[str, Any]:
        """Options with which a training starts from the current weights."""
        found = load_network(self._with_weights())[1]
        return {"weights": str(self.weights), "network": found.version, "base_width": found.base}

    def _gpu_id(self) -> int | None:
        if self._device in ("", "cpu"):
            return CPU if self._device else None
        return choose_device(self._device).index

    def _with_weights(self) -> Path:
        if self.weights is None:
            raise ConfigError(f"{self._fresh['network']} has no weights yet. Train it, or load a weights file.")
        return self.weights


class _Opened(NamedTuple):
    """An image that was read."""

    planes_CHW: np.ndarray
    path: str
    """"" for an array."""
    is_pair: bool = False
    """Whether its references are an aligned template."""


def _opened(given: Given) -> Iterator[_Opened]:
    """Every image that is given, one at a time."""
    if isinstance(given, np.ndarray):
        if given.ndim != 3 or given.shape[0] != 3:
            raise ConfigError(
                f"predict() got an array of shape {list(given.shape)}. Stack the target and its two references as "
                "[3, height, width] with values from 0 to 255, or give the path of a file."
            )
        yield _Opened(given, "")
        return
    are_pairs = holds_pairs(given)
    files, read = _pairs(given) if are_pairs else (_image_files(Path(given)), read_canonical)
    for file in files:
        try:
            planes_CHW = read(file)
        except (OSError, DecodeError) as error:
            raise DataError(str(error)) from None
        yield _Opened(planes_CHW, str(file), are_pairs)


def _pairs(path: str | Path) -> tuple[list[Path], ReadImage]:
    images = list_pair_images(path)
    return [image.path for image in images], PairReader(images, AlignConfig())


def _image_files(path: Path) -> list[Path]:
    endings = {ending for each in EXTENSIONS.values() for ending in each}
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in endings) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no images in this folder. File names must end in {', '.join(sorted(endings))}.")
    return files
