"""Random numbers as a pure function of where they are used.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised in
NumPy. There is no generator state to carry, split or restore: the numbers for a sample follow from
(seed, epoch, position), so they do not depend on which worker draws them, on the size of its
micro-batch, or on where a run was resumed. Written out here instead of taken from numpy.random
because that module does not promise the same stream in every version.

Dimension key:  M positions   K numbers per position
"""

import sys
from enum import IntEnum
from functools import lru_cache

import numpy as np

_MULTIPLIERS_21 = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = 0x9E3779B9, 0xBB67AE85
_32_BITS = 0xFFFFFFFF
_32 = np.uint64(32)
_LOW = 0 if sys.byteorder == "little" else 1
"""Which half of a uint64 in memory is the lower one."""


class Purpose(IntEnum):
    """Keeps the streams of different uses apart, also where seed, epoch and position are equal."""

    SAMPLE = 0
    ORDER = 1
    STEP = 2
    SUBSTITUTE = 3


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox over counters uint64 [..., 4] of 32-bit words; returns words uint64 [..., 4].

    For a few dozen samples the number of array operations is what counts, so there are three per round: words 0 and 2
    are treated as one array, 1 and 3 as another, and halves of products are views of them.
    """
    word_N4 = counter.reshape(-1, 4)
    even_2N = np.ascontiguousarray(word_N4[:, 0::2].T, np.uint64)
    odd_2N = word_N4[:, 1::2].T.astype(np.uint32)
    even_low_2N = even_2N.view(np.uint32)[:, _LOW::2]
    # Two, in turns: the halves of one are read while the next is computed.
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
    """The two keys of each of ten rounds, uint32 [2, 1]."""
    rounds = (
        [(key + number * step) & _32_BITS for key, step in zip((k0, k1), _WEYL, strict=True)] for number in range(10)
    )
    return tuple(np.array(keys, np.uint32)[:, None] for keys in rounds)


def keyed_bits(
    seed: int, epoch: int, positions_M: np.ndarray, num: int, *, skip: int = 0, purpose: Purpose = Purpose.SAMPLE
) -> np.ndarray:
    """Random uint64 [M, num], row m a pure function of (seed, epoch, positions_M[m], purpose).

    A longer row begins with the shorter one: asking for more numbers changes none of the first. `skip`, an even number,
    leaves out that many numbers at the beginning of the row without computing them.
    Positions below 2**48, epochs and seeds below 2**32 and 2**64 give distinct streams.
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
    """Uniform float64 [M, num] in [0, 1), keyed as `keyed_bits`."""
    bits = keyed_bits(seed, epoch, positions_M, num, purpose=purpose)
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def keyed_generator(bits_2: np.ndarray) -> np.random.Generator:
    """An ordinary NumPy generator for one sample, from two of its `keyed_bits`."""
    return np.random.Generator(np.random.Philox(key=bits_2))
