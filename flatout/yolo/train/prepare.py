"""The network at its first step: built or loaded, anchors checked, layers frozen, an optimizer with three groups."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.engine.ema import MovingAverage
from flatout.engine.optim import make_optimizer, parameters_of
from flatout.yolo.autoanchor import check_anchors
from flatout.yolo.data.data_yaml import DataSet
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.find_file import find_cfg, find_weights
from flatout.yolo.hyp import Hyp
from flatout.yolo.input_size import LEAST_GRID
from flatout.yolo.loading import Start, start_network
from flatout.yolo.model.info import describe
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.options import TrainOptions
from flatout.yolo.param_groups import parameter_groups
from flatout.yolo.schedule import scaled_weight_decay
from flatout.yolo.train.heads import chosen_heads
from flatout.yolo.weights import transfer

logger = logging.getLogger(__name__)


def class_names(data: DataSet, *, single_cls: bool) -> list[str]:
    """Names of the classes that the network learns."""
    return ["item"] if single_cls and len(data.names) != 1 else list(data.names)


def make_network(options: TrainOptions, hyp: Hyp, names: Sequence[str]) -> Start:
    """Fresh, or with whatever fits of `--weights`; on the CPU, in float32."""
    weights = find_weights(options.weights)
    cfg = find_cfg(options.cfg, weights=weights)
    heads = chosen_heads(options, num_classes=len(names))
    start = start_network(
        cfg, weights, nc=len(names), anchors=hyp.anchors, heads=heads, keeps_anchors=options.transfer_weights
    )
    if options.transfer_weights:
        start = start._replace(weights=None)
    start.network.names = list(names)
    logger.info("%s", describe(start.network).line())
    return start


def network_of_run(saved: Mapping[str, Any], names: Sequence[str]) -> Start:
    """The network of a saved training, as its file describes it; `--weights` and `--cfg` may be gone by now."""
    network = build_network(saved["config"], where="the saved model config")
    network.names = list(names)
    logger.info("%s", describe(network).line())
    return Start(network, None, None)


def round_weights(network: Network) -> None:
    """To half precision and back, as YOLOv7 does before training (its way of sharing anchors with the loss)."""
    network.half().float()


def fit_anchors(network: Network, images: ImageSet, options: TrainOptions, hyp: Hyp, *, size: int, seed: int) -> None:
    if not options.noautoanchor:
        rng = np.random.default_rng((seed, 0xA11C))
        check_anchors(network.head, images, size=size, threshold=hyp.anchor_t, rng=rng)


def freeze(network: Network, layers: Sequence[int]) -> None:
    """Stop layers from learning: all below one number, or exactly those of several. Batch-norm statistics go on."""
    frozen = range(layers[0]) if len(layers) == 1 else layers
    prefixes = tuple(f"model.{layer}." for layer in frozen)
    count = 0
    for name, parameter in network.named_parameters():
        if prefixes and name.startswith(prefixes):
            parameter.requires_grad_(False)
            count += 1
    if count:
        which = f"0 to {layers[0] - 1}" if len(layers) == 1 else ", ".join(map(str, layers))
        logger.info("Frozen: %d tensors of layers %s.", count, which)


def optimizer_for(network: Network, hyp: Hyp, *, total_batch: int, adam: bool) -> torch.optim.Optimizer:
    """SGD or Adam over the groups of `param_groups`; only the weights of convolutions shrink."""
    groups = parameter_groups(network)
    decay = scaled_weight_decay(hyp.weight_decay, total_batch=total_batch)
    return make_optimizer(
        "adam" if adam else "sgd", groups, lr=hyp.lr0, momentum=hyp.momentum, decays=(0.0, decay, 0.0)
    )


def take_over(start: Start, optimizer: torch.optim.Optimizer, average: MovingAverage) -> None:
    """From an unfinished YOLOv7 checkpoint: momentum and the moving average, not just the weights."""
    weights = start.weights
    if weights is None or weights.optimizer is None:
        return
    if take_over_optimizer(optimizer, weights.optimizer) and weights.ema is not None and start.transfer is not None:
        transfer(average.network, weights.ema, skip_anchors=bool(start.transfer.skipped))
        average.updates = weights.updates or 0


def take_over_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any] | None) -> bool:
    """Momentum from a YOLOv7 checkpoint, if it is of the same network; False if it is not used."""
    if not saved:
        return False
    parameters = parameters_of(optimizer)
    state: Mapping[Any, Mapping[str, Any]] = saved.get("state", {})
    for number, parameter in enumerate(parameters):
        entry = state.get(number, {})
        if state and not entry:
            continue  # frozen when it was saved: there is no momentum yet
        fits = all(not _is_map(value) or value.shape == parameter.shape for value in entry.values())
        if entry.keys() != optimizer.state[parameter].keys() or not fits:
            logger.warning("The optimizer state of these weights is of another network or kind: it starts anew.")
            return False
    for number, parameter in enumerate(parameters):
        for key, value in state.get(number, {}).items():
            kept = optimizer.state[parameter][key]
            kept.copy_(value.to(kept))
    return True


def start_epoch_of(start: Start, *, epochs: int) -> tuple[int, int]:
    """First epoch, and the number of epochs: an unfinished YOLOv7 checkpoint goes on, a finished one adds to it."""
    weights = start.weights
    if weights is None or weights.optimizer is None or weights.epoch is None or weights.epoch < 0:
        return 0, epochs
    first = weights.epoch + 1
    if epochs < first:
        logger.info("These weights were trained for %d epochs; %d more follow.", first, epochs)
        return first, epochs + weights.epoch
    return first, epochs


def grid_of(network: Network) -> int:
    """Sides of the input are multiples of it."""
    return max(int(network.stride.max()), LEAST_GRID)


def about(network: Network, hyp: Mapping[str, Any]) -> dict[str, Any]:
    """What files of weights say about the network, without its tensors."""
    return {"config": network.config, "names": list(network.names), "nc": network.nc, "hyp": dict(hyp)}


def _is_map(value: Any) -> bool:
    """A tensor as large as a parameter; Adam also keeps a counter."""
    return isinstance(value, Tensor) and value.dim() > 0
