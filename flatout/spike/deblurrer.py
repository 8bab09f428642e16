"""Deblurring in Python: train, evaluate and predict as methods of one object."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import build_config
from flatout.errors import CheckpointError, ConfigError
from flatout.spike.config import load_config
from flatout.spike.options import TrainOptions

if TYPE_CHECKING:
    from flatout.engine import Callback
    from flatout.export import Exported
    from flatout.spike.predict import DeblurPredictor, PredictedFolder, SplitScores
    from flatout.spike.train import TrainResult


class Deblurrer:
    """A trained deblurring network, or the config of one to be trained."""

    def __init__(self, path_or_config: str | Path, *, device: str = "") -> None:
        """See `flatout.spike.load`."""
        self._device = device
        path = Path(path_or_config)
        is_config = path.suffix in (".yaml", ".yml")
        self.config = path if is_config else None
        """The YAML file that describes the training; None for a deblurrer from weights, which contain their config."""
        self.weights = None if is_config else path
        """The weights file; after `train`, the best weights of the run. None before a training."""
        if not path.is_file():
            kind = "config" if is_config else "weights file"
            raise (ConfigError if is_config else CheckpointError)(f"{path}: no such {kind}. Check the path.")

    def __repr__(self) -> str:
        return f"Deblurrer({str(self.weights or self.config)!r})"

    def train(
        self, overrides: Mapping[str, Any] | None = None, *, callbacks: Iterable["Callback"] = (), **options: Any
    ) -> "TrainResult":
        """Train as the config describes; `overrides` replace keys of it, like {"TRAIN.EPOCHS": 3}.

        `options` are flags of `flatout spike train`. `callbacks` are notified of the training's events
        (docs/callbacks.md). Afterwards the deblurrer uses the best weights of the run.
        """
        from flatout.spike.train import train

        if self.config is None:
            raise ConfigError(
                f"{self.weights}: a weights file cannot be trained. To train, load the YAML config instead."
            )
        # Texts may be YAML, as for `--set`; JSON is YAML, too.
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in (overrides or {}).items()
        }
        config = load_config(self.config, [f"{key}={text}" for key, text in texts.items()])
        values = {"device": self._device, **options}
        result = train(config, build_config(values, TrainOptions, where="train()"), callbacks)
        files = [result.folder / "ckpts" / name for name in ("best.pt", "last.pt")]
        self.weights = next(file for file in files if file.is_file())
        return result

    def evaluate(
        self, split: str | None = None, *, output: str | Path | None = None, lpips: str | Path | None = None
    ) -> "SplitScores":
        """Score every frame of a split (default: the validation split) once; writes scores and images to `output`.

        `lpips` is a file with the weights of LPIPS, which is computed only with them.
        """
        from flatout.spike.predict import score_split

        return score_split(self._predictor(), split, None if output is None else Path(output), lpips=lpips)

    def predict(
        self,
        blur: str | Path,
        spikes: str | Path,
        output: str | Path,
        *,
        video: bool = False,
        side_by_side: bool = False,
        page: bool = False,
    ) -> "PredictedFolder":
        """Deblur the frames in `blur` with the spike files of the same names in `spikes`; writes them to `output`.

        Both may also be one file: a frame and its stream.
        Also writes a video, images side by side, and a page with a slider, as requested.
        """
        from flatout.spike.predict import predict_folder

        return predict_folder(
            self._predictor(), Path(blur), Path(spikes), Path(output), video=video, compare=side_by_side, page=page
        )  # fmt: skip

    def export(
        self,
        size_hw: tuple[int, int],
        *,
        length: int | None = None,
        output: str | Path | None = None,
        openvino: bool = False,
    ) -> "Exported":
        """Write the network as an ONNX file for frames of this height and width, compared with the network.

        `length`: frames of a clip (default: 1, or those of the training if the network mixes neighbouring frames).
        `output` is the file (default: beside the weights). `openvino`: also write an OpenVINO model.
        """
        from flatout.spike.export import export_file

        return export_file(self._trained_weights(), size_hw, length=length, output=output, openvino=openvino)

    def _predictor(self) -> "DeblurPredictor":
        from flatout.spike.predict import load_predictor

        return load_predictor(self._trained_weights(), self._device)

    def _trained_weights(self) -> Path:
        if self.weights is None:
            raise ConfigError(f"{self.config} has no weights yet. Train it first, or load a weights file.")
        return self.weights
