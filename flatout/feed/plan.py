"""Which sample goes into which step, decided before anything is read, and random numbers keyed by position.

Pure NumPy: no files, no processes, no torch. The same arguments give the same result on any machine and in any
version; resuming and sharding depend on that.

A *position* counts samples along the epoch's order, over all ranks: position p shows sample order[p].
Random draws are keyed by position, so a sample that an epoch shows twice is augmented differently.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised in
NumPy. There is no generator state to carry, split or restore: the numbers of a sample are a pure function of
(seed, epoch, position), so they do not depend on which worker draws them, on the size of its micro-batch, or on where
a run was resumed. It is written out here instead of taken from numpy.random because that module does not promise the
same stream in every version.

Dimension key:  N samples in the epoch's order   R ranks   S steps   B batch size per rank   M positions
                In Philox: N counters, each of 4 words, 2 of them even and 2 odd
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError

_MULTIPLIERS_21 = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = 0x9E3779B9, 0xBB67AE85
_32_BITS = 0xFFFFFFFF
_32 = np.uint64(32)
_LOW = 0 if sys.byteorder == "little" else 1
"""Index of the lower half of a uint64 in memory."""


# Keyed random numbers


class Purpose(IntEnum):
    """Separates the random streams of different uses, even where seed, epoch and position are equal."""

    SAMPLE = 0
    ORDER = 1
    STEP = 2
    SUBSTITUTE = 3


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox over counters uint64 [..., 4] of 32-bit words; returns words uint64 [..., 4].

    For a few dozen samples the cost is the number of array operations, so there are only three per round: words 0 and 2
    are treated as one array, 1 and 3 as another, and the halves of the products are views.
    """
    word_N4 = counter.reshape(-1, 4)
    even_2N = np.ascontiguousarray(word_N4[:, 0::2].T, np.uint64)
    odd_2N = word_N4[:, 1::2].T.astype(np.uint32)
    even_low_2N = even_2N.view(np.uint32)[:, _LOW::2]
    # Two buffers, used alternately: the halves of one are read while the next product is computed.
    products_22N = np.empty((2, *even_2N.shape), np.uint64)
    halves = products_22N.view(np.uint32)
    # Reversed: the product of word 0 goes into words 2 and 3, that of word 2 into 0 and 1.
    low_22N, high_22N = halves[:, ::-1, _LOW::2], halves[:, ::-1, 1 - _LOW :: 2]
    for number, key_21 in enumerate(_round_keys(*key)):
        turn = number % 2
        np.multiply(even_2N, _MULTIPLIERS_21, out=products_22N[turn])
        np.bitwise_xor(high_22N[turn], odd_2N, out=even_low_2N)
        np.bitwise_xor(even_low_2N, key_21, out=even_low_2N)
        odd_2N = low_22N[turn]
    words_N4 = np.empty(word_N4.shape, np.uint64)
    words_N4[:, 0::2], words_N4[:, 1::2] = even_2N.T, odd_2N.T
    return words_N4.reshape(counter.shape)


@lru_cache(maxsize=64)
def _round_keys(k0: int, k1: int) -> tuple[np.ndarray, ...]:
    """The keys of the ten rounds, uint32 [2, 1] each."""
    rounds = (
        [(key + number * step) & _32_BITS for key, step in zip((k0, k1), _WEYL, strict=True)] for number in range(10)
    )
    return tuple(np.array(keys, np.uint32)[:, None] for keys in rounds)


def keyed_bits(
    seed: int, epoch: int, positions_M: np.ndarray, num: int, *, skip: int = 0, purpose: Purpose = Purpose.SAMPLE
) -> np.ndarray:
    """Random uint64 [M, num], row m a pure function of (seed, epoch, positions_M[m], purpose).

    A longer row begins with the shorter one: a larger `num` does not change the first numbers. `skip`, an even number,
    leaves out that many numbers at the beginning of the row without computing them.
    Streams are distinct for positions below 2**48, epochs below 2**32 and seeds below 2**64.
    """
    positions_M = np.asarray(positions_M, np.uint64)
    num_blocks = (num + 1) // 2  # a block of four 32-bit words holds two 64-bit numbers
    counter = np.empty((len(positions_M), num_blocks, 4), np.uint64)
    counter[..., 0] = np.arange(skip // 2, skip // 2 + num_blocks)
    counter[..., 1] = (positions_M & np.uint64(_32_BITS))[:, None]
    counter[..., 2] = np.uint64(epoch & _32_BITS)
    counter[..., 3] = ((positions_M >> _32) & np.uint64(0xFFFF))[:, None] | np.uint64(int(purpose) << 16)
    words = philox4x32(counter, (seed & _32_BITS, (seed >> 32) & _32_BITS))
    pairs = words.reshape(len(positions_M), num_blocks * 2, 2)
    return np.asarray(((pairs[..., 0] << _32) | pairs[..., 1])[:, :num])


def keyed_uniform(
    seed: int, epoch: int, positions_M: np.ndarray, num: int, *, purpose: Purpose = Purpose.SAMPLE
) -> np.ndarray:
    """Uniform float64 [M, num] in [0, 1), keyed like `keyed_bits`."""
    bits = keyed_bits(seed, epoch, positions_M, num, purpose=purpose)
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def keyed_generator(bits_2: np.ndarray) -> np.random.Generator:
    """An ordinary NumPy generator for one sample, from two of its `keyed_bits`."""
    return np.random.Generator(np.random.Philox(key=bits_2))


# Orders and steps

Shapes = Mapping[str, tuple[int, ...]]
"""Per-sample shape of some fields, by field name."""


def shuffled_order(num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Visiting order of one epoch, int64 [N]: every sample exactly once."""
    keys_N = keyed_bits(seed, epoch, np.arange(num_samples), 1, purpose=Purpose.ORDER)[:, 0]
    return np.asarray(np.argsort(keys_N, kind="stable"))


def weighted_order(weights_N: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """N samples drawn with replacement, int64 [N]: sample i appears about N * weight_i / sum(weights) times."""
    cumulative_N = np.cumsum(weights_N, dtype=np.float64)
    drawn_N = keyed_uniform(seed, epoch, np.arange(len(weights_N)), 1, purpose=Purpose.ORDER)[:, 0]
    order_N = np.searchsorted(cumulative_N, drawn_N * cumulative_N[-1], side="right")
    return np.asarray(np.minimum(order_N, len(weights_N) - 1))


def micro_batches(num_rows: int, micro_batch: int) -> list[tuple[int, int]]:
    """Row ranges [begin, end) of the micro-batches that workers fill in parallel."""
    return [(begin, min(begin + micro_batch, num_rows)) for begin in range(0, num_rows, micro_batch)]


def choose_micro_batch(batch_size: int, num_workers: int) -> int:
    """Samples per task: four tasks per worker and batch, to balance samples of unequal cost; 64 at most."""
    return max(1, min(64, -(-batch_size // (4 * max(1, num_workers)))))


def choose_slots(batch_size: int, num_workers: int) -> int:
    """Batches in flight: four, or more where batches are so small that workers would run out of work."""
    return max(4, -(-2 * num_workers // batch_size) + 1)


class Step(NamedTuple):
    """One rank's share of one training step."""

    epoch: int
    step: int
    indices: np.ndarray  # int64 [<= B], sample indices
    positions: np.ndarray  # int64 [<= B], positions in the epoch's order
    num_valid: int  # number of rows that are not padding; the others repeat samples to fill a padded batch
    shapes: Shapes  # per-sample shapes that differ from the source's fields in this step


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The order of every epoch and its division into steps, for one rank."""

    num_samples: int
    """Samples in the source."""

    batch_size: int
    """Samples per step on this rank; a step takes batch_size * num_ranks in all."""

    seed: int = 0
    """Seed of the order and of all random draws."""

    shuffle: bool = True
    """A new order each epoch; False keeps the source's order."""

    last: Literal["drop", "pad", "short"] = "drop"
    """An incomplete last step is dropped, filled up from the start of the order, or left short."""

    rank: int = 0
    num_ranks: int = 1

    weights: np.ndarray | None = None
    """Sampling weights [num_samples]: each epoch draws num_samples times with replacement."""

    order: Callable[[int], np.ndarray] | np.ndarray | None = None
    """Sample indices to show, in this order: one array for all epochs, or a function of the epoch."""

    shapes: Callable[[int, int], Shapes] | None = None
    """Per-sample shapes as a function of (epoch, step), none larger than the source's fields."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("The source is empty (0 samples). Check the data path.")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} must be 1 or more.")
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank={self.rank} must be in 0..{self.num_ranks - 1} (num_ranks={self.num_ranks}).")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed} must be in 0..2**64-1.")
        if self.last not in ("drop", "pad", "short"):
            raise ConfigError(f"last={self.last!r} is unknown: use 'drop', 'pad' or 'short'.")
        if self.weights is not None and self.order is not None:
            raise ConfigError("weights and order cannot be combined: an order already decides which sample comes when.")
        if self.weights is not None:
            _check_weights(self.weights, self.num_samples)

    def with_weights(self, weights: np.ndarray | None) -> "Plan":
        """The same plan with other sampling weights."""
        return replace(self, weights=weights)

    def epoch(self, epoch: int) -> "EpochPlan":
        """The steps of one epoch."""
        return EpochPlan(self, epoch, self._order_of(epoch))

    def fingerprint(self) -> dict[str, Any]:
        """The values that must be equal for a stream to continue.

        The number of ranks may change, the number of samples per step may not.
        """
        return {
            "num_samples": self.num_samples,
            "samples_per_step": self.batch_size * self.num_ranks,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "last": self.last,
        }

    def _order_of(self, epoch: int) -> np.ndarray:
        if self.order is not None:
            return _check_order(self.order(epoch) if callable(self.order) else self.order, self.num_samples)
        if self.weights is not None:
            return weighted_order(self.weights, seed=self.seed, epoch=epoch)
        if self.shuffle:
            return shuffled_order(self.num_samples, seed=self.seed, epoch=epoch)
        return np.arange(self.num_samples)


class EpochPlan:
    """The steps of one epoch, computed one at a time: memory is N integers, not S * B."""

    def __init__(self, plan: Plan, epoch: int, order_N: np.ndarray) -> None:
        self._plan = plan
        self._epoch = epoch
        self.order = order_N
        """Sample indices in the order of the epoch, int64 [N]."""
        per_step = plan.batch_size * plan.num_ranks
        # An incomplete last step counts unless it is dropped.
        self.num_steps = len(order_N) // per_step if plan.last == "drop" else -(-len(order_N) // per_step)
        if self.num_steps == 0:
            raise ConfigError(
                f"An epoch of {len(order_N)} samples has no complete step of {per_step} samples "
                f"(batch_size={plan.batch_size}, num_ranks={plan.num_ranks}). "
                "Use a smaller batch, or last='short' or last='pad'."
            )

    def step(self, step: int) -> Step:
        """This rank's share of step `step`.

        Step-major: a step trains on the same samples however many ranks share it, so the loss curve does not change
        with the number of GPUs. The samples of a short last step are divided evenly.
        """
        plan, num_samples = self._plan, len(self.order)
        per_step = plan.batch_size * plan.num_ranks
        begin, end = step * per_step, (step + 1) * per_step
        if end > num_samples and plan.last == "short":
            edges = begin + (num_samples - begin) * np.arange(plan.num_ranks + 1) // plan.num_ranks
            positions = np.arange(edges[plan.rank], edges[plan.rank + 1])
        else:
            positions = begin + plan.rank * plan.batch_size + np.arange(plan.batch_size)
        num_valid = int((positions < num_samples).sum())
        shapes = plan.shapes(self._epoch, step) if plan.shapes else {}
        return Step(self._epoch, step, self.order[positions % num_samples], positions, num_valid, shapes)

    def digest(self) -> str:
        """Short hash of the order: two runs with the same digest show the same samples."""
        return hashlib.sha256(np.ascontiguousarray(self.order, np.int64).tobytes()).hexdigest()[:16]


class EpochPlans:
    """The epochs of a plan; keeps two of them: the one that is trained on and the one that is read ahead."""

    def __init__(self, plan: Plan) -> None:
        self._plan_of = lru_cache(maxsize=2)(plan.epoch)

    def __getitem__(self, epoch: int) -> EpochPlan:
        return self._plan_of(epoch)

    def steps(self, epoch: int, start: int, last_epoch: float) -> Iterator[Step]:
        """Steps in the order of training: the rest of `epoch`, then the epochs up to `last_epoch`."""
        plan = self[epoch]
        while True:
            yield from map(plan.step, range(start, plan.num_steps))
            if epoch >= last_epoch:
                return
            epoch, start = epoch + 1, 0
            try:
                plan = self[epoch]
            except Exception:  # `plan.order` is the user's function; its error is raised when this epoch is opened
                return


def _check_weights(weights: np.ndarray, num_samples: int) -> None:
    if np.shape(weights) != (num_samples,):
        raise ConfigError(
            f"Plan.weights has shape {np.shape(weights)}, but the source has {num_samples} samples: give one weight "
            "each."
        )
    if not np.all(np.isfinite(weights)) or np.min(weights) < 0 or np.sum(weights) <= 0:
        raise ConfigError("Plan.weights must be finite, non-negative, and not all zero. Check how they are computed.")


def _check_order(order: np.ndarray, num_samples: int) -> np.ndarray:
    order_N = np.asarray(order)
    if order_N.ndim != 1 or len(order_N) == 0:
        raise ConfigError(f"Plan.order has shape {order_N.shape}: give a list of at least one sample index.")
    if order_N.dtype.kind not in "iu":
        raise ConfigError(
            f"Plan.order has dtype {order_N.dtype}: give sample indices as integers (for a mask, use np.flatnonzero)."
        )
    if order_N.min() < 0 or order_N.max() >= num_samples:
        bad = int(order_N[(order_N < 0) | (order_N >= num_samples)][0])
        raise ConfigError(
            f"Plan.order contains sample {bad}, but the source has samples 0 to {num_samples - 1}. Leave out indices "
            "that the source does not have."
        )
    return order_N.astype(np.int64)
