"""Finding defects in Python: the commands train, test, predict and export as methods of one object.

Dimension key:  C planes: target, ref1, ref2   H W image
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from flatout.config import build_config
from flatout.defect.data.find import EXTENSIONS
from flatout.defect.data.items import read_canonical
from flatout.defect.demo_data import STRIP_HW
from flatout.defect.evaluate.evaluate import FINE, HeatMapper
from flatout.defect.evaluate.scores import Detection, detect
from flatout.defect.options import CPU, PATCH_OF_TYPE, Network, TestOptions, TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.pictures import overlay
from flatout.defect.weights import load_network
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.feed import DecodeError
from flatout.ranks import choose_device

if TYPE_CHECKING:
    from flatout.defect.evaluate.scores import Outcome
    from flatout.defect.export import Exported
    from flatout.defect.train import TrainResult
    from flatout.engine import Callback

Given = str | Path | np.ndarray
"""A file or folder; or planes, [3, H, W] in 0..255."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inspected:
    """What was seen in one image. The arrays are the caller's."""

    heat: np.ndarray
    """float32 [H, W]: probability of a defect."""
    detections: tuple[Detection, ...]
    """Its highest places, (y, x, score) each, the surest first."""
    planes: np.ndarray = field(repr=False)
    """[3, H, W] in 0..255: target, ref1, ref2."""
    path: str = ""

    def draw(self) -> np.ndarray:
        """The target with its heat in colour over it: uint8 [H, W, 3], BGR."""
        return overlay(self.planes[0], self.heat, None)


class Inspector:
    """A network with weights, or the name of one that has none yet. Methods take the commands' flags as keywords."""

    def __init__(self, path_or_network: str | Path, *, device: str = "") -> None:
        """See `flatout.defect.load`."""
        self._device = device
        self._mappers: dict[tuple[int, int], HeatMapper] = {}
        self._fresh = {"network": str(path_or_network)} if str(path_or_network) in get_args(Network) else {}
        self.weights = None if self._fresh else Path(path_or_network)
        """The file of weights; after `train`, the best of the run. None before."""
        if self.weights is not None and not self.weights.is_file():
            raise CheckpointError(f"{path_or_network}: no such file of weights, and no network: those are v1 and v2.")

    def __repr__(self) -> str:
        return f"Inspector({str(self.weights or self._fresh['network'])!r})"

    def train(self, data: str | Path, *, callbacks: Iterable["Callback"] = (), **options: Any) -> "TrainResult":
        """Train on the defect-free images below a root; `options` are the flags of `flatout defect train`: epochs=3.

        Afterwards the inspector is the best of the run. One that has weights starts from them. `callbacks` hear of the
        training (docs/callbacks.md).
        """
        from flatout.defect.train import train
        from flatout.runs import OnDone, Spending

        start = self._fresh or self._of_weights()
        values = {"training_dataset_path": str(data), "gpu_id": self._gpu_id(), **start, **options}
        asked = build_config(values, TrainOptions, where="train()")
        spending = Spending(asked.price, asked.budget)
        with OnDone(asked.on_done, spending) as done:
            result = train(asked, [*callbacks, done], spending=spending)
        self.weights, self._fresh = result.folder / "weights/best.pt", {}
        self._mappers.clear()
        return result

    def evaluate(self, data: str | Path, **options: Any) -> "Outcome":
        """Judge it on test images; `options` are the flags of `flatout defect test`: output_dir="found", ..."""
        from flatout.defect.predict import predict

        values = {"model_path": str(self._with_weights()), "test_path": str(data), "gpu_id": self._gpu_id(), **options}
        return predict(build_config(values, TestOptions, where="evaluate()"))

    def predict(self, images: Given | Sequence[Given]) -> list[Inspected]:
        """Heat maps and detections: of a file, of all images of a folder, of planes, or of a sequence of these."""
        self._with_weights()  # before anything is read
        several = [images] if isinstance(images, str | Path | np.ndarray) else list(images)
        return [self._inspect(planes_CHW, path) for each in several for planes_CHW, path in _planes_of(each)]

    def export(self, size_hw: tuple[int, int] = STRIP_HW, **options: Any) -> "Exported":
        """Write it as an ONNX file for images of a size; `options` as of `flatout.defect.export.export_file`."""
        from flatout.defect.export import export_file

        return export_file(self._with_weights(), size_hw, **options)

    def _inspect(self, planes_CHW: np.ndarray, path: str) -> Inspected:
        shape_hw = planes_CHW.shape[1], planes_CHW.shape[2]
        if shape_hw not in self._mappers:
            self._mappers[shape_hw] = self._mapper(shape_hw)
        heat_HW = self._mappers[shape_hw](planes_CHW)
        return Inspected(heat=heat_HW, detections=tuple(detect(heat_HW, FINE)), planes=planes_CHW, path=path)

    def _mapper(self, shape_hw: tuple[int, int]) -> HeatMapper:
        network, weights = load_network(self._with_weights())
        device = choose_device(self._device)
        network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return HeatMapper(network, Grid.over(shape_hw, weights.patch or PATCH_OF_TYPE["strip"], None), device)

    def _of_weights(self) -> dict[str, Any]:
        found = load_network(self._with_weights())[1]
        return {"weights": str(self.weights), "network": found.version, "base_width": found.base}

    def _gpu_id(self) -> int | None:
        if self._device in ("", "cpu"):
            return CPU if self._device else None
        return choose_device(self._device).index

    def _with_weights(self) -> Path:
        if self.weights is None:
            raise ConfigError(f"{self._fresh['network']} has no weights yet. Train it, or load a file of weights.")
        return self.weights


def _planes_of(given: Given) -> Iterator[tuple[np.ndarray, str]]:
    """Planes [3, H, W] and the path, one image at a time."""
    if isinstance(given, np.ndarray):
        if given.ndim != 3 or given.shape[0] != 3:
            raise ConfigError(f"an array of shape {list(given.shape)} is no image: [3, height, width] is, in 0..255.")
        yield given, ""
        return
    path = Path(given)
    endings = {ending for each in EXTENSIONS.values() for ending in each}
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in endings) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no images in this folder; they end in {', '.join(sorted(endings))}.")
    for file in files:
        try:
            planes_CHW = read_canonical(file)
        except (OSError, DecodeError) as error:
            raise DataError(str(error)) from None
        yield planes_CHW, str(file)
