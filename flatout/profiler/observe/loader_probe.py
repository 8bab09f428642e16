"""Timing inside the workers of a torch DataLoader: samples, collation, CPU time and running lines.

Wrappers around the dataset and the collate function write into tables in shared memory, one per worker, which the main
process reads while the workers run; nothing is sent with the batches.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flatout.clock import TIMELINE_DTYPE, TracedTotals, clock, want
from flatout.profiler.observe.recorder import Line, Sampler

LINE_DTYPE = np.dtype([("where", "S200"), ("function", "S56"), ("samples", np.int64)])
WORKER_DTYPE = np.dtype(
    [
        ("stages", clock.STAGE_DTYPE, 32),
        ("lines", LINE_DTYPE, 128),
        ("cpu_ns", np.int64),
        ("wanted_ns", np.int64),
        ("timeline", TIMELINE_DTYPE),
    ]
)
"""`cpu_ns`: CPU time of the worker process and of those it replaced; `wanted_ns`: time in which its main thread ran or
queued for a core."""


class WorkerTables:
    """One table per worker, in memory that is shared with worker processes whatever their start method."""

    def __init__(self, num_workers: int) -> None:
        import torch

        # A torch tensor can be shared under every start method of DataLoader workers.
        self._memory = torch.zeros(max(1, num_workers) * WORKER_DTYPE.itemsize, dtype=torch.uint8).share_memory_()
        want(self.rows()["timeline"], True)

    def rows(self) -> np.ndarray:
        """The workers' tables as one array that shows later changes, WORKER_DTYPE [workers]."""
        return np.asarray(self._memory.numpy().view(WORKER_DTYPE))

    def snapshot(self) -> np.ndarray:
        return self.rows().copy()


class WorkerTable:
    """The table of this worker process: opened on first use, shared by the dataset and collate wrappers."""

    def __init__(self, tables: WorkerTables) -> None:
        self.tables = tables
        self._totals: clock.Totals | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"tables": self.tables, "_totals": None}

    def totals(self) -> clock.Totals | None:
        """The recorder of this worker; None in the main process, which has its own."""
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is None:
            return None
        if self._totals is None:
            row = self.tables.rows()[info.id]
            self._totals = TracedTotals(row["stages"], self.tables.rows()["timeline"][info.id : info.id + 1])
            lines = _LineTable(row["lines"])
            Sampler(on_sample=lines.add, label=lambda: _current_stage(self._totals))
            self._cpu = row
            # Without persistent workers, every epoch starts new processes, whose CPU times begin at zero.
            self._earlier = int(row["cpu_ns"]), int(row["wanted_ns"])
        return self._totals

    def update_cpu_times(self) -> None:
        if self._totals is not None:
            cpu_ns, wanted_ns = self._earlier
            self._cpu["cpu_ns"] = cpu_ns + time.process_time_ns()
            self._cpu["wanted_ns"] = wanted_ns + ran_or_queued_ns()

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, run as stage `name`."""
        totals = self.totals()
        if totals is None:
            with clock.stage(name):
                return work()
        with clock.recording(totals), clock.stage(name):
            result = work()
        if name == "collate":  # once per batch is enough
            self.update_cpu_times()
        return result


def ran_or_queued_ns() -> int:
    """Time this thread has run or waited for a free core; 0 if the system does not report it."""
    try:
        ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0
    return int(ran) + int(queued)


def _current_stage(totals: clock.Totals | None) -> str | None:
    return None if totals is None or totals.innermost is None else totals.innermost.name


class _LineTable:
    """Samples per line, in a table of fixed size; the last row collects lines that have no row of their own."""

    def __init__(self, table: np.ndarray) -> None:
        self._table = table
        # A worker of an earlier epoch may have filled rows already.
        self._rows = {bytes(where): row for row, where in enumerate(table["where"]) if where}

    def add(self, line: Line, stage: str | None) -> None:
        if stage is None:  # the worker is waiting for its next batch indices
            return
        where = str(line).encode()[-200:]
        if where not in self._rows:
            row = self._rows[where] = min(len(self._rows), len(self._table) - 1)
            self._table[row]["where"] = where
            self._table[row]["function"] = line.function.encode()[-56:]
        self._table[self._rows[where]]["samples"] += 1


class _DatasetProxy:
    """Proxy of a dataset: attributes are read from and set on the dataset itself (by a worker_init_fn, for example)."""

    def __init__(self, dataset: Any, worker_table: WorkerTable) -> None:
        vars(self).update(_dataset=dataset, _worker_table=worker_table)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_dataset", "_worker_table"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._dataset, name)


class TimedDataset(_DatasetProxy):
    """Proxy that times the samples of a map-style dataset."""

    def __init__(self, dataset: Any, worker_table: WorkerTable) -> None:
        super().__init__(dataset, worker_table)
        if hasattr(dataset, "__getitems__"):
            vars(self)["__getitems__"] = self._get_items

    def __getitem__(self, index: Any) -> Any:
        return self._worker_table.timed("fetch", lambda: self._dataset[index])

    def _get_items(self, indices: Any) -> Any:
        return self._worker_table.timed("fetch", lambda: self._dataset.__getitems__(indices))


class TimedStream(_DatasetProxy):
    """Proxy that times the samples of an iterable dataset."""

    def __iter__(self) -> Iterator[Any]:
        samples, end = iter(self._dataset), object()
        while (sample := self._worker_table.timed("fetch", lambda: next(samples, end))) is not end:
            yield sample


class TimedCollate:
    """Wrapper that times a collate function."""

    def __init__(self, collate: Callable[[Any], Any], worker_table: WorkerTable) -> None:
        self._collate = collate
        self._worker_table = worker_table

    def __call__(self, samples: Any) -> Any:
        return self._worker_table.timed("collate", lambda: self._collate(samples))


def stage_ns(before: np.ndarray, after: np.ndarray) -> tuple[dict[str, int], dict[str, int]]:
    """Self time and runs per stage between two snapshots, all workers together."""
    self_ns: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for old, new in zip(before, after, strict=True):
        for name, ns in clock.read_self_ns(new["stages"]).items():
            self_ns[name] += ns - clock.read_self_ns(old["stages"]).get(name, 0)
            earlier = clock.read_totals(old["stages"]).get(name, clock.StageTime(0, 0)).runs
            runs[name] += clock.read_totals(new["stages"])[name].runs - earlier
    return dict(self_ns), dict(runs)


def line_samples(after: np.ndarray) -> Counter[tuple[str, str]]:
    """Samples per (file:line, function), all workers together."""
    counts: Counter[tuple[str, str]] = Counter()
    for worker in after:
        for row in worker["lines"][worker["lines"]["samples"] > 0]:
            counts[row["where"].decode(errors="replace"), row["function"].decode(errors="replace")] += int(
                row["samples"]
            )
    return counts
