"""Random numbers in datasets that take them from torch, numpy or random without saying so.

A sample's numbers must not depend on which worker reads it, so the global generators are seeded
before each sample. That takes 20 microseconds, much for a dataset that draws nothing: it is done
only once the dataset was seen to draw. Where workers take turns, they are seeded once, as in torch.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker

T = TypeVar("T")


def seed_everything(seed: int) -> None:
    """Seed the generators that a dataset finds without asking; a seed below 2**64."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002 - datasets use it


def seed_as_torch(base_seed: int, worker: int) -> None:
    """Seed the same generators as torch's DataLoader does when a worker starts."""
    seed_everything(base_seed + worker)
    np.random.seed(torch_worker._generate_state(base_seed, worker))  # noqa: NPY002 - datasets use it


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Leave the generators in the state they had before."""
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def _draw_from_all() -> tuple[float, float, float]:
    return random.random(), float(torch.rand(())), float(np.random.random_sample())  # noqa: NPY002


class DrawWatch:
    """Notices whether something drew random numbers.

    Its seed is the worker's own: a dataset may ask for torch.initial_seed() without drawing, to seed a
    generator of its own, which must not be the same in every worker.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        seed_everything(seed)
        self._untouched = _draw_from_all()

    def drew(self, call: Callable[[], T]) -> tuple[T, bool]:
        """The call's result, and whether one of the generators moved meanwhile."""
        seed_everything(self._seed)
        result = call()
        # Cheaper than comparing states: an untouched generator gives the known first number.
        return result, _draw_from_all() != self._untouched
