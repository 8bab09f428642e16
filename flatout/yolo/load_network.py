"""Build networks from weights files: complete ones for inference, or for training with whatever weights fit."""

import logging
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.errors import CheckpointError, ConfigError
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.module_specs import KEYS
from flatout.yolo.model.network import Network
from flatout.yolo.model.spec import ModelSpec, parse_model
from flatout.yolo.multihead.training import HeadChoice
from flatout.yolo.weights import State, Transfer, Weights, read_weights, transfer

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A network for inference and the weights it was loaded from."""

    network: Network
    """float32 on the CPU, in evaluation mode, with the class names of the file; shares no memory with `weights`."""
    weights: Weights


class TrainingStart(NamedTuple):
    """A network to train and the weights it starts from."""

    network: Network
    weights: Weights | None
    """None when training from scratch."""
    transfer: Transfer | None
    """Which tensors were loaded from the weights."""


def load_network(path: str | Path, *, cfg: str | Path | None = None) -> Loaded:
    """Load the network of a weights file, built by `cfg` or by the config in the file.

    Uses the moving average if there is one. CheckpointError unless every entry of the weights fits the config.
    """
    weights = read_weights(path)
    return Loaded(network_of(weights, weights.for_inference(), where=path, cfg=cfg), weights)


def start_network(
    cfg: str | Path | None,
    path: str | Path | None,
    *,
    nc: int | None = None,
    anchors: float | None = None,
    heads: HeadChoice | None = None,
    keeps_anchors: bool = False,
) -> TrainingStart:
    """Build a network to train: a new one from `cfg`, with those weights of `path` that fit.

    `nc` and `anchors` override the config as in `parse_model`, `heads` replaces its detection layer. Without `cfg` the
    config in the weights file is used. If a config or a number of anchors is given, the anchors of the file are not
    loaded, unless `keeps_anchors` asks for every entry that fits.
    """
    if path is None:
        if cfg is None:
            raise ConfigError("There is neither a model config nor weights. Give one with --cfg or --weights.")
        return TrainingStart(Network(_model_spec(load_config(cfg), nc, anchors, heads, str(cfg))), None, None)
    weights = read_weights(path)
    network = Network(model_spec_of(weights, where=path, cfg=cfg, nc=nc, anchors=anchors, heads=heads))
    given = cfg is not None or anchors is not None
    taken = transfer(network, weights.for_training(), skip_anchors=given and not keeps_anchors)
    logger.info("%s", taken.line(path))
    return TrainingStart(network, weights, taken)


def network_of(weights: Weights, state: State, *, where: str | Path, cfg: str | Path | None = None) -> Network:
    """Build the network of `state`, which is one of the states of `weights`; CheckpointError if they do not match."""
    blueprint = model_spec_of(weights, where=where, cfg=cfg, nc=num_classes_of(weights))
    with torch.device("meta"):  # every value comes from the file
        network = Network(blueprint)
        if is_fused(state):
            network = fused(network)
    check_fit(network, state, where)
    network.load_state_dict({key: _own(tensor) for key, tensor in state.items()}, assign=True)
    if weights.names is not None and len(weights.names) == network.nc:
        network.names = list(weights.names)
    return network.eval()


def model_spec_of(
    weights: Weights,
    *,
    where: str | Path,
    cfg: str | Path | None = None,
    nc: int | None = None,
    anchors: float | None = None,
    heads: HeadChoice | None = None,
) -> ModelSpec:
    """The model spec of weights: from `cfg` if it is given, or else from the config stored with the weights."""
    if cfg is not None:
        return _model_spec(load_config(cfg), nc, anchors, heads, str(cfg))
    if weights.config is None:
        raise CheckpointError(f"{where}: contains tensors but no model config. Give the config with --cfg.")
    # Forks of YOLOv7 store additional keys in it.
    config = {key: value for key, value in weights.config.items() if key in KEYS}
    try:
        return _model_spec(config, nc, anchors, heads, f"{where}: its model config")
    except ConfigError as error:
        raise CheckpointError(f"{error} Give a valid one with --cfg.") from None


def _model_spec(
    config: object, nc: int | None, anchors: float | None, heads: HeadChoice | None, where: str
) -> ModelSpec:
    if heads is not None:
        config = heads.applied_to(config, where=where)
    return parse_model(config, nc=nc, anchors=anchors, where=where)


def check_fit(network: Network, state: State, where: str | Path) -> None:
    """CheckpointError unless `state` has exactly the entries of the network."""
    own = network.state_dict()
    compared = transfer(own, state, skip_anchors=False)
    shapes = [f"{key} is {_differing(state[key], own[key])}" for key in compared.mismatched]
    differences = [
        _listed_keys(compared.missing, "missing"),
        _listed_keys(compared.unexpected, "unknown"),
        _listed_keys(shapes, "of another shape or type"),
    ]
    if any(differences):
        kind = network.spec.head.module
        raise CheckpointError(
            f"{where}: its tensors do not fit the network of its config, or of --cfg, which has {compared.total} "
            f"entries and ends in {kind}: {'; '.join(filter(None, differences))}. Give the config that the weights "
            "were trained with by --cfg."
        )


def _differing(found: Tensor, wanted: Tensor) -> str:
    """The two shapes, or the two types if the shapes are equal."""
    if found.shape != wanted.shape:
        return f"{list(found.shape)}, not {list(wanted.shape)}"
    return f"{found.dtype}, not {wanted.dtype}"


def _listed_keys(keys: list[str], what: str) -> str:
    more = ", ..." if len(keys) > 2 else ""
    return f"{len(keys)} {what} ({', '.join(key[:120] for key in keys[:2])}{more})" if keys else ""


def is_fused(state: State) -> bool:
    """Whether the state has convolution biases, which only a fused network has."""
    return any(key.endswith((".conv.bias", ".rbr_reparam.bias")) for key in state)


def num_classes_of(weights: Weights) -> int | None:
    """Number of classes stored in the file, or else derived from the detection layer; None if that is not possible."""
    if weights.nc is not None:
        return weights.nc
    shapes = {key: tensor.shape for key, tensor in weights.state.items()}
    anchors = [shape[1] for key, shape in shapes.items() if key.endswith(".anchors") and len(shape) == 3]
    outputs = [shape[0] for key, shape in shapes.items() if key.endswith(".m.0.bias") and len(shape) == 1]
    if not anchors or not outputs or not 0 < 5 * anchors[-1] < outputs[-1]:
        return None
    return outputs[-1] // anchors[-1] - 5


def _own(tensor: Tensor) -> Tensor:
    """A copy in float32 (counters keep their type): entries of a file may share or overlap their memory."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
