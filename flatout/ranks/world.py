"""Which of several processes is this one? Started by torchrun, by an older launcher, or alone.

    with process_group(world, device):   ranks meet; an error of one ends all, and each says why

Two groups of connections: one for gradients, impatient once training goes, and one for small words between hosts, which
waits as long as saving, opening data or the slowest rank may take. Ranks that are gone are not noticed by timeouts, but
by `rank_watch`.

Which devices does `--device` mean? `cpu`, one GPU (`0`), several (`0,1`), or all there are (nothing).
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flatout.errors import ConfigError, Interrupted, ResourceError
from flatout.ranks.signals import ignore_ending
from flatout.ranks.watch import LOST_AFTER_S, RankWatch, is_of_collective, store_of_launcher

logger = logging.getLogger(__name__)


def choose_devices(text: str) -> list[torch.device]:
    """The devices in the order of their numbers as written; the CPU alone where there is no GPU and none was named."""
    wanted = text.strip().lower()
    if wanted == "cpu":
        return [torch.device("cpu")]
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not wanted:
        return [torch.device("cuda", number) for number in range(present)] or [torch.device("cpu")]
    numbers = [_gpu_number(part, text) for part in wanted.split(",")]
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"--device {text}: a GPU is named twice.")
    if missing := [number for number in numbers if number >= present]:
        there = f"this machine has {present}, numbered from 0" if present else "torch sees no GPU here"
        raise ResourceError(
            f"--device {text}: there is no GPU {missing[0]}: {there}. Use --device cpu, or see: flatout doctor"
        )
    return [torch.device("cuda", number) for number in numbers]


def choose_device(text: str) -> torch.device:
    """The first of them, for work that one device does."""
    first, *others = choose_devices(text)
    if others and text.strip():
        logger.info("An evaluation runs on one GPU: of --device %s only %s is used.", text, first)
    return first


def make_current(device: torch.device) -> None:
    """Let this process mean `device` where none is named: events, streams and kernels of Triton would else be those of
    GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _gpu_number(part: str, text: str) -> int:
    digits = part.strip().removeprefix("cuda:")
    if not digits.isdecimal():
        raise ConfigError(f"--device {text}: use cpu, the number of a GPU (0), or several (0,1).")
    return int(digits)


PATIENCE_S = 1800
"""Scanning data, decoding it into a store, fetching a mirrored state, compiling: one rank does it, the others wait."""
STEP_TIMEOUT_S = 120
"""For sums of gradients, from the first step on."""


@dataclass(frozen=True)
class World:
    """The ranks of a training; one alone unless a launcher says otherwise."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 0
    """Ranks on this machine; 0: the launcher does not say."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def size_here(self) -> int:
        """Ranks that share the cores of this machine; all of them, where nothing better is known."""
        return self.local_size or self.size

    def share_of(self, total_batch: int) -> int:
        """Samples per step of one rank."""
        if total_batch % self.size:
            raise ConfigError(
                f"--batch-size {total_batch} is for all {self.size} ranks together and cannot be divided among them: "
                f"use {total_batch - total_batch % self.size or self.size} or another multiple of {self.size}."
            )
        return total_batch // self.size

    def all_reduce_max(self, numbers: np.ndarray) -> np.ndarray:
        """Entry by entry, the largest of all ranks. All ask at the same step; over the host, so no GPU waits."""
        if self.size == 1 or not numbers.size:
            return numbers
        told = torch.from_numpy(numbers.astype(np.int64))
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=_host_group())
        return told.numpy()

    def any(self, flag: bool) -> bool:
        """Has any rank raised its flag?"""
        return bool(self.all_reduce_max(np.array([flag]))[0])

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, on every rank; plain values only. All ranks ask at the same time."""
        if self.size == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, group=_host_group())
        return told[0]

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks in their order, for the first rank; None for the others. All tell at the same time.

        Pickled: for values of our own making that went through no file.
        """
        if self.size == 1:
            return [value]
        told: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, told, dst=0, group=_host_group())
        return told

    def broadcast_weights(self, network: nn.Module) -> None:
        """Give a network the first rank's weights and buffers: running statistics are each rank's own between steps."""
        if self.size == 1:
            return
        tensors = list(network.state_dict().values())
        # One copy per number format, whatever the memory formats are.
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(flat, src=0)
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def wait_for_all(self) -> None:
        """Returns when every rank has come here, however long that takes."""
        if self.size > 1:
            dist.barrier(group=_host_group())

    def settle(self) -> None:
        """The first step is done: from here on nobody has a reason to be silent or late."""
        if self.size > 1 and dist.is_initialized():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=STEP_TIMEOUT_S))
            for watch in _watches:
                watch.settle()


def read_world(local_rank: int = -1) -> World:
    """From torchrun's environment; `local_rank` is what older launchers pass as a flag (-1: none)."""
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        return World()
    local = local_rank if local_rank >= 0 else _number("LOCAL_RANK", -1)
    if local < 0:
        raise ConfigError(
            "WORLD_SIZE is set, but neither LOCAL_RANK nor --local_rank says which GPU is this process's."
        )
    return World(rank=_number("RANK", local), size=size, local_rank=local, local_size=_number("LOCAL_WORLD_SIZE", 0))


@contextmanager
def process_group(world: World, device: torch.device, *, lost_after_s: float = LOST_AFTER_S) -> Iterator[None]:
    """Meet the other ranks, and part at the end of the block.

    An error of this rank is told to the others, which end with ChildLostError (exit code 7); so do all if a rank shows
    no sign of life for `lost_after_s` after the first step.
    """
    join(world, device, lost_after_s=lost_after_s)
    try:
        yield
    except Interrupted:
        _leave_with_all(world)
        raise
    except BaseException as error:
        # Not parted from properly: taking connections down together needs everybody.
        while _watches:
            watch = _watches.pop()
            watch.tell(error)
            if is_of_collective(error):
                # A launcher wants us to end, as we do; first we say why.
                ignore_ending()
                cause = watch.explain(error)
                watch.stop()
                raise cause from error
            watch.wait_until_heard()
            watch.stop()
        raise
    leave(world)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Report an error of the block to the other ranks at once, while this one may still take long to end."""
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        for watch in _watches:
            watch.tell(error)
        raise


def join(world: World, device: torch.device, *, lost_after_s: float = LOST_AFTER_S) -> None:
    """Make `device` this process's own, and meet the other ranks; blocks until all are there."""
    make_current(device)
    if world.size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE_S))
        store = store_of_launcher(os.environ)
        _watches.append(RankWatch(world.rank, world.size, store, lost_after_s=lost_after_s))
        world.wait_for_all()
        _watches[-1].start()


def leave(world: World) -> None:
    """Part from the other ranks."""
    if world.size > 1 and dist.is_initialized():
        _stop_watches()
        dist.destroy_process_group()
        _groups.clear()


def _leave_with_all(world: World) -> None:
    """All have come to the same end. A launcher ends all as soon as one has ended, so none may be the first."""
    try:
        world.wait_for_all()
    except RuntimeError as error:
        if not is_of_collective(error):
            raise
        # One is gone already. Everything is saved, and to end is what was asked for.
        _stop_watches()
        return
    leave(world)


def _stop_watches() -> None:
    while _watches:
        _watches.pop().stop()


_groups: dict[str, dist.ProcessGroup] = {}
_watches: list[RankWatch] = []
"""One while ranks are together, else none."""


def _host_group() -> "dist.ProcessGroup":
    """A group for small words between hosts: NCCL's own would make the GPU's stream wait."""
    if "host" not in _groups:
        _groups["host"] = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    return _groups["host"]


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return otherwise
    if not text.isdigit():
        raise ConfigError(
            f"the environment variable {name}={text!r} is no number. The launcher sets it: unset it, or use torchrun."
        )
    return int(text)
