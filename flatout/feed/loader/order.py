"""What a batch is to be made of, as the trainer writes it down for the workers. Pure: values in, bytes out.

header | sample indices as int64, or, where keys are anything else, the pickled list of them
"""

import pickle
from typing import Any, NamedTuple

import numpy as np

from flatout.feed.philox import Purpose, keyed_bits

_HEADER = np.dtype(
    [(name, np.int64) for name in ("num_keys", "micro_batch", "seed", "epoch", "position", "pickled_bytes", "probe")]
)


class Order(NamedTuple):
    """One batch, or a part of it: the dataset's keys, and what random numbers follow from."""

    keys: list[Any]
    micro_batch: int
    """Keys per piece: piece p is made of keys[p * micro_batch : (p + 1) * micro_batch]."""

    seed: int
    epoch: int
    position: int
    """How many samples came before the first key in this epoch."""

    probe: int = 0
    """If not 0, nobody wants this batch: it is read to learn how much room a batch of `probe` samples takes."""

    @property
    def num_pieces(self) -> int:
        """An empty batch is one piece too: collating it is the dataset's owner's business."""
        return max(1, -(-len(self.keys) // self.micro_batch))

    def seeds(self, begin: int, end: int) -> list[int]:
        """A seed for each of the keys [begin, end)."""
        positions = self.position + np.arange(begin, end)
        return [_as_seed(bits) for bits in keyed_bits(self.seed, self.epoch, positions, 1)[:, 0]]

    def step_seed(self) -> int:
        """A seed for what happens once per batch."""
        return _as_seed(keyed_bits(self.seed, self.epoch, np.array([self.position]), 1, purpose=Purpose.STEP)[0, 0])


def encode(order: Order) -> bytes:
    """An order as bytes."""
    pickled = b"" if _fits_table(order.keys) else pickle.dumps(order.keys)
    keys = pickled or np.array(order.keys, np.int64).tobytes()
    header = np.array(
        (len(order.keys), order.micro_batch, order.seed, order.epoch, order.position, len(pickled), order.probe),
        _HEADER,
    )
    return header.tobytes() + keys


def decode(memory: np.ndarray) -> Order:
    """The order that `memory` begins with."""
    header = memory[: _HEADER.itemsize].view(_HEADER)[0]
    num_keys, micro_batch, seed, epoch, position, pickled_bytes, probe = map(int, header)
    rest = memory[_HEADER.itemsize :]
    if pickled_bytes:
        keys = pickle.loads(rest[:pickled_bytes].tobytes())
    else:
        keys = rest[: 8 * num_keys].view(np.int64).tolist()
    return Order(keys, micro_batch, seed, epoch, position, probe)


def _as_seed(bits: np.uint64) -> int:
    """Below 2**63, as torch's are: a dataset may return torch.initial_seed(), and a batch of ints is int64."""
    return int(bits) & (2**63 - 1)


def _fits_table(keys: list[Any]) -> bool:
    """Plain integers only: a dataset may tell a NumPy integer or a tensor from an int."""
    return all(type(key) is int and -(2**63) <= key < 2**63 for key in keys)
