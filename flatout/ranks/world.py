"""Devices and ranks: what `--device` selects, which rank this process is, and the process group of all ranks.

    --device  cpu | 0 (one GPU) | 0,1 (several) | empty (all GPUs, else the CPU)
    with process_group(world, device):   ranks join; an error of one ends all of them, and each says why

Ranks come from torchrun, an older launcher or `launch_ranks`; a process without a launcher is a world of one. There are
two groups of connections: one for gradients, with a short timeout once training runs, and one between hosts for small
values, which waits as long as saving, opening data or the slowest rank may take. Ranks that are gone are noticed by
heartbeats (`RankWatch`), not by timeouts.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flatout.errors import ConfigError, Interrupted, ResourceError, counted
from flatout.ranks.signals import ignore_stop_signals
from flatout.ranks.watch import LOST_AFTER_S, RankWatch, is_of_collective, store_of_launcher

logger = logging.getLogger(__name__)

T = TypeVar("T")


# Devices


def choose_devices(text: str) -> list[torch.device]:
    """The devices that `--device` selects, in the given order; the CPU if it is empty and there is no GPU.

    ConfigError if the text names no devices, ResourceError if a GPU is not there.
    """
    selection = text.strip().lower()
    if selection == "cpu":
        return [torch.device("cpu")]
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not selection:
        return [torch.device("cuda", number) for number in range(present)] or [torch.device("cpu")]
    numbers = [_gpu_number(part, text) for part in selection.split(",")]
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"--device {text}: a GPU is listed twice.")
    if missing := [number for number in numbers if number >= present]:
        there = f"torch sees {counted(present, 'GPU')}, numbered from 0" if present else "torch sees no GPU"
        raise ResourceError(
            f"--device {text}: there is no GPU {missing[0]}; {there}. Use {'one of these or ' if present else ''}"
            "--device cpu. If there should be more, run: flatout doctor"
        )
    return [torch.device("cuda", number) for number in numbers]


def choose_device(text: str) -> torch.device:
    """The first device that `--device` selects, for work on one device."""
    first, *others = choose_devices(text)
    if others and text.strip():
        logger.info("Evaluation runs on one GPU: of --device %s only %s is used.", text, first)
    return first


def make_current(device: torch.device) -> None:
    """Make `device` the default GPU of this process: events, streams and Triton kernels would otherwise use GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _gpu_number(part: str, text: str) -> int:
    # torch's "cuda" is its current GPU, which is the first one in a process that has not chosen another.
    digits = "0" if part.strip() == "cuda" else part.strip().removeprefix("cuda:")
    if not digits.isdecimal():
        raise ConfigError(f"--device {text}: use cpu, the number of a GPU (0), or several (0,1).")
    return int(digits)


# Ranks

PATIENCE_S = 1800
"""Timeout for work that one rank does while the others wait: scanning data, decoding it into a store, fetching a
mirrored checkpoint, compiling."""
STEP_TIMEOUT_S = 120
"""Timeout of the all-reduce of gradients, after the first step."""


@dataclass(frozen=True)
class World:
    """The ranks of a training and collective operations on them; a single rank unless there is a launcher."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 0
    """Ranks on this machine; 0: unknown, because the launcher does not set it."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def ranks_here(self) -> int:
        """Ranks that share the cores of this machine; all of them if that is unknown."""
        return self.local_size or self.size

    def batch_per_rank(self, total_batch: int) -> int:
        """Samples per step on one rank; ConfigError if the total is not divisible."""
        if total_batch % self.size:
            raise ConfigError(
                f"the batch size {total_batch} counts over all {self.size} ranks and is not divisible by {self.size}: "
                f"use {total_batch - total_batch % self.size or self.size} or another multiple of {self.size}."
            )
        return total_batch // self.size

    def all_reduce_max(self, numbers: np.ndarray) -> np.ndarray:
        """Element-wise maximum over all ranks, as integers. Runs between hosts, so no GPU waits; a collective call."""
        if self.size == 1 or not numbers.size:
            return numbers
        largest = torch.from_numpy(numbers.astype(np.int64))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_host_group())
        return largest.numpy()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; a collective call."""
        return bool(self.all_reduce_max(np.array([flag]))[0])

    def broadcast(self, value: T) -> T:
        """The first rank's value, on every rank; plain values only. A collective call."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=_host_group())
        return values[0]

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks in order, on the first rank; None on the others. A collective call.

        Values are pickled: use it only for values that do not come from a file.
        """
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=0, group=_host_group())
        return values

    def broadcast_weights(self, network: nn.Module) -> None:
        """Copy the first rank's weights and buffers to all ranks: running statistics differ between ranks."""
        if self.size == 1:
            return
        tensors = list(network.state_dict().values())
        # One broadcast per dtype, for any memory format.
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(flat, src=0)
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def wait_for_all(self) -> None:
        """A barrier: wait until every rank has called it, up to `PATIENCE_S`."""
        if self.size > 1:
            dist.barrier(group=_host_group())

    @contextmanager
    def first_rank_first(self) -> Iterator[None]:
        """The first rank runs the block before all others, which find what it has written; a collective call."""
        if not self.is_first:
            self.wait_for_all()
        yield
        if self.is_first:
            self.wait_for_all()

    def tighten_timeouts(self) -> None:
        """Use short timeouts from here on; called after the first step, when no rank has a reason to be slow."""
        if self.size > 1 and dist.is_initialized():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=STEP_TIMEOUT_S))
            for watch in _watches:
                watch.tighten_timeouts()


def read_world(local_rank: int = -1) -> World:
    """The world that the environment variables of torchrun describe; older launchers pass `local_rank` as a flag (-1:
    not given). ConfigError if variables are missing or not numbers."""
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        return World()
    local = local_rank if local_rank >= 0 else _number("LOCAL_RANK", -1)
    if local < 0:
        raise ConfigError(
            "WORLD_SIZE is set, but neither LOCAL_RANK nor --local_rank says which GPU this process uses. "
            "Start with torchrun, or unset WORLD_SIZE."
        )
    return World(rank=_number("RANK", local), size=size, local_rank=local, local_size=_number("LOCAL_WORLD_SIZE", 0))


@contextmanager
def process_group(world: World, device: torch.device, *, lost_after_s: float = LOST_AFTER_S) -> Iterator[None]:
    """Join the other ranks for the block.

    An error of this rank is reported to the others, which end with ChildLostError (exit code 7). So do all ranks if one
    sends no heartbeat for `lost_after_s` after the first step.
    """
    join(world, device, lost_after_s=lost_after_s)
    try:
        yield
    except Interrupted:
        _leave_together(world)
        raise
    except BaseException as error:  # also KeyboardInterrupt: the other ranks must learn of any end
        # The process group is not destroyed here, because that needs all ranks.
        while _watches:
            watch = _watches.pop()
            watch.report_failure(error)
            if is_of_collective(error):
                # A launcher sends SIGTERM now. This process ends anyway, but first says why.
                ignore_stop_signals()
                cause = watch.explain(error)
                watch.stop()
                raise cause from error
            watch.wait_until_seen()
            watch.stop()
        raise
    leave(world)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Report an error in the block to the other ranks immediately, as this one may take long to end."""
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:  # also KeyboardInterrupt: the other ranks must learn of any end
        for watch in _watches:
            watch.report_failure(error)
        raise


def join(world: World, device: torch.device, *, lost_after_s: float = LOST_AFTER_S) -> None:
    """Make `device` the default of this process and join the other ranks; blocks until all have joined."""
    make_current(device)
    if world.size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE_S))
        store = store_of_launcher(os.environ)
        _watches.append(RankWatch(world.rank, world.size, store, lost_after_s=lost_after_s))
        world.wait_for_all()
        _watches[-1].start()


def leave(world: World) -> None:
    """Leave the process group."""
    if world.size > 1 and dist.is_initialized():
        _stop_watches()
        dist.destroy_process_group()
        _host_group.cache_clear()


def _leave_together(world: World) -> None:
    """Leave after all ranks have come to the same end: a launcher ends all of them as soon as one has ended."""
    try:
        world.wait_for_all()
    except RuntimeError as error:
        if not is_of_collective(error):
            raise
        # Another rank has already ended. Everything is saved, and this one was to end anyway.
        _stop_watches()
        return
    leave(world)


def _stop_watches() -> None:
    while _watches:
        _watches.pop().stop()


_watches: list[RankWatch] = []
"""Holds the one watch while the process group exists, else nothing."""


@cache
def _host_group() -> "dist.ProcessGroup":
    """The group for small values between hosts: NCCL would make the GPU's stream wait."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    return group


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise ConfigError(
            f"environment variable {name}={text!r}: not a number. Launchers set it: unset it, or start with torchrun."
        )
    return int(text)
