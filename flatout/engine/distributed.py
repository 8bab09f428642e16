"""Which of several processes is this one? Started by torchrun, by an older launcher, or alone."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flatout.engine.device_choice import make_current
from flatout.errors import ConfigError

TIMEOUT_S = 120
"""Until a lost rank ends the others; compilation and validation of rank 0 must fit in."""


@dataclass(frozen=True)
class World:
    """The ranks of a training; one alone unless a launcher says otherwise."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share_of(self, total_batch: int) -> int:
        """Samples per step of one rank."""
        if total_batch % self.size:
            raise ConfigError(
                f"--batch-size {total_batch} is for all {self.size} ranks together and cannot be divided among them: "
                f"use {total_batch - total_batch % self.size or self.size} or another multiple of {self.size}."
            )
        return total_batch // self.size

    def largest(self, numbers: np.ndarray) -> np.ndarray:
        """Entry by entry, the largest of all ranks. All ask at the same step; over the host, so no GPU waits."""
        if self.size == 1 or not numbers.size:
            return numbers
        told = torch.from_numpy(numbers.astype(np.int64))
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=_host_group())
        return told.numpy()

    def any_of(self, flag: bool) -> bool:
        """Has any rank raised its flag?"""
        return bool(self.largest(np.array([flag]))[0])

    def from_first(self, value: Any) -> Any:
        """The first rank's value, on every rank; plain values only. All ranks ask at the same time."""
        if self.size == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, group=_host_group())
        return told[0]

    def wait_for_all(self) -> None:
        if self.size > 1:
            dist.barrier(group=_host_group())


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
    return World(rank=_number("RANK", local), size=size, local_rank=local)


def join(world: World, device: torch.device) -> None:
    """Make `device` this process's own, and meet the other ranks; blocks until all are there."""
    make_current(device)
    if world.size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=TIMEOUT_S))


def leave(world: World) -> None:
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
        _groups.clear()


_groups: dict[str, dist.ProcessGroup] = {}


def _host_group() -> "dist.ProcessGroup":
    """A group for small words between hosts: NCCL's own would make the GPU's stream wait."""
    if "host" not in _groups:
        _groups["host"] = dist.new_group(backend="gloo")
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
