"""Prediction with an exported network in any runtime: `flatout.yolo.predict_with`.

    source -> frames, cut into tiles if asked -> input as the file's metadata describe it -> function of the caller
           -> NMS, boxes of tiles merged -> results of whole images

Dimension key:  B images   h w input   K boxes of an image   O box, objectness, class scores
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.yolo.detector import predict_options
from flatout.yolo.evaluate.run import InferenceModel
from flatout.yolo.model.layers import Predictions
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.results import predictor_for, results_of_source

if TYPE_CHECKING:
    from flatout.yolo.predict.given import Given

Run = Callable[[np.ndarray], Any]
"""Images, float32 [B, 3, h, w], RGB in 0..1 -> decoded boxes [B, K, O], as of `export --grid`."""


class FileFacts(NamedTuple):
    """What the metadata of an exported file say about its input."""

    names: tuple[str, ...]
    stride: int
    side: int | None
    """Both sides of the input; None: any multiple of the stride."""
    batch: int | None
    """Images per call; None: any number."""
    tiles: dict[str, Any]
    """`tiles` and `tile_overlap` of the training, or nothing."""

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Self:
        """From the metadata of a file; ConfigError if there are none, or if the file cannot be used."""
        try:
            names, size, batch = json.loads(metadata["names"]), metadata["input_size_hw"], metadata["input_batch"]
            stride, output, trained = int(metadata["stride"]), metadata["output"], metadata.get("tiles")
            sides = set() if size.startswith("any") else {int(side) for side in size.split(",")}
            recorded = {} if trained is None else json.loads(trained)
            tiles = {"tiles": recorded["tile"], "tile_overlap": recorded["overlap"]} if recorded else {}
            found = cls(tuple(names), stride, max(sides, default=None), int(batch) if batch != "any" else None, tiles)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"predict_with(): these are not the metadata of a file that flatout exported ({error!r}). See "
                "docs/export.md for where each format has them."
            ) from None
        if not output.startswith("cx, cy"):
            raise ConfigError(
                f"predict_with(): this file outputs {output}. Export it with --grid, and without NMS inside."
            )
        if len(sides) > 1:
            raise ConfigError(f"predict_with(): its input of {size} is not square. Export it with one --img-size.")
        return found


class ExportedNetwork(nn.Module):
    """The function of the caller as a network; a batch of a fixed size is filled up with zeros."""

    def __init__(self, run: Run, batch: int | None, num_classes: int) -> None:
        super().__init__()
        self._run, self._batch, self._num_outputs = run, batch, 5 + num_classes

    def forward(self, x: Tensor) -> Predictions:
        images_B3hw = np.ascontiguousarray(x.numpy())
        size = self._batch or len(images_B3hw)
        decoded = []
        for first in range(0, len(images_B3hw), size):
            part = images_B3hw[first : first + size]
            missing = np.zeros((size - len(part), *part.shape[1:]), np.float32)
            found_BKO = np.asarray(self._run(np.concatenate((part, missing)) if len(missing) else part), np.float32)
            if found_BKO.ndim != 3 or found_BKO.shape[::2] != (size, self._num_outputs):
                raise ConfigError(
                    f"predict_with(): the network returned {list(found_BKO.shape)} for {size} images, not [{size}, "
                    f"boxes, {self._num_outputs}]. Return its output `output` as it is."
                )
            decoded.append(torch.from_numpy(found_BKO[: len(part)]))
        return Predictions(torch.cat(decoded), [])


def predict_with(
    run: Run, metadata: Mapping[str, str], source: "Given | Iterable[Given]", options: dict[str, Any]
) -> Iterator[Result]:
    """See `flatout.yolo.predict_with`."""
    facts = FileFacts.of(metadata)
    defaults = {**facts.tiles, **({"img_size": facts.side} if facts.side else {})}
    made = predict_options(options, defaults=defaults, where="predict_with()")
    if facts.side not in (None, made.img_size):
        raise ConfigError(f"predict_with(): img_size={made.img_size}: the input of this file is {facts.side} px.")
    if made.augment or made.track:
        raise ConfigError("predict_with(): augment and track need the weights: use flatout.yolo.load().")
    # With the whole side as stride, every image is letterboxed to the full square that the file expects.
    network = ExportedNetwork(run, facts.batch, len(facts.names))
    model = InferenceModel(network, len(facts.names), facts.side or facts.stride, facts.names)
    predictor = predictor_for(model, torch.device("cpu"), made)
    with closing(results_of_source(source, predictor, made)) as results:
        for result in results:
            if isinstance(result, Result):
                yield result
