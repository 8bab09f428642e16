"""Numbers of every step, written on the device and fetched many steps at a time.

    step --row--> buffer A | B --one copy per interval--> host, read an interval later

Dimension key:  N steps of an interval   K numbers of a step
"""

import numpy as np
import torch
from torch import Tensor


class StepLog:
    """Collects one row of K numbers per step, the last of them a flag; nobody waits for the device but `drain`."""

    def __init__(self, num_columns: int, capacity: int, device: torch.device) -> None:
        self._device = device
        self._on_device = [torch.zeros(capacity, num_columns, device=device) for _ in range(2)]
        self._on_host = [self._host_rows(capacity, num_columns) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._counts = [0, 0]
        self._turn = 0

    def put(self, row_K: Tensor) -> None:
        """Keep the first K - 1 numbers of a step; at most `capacity` between two calls of `turn`."""
        row = self._on_device[self._turn][self._counts[self._turn]]
        row[:-1].copy_(row_K)
        row[-1].zero_()
        self._counts[self._turn] += 1

    def mark(self, flag: Tensor) -> None:
        """Set the last column of the row that was put last."""
        self._on_device[self._turn][self._counts[self._turn] - 1, -1].copy_(flag)

    def turn(self) -> np.ndarray:
        """Begin the copy of what came since the last turn; returns what came before that, float64 [N, K]."""
        earlier = self._read(1 - self._turn)
        self._begin_copy(self._turn)
        self._turn = 1 - self._turn
        return earlier

    def drain(self) -> np.ndarray:
        """Everything that was put and not yet returned, in order; waits for the device."""
        return np.concatenate((self.turn(), self.turn()))

    def _begin_copy(self, side: int) -> None:
        count = self._counts[side]
        self._on_host[side][:count].copy_(self._on_device[side][:count], non_blocking=True)
        if self._device.type == "cuda":
            self._copied[side] = torch.cuda.Event()
            self._copied[side].record()  # type: ignore[union-attr]

    def _read(self, side: int) -> np.ndarray:
        if (event := self._copied[side]) is not None:
            event.synchronize()  # recorded an interval ago: long past
        rows_NK = self._on_host[side][: self._counts[side]].numpy().astype(np.float64)
        self._counts[side] = 0
        return rows_NK

    def _host_rows(self, capacity: int, num_columns: int) -> Tensor:
        return torch.zeros(capacity, num_columns, pin_memory=self._device.type == "cuda")
