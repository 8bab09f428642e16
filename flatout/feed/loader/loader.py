"""The Loader: torch's DataLoader with workers that fill each batch together."""

import itertools
import logging
import multiprocessing
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory as pin_batch

from flatout.errors import ConfigError
from flatout.feed.loader.batch_parts import BatchPart, BatchRequest
from flatout.feed.loader.passes import Assembler, LoaderPass, probe_size
from flatout.feed.loader.runtime import LoaderRuntime, Slots
from flatout.feed.loader.source import CollateMode, DatasetSource
from flatout.feed.plan import choose_micro_batch, choose_slots

logger = logging.getLogger(__name__)

# Arguments of a Loader

_LAID_OUT = frozenset(default_collate_fn_map) - {str, bytes}


def check_arguments(
    dataset: object, micro_batch: int | str, join_fn: object, collate_fn: object, batch_size: int | None
) -> None:
    """Raise ConfigError for arguments that torch's own checks do not cover."""
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} is an IterableDataset, which decides by itself what each worker reads, but "
            "Loader needs dataset[index]. Give the dataset a __getitem__, or use torch.utils.data.DataLoader."
        )
    if micro_batch != "auto" and (not isinstance(micro_batch, int) or micro_batch < 1):
        raise ConfigError(f"micro_batch={micro_batch!r} must be 'auto' or an integer of 1 or more.")
    if join_fn is not None and (collate_fn is None or batch_size is None):
        raise ConfigError(
            "join_fn needs a collate_fn and a batch_size: it joins the micro-batches that collate_fn made. "
            "The default collate does not need a join_fn."
        )


def collates_as_torch_does() -> bool:
    """Whether the default collate of tensors, arrays and numbers is torch's own and has not been replaced."""
    return all(
        getattr(function, "__module__", "") == default_collate.__module__
        for kind, function in default_collate_fn_map.items()
        if kind in _LAID_OUT
    )


def start_method_of(context: Any) -> str:
    """The feed's start method for torch's `multiprocessing_context`: 'fork', or 'spawn' for a fresh interpreter."""
    # Without allow_none, this would fix the method for the whole process.
    method = (context or multiprocessing).get_start_method(allow_none=True)
    default, *_ = multiprocessing.get_all_start_methods()
    return "fork" if (method or default) == "fork" else "spawn"


T_co = TypeVar("T_co", covariant=True)

COLLATE_MARGIN = 1.25
"""Initial room per batch as a multiple of what one sample suggests: a collate_fn without join_fn may pad."""

MIN_PART_S = 0.004


class Loader(DataLoader[T_co]):
    """torch.utils.data.DataLoader for map-style datasets, implemented by the feed.

    Same arguments, attributes, batches and order; see docs/loader.md for the differences. Two more arguments:

    micro_batch   samples that a worker reads at a time; batches do not depend on it
    join_fn       list of the micro-batches made by `collate_fn` -> batch: with it, workers also fill batches together
                  under a custom `collate_fn` (see `join_rows`, `cat_rows`)
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        micro_batch: int | str = "auto",
        join_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        check_arguments(dataset, micro_batch, join_fn, collate_fn, batch_size)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.micro_batch = micro_batch
        self.join_fn = join_fn
        self._prefetch = prefetch_factor
        self._assembler = Assembler(join_fn)
        self._slots: Slots | None = None  # kept for the next pass
        self._body_bytes = 0
        self._micro_batch_factor = 1
        self._runtime: LoaderRuntime | None = None  # of persistent workers
        self._pass: weakref.ref[LoaderPass] | None = None  # the pass that uses them
        if self._round_robin and num_workers > 1:
            logger.info(
                "Loader: with a worker_init_fn, each worker makes whole batches, round-robin; without one, workers "
                "fill each batch together."
            )
        if not in_order:
            logger.info(
                "Loader: in_order=False is accepted, but batches come in order; a slow sample only delays its own "
                "micro-batch."
            )

    def __iter__(self) -> Any:
        if self.num_workers == 0:
            join_fn, whole_batches = self.join_fn, super().__iter__()
            return whole_batches if join_fn is None else (join_fn([batch]) for batch in whole_batches)
        if self.pin_memory and not self._pins_memory:
            warnings.warn("pin_memory=True has no effect: there is no CUDA device.", stacklevel=2)
        keys = iter(self.batch_sampler if self.batch_sampler is not None else self.sampler)
        runtime = self._idle_runtime()
        # Drawn at the same point as in torch, so that a generator gives the same order in both.
        base_seed = runtime.base_seed if runtime else _draw_seed(self.generator)
        first = next(keys, _EXHAUSTED)
        if first is _EXHAUSTED:
            return iter(())
        batches = map(self._as_list, itertools.chain([first], keys))
        if runtime is None:
            runtime = self._open(base_seed, self._as_list(first))
        return self._begin(runtime, batches)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_slots": None, "_runtime": None, "_pass": None}

    def _begin(self, runtime: LoaderRuntime, batches: Iterator[list[Any]]) -> LoaderPass:
        requests = self._requests(runtime, batches)
        loader_pass = LoaderPass(
            runtime,
            requests,
            self._assembler,
            length=self.__len__,
            timeout_s=self.timeout,
            finish_batch=pin_batch if self._pins_memory else lambda batch: batch,
            on_parts=self._adapt_micro_batch,
            on_end=self._on_pass_end,
        )
        runtime.num_passes += 1
        if runtime is self._runtime:
            self._pass = weakref.ref(loader_pass)
        return loader_pass

    def _requests(self, runtime: LoaderRuntime, batches: Iterator[list[Any]]) -> Iterator[BatchRequest]:
        epoch, position, most = runtime.num_passes, 0, runtime.slots.ring.spec.batch_size
        for keys in batches:
            micro_batch = max(self._micro_batch_of(len(keys)), -(-len(keys) // most))
            yield BatchRequest(keys, micro_batch, runtime.base_seed, epoch, position)
            position += len(keys)

    def _open(self, base_seed: int, first: list[Any]) -> LoaderRuntime:
        """Start new workers, on the slots of an earlier pass if there are any."""
        batch_size = self.batch_size or len(first)
        slots, self._slots = self._slots, None
        if slots is None or slots.ring.spec.num_lanes != self._num_lanes:  # a worker_init_fn was set or removed since
            slots = self._new_slots(batch_size)
        slots.require_body(self._body_bytes)
        source = DatasetSource(
            self.dataset,
            self._collate_mode,
            self.collate_fn,
            self.worker_init_fn,
            num_workers=self.num_workers,
            base_seed=base_seed,
            table_offset=slots.buffers.table_offset,
            round_robin=self._round_robin,
        )
        runtime = LoaderRuntime(slots, source, start_method=start_method_of(self.multiprocessing_context))
        runtime.start_workers()
        if not self._body_bytes and first:
            margin = 1 if self._collate_mode in ("rows", "part") else COLLATE_MARGIN
            probe_size(runtime, BatchRequest(first[:1], 1, base_seed, 0, 0, probe=batch_size), margin)
            self._body_bytes = slots.body_bytes
        if self.persistent_workers and self._runtime is None:
            self._runtime = runtime
        return runtime

    def _new_slots(self, batch_size: int) -> Slots:
        micro_batch = self._micro_batch_of(batch_size)
        if self._makes_whole_batches:
            # Each worker makes a whole batch: it needs a slot to fill, besides those that are ready or in use.
            ahead = self.num_workers if self._prefetch is None else self._prefetch * self.num_workers
            num_slots, num_parts = ahead + 3, 1
        else:
            selection = choose_slots(max(1, batch_size), self.num_workers)
            num_slots = max(4, selection if self._prefetch is None else self._prefetch + 2)
            num_parts = max(4 * self.num_workers, -(-batch_size // micro_batch))
        return Slots(
            num_slots=num_slots,
            num_parts=num_parts,
            num_workers=self.num_workers,
            num_lanes=self._num_lanes,
            pinned=self._pins_memory,
        )

    def _idle_runtime(self) -> LoaderRuntime | None:
        """Persistent workers that no pass uses at the moment; None if there are none."""
        loader_pass = self._pass() if self._pass is not None else None
        if self._runtime is None or (loader_pass is not None and not loader_pass.has_ended):
            return None
        try:
            self._runtime.supervisor.cancel()
            self._runtime.probing.clear()
        except BaseException:  # Ctrl-C included: the workers are in an unknown state
            self._runtime = None
            raise
        return self._runtime

    def _on_pass_end(self, runtime: LoaderRuntime, cleanly: bool) -> None:
        """Called when a pass has ended; not `cleanly` if workers may still be running tasks."""
        self._body_bytes = max(self._body_bytes, runtime.slots.body_bytes)
        if runtime is self._runtime and cleanly:
            return
        if runtime is self._runtime:
            self._runtime = None
        if cleanly:
            runtime.backend.stop_workers()
            self._slots = runtime.slots
        runtime.close()

    def _micro_batch_of(self, num_samples: int) -> int:
        if self._makes_whole_batches:
            return max(1, num_samples)
        if isinstance(self.micro_batch, int):
            return self.micro_batch
        return min(max(1, num_samples), self._micro_batch_factor * choose_micro_batch(num_samples, self.num_workers))

    def _adapt_micro_batch(self, parts: list[BatchPart]) -> None:
        """Read small samples in larger micro-batches: a part costs a millisecond in addition to its samples."""
        took_s = median(part.took_s for part in parts)
        if took_s < MIN_PART_S and len(parts) > 1:
            self._micro_batch_factor *= 2
        elif took_s > 4 * MIN_PART_S and self._micro_batch_factor > 1:
            self._micro_batch_factor //= 2

    def _as_list(self, keys: Any) -> list[Any]:
        return list(keys) if self.batch_sampler is not None else [keys]

    @property
    def _collate_mode(self) -> CollateMode:
        if self.batch_sampler is None:
            return "single"
        if self.join_fn is not None:
            return "part"
        return "rows" if self.collate_fn is default_collate and collates_as_torch_does() else "whole"

    @property
    def _round_robin(self) -> bool:
        """Whether worker w of n makes the batches w, w + n, ..., with random numbers of its own, as in torch: with a
        worker_init_fn it may matter what each worker does."""
        return self.worker_init_fn is not None

    @property
    def _num_lanes(self) -> int:
        return self.num_workers if self._round_robin else 1

    @property
    def _makes_whole_batches(self) -> bool:
        return self._round_robin or self._collate_mode in ("whole", "single")

    @property
    def _pins_memory(self) -> bool:
        return self.pin_memory and torch.cuda.is_available()


_EXHAUSTED = object()


def _draw_seed(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
