"""Defect detection in Python: train, evaluate, predict and export as methods of one object.

Dimension key:  C planes: target, ref1, ref2   H W image
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from flatout.config import build_config
from flatout.defect.compare.align import AlignConfig
from flatout.defect.data.find import ENDINGS, EvaluationImage
from flatout.defect.data.items import FAINT, BlindnessWarning, is_faint, read_canonical
from flatout.defect.data.pairs import PairReader, holds_pairs, list_pair_images
from flatout.defect.demo_data import STRIP_HW
from flatout.defect.evaluate.evaluate import FINE
from flatout.defect.evaluate.maps import HeatMapper, Mapped, ReadImage, choose_map_maker, map_images, open_mapper
from flatout.defect.evaluate.scores import DEFAULT_THRESHOLD, Detection, detect, detect_components
from flatout.defect.options import CPU, PATCH_OF_TYPE, Network, TestOptions, TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.plots import overlay
from flatout.defect.weights import load_network
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.ranks import choose_device

if TYPE_CHECKING:
    from flatout.defect.evaluate.scores import DefectEvaluation
    from flatout.defect.train import TrainResult
    from flatout.engine import Callback
    from flatout.export import Exported

logger = logging.getLogger(__name__)

Given = str | Path | np.ndarray
"""A file, a folder, a CSV file of pairs, or planes [3, H, W] in 0..255."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inspected:
    """The result for one image. The caller owns the arrays."""

    heat: np.ndarray
    """float32 [H, W]: probability of a defect."""
    detections: tuple[Detection, ...]
    """(y, x, score) each, at or above the threshold, highest first: local maxima of the heat map; of a pair, and of the
    classical method, its components."""
    planes: np.ndarray = field(repr=False)
    """[3, H, W] in 0..255: target, ref1, ref2."""
    path: str = ""
    """File of the image; "" for an array."""

    def draw(self) -> np.ndarray:
        """The target with the heat map in colour over it: uint8 [H, W, 3], BGR."""
        return overlay(self.planes[0], self.heat, None)


CLASSICAL = "classical"
"""The name of the method that needs no weights."""


class Inspector:
    """A trained network, the name of one to be trained, or the classical method, which can only predict and evaluate.

    Methods take the flags of the commands as keywords.
    """

    def __init__(self, path_or_network: str | Path, *, device: str = "") -> None:
        """See `flatout.defect.load`."""
        self._device = device
        self._mapper: HeatMapper | None = None
        self._threshold = DEFAULT_THRESHOLD
        self._fresh = {"network": str(path_or_network)} if str(path_or_network) in get_args(Network) else {}
        self._is_classical = str(path_or_network) == CLASSICAL
        self.weights = None if self._fresh or self._is_classical else Path(path_or_network)
        """The weights file; after `train`, the best weights of the run. None for an untrained network, and for the
        classical method."""
        if self.weights is not None and not self.weights.is_file():
            raise CheckpointError(
                f"{path_or_network}: no such weights file, and not the name of a network, v1 or v2, nor {CLASSICAL}."
            )

    def __repr__(self) -> str:
        return f"Inspector({str(self.weights or self._fresh.get('network', CLASSICAL))!r})"

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

        way = {"method": CLASSICAL} if self._is_classical else {"model_path": str(self._with_weights())}
        values = {**way, "test_path": str(data), "gpu_id": self._gpu_id(), **options}
        return predict(build_config(values, TestOptions, where="evaluate()"))

    def predict(self, images: Given | Sequence[Given], *, threshold: float | None = None) -> list[Inspected]:
        """Heat maps and detections of a file, of all images of a folder, of planes, or of a sequence of these.

        Pairs, in a folder or a CSV file, are aligned, and their heat maps drawn by the difference to the template, as
        `flatout defect predict` does. `threshold`: lowest score of a detection; None: the one in the weights, or 0.5 if
        there is none.
        """
        if not self._is_classical:
            self._with_weights()  # fail before any image is read
        several = [images] if isinstance(images, str | Path | np.ndarray) else list(images)
        return [each for given in several for each in self._inspect(_Given.of(given), threshold)]

    def export(self, size_hw: tuple[int, int] = STRIP_HW, **options: Any) -> "Exported":
        """Export as an ONNX file for images of a size; `options` are those of `flatout.defect.export.export_file`."""
        from flatout.defect.export import export_file

        return export_file(self._with_weights(), size_hw, **options)

    def _inspect(self, given: "_Given", threshold: float | None) -> Iterator[Inspected]:
        if self._mapper is None and not self._is_classical:
            self._mapper = self._open_mapper()
        has_components = given.are_pairs or self._is_classical
        least = self._threshold if threshold is None else threshold

        def inspected(image: EvaluationImage, mapped: Mapped) -> Inspected:
            everything = detect_components(mapped.heat_HW) if has_components else detect(mapped.heat_HW, FINE)
            return Inspected(
                heat=mapped.heat_HW,
                detections=tuple(each for each in everything if each.score >= least),
                planes=mapped.planes_CHW,
                path="" if given.is_array else str(image.path),
            )

        align = AlignConfig() if given.are_pairs else None
        maker = choose_map_maker(self._mapper, choose_device(self._device), align=align, refines=given.are_pairs)
        read = given.read if given.is_array else BlindnessWarning(given.read, are_pairs=given.are_pairs)
        return map_images(given.images, read, maker, inspected)

    def _open_mapper(self) -> HeatMapper:
        network, weights = load_network(self._with_weights())
        self._threshold = DEFAULT_THRESHOLD if weights.threshold is None else weights.threshold
        patch = weights.patch or PATCH_OF_TYPE["strip"]
        return open_mapper(network, partial(Grid.over, patch=patch), choose_device(self._device))

    def _start_options(self) -> dict[str, Any]:
        """Options with which a training starts from the current weights."""
        found = load_network(self._with_weights())[1]
        return {"weights": str(self.weights), "network": found.version, "base_width": found.base}

    def _gpu_id(self) -> int | None:
        if self._device in ("", "cpu"):
            return CPU if self._device else None
        return choose_device(self._device).index

    def _with_weights(self) -> Path:
        if self._is_classical:
            raise ConfigError(
                'The classical method has no weights: it can predict and evaluate. Train with load("v1").'
            )
        if self.weights is None:
            raise ConfigError(f"{self._fresh['network']} has no weights yet. Train it, or load a weights file.")
        return self.weights


class _Given(NamedTuple):
    """Images that were given, and how they are read."""

    images: list[EvaluationImage]
    read: ReadImage
    are_pairs: bool = False
    is_array: bool = False

    @classmethod
    def of(cls, given: Given) -> "_Given":
        """The images of a file, a folder or a CSV file, or the one of an array."""
        if isinstance(given, np.ndarray):
            if given.ndim != 3 or given.shape[0] != 3:
                raise ConfigError(
                    f"predict() got an array of shape {list(given.shape)}. Stack the target and its two references as "
                    "[3, height, width] with values from 0 to 255, or give the path of a file."
                )
            if given.size and is_faint(given):
                logger.warning("predict() got an array: %s.", FAINT)
            return cls([EvaluationImage(Path(), None, is_good=False)], lambda _: given, is_array=True)
        if holds_pairs(given):
            images = list_pair_images(given)
            return cls(images, PairReader(images, None).stored, are_pairs=True)
        if not Path(given).exists():
            raise DataError(f"{given}: no such file or folder.")
        return cls([EvaluationImage(file, None, is_good=False) for file in _image_files(Path(given))], read_canonical)


def _image_files(path: Path) -> list[Path]:
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in ENDINGS) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no images in this folder. File names must end in {', '.join(sorted(ENDINGS))}.")
    return files
