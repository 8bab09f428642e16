"""Two areas per slot whose size only the data knows: what is to be read, and room for the batch itself.

    table   one row per slot: layout agreed on | where its body lies | where its order lies
    body    the tensors of one batch; every worker writes its rows in their final place
    order   written by the trainer: which samples, by which seed (batch_parts.py)

They live in the ring's arena, so workers reach them through the descriptor they have anyway. The
trainer enlarges an area while nobody works on its slot; workers map it when they first look.
"""

import numpy as np

from flatout.feed.arena import Arena
from flatout.feed.ring import KernelLock, pack

UNDECIDED = 0

TABLE_DTYPE = np.dtype(
    [(name, np.int64) for name in ("layout", "body_offset", "body_bytes", "order_offset", "order_bytes")]
)


class Areas:
    """The areas of all slots, as seen by one process."""

    def __init__(self, arena: Arena, table_offset: int, num_slots: int) -> None:
        self.table_offset = table_offset
        self._arena = arena
        layout = pack([("table", TABLE_DTYPE, (num_slots,))])
        self._table = layout.views(arena.extent(table_offset, layout.nbytes))["table"]
        self._lock = KernelLock(arena.fd)

    @classmethod
    def create(cls, arena: Arena, num_slots: int) -> "Areas":
        """New areas, all of them empty."""
        return cls(arena, arena.grow(pack([("table", TABLE_DTYPE, (num_slots,))]).nbytes), num_slots)

    # The trainer's side; nobody may work on the slot or look at it.

    def provide_body(self, slot: int, nbytes: int) -> bool:
        """Make room for a batch of `nbytes`; says whether the body is a new one."""
        return self._enlarge(slot, "body", nbytes)

    def write_order(self, slot: int, order: bytes) -> None:
        self._enlarge(slot, "order", len(order))
        self._bytes(slot, "order")[: len(order)] = np.frombuffer(order, np.uint8)
        self._table[slot]["layout"] = UNDECIDED

    # Both sides.

    def body(self, slot: int) -> np.ndarray:
        """Bytes [n] of the slot's body, n as last provided or a little more."""
        return self._bytes(slot, "body")

    def order(self, slot: int) -> np.ndarray:
        """Bytes that begin with the slot's order."""
        return self._bytes(slot, "order")

    # The workers' side.

    def agree(self, slot: int, layout: int) -> bool:
        """Whether this batch is laid out as `layout` says: yes to the first who asks, and to all who say the same."""
        with self._lock:
            row = self._table[slot]
            if row["layout"] == UNDECIDED:
                row["layout"] = layout
            return bool(row["layout"] == layout)

    def _bytes(self, slot: int, area: str) -> np.ndarray:
        offset, nbytes = int(self._table[slot][f"{area}_offset"]), int(self._table[slot][f"{area}_bytes"])
        return self._arena.extent(offset, nbytes) if nbytes else np.empty(0, np.uint8)

    def _enlarge(self, slot: int, area: str, nbytes: int) -> bool:
        row = self._table[slot]
        if nbytes <= row[f"{area}_bytes"]:
            return False
        offset = self._arena.grow(nbytes)
        if row[f"{area}_bytes"]:
            self._arena.discard(int(row[f"{area}_offset"]))
        row[f"{area}_offset"], row[f"{area}_bytes"] = offset, nbytes
        return True
