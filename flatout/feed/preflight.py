"""Will it fit? Asked before anything is started, answered with numbers."""

import logging
from dataclasses import replace

from flatout.errors import ResourceError
from flatout.feed.ring import RingSpec
from flatout.profiler.machine import Descriptors

logger = logging.getLogger(__name__)

FEWEST_SLOTS = 2
MEMORY_SHARE = 0.5
"""Of the free memory, what the slots may take: the model, the page cache and the workers need the rest."""
DESCRIPTORS_NEEDED = 16
"""Two pipes, three sockets and the ring, and a few for starting processes; every further lane needs a pipe."""


def fit_slots(spec: RingSpec, free_bytes: int) -> RingSpec:
    """The same ring, with fewer slots if memory demands it; ResourceError if even the fewest do not fit."""
    budget = int(free_bytes * MEMORY_SHARE)
    if spec.total_bytes <= budget:
        return spec
    fixed_bytes = spec.total_bytes - spec.num_slots * spec.slot_bytes
    num_slots = (budget - fixed_bytes) // spec.slot_bytes
    if num_slots < FEWEST_SLOTS:
        raise ResourceError(
            f"A batch of {spec.batch_size} takes {_mib(spec.slot_bytes)}, and at least {FEWEST_SLOTS} must fit into "
            f"half of the free memory ({_mib(free_bytes)} free). Use a smaller batch, or free memory."
        )
    logger.warning(
        "Memory: %d slots of %s would take more than half of the %s that are free; using %d slots.",
        spec.num_slots,
        _mib(spec.slot_bytes),
        _mib(free_bytes),
        num_slots,
    )
    return replace(spec, num_slots=num_slots)


def check_descriptors(limits: Descriptors, num_lanes: int = 1) -> None:
    """Refuse to start what would fail half-way for lack of descriptors."""
    needed = DESCRIPTORS_NEEDED + 2 * (num_lanes - 1)
    if limits.soft is not None and limits.soft - limits.open < needed:
        raise ResourceError(
            f"The feed needs {needed} file descriptors, but only {max(0, limits.soft - limits.open)} of "
            f"{limits.soft} are left. Raise the limit: ulimit -n {limits.open + 2 * needed} or more."
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
