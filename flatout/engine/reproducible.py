"""Reproducibility: versions, processor, threads, kernels and random generators that results may depend on.

A checkpoint records them. Continuing under other ones is not an error but is logged: samples and schedule stay the
same, the last bits of sums do not. The data stream uses no random generator; dropout and a job's own code may.
"""

import logging
import os
import platform
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flatout.clock import busy_cores, fitting_threads, machine

logger = logging.getLogger(__name__)

_OPENCV = ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python")

_MEANING = {
    "world_size": "samples and their order per step stay the same; sums over ranks round differently",
    "opencv": "single pixel values may differ",
    "threads": "sums round differently from here on; samples and schedule stay the same",
    "cpu_capability": "sums round differently from here on; samples and schedule stay the same",
    "gpu": "sums round differently from here on; samples and schedule stay the same",
    "cuda": "kernels may round differently from here on; samples and schedule stay the same",
    "torch": "kernels may round differently from here on; samples and schedule stay the same",
    "deterministic": "bit-exact only where it was on all the time",
}
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_HARMLESS = frozenset({"python", "numpy"})
"""Recorded for later reference: no result depends on them."""


def environment(num_ranks: int = 1) -> dict[str, str | int | bool | None]:
    """Versions, processor, threads, GPU and ranks of this process, in plain values."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        # Without importing OpenCV, which training on the GPU does not need.
        "opencv": next(filter(None, map(machine.package_version, _OPENCV)), None),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "world_size": num_ranks,
    }


def warn_of_waiting_threads(device: torch.device) -> None:
    """Warn if torch is about to compute on the CPU with more threads than there are free cores.

    The number of threads is not changed: the last bits of a result depend on it, and a choice by the current load could
    not be reproduced. No warning if the user has set it.
    """
    if device.type != "cpu" or os.environ.keys() & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}:
        return
    cores, num_threads = machine.cores(), torch.get_num_threads()
    # Programs on cores that this process may not use take nothing away.
    free = min(cores.usable, cores.machine - busy_cores())
    if (fitting := fitting_threads(num_threads, free)) is not None:
        logger.warning(
            "torch uses %d threads, but there is a free core for only %d of them: threads wait for each other, and a "
            "step may take several times as long. If that lasts, put OMP_NUM_THREADS=%d in front of the command.",
            num_threads, fitting, fitting,
        )  # fmt: skip


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """A line for each difference that may change results: 'threads 2 -> 1: sums round differently ...'."""
    return [
        f"{key} {old.get(key)} -> {new.get(key)}: {_MEANING.get(key, 'results may differ from here on')}."
        for key in sorted((old.keys() | new.keys()) - _HARMLESS)
        if old.get(key) != new.get(key)
    ]


# Kernels and generators


def set_determinism(deterministic: bool, *, long_run: bool = True) -> None:
    """Use deterministic kernels in this process; otherwise, in a long run, let cuDNN benchmark for the fastest ones.

    Benchmarking takes half a minute for a network of 60 convolutions, which does not pay in a short run.
    """
    torch.backends.cudnn.benchmark = long_run and not deterministic
    torch.backends.cudnn.deterministic = deterministic
    if deterministic or torch.are_deterministic_algorithms_enabled():  # the call imports torch's compiler
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
    if deterministic and torch.cuda.is_available() and os.environ.setdefault(_WORKSPACE, ":4096:8") == "":
        logger.warning("%s is empty: matrix products may differ from run to run.", _WORKSPACE)


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all generators, as plain values and tensors."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.astype(np.int64).tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned; the GPU's generator is left alone if its state is missing."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
