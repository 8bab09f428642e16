"""Timing inside the workers of a torch DataLoader: samples, collation, CPU time and running lines.

Wrappers around the dataset and the collate function write into tables in shared memory, one per worker, which the main
process reads while the workers run; nothing is sent with the batches.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from flatout.clock import TIMELINE_DTYPE, TracedTotals, clock, want, worker_registry
from flatout.profiler.observe.recorder import Line, Sampler

LINE_DTYPE = np.dtype([("where", "S200"), ("function", "S56"), ("samples", np.int64)])
SUMS = ("cpu_ns", "wanted_ns", "made_ns", "first_ns", "num_first")
"""`cpu_ns`: CPU time of the worker process and of those it replaced; `wanted_ns`: time in which its main thread ran or
queued for a core; `made_ns`: without workers, the time in which the main process made batches; `first_ns` and
`num_first`: time and number of first samples, one per start of the worker."""

WORKER_DTYPE = np.dtype(
    [
        ("stages", clock.STAGE_DTYPE, 32),
        ("lines", LINE_DTYPE, 128),
        *((name, np.int64) for name in SUMS),
        ("timeline", TIMELINE_DTYPE),
    ]
)


class ProbedTotals(NamedTuple):
    """What the workers of a DataLoader have spent so far."""

    spent: worker_registry.WorkerTotals
    made_ns: int
    """Without workers: time in which the main process made batches."""

    first_ns: int
    """Time of the first sample after each start of a worker."""
    num_first: int

    def since(self, before: "ProbedTotals") -> "ProbedTotals":
        """What was added after `before`."""
        rest = zip(self[1:], before[1:], strict=True)
        return ProbedTotals(self.spent.since(before.spent), *(now - then for now, then in rest))

    @property
    def blocked_ns(self) -> float:
        """Time of the work in which neither a core was used nor waited for."""
        return max(0.0, sum(self.spent.self_ns.values()) + self.made_ns - self.spent.wanted_ns)

    @property
    def start_ns(self) -> float:
        """What first samples took beyond others."""
        later_ns = self.spent.self_ns["fetch"] - self.first_ns
        num_later = self.spent.runs["fetch"] - self.num_first
        return max(0.0, self.first_ns - self.num_first * later_ns / num_later) if num_later > 0 else 0.0


NOTHING_SPENT = ProbedTotals(worker_registry.WorkerTotals(Counter(), Counter(), 0, 0), 0, 0, 0)


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

    def totals(self) -> ProbedTotals:
        """What all workers have spent so far."""
        rows = self.rows().copy()
        cpu_ns, wanted_ns, *others = (int(rows[name].sum()) for name in SUMS)
        spent = worker_registry.WorkerTotals(*worker_registry.stage_sums(rows["stages"]), cpu_ns, wanted_ns)
        return ProbedTotals(spent, *others)


class WorkerTable:
    """The table of this worker process: opened on first use, shared by the dataset and collate wrappers."""

    def __init__(self, tables: WorkerTables) -> None:
        self.tables = tables
        self._totals: clock.Totals | None = None
        self._batch_began: tuple[int, int] | None = None  # in the main process: time, and time that it ran or queued

    def __getstate__(self) -> dict[str, Any]:
        return {"tables": self.tables, "_totals": None, "_batch_began": None}

    def totals(self) -> clock.Totals | None:
        """The recorder of this worker; None in the main process, which has its own."""
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is None:
            return None
        if self._totals is None:
            row = self.tables.rows()[info.id]
            totals = self._totals = TracedTotals(row["stages"], self.tables.rows()["timeline"][info.id : info.id + 1])
            Sampler(_LineTable(row["lines"]).add, label=lambda: getattr(totals.innermost, "name", None))
            self._cpu = row
            self._is_first = True
            # Without persistent workers, every epoch starts new processes, whose CPU times begin at zero.
            self._earlier = int(row["cpu_ns"]), int(row["wanted_ns"])
        return self._totals

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, run as stage `name`."""
        totals = self.totals()
        if totals is None:
            return self._timed_here(name, work)
        began_ns = time.perf_counter_ns()
        with clock.recording(totals), clock.stage(name):
            result = work()
        if self._is_first:
            self._is_first = False
            self._cpu["first_ns"] += time.perf_counter_ns() - began_ns
            self._cpu["num_first"] += 1
        if name == "collate":  # once per batch is enough
            cpu_ns, wanted_ns = self._earlier
            self._cpu["cpu_ns"] = cpu_ns + time.process_time_ns()
            self._cpu["wanted_ns"] = wanted_ns + worker_registry.wanted_ns("thread-self")
        return result

    def _timed_here(self, name: str, work: Callable[[], Any]) -> Any:
        """As `timed`, in the main process, which has a recorder of its own; only waiting is noted, once per batch."""
        if self._batch_began is None:
            self._batch_began = time.perf_counter_ns(), worker_registry.wanted_ns("thread-self")
        with clock.stage(name):
            result = work()
        if name == "collate":
            began_ns, ran_ns = self._batch_began
            row = self.tables.rows()[0]
            row["made_ns"] += time.perf_counter_ns() - began_ns
            row["wanted_ns"] += worker_registry.wanted_ns("thread-self") - ran_ns
            self._batch_began = None
        return result


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


def timed_collate(collate: Callable[[Any], Any], worker_table: WorkerTable, samples: Any) -> Any:
    """The result of a collate function, which is timed."""
    return worker_table.timed("collate", lambda: collate(samples))


def line_samples(after: np.ndarray) -> Counter[tuple[Line, str | None]]:
    """Samples per line, of no stage, all workers together."""
    counts: Counter[tuple[Line, str | None]] = Counter()
    for row in after["lines"][after["lines"]["samples"] > 0]:
        where, function = (row[name].decode(errors="replace") for name in ("where", "function"))
        file, _, line = where.rpartition(":")
        counts[Line(file, int(line), function), None] += int(row["samples"])
    return counts
