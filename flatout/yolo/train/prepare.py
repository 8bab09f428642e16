"""Everything before the first step: network, anchors, frozen layers, optimizer, and a preflight of the machine.

    weights, cfg -> network -> anchors that fit the data -> frozen layers -> optimizer with three parameter groups

Dimension key:  N images   T targets   A anchors   L levels of the head   2 width, height
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatout.clock import machine
from flatout.engine import MovingAverage, make_optimizer, parameters_of
from flatout.errors import ConfigError
from flatout.feed import DecodeError
from flatout.findings import in_units
from flatout.images import read_image
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.layout import decoded_bytes
from flatout.yolo.augment.samples import WholeImages
from flatout.yolo.data.anchors import boxes_at_size, fit_of, search_anchors
from flatout.yolo.data.data_yaml import DataSet
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import MIN_GRID
from flatout.yolo.data.tile_set import TileSet
from flatout.yolo.hyp import Hyp
from flatout.yolo.load_network import TrainingStart
from flatout.yolo.model.info import describe
from flatout.yolo.model.layers import Detect
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.train.step import scaled_weight_decay
from flatout.yolo.weights import transfer
from flatout.yolo.weights.legacy import parameter_groups as names_of_groups

logger = logging.getLogger(__name__)

# Anchors

MIN_RECALL = 0.98
"""Share of boxes that must match an anchor; with less, better anchors are searched for."""
JITTER = 0.1
"""Boxes are checked at sizes up to this share smaller or larger, as in training."""


def fit_anchors(network: Network, images: ImageSet, hyp: Hyp, *, size: int, seed: int) -> None:
    """Replace the network's anchors if others match more boxes of the training images."""
    head, rng = network.head, np.random.default_rng((seed, 0xA11C))
    per_image_N = np.diff(images.labels.first_N)
    size_wh_T2 = np.repeat(images.size_wh_N2, per_image_N, axis=0)
    if not len(size_wh_T2):
        return
    plain_T2 = boxes_at_size(size_wh_T2, images.labels.class_box_T5[:, 3:5].astype(np.float64), size)
    factor_N = rng.uniform(1 - JITTER, 1 + JITTER, len(images))
    jittered_T2 = plain_T2 * np.repeat(factor_N, per_image_N)[:, None]
    anchors_A2 = head.anchor_grid.cpu().numpy().reshape(-1, 2).astype(np.float64)
    fit = fit_of(anchors_A2, jittered_T2, threshold=hyp.anchor_t)
    logger.info("Anchors: %.2f match each target, best possible recall %.4f.", fit.above_threshold, fit.best_recall)
    if fit.best_recall >= MIN_RECALL:
        return
    try:
        found_A2 = search_anchors(plain_T2, len(anchors_A2), rng, threshold=hyp.anchor_t)
    except ValueError as error:
        logger.warning("The anchors do not fit the data, and no search for better ones is possible: %s", error)
        return
    better = fit_of(found_A2, jittered_T2, threshold=hyp.anchor_t)
    if better.best_recall <= fit.best_recall:
        logger.info("The search found no better anchors (recall %.4f): the network keeps its own.", better.best_recall)
        return
    set_anchors(head, found_A2)
    logger.info("New anchors fit the data better: recall %.4f. They are saved with the weights.", better.best_recall)


def set_anchors(head: Detect, anchors_A2: np.ndarray) -> None:
    """Assign anchors in pixels to the levels, from the finest to the coarsest. The caller passes them sorted, smallest
    first."""
    rising_LA2 = torch.tensor(anchors_A2, dtype=torch.float32).view(head.nl, head.na, 2)
    stride_L = head.stride
    by_stride = torch.argsort(stride_L)
    anchors_LA2 = torch.empty_like(rising_LA2)
    anchors_LA2[by_stride] = rising_LA2
    head.anchor_grid.copy_(anchors_LA2.view_as(head.anchor_grid))
    head.anchors.copy_(anchors_LA2 / stride_L.view(-1, 1, 1))


# Network


def parameter_groups(network: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of a network in YOLOv7's three groups, in the order in which its optimizer states number them:

    weights of batch norms and implicit vectors; all other weights, to which alone weight decay applies; and biases,
    which have a learning rate of their own during warm-up. Every parameter is in one of them, frozen ones too.
    """
    parameters = dict(network.named_parameters())
    groups = names_of_groups(network.state_dict())
    grouped = [name for group in groups for name in group]
    assert sorted(grouped) == sorted(parameters), f"in no group: {sorted(set(parameters) ^ set(grouped))}"
    return [[parameters[name] for name in group] for group in groups]


def class_names(data: DataSet, *, single_cls: bool) -> list[str]:
    """Names of the classes that the network learns; one class "item" with --single-cls."""
    return ["item"] if single_cls and len(data.names) != 1 else list(data.names)


def rebuild_network(saved: Mapping[str, Any], names: Sequence[str]) -> TrainingStart:
    """The network of a checkpoint, built from the config saved there: `--weights` and `--cfg` may no longer exist."""
    network = build_network(saved["config"], where="the saved model config")
    network.names = list(names)
    logger.info("%s", describe(network).line())
    return TrainingStart(network, None, None)


def freeze(network: Network, layers: Sequence[int]) -> None:
    """Freeze layers: one number N freezes layers 0 to N-1, several freeze exactly these.

    Batch-norm statistics of frozen layers are still updated. ConfigError if the network has no such layer, or if
    nothing is left to train.
    """
    frozen = range(layers[0]) if len(layers) == 1 else layers
    last = len(network.model) - 1
    if frozen and max(frozen) > last:
        raise ConfigError(
            f"--freeze {' '.join(map(str, layers))}: the network has no layer {max(frozen)}, only 0 to {last}; "
            f"--freeze {last} freezes all layers but the last."
        )
    prefixes = tuple(f"model.{layer}." for layer in frozen)
    count = 0
    for name, parameter in network.named_parameters():
        if prefixes and name.startswith(prefixes):
            parameter.requires_grad_(False)
            count += 1
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ConfigError(
            f"--freeze {' '.join(map(str, layers))}: nothing is left to train. --freeze {last} freezes all layers but "
            "the last."
        )
    if count:
        which = f"0 to {layers[0] - 1}" if len(layers) == 1 else ", ".join(map(str, layers))
        logger.info("Frozen: %d tensors in layers %s.", count, which)


# Optimizer and training state


def optimizer_for(network: Network, hyp: Hyp, *, total_batch: int, adam: bool) -> torch.optim.Optimizer:
    """SGD or Adam over the groups of `parameter_groups`; weight decay applies to the second group only."""
    groups = parameter_groups(network)
    decay = scaled_weight_decay(hyp.weight_decay, total_batch=total_batch)
    return make_optimizer(
        "adam" if adam else "sgd", groups, lr=hyp.lr0, momentum=hyp.momentum, decays=(0.0, decay, 0.0)
    )


def load_training_state(start: TrainingStart, optimizer: torch.optim.Optimizer, average: MovingAverage) -> None:
    """Load momentum and moving average, too, if the network came from an unfinished YOLOv7 checkpoint."""
    weights = start.weights
    if weights is None or weights.optimizer is None:
        return
    if load_optimizer_state(optimizer, weights.optimizer) and weights.ema is not None and start.transfer is not None:
        transfer(average.network, weights.ema, skip_anchors=bool(start.transfer.skipped))
        average.updates = weights.updates or 0


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any] | None) -> bool:
    """Load momentum from a YOLOv7 checkpoint of the same network; False if it does not fit or there is none."""
    if not saved:
        return False
    parameters = parameters_of(optimizer)
    state: Mapping[Any, Mapping[str, Any]] = saved.get("state", {})
    for number, parameter in enumerate(parameters):
        entry = state.get(number, {})
        if state and not entry:
            continue  # frozen when it was saved: there is no momentum yet
        fits = all(not _is_elementwise(value) or value.shape == parameter.shape for value in entry.values())
        if entry.keys() != optimizer.state[parameter].keys() or not fits:
            logger.warning(
                "The optimizer state in these weights belongs to another network or optimizer: starting without it."
            )
            return False
    for number, parameter in enumerate(parameters):
        for key, value in state.get(number, {}).items():
            kept = optimizer.state[parameter][key]
            kept.copy_(value.to(kept))
    return True


def start_epoch_of(start: TrainingStart, *, epochs: int) -> tuple[int, int]:
    """First epoch and number of epochs.

    An unfinished YOLOv7 checkpoint continues; if it is already past `epochs`, they are added to its own, as in YOLOv7.
    """
    weights = start.weights
    if weights is None or weights.optimizer is None or weights.epoch is None or weights.epoch < 0:
        return 0, epochs
    first = weights.epoch + 1
    if epochs < first:
        logger.info("These weights were trained for %d epochs: training %d more.", first, epochs)
        return first, epochs + weights.epoch
    return first, epochs


def use_sync_batch_norm(network: nn.Module, *, ranks: int, on_gpu: bool) -> str:
    """`--sync-bn`: compute batch-norm statistics over all ranks; returns a message for the log.

    The network is converted in place and keeps its tensors. Does nothing with one rank or without GPUs; the message
    says so.
    """
    if ranks == 1:
        return "--sync-bn has no effect with one rank."
    if not on_gpu:
        # torch has the kernel for GPUs only.
        return "--sync-bn needs GPUs: on CPUs each rank uses the batch-norm statistics of its own images."
    nn.SyncBatchNorm.convert_sync_batchnorm(network)
    return f"Batch-norm statistics are computed over the images of all {ranks} ranks."


def grid_of(network: Network) -> int:
    """The number of pixels of which the sides of the input are multiples."""
    return max(int(network.stride.max()), MIN_GRID)


def _is_elementwise(value: Any) -> bool:
    """Whether an optimizer state has a value per element of its parameter; Adam also keeps a counter."""
    return isinstance(value, Tensor) and value.dim() > 0


# Preflight

LOW_MEMORY_BYTES = 2**30
STORE_SHARE = 0.5
"""Share of the free memory that decoded images may take."""
MEASURE_S = 0.1
"""How long decoding is measured."""
MAX_IMAGES = 32
"""Images decoded in that time, at most."""


def remarks(
    images: ImageSet, augment: AugmentConfig, *, size: int, keeps_images: bool, workers: int, ranks: int
) -> Iterator[str]:
    """Remarks on memory and decoding speed for the preflight line; a shortage is also logged as a warning.

    `keeps_images`: images are decoded once and kept in memory, else decoded in every epoch, by `workers` of each rank.
    """
    if isinstance(images, TileSet):
        free, needed = in_units(machine.memory().free), in_units(WholeImages(images.whole).num_bytes)
        yield f"memory {free} free, {needed} for decoded images, or on disk if that is too much"
        yield _shm()
        return
    yield _memory(images, size, keeps_images=keeps_images)
    yield _shm()
    if not keeps_images:
        yield _decoding(images, augment, workers, ranks=ranks)


def reads_per_sample(augment: AugmentConfig) -> float:
    """Images that a training sample is made of, on average; pasted-in objects are not counted."""
    return (1 + 3 * augment.mosaic) * (1 + augment.mosaic * augment.mixup)


def _memory(images: ImageSet, size: int, *, keeps_images: bool) -> str:
    free = machine.memory().free
    if free < LOW_MEMORY_BYTES:
        logger.warning("Only %s of memory is free: workers may be killed. Close other programs first.", in_units(free))
    if not keeps_images:
        return f"memory {in_units(free)} free"
    needed = decoded_bytes(images.size_wh_N2, size)
    share = STORE_SHARE * free / max(1, needed)
    if share < 1:
        logger.warning(
            "Decoded images need %s, but half of the free memory is %s: about %.0f %% of them stay decoded, the others "
            "are decoded in every epoch. A smaller --img-size, or closing other programs, lets more of them stay.",
            in_units(needed), in_units(int(STORE_SHARE * free)), 100 * share,
        )  # fmt: skip
    return f"memory {in_units(free)} free, {in_units(needed)} for decoded images"


def _shm() -> str:
    shm = machine.shm()
    return f"/dev/shm {in_units(shm.free)}, not needed" if shm is not None else ""


def _decoding(images: ImageSet, augment: AugmentConfig, workers: int, *, ranks: int) -> str:
    """The upper limit on the speed of a training that decodes in every epoch, measured on its own images."""
    seconds = _seconds_per_image(images)
    if seconds is None:
        return ""
    limit = ranks * max(1, workers) / seconds / reads_per_sample(augment)
    who = (f"{workers} workers" if workers else "no workers") + (f" on each of {ranks} ranks" if ranks > 1 else "")
    return f"decoding allows at most about {limit:,.0f} img/s with {who} (--fast-dataloader decodes once)"


def _seconds_per_image(images: ImageSet) -> float | None:
    """Time to read and decode an image in one thread; None if none can be read."""
    step = max(1, len(images) // MAX_IMAGES)
    began, count = time.perf_counter(), 0
    for path in images.paths[::step][:MAX_IMAGES]:
        try:
            read_image(path)
            count += 1
        except (OSError, DecodeError):
            continue
        if time.perf_counter() - began > MEASURE_S:
            break
    return (time.perf_counter() - began) / count if count else None
