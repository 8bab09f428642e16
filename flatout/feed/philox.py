"""Random numbers as a pure function of where they are used.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised in
NumPy. There is no generator state to carry, split or restore: the numbers for a sample follow from
(seed, epoch, position), so they do not depend on which worker draws them, on the size of its
micro-batch, or on where a run was resumed. Written out here instead of taken from numpy.random
because that module does not promise the same stream in every version.

Dimension key:  M positions   K numbers per position
"""

from enum import IntEnum

import numpy as np

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


class Purpose(IntEnum):
    """Keeps the streams of different uses apart, also where seed, epoch and position are equal."""

    SAMPLE = 0
    ORDER = 1
    STEP = 2
    SUBSTITUTE = 3


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox over counters uint64 [..., 4] of 32-bit words; returns words uint64 [..., 4]."""
    c0, c1, c2, c3 = (counter[..., word].astype(np.uint64) for word in range(4))
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _32) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1)


def keyed_bits(
    seed: int, epoch: int, positions_M: np.ndarray, num: int, *, purpose: Purpose = Purpose.SAMPLE
) -> np.ndarray:
    """Random uint64 [M, num], row m a pure function of (seed, epoch, positions_M[m], purpose).

    A longer row begins with the shorter one: asking for more numbers changes none of the first.
    Positions below 2**48, epochs and seeds below 2**32 and 2**64 give distinct streams.
    """
    positions_M = np.asarray(positions_M, np.uint64)
    num_blocks = (num + 1) // 2  # a block of four 32-bit words holds two 64-bit numbers
    counter = np.empty((len(positions_M), num_blocks, 4), np.uint64)
    counter[..., 0] = np.arange(num_blocks)
    counter[..., 1] = (positions_M & _LOW)[:, None]
    counter[..., 2] = np.uint64(epoch & 0xFFFFFFFF)
    counter[..., 3] = ((positions_M >> _32) & np.uint64(0xFFFF))[:, None] | np.uint64(int(purpose) << 16)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
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
