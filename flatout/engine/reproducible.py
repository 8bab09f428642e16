"""What a result may depend on beside code, config and data: versions, processor, threads, kernels, random generators.

A saved state remembers it. When it is continued elsewhere that is said in a line and is no error: the stream of samples
and the schedule stay the same, the last bits of sums do not. The data stream needs no generator; dropout, and whatever
a job's own code draws, do.
"""

import logging
import os
import platform
import random
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import numpy as np
import torch

from flatout.clock import busy_cores, fitting_threads, machine

logger = logging.getLogger(__name__)

_OPENCV = ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python")

_MEANING = {
    "world_size": "samples and their order per step stay the same; sums over ranks round differently",
    "opencv": "pictures may differ in single values",
    "threads": "sums round differently from here on; samples and schedule stay the same",
    "cpu_capability": "sums round differently from here on; samples and schedule stay the same",
    "gpu": "sums round differently from here on; samples and schedule stay the same",
    "cuda": "kernels may round differently from here on; samples and schedule stay the same",
    "torch": "kernels may round differently from here on; samples and schedule stay the same",
    "deterministic": "bit-exact only where it was on all the time",
}
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_HARMLESS = frozenset({"python", "numpy"})
"""Recorded for those who wonder later: nothing that is computed depends on them."""


def environment() -> dict[str, str | int | bool | None]:
    """Of this process, in plain values. Asks the GPU for its name where there is one."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "opencv": _opencv_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }


def warn_of_waiting_threads(device: torch.device) -> None:
    """One warning if torch is about to compute on the CPU with more threads than there are free cores.

    Their number is not changed: the last bits of a result depend on it, and a choice by the load of the moment could be
    neither repeated nor continued. Whoever has set it, knows.
    """
    if device.type != "cpu" or os.environ.keys() & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}:
        return
    cores, num_threads = machine.cores(), torch.get_num_threads()
    # Programs on cores that we may not use take nothing away.
    free = min(cores.usable, cores.machine - busy_cores())
    if (fitting := fitting_threads(num_threads, free)) is not None:
        logger.warning(
            "Torch computes with %d threads, and for %d of them a core is free: those that run wait for those that do "
            "not, and a step may take several times as long. If that lasts, start with OMP_NUM_THREADS=%d in front of "
            "the command.",
            num_threads, fitting, fitting,
        )  # fmt: skip


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """One line per difference that may change results: 'threads 2 -> 1: sums round differently ...'."""
    return [
        f"{key} {old.get(key)} -> {new.get(key)}: {_MEANING.get(key, 'results may differ from here on')}."
        for key in sorted((old.keys() | new.keys()) - _HARMLESS)
        if old.get(key) != new.get(key)
    ]


def _opencv_version() -> str | None:
    """Without importing it: training on the GPU path does without OpenCV."""
    for name in _OPENCV:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


# Kernels and generators


def set_determinism(wanted: bool, *, long_run: bool = True) -> None:
    """For this process: deterministic kernels, or in a long run for every shape the fastest that cuDNN finds by trying.

    Trying takes half a minute for a network of 60 convolutions, which a short run would not earn back.
    """
    torch.backends.cudnn.benchmark = long_run and not wanted
    torch.backends.cudnn.deterministic = wanted
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    if wanted and torch.cuda.is_available() and os.environ.setdefault(_WORKSPACE, ":4096:8") == "":
        logger.warning("%s is empty: matrix products may differ from run to run.", _WORKSPACE)


def seed_all(seed: int) -> None:
    """Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """All generators, as plain values and tensors."""
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
    """Continue where `random_state` was taken; a state without a GPU's leaves that of the GPU as it is."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
