"""The Python interface to detection: train, evaluate, predict and export as methods of one object."""

import difflib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from flatout.config import build_config
from flatout.errors import ConfigError, DataError, counted
from flatout.hub import downloaded
from flatout.ranks import choose_device, make_current
from flatout.yolo.evaluate.run import InferenceModel
from flatout.yolo.find_file import shipped_weights, weights_file
from flatout.yolo.model.configs import find_config, is_config_name
from flatout.yolo.options import TestOptions, TrainOptions
from flatout.yolo.predict.files import Unreadable
from flatout.yolo.predict.given import Given
from flatout.yolo.predict.options import PredictOptions
from flatout.yolo.predict.result import Result, shown
from flatout.yolo.predict.results import load_networks, predictor_for, results_of_source
from flatout.yolo.predict.tracks import Tracker

if TYPE_CHECKING:
    from flatout.engine import Callback
    from flatout.yolo.evaluate import TestResult
    from flatout.yolo.export import ExportOutcome
    from flatout.yolo.model.info import Description
    from flatout.yolo.train import TrainResult

ALIASES = {"conf": "conf_thres", "iou": "iou_thres", "imgsz": "img_size"}
"""Other names of options, as users of other detectors know them; docs/api.md lists them."""
BATCH_ALIAS = {"batch": "batch_size"}
EXPORT_ALIAS = {"format": "formats"}
PREDICT_ALIAS = {"batch": "at_once"}


class Detector:
    """A network with weights, or a model config that has none yet. Methods take the flags of the commands as keywords.

    The network is loaded at first use and stays on its device. Not thread-safe.
    """

    def __init__(self, path_or_cfg: str | Path, *, device: str | int = "") -> None:
        """See `flatout.yolo.load`."""
        self._device = str(device)
        self._tracker: Tracker | None = None
        self._loaded: tuple[bool, torch.device, InferenceModel] | None = None
        self.config: Path | None = None
        """The model config of a detector that has no weights yet."""
        self.weights: Path | None = None
        """The weights file; after `train`, the best weights of the run."""
        is_name = shipped_weights(path_or_cfg) is not None or downloaded(path_or_cfg) is not None
        if not is_name and is_config_name(path_or_cfg):
            self.config = find_config(path_or_cfg)
        else:
            self.weights = weights_file(path_or_cfg, flag="")

    def __repr__(self) -> str:
        return f"Detector({str(self.weights or self.config)!r})"

    @property
    def names(self) -> tuple[str, ...]:
        """The class names."""
        return self._networks()[1].names

    def info(self) -> "Description":
        """The layers, size and cost of the network, and what the weights file contains; `print` it for a table."""
        from flatout.yolo.model.info import describe_config, describe_weights

        return describe_config(self.config) if self.config is not None else describe_weights(self._require_weights())

    def train(self, data: str | Path, *, callbacks: Iterable["Callback"] = (), **options: Any) -> "TrainResult":
        """Train on the data set of a YAML; `options` are the flags of `train.py`, such as epochs=10, img_size=320.

        `callbacks` are notified of the progress (docs/callbacks.md). The run folder is the same as that of the command;
        afterwards the detector has the best weights of the run. A detector from a config starts from scratch, one from
        weights starts from them. After a signal, Interrupted is raised when everything is saved; the same call then
        continues.
        """
        from flatout.runs import OnDone, Spending
        from flatout.yolo.train import train

        start = {"cfg": str(self.config), "weights": ""} if self.config else {"weights": str(self.weights)}
        options = _renamed(options, TrainOptions, ALIASES | BATCH_ALIAS, "train()")
        values = {"data": str(data), "device": self._device, **start, **options}
        if isinstance(values.get("img_size"), int):
            values["img_size"] = [values["img_size"]] * 2
        train_options = build_config(values, TrainOptions, where="train()")
        spending = Spending(train_options.price, train_options.budget)
        with OnDone(train_options.on_done, spending) as done:
            result = train(train_options, [*callbacks, done], spending=spending)
        if result is None:
            raise ConfigError("train(diagnose_compile=True) only reports, and does not train. Leave it out.")
        files = [result.folder / "weights" / name for name in ("best.pt", "last.pt")]
        self._use_weights(next(file for file in files if file.is_file()))
        return result

    def evaluate(self, data: str | Path, **options: Any) -> "TestResult":
        """Evaluate on the data set of a YAML; `options` are the flags of `test.py`, such as img_size=320, task="test".

        The result has `map50`, `map`, `precision`, `recall` and `per_class`, a table; `str(result)` is what the command
        prints.
        """
        from flatout.yolo.evaluate import test

        options = _renamed(options, TestOptions, ALIASES | BATCH_ALIAS, "evaluate()")
        values = {"data": str(data), "device": self._device, "weights": [str(self._require_weights())], **options}
        return test(build_config(values, TestOptions, where="evaluate()"))

    val = evaluate

    def predict(
        self, source: "Given | Iterable[Given]", *, on_error: Literal["raise", "skip"] = "raise", **options: Any
    ) -> list[Result]:
        """Detect objects; returns one result per image or frame, in order. Calling the detector does the same.

        `source` is a path (of an image, folder, pattern, list or video), an array (uint8 [H, W, 3], BGR, as OpenCV
        reads images), a PIL image, a tensor (RGB, [3, H, W] or [B, 3, H, W], uint8 or 0 to 1), the bytes of an image
        file or the open file, or a list of these; with allow_urls=True also the address of an image. The number of a
        camera, or the address of a stream, gives one result: `stream` continues. `options` are the fields of
        `PredictOptions`: img_size=640, conf_thres=0.25, iou_thres=0.45, classes (numbers or names), agnostic_nms,
        augment, at_once, workers, track, and for large images tiles=640, tile_overlap=0.2, tile_full_view; conf, iou
        and imgsz are accepted, too. If sources cannot be read, a DataError lists them all, or with on_error="skip" they
        are left out. Results keep their images: use `stream` for sources that do not fit into memory.
        """
        return self._predict(source, on_error, predict_options(options))

    __call__ = predict

    def track(
        self,
        source: "Given | Iterable[Given]",
        *,
        persist: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        **options: Any,
    ) -> list[Result]:
        """Like `predict`, but objects keep their `result.ids` from frame to frame; needs the extra `track`.

        Every video is a sequence of its own; images and arrays are one sequence, in order. `persist=True` continues
        the tracks of the call before, for loops that pass one frame at a time. For long videos and cameras, use
        `stream(source, track=True)`.
        """
        made = predict_options({**options, "track": True})
        if not persist or self._tracker is None:
            self._tracker = Tracker.from_options(made)
        return self._predict(source, on_error, made, self._tracker)

    def stream(self, source: "Given | Iterable[Given]", **options: Any) -> Iterator[Result]:
        """Like `predict`, but an iterator: for long videos, and for cameras (0) and streams, which never end.

        Close or delete the iterator to stop its threads. Sources that cannot be read are left out.
        """
        with closing(self._results(source, predict_options(options))) as results:
            for result in results:
                if isinstance(result, Result):
                    yield result

    def export(self, **options: Any) -> "ExportOutcome":
        """Export the network; `options` are the flags of `export.py`, such as grid=True, simplify=True."""
        from flatout.yolo.export import ExportOptions, export

        weights = str(self._require_weights())
        options = _renamed(options, ExportOptions, ALIASES | BATCH_ALIAS | EXPORT_ALIAS, "export()")
        if isinstance(options.get("img_size"), int):
            options["img_size"] = [options["img_size"]] * 2
        if isinstance(options.get("formats"), str):
            options["formats"] = [options["formats"]]
        return export(weights, build_config({"weights": weights, **options}, ExportOptions, where="export()"))

    def _predict(
        self, source: "Given | Iterable[Given]", on_error: str, options: PredictOptions, tracker: Tracker | None = None
    ) -> list[Result]:
        if on_error not in ("raise", "skip"):
            raise ConfigError(f'predict(): on_error={on_error!r}: use "raise" or "skip".')
        found = list(self._results(source, options, tracker, one_of_live=True))
        unreadable = [each for each in found if isinstance(each, Unreadable)]
        if unreadable and on_error == "raise":
            listed = "\n".join(f"  {shown(each.path)}: {each.reason}" for each in unreadable)
            count = counted(len(unreadable), "source")
            raise DataError(f'{count} cannot be read (on_error="skip" would leave them out):\n{listed}')
        return [each for each in found if isinstance(each, Result)]

    def _results(
        self,
        source: "Given | Iterable[Given]",
        options: PredictOptions,
        tracker: Tracker | None = None,
        *,
        one_of_live: bool = False,
    ) -> Generator[Result | Unreadable, None, None]:
        tracker = tracker or Tracker.from_options(options)
        device, model = self._networks(augment=options.augment)
        predictor = predictor_for(model, device, options)
        return results_of_source(source, predictor, options, tracker=tracker, one_of_live=one_of_live)

    def _networks(self, *, augment: bool = False) -> tuple[torch.device, InferenceModel]:
        """The device and the network. Only one network is kept, to save GPU memory."""
        if self._loaded is None or self._loaded[0] != augment:
            device = choose_device(self._device)
            make_current(device)
            self._loaded = augment, device, load_networks([str(self._require_weights())], device, augment=augment)
        return self._loaded[1:]

    def _require_weights(self) -> Path:
        if self.weights is None:
            raise ConfigError(
                f"{self.config} is a model config, which has no weights yet. Train it first, or load a weights file."
            )
        return self.weights

    def _use_weights(self, weights: Path) -> None:
        self.weights, self.config = weights, None
        self._loaded = None


def predict_options(
    options: dict[str, Any], *, defaults: Mapping[str, Any] | None = None, where: str = "predict()"
) -> PredictOptions:
    """The options of a prediction from keywords and their aliases; `defaults` are used for those that are not given."""
    options = {**(defaults or {}), **_renamed(options, PredictOptions, ALIASES | PREDICT_ALIAS, where)}
    classes = options.get("classes")
    if isinstance(classes, str | Integral):
        options["classes"] = [classes]
    elif classes is not None:
        # Numbers of NumPy become plain ones, which is all that the validation accepts.
        options["classes"] = [int(each) if isinstance(each, Integral) else each for each in classes]
    return build_config(options, PredictOptions, where=where)


def _renamed(options: dict[str, Any], model: type, aliases: Mapping[str, str], where: str) -> dict[str, Any]:
    """The options under the names of the fields of `model`; ConfigError if one is given twice, or almost an alias."""
    known = {each.name for each in fields(model)}
    for name in options.keys() - known - aliases.keys():
        close = difflib.get_close_matches(name, [*known, *aliases], n=1)
        if close and close[0] in aliases:  # of the others, the validation knows the nearest
            raise ConfigError(f"{where}: {name}: unknown key ({options[name]!r}) - did you mean {close[0]!r}?")
    if twice := [alias for alias, name in aliases.items() if alias in options and name in options]:
        raise ConfigError(f"{where}: {twice[0]} and {aliases[twice[0]]} are the same option. Give one of them.")
    return {aliases.get(name, name): value for name, value in options.items()}
