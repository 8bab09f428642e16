"""The result of a loss, with a name for every part."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class LossParts(NamedTuple):
    """A loss and what it is made of, on the device of the maps: reading a number there makes the host wait."""

    total: Tensor
    """Call backward() on this: (box + obj + cls) times the number of images, float32 scalar."""

    items: Tensor
    """Detached [4]: box, obj, cls and their sum, with gains, without the number of images."""

    obj_L: Tensor
    """Detached [L]: mean objectness loss of each layer, without gain or balance; see `rebalance`."""

    @property
    def box(self) -> Tensor:
        return self.items[0]

    @property
    def obj(self) -> Tensor:
        return self.items[1]

    @property
    def cls(self) -> Tensor:
        return self.items[2]


def sum_parts(parts: Sequence[LossParts]) -> LossParts:
    """The loss of several heads together; the layers' objectness is the first one's."""
    first, *others = parts
    total, items = first.total, first.items
    for other in others:
        total, items = total + other.total, items + other.items
    return LossParts(total, items, first.obj_L)


def rebalance(balance_L: Tensor, obj_L: Tensor, strides_px: Sequence[float]) -> Tensor:
    """YOLOv7's autobalance, off in its trainers: the next step's balance, moved towards equal objectness losses."""
    moved_L = 0.9999 * balance_L + 0.0001 / obj_L
    return moved_L / moved_L[list(strides_px).index(16.0)]
