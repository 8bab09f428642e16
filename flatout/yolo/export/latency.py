"""How long a call takes: medians of programs that take turns, so that a busy moment of the machine hits them all."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

WARM_UP = 1
LEAST_TURNS, MOST_TURNS = 3, 50
BUDGET_S = 3.0
"""For all turns together, unless the least number of them takes longer."""


def medians_ms(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Name -> median in milliseconds; the GPU, if it is one, is drained around each call."""
    for call in calls.values():
        for _ in range(WARM_UP):
            _seconds(call, device)
    took: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() - began > BUDGET_S:
            break
        for name, call in calls.items():
            took[name].append(_seconds(call, device))
    return {name: 1e3 * median(durations) for name, durations in took.items()}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
