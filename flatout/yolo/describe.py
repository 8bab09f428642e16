"""What is a network, and what does a file of weights hold? Facts for people and for programs."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.errors import CheckpointError
from flatout.yolo.load_network import blueprint_of, check_fit, is_fused, num_classes_of
from flatout.yolo.model.configs import find_config, load_config
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.info import Info, describe, layer_table
from flatout.yolo.model.network import Network
from flatout.yolo.model.parse import draw_blueprint
from flatout.yolo.model.spec import Blueprint, Head, Row
from flatout.yolo.weights import State, Weights, read_weights


@dataclass(frozen=True)
class NetworkFacts:
    """What a config builds."""

    head: str
    """Detect, IDetect, IAuxDetect, or a layer with several heads."""
    num_classes: int
    channels: int
    """Of the picture."""
    strides: list[float]
    anchors_px: list[list[float]]
    """Per level: w0, h0, w1, h1, ..."""
    size: Info
    fused_size: Info
    """With batch norms folded into the convolutions, as for inference."""
    rows: list[dict[str, Any]]
    """index, from, number, module, args, parameters."""
    table: str
    """The rows as aligned text."""
    heads: list[dict[str, Any]] | None = None
    """Of a layer with several: name, classes and weight of each."""


@dataclass(frozen=True)
class Contents:
    """What a file of weights holds; None is what it does not say."""

    num_bytes: int
    format: str
    kind: str
    num_tensors: int
    num_values: int
    dtypes: dict[str, int]
    """dtype -> how many tensors have it."""
    num_classes: int | None
    names: list[str] | None
    epoch: int | None
    best_fitness: float | None
    has_ema: bool
    ema_updates: int | None
    has_optimizer: bool
    has_config: bool
    has_hyperparameters: bool
    has_training_results: bool


@dataclass(frozen=True)
class Description:
    """Of a config, or of a file of weights; one of the two parts may be missing."""

    source: str
    network: NetworkFacts | None
    contents: Contents | None
    problem: str | None = None
    """Why the network of a file of weights cannot be built from it."""


def describe_config(cfg: str | Path) -> Description:
    """A config, by path or by name."""
    path = find_config(cfg)
    return Description(str(path), _facts(draw_blueprint(load_config(path), where=str(path))), None)


def describe_weights(path: str | Path, *, cfg: str | Path | None = None) -> Description:
    """A file of weights, and the network that its own config (or `cfg`) builds."""
    weights = read_weights(path)
    contents = _contents(weights, Path(path).stat().st_size)
    try:
        blueprint = blueprint_of(weights, where=path, cfg=cfg, nc=num_classes_of(weights))
        facts = _facts(blueprint, weights.for_inference(), where=path)
    except CheckpointError as error:
        return Description(str(path), None, contents, str(error))
    return Description(str(path), facts, contents)


def _facts(blueprint: Blueprint, state: State | None = None, where: str | Path = "") -> NetworkFacts:
    """Facts of a network that is built without memory; its anchors are those of the state, if there is one."""
    head = blueprint.head
    with torch.device("meta"):
        network = Network(blueprint)
    inference = fused(network)
    anchors_px = [list(level) for level in head.anchors_px]
    if state is not None:
        check_fit(inference if is_fused(state) else network, state, where)
        anchors_px = state[f"model.{head.index}.anchor_grid"].float().flatten(1).tolist()
    return NetworkFacts(
        head=head.kind,
        num_classes=head.num_classes,
        channels=blueprint.channels,
        strides=list(head.strides),
        anchors_px=anchors_px,
        size=describe(network),
        fused_size=describe(inference),
        rows=_rows(network),
        table=layer_table(network),
        heads=None if head.groups is None else [asdict(group) for group in head.groups.heads],
    )


def _rows(network: Network) -> list[dict[str, Any]]:
    rows: tuple[Row | Head, ...] = (*network.blueprint.rows, network.blueprint.head)
    return [
        dict(zip(("from", "number", "module", "args"), row.written, strict=True))
        | {"index": row.index, "parameters": sum(parameter.numel() for parameter in layer.parameters())}
        for row, layer in zip(rows, network.model, strict=True)
    ]


def _contents(weights: Weights, num_bytes: int) -> Contents:
    tensors = weights.for_inference().values()
    return Contents(
        num_bytes=num_bytes,
        format=weights.format,
        kind=weights.kind,
        num_tensors=len(tensors),
        num_values=sum(tensor.numel() for tensor in tensors),
        dtypes=dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        num_classes=num_classes_of(weights),
        names=weights.names,
        epoch=weights.epoch,
        best_fitness=weights.best_fitness,
        has_ema=weights.ema is not None,
        ema_updates=weights.updates,
        has_optimizer=weights.optimizer is not None,
        has_config=weights.config is not None,
        has_hyperparameters=weights.hyp is not None,
        has_training_results=weights.training_results is not None,
    )
