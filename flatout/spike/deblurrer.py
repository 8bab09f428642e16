"""Deblurring in Python: the commands train, test and predict as methods of one object."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import build_config
from flatout.errors import CheckpointError, ConfigError
from flatout.spike.config import load_config
from flatout.spike.options import TrainOptions

if TYPE_CHECKING:
    from flatout.engine import Callback
    from flatout.spike.evaluate import Evaluation
    from flatout.spike.predict import Predicted, Ready
    from flatout.spike.train import TrainResult


class Deblurrer:
    """A network with weights, or a config that has none yet."""

    def __init__(self, path_or_config: str | Path, *, device: str = "") -> None:
        """See `flatout.spike.load`."""
        self._device = device
        path = Path(path_or_config)
        is_config = path.suffix in (".yaml", ".yml")
        self.config = path if is_config else None
        """The YAML it trains by; None for a deblurrer from weights, which hold their own."""
        self.weights = None if is_config else path
        """The file of weights; after `train`, the best of the run. None before."""
        if not path.is_file():
            kind = "config" if is_config else "file of weights"
            raise (ConfigError if is_config else CheckpointError)(f"{path}: no such {kind}. Check the path.")

    def __repr__(self) -> str:
        return f"Deblurrer({str(self.weights or self.config)!r})"

    def train(
        self, overrides: Mapping[str, Any] | None = None, *, callbacks: Iterable["Callback"] = (), **options: Any
    ) -> "TrainResult":
        """Train as the config says; `overrides` are keys of it: {"TRAIN.EPOCHS": 3}; `options` flags of the command.

        Afterwards the deblurrer is the best of the run. `callbacks` hear of the training (docs/callbacks.md).
        """
        from flatout.spike.train import train

        if self.config is None:
            raise ConfigError(f"{self.weights}: to train, load the YAML config of the training.")
        config = load_config(self.config, [f"{key}={value}" for key, value in (overrides or {}).items()])
        values = {"device": self._device, **options}
        result = train(config, build_config(values, TrainOptions, where="train()"), callbacks)
        files = [result.folder / "ckpts" / name for name in ("best.pt", "last.pt")]
        self.weights = next(file for file in files if file.is_file())
        return result

    def evaluate(self, split: str | None = None, *, output: str | Path | None = None) -> "Evaluation":
        """Score every frame of a split once, by default the validation's; `output` gets scores and pictures."""
        from flatout.spike.predict import score_split

        return score_split(self._ready(), split, None if output is None else Path(output))

    def predict(
        self,
        blur: str | Path,
        spikes: str | Path,
        output: str | Path,
        *,
        video: bool = False,
        side_by_side: bool = False,
    ) -> "Predicted":
        """Deblur the frames of a folder by the spike files of the same names in another, and write them to `output`."""
        from flatout.spike.predict import predict_folder

        return predict_folder(
            self._ready(), Path(blur), Path(spikes), Path(output), video=video, compare=side_by_side
        )  # fmt: skip

    def _ready(self) -> "Ready":
        from flatout.spike.predict import ready

        if self.weights is None:
            raise ConfigError(f"{self.config} has no weights yet. Train it first, or load a file of weights.")
        return ready(self.weights, self._device)
