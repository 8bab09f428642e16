"""The network at its first step: built or loaded, anchors checked, layers frozen, an optimizer with three groups.

Before a detection training begins: memory, and how fast pictures can be decoded at most.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatout.clock import machine
from flatout.engine import MovingAverage, make_optimizer, parameters_of
from flatout.feed import DecodeError
from flatout.findings import in_units
from flatout.images import read_image
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.layout import decoded_bytes
from flatout.yolo.data.anchors import boxes_at_size, fit_of, search_anchors
from flatout.yolo.data.data_yaml import DataSet
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import LEAST_GRID
from flatout.yolo.find_file import find_cfg, find_weights
from flatout.yolo.hyp import Hyp
from flatout.yolo.load_network import Start, start_network
from flatout.yolo.model.info import describe
from flatout.yolo.model.layers import Detect
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.multihead.training import WantedHeads, chosen_heads
from flatout.yolo.train.step import scaled_weight_decay
from flatout.yolo.weights import transfer
from flatout.yolo.weights.legacy import parameter_groups as names_of_groups

logger = logging.getLogger(__name__)

# Do the network's anchors fit the data set? If not, better ones are searched for before the training begins.

LEAST_RECALL = 0.98
"""Share of boxes that an anchor must suit; with less, anchors are searched for."""
JITTER = 0.1
"""The check looks at boxes of pictures that are up to this share smaller or larger, as in training."""


def check_anchors(head: Detect, images: ImageSet, *, size: int, threshold: float, rng: np.random.Generator) -> bool:
    """Replace the anchors of `head` if that lets more boxes be found; True if it was done."""
    size_wh_T2, box_wh_T2 = _boxes(images)
    if not len(box_wh_T2):
        return False
    plain_T2 = boxes_at_size(size_wh_T2, box_wh_T2, size)
    factor_N = rng.uniform(1 - JITTER, 1 + JITTER, len(images))
    jittered_T2 = plain_T2 * np.repeat(factor_N, np.diff(images.labels.first_N))[:, None]
    anchors_A2 = _anchors_px(head)
    fit = fit_of(anchors_A2, jittered_T2, threshold=threshold)
    logger.info("Anchors: %.2f per target, %.4f of all boxes can be found.", fit.above_threshold, fit.best_recall)
    if fit.best_recall >= LEAST_RECALL:
        return False
    try:
        found_A2 = search_anchors(plain_T2, len(anchors_A2), rng, threshold=threshold)
    except ValueError as error:
        logger.warning("The anchors do not fit, but no better ones can be searched for: %s", error)
        return False
    better = fit_of(found_A2, jittered_T2, threshold=threshold)
    if better.best_recall <= fit.best_recall:
        logger.info("Anchors that were searched for are no better (%.4f): the old ones stay.", better.best_recall)
        return False
    set_anchors(head, found_A2)
    logger.info(
        "New anchors, with which %.4f of all boxes can be found; the weights remember them.", better.best_recall
    )
    return True


def set_anchors(head: Detect, anchors_A2: np.ndarray) -> None:
    """Anchors in pixels, smallest first, to the levels from the finest to the coarsest."""
    rising_LA2 = torch.tensor(anchors_A2, dtype=torch.float32).view(head.nl, head.na, 2)
    stride_L = head.stride
    by_stride = torch.argsort(stride_L)
    anchors_LA2 = torch.empty_like(rising_LA2)
    anchors_LA2[by_stride] = rising_LA2
    head.anchor_grid.copy_(anchors_LA2.view_as(head.anchor_grid))
    head.anchors.copy_(anchors_LA2 / stride_L.view(-1, 1, 1))


def _anchors_px(head: Detect) -> np.ndarray:
    pixels: np.ndarray = head.anchor_grid.cpu().numpy().reshape(-1, 2).astype(np.float64)
    return pixels


def _boxes(images: ImageSet) -> tuple[np.ndarray, np.ndarray]:
    """Size of the picture and relative size of the box, for every label."""
    per_picture_N = np.diff(images.labels.first_N)
    return np.repeat(images.size_wh_N2, per_picture_N, axis=0), images.labels.class_box_T5[:, 3:5].astype(np.float64)


# Which parameters shrink by weight decay, and which learn as biases do: the three groups of YOLOv7's optimizers.


class ParameterGroups(NamedTuple):
    """Every parameter of a network exactly once, frozen ones included, in YOLOv7's order."""

    no_decay: list[nn.Parameter]
    """Weights of batch norms, and implicit vectors."""
    decay: list[nn.Parameter]
    """All other weights: convolutions, linear layers."""
    bias: list[nn.Parameter]


def parameter_groups(network: nn.Module) -> ParameterGroups:
    """The groups of a network, in the order in which an optimizer state of YOLOv7 numbers them."""
    parameters = dict(network.named_parameters())
    groups = names_of_groups(network.state_dict())
    grouped = [name for group in groups for name in group]
    assert sorted(grouped) == sorted(parameters), f"in no group: {sorted(set(parameters) ^ set(grouped))}"
    return ParameterGroups(*([parameters[name] for name in group] for group in groups))


def class_names(data: DataSet, *, single_cls: bool) -> list[str]:
    """Names of the classes that the network learns."""
    return ["item"] if single_cls and len(data.names) != 1 else list(data.names)


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """What a network is built from."""

    weights: str = ""
    """A file or a name; empty: from scratch."""
    cfg: str = ""
    """Empty: the one inside the weights."""
    transfer: bool = False
    """Take tensors of the weights that fit, anchors too, and nothing else."""
    heads: WantedHeads = field(default_factory=WantedHeads)


def make_network(config: StartConfig, hyp: Hyp, names: Sequence[str]) -> Start:
    """Fresh, or with whatever fits of the weights; on the CPU, in float32."""
    weights = find_weights(config.weights)
    cfg = find_cfg(config.cfg, weights=weights)
    heads = chosen_heads(config.heads, num_classes=len(names))
    start = start_network(
        cfg, weights, nc=len(names), anchors=hyp.anchors, heads=heads, keeps_anchors=config.transfer
    )  # fmt: skip
    if config.transfer:
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


def fit_anchors(network: Network, images: ImageSet, hyp: Hyp, *, size: int, seed: int) -> None:
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


def share_batch_norms(network: nn.Module, *, ranks: int, on_gpu: bool) -> str:
    """`--sync-bn`: statistics over the pictures of all ranks, in place; tensors stay the same. Says what was done."""
    if ranks == 1:
        return "--sync-bn: one rank trains alone, so its batch-norm statistics are those of all pictures."
    if not on_gpu:
        # torch has the kernel for GPUs only.
        return "--sync-bn needs GPUs: on CPUs each rank keeps the batch-norm statistics of its own pictures."
    nn.SyncBatchNorm.convert_sync_batchnorm(network)
    return f"Batch-norm statistics are those of the pictures of all {ranks} ranks."


def grid_of(network: Network) -> int:
    """Sides of the input are multiples of it."""
    return max(int(network.stride.max()), LEAST_GRID)


def about(network: Network, hyp: Mapping[str, Any]) -> dict[str, Any]:
    """What files of weights say about the network, without its tensors."""
    return {"config": network.config, "names": list(network.names), "nc": network.nc, "hyp": dict(hyp)}


def _is_map(value: Any) -> bool:
    """A tensor as large as a parameter; Adam also keeps a counter."""
    return isinstance(value, Tensor) and value.dim() > 0


LOW_MEMORY_BYTES = 2**30
STORE_SHARE = 0.5
"""Of the free memory, what decoded pictures may take."""
MEASURE_S = 0.1
MOST_PICTURES = 32


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """What a training is going to do with its pictures."""

    size: int
    keeps_pictures: bool
    """Decode once, into memory; else in every epoch."""
    workers: int
    """Of each rank."""
    ranks: int = 1


def remarks(images: ImageSet, augment: AugmentConfig, config: PreflightConfig) -> Iterator[str]:
    """What was found, a text each; what is too little is a warning of its own."""
    yield _memory(images, config)
    yield _shm()
    if not config.keeps_pictures:
        yield _decoding(images, augment, config.workers, ranks=config.ranks)


def reads_per_sample(augment: AugmentConfig) -> float:
    """Pictures that a training sample is made of, on average; what is pasted in is not counted."""
    return (1 + 3 * augment.mosaic) * (1 + augment.mosaic * augment.mixup)


def _memory(images: ImageSet, config: PreflightConfig) -> str:
    free = machine.memory().free
    if free < LOW_MEMORY_BYTES:
        logger.warning("Only %s of memory are free: workers may be killed. End other programs first.", in_units(free))
    if not config.keeps_pictures:
        return f"memory {in_units(free)} free"
    needed = decoded_bytes(images.size_wh_N2, config.size)
    share = STORE_SHARE * free / max(1, needed)
    if share < 1:
        logger.warning(
            "Decoded pictures take %s, and half of the free memory is %s: about %.0f %% stay decoded, the others are "
            "decoded in every epoch.", in_units(needed), in_units(int(STORE_SHARE * free)), 100 * share,
        )  # fmt: skip
    return f"memory {in_units(free)} free, {in_units(needed)} for decoded pictures"


def _shm() -> str:
    shm = machine.shm()
    return f"/dev/shm {in_units(shm.free)}, not needed" if shm is not None else ""


def _decoding(images: ImageSet, augment: AugmentConfig, workers: int, *, ranks: int) -> str:
    """The speed that no training can exceed whose pictures are decoded in every epoch; measured on its own pictures."""
    seconds = _seconds_per_picture(images)
    if seconds is None:
        return ""
    limit = ranks * max(1, workers) / seconds / reads_per_sample(augment)
    who = (f"{workers} workers" if workers else "no workers") + (f" on each of {ranks} ranks" if ranks > 1 else "")
    return f"decoding allows at most about {limit:,.0f} img/s with {who} (--fast-dataloader decodes once)"


def _seconds_per_picture(images: ImageSet) -> float | None:
    """Reading and decoding, one after the other, for a tenth of a second; None if none can be read."""
    step = max(1, len(images) // MOST_PICTURES)
    began, count = time.perf_counter(), 0
    for path in images.paths[::step][:MOST_PICTURES]:
        try:
            read_image(path)
            count += 1
        except (OSError, DecodeError):
            continue
        if time.perf_counter() - began > MEASURE_S:
            break
    return (time.perf_counter() - began) / count if count else None
