"""The face of torch's DataLoader, with workers that fill the batch together."""

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
from flatout.feed.loader.batch_parts import Order, Piece
from flatout.feed.loader.passes import Assembler, Pass, learn_size
from flatout.feed.loader.runtime import Slots, Workshop
from flatout.feed.loader.source import DatasetSource, Way
from flatout.feed.plan import choose_micro_batch, choose_slots

logger = logging.getLogger(__name__)

# What the arguments of a Loader mean, and which of them cannot be obeyed.

_LAID_OUT = frozenset(default_collate_fn_map) - {str, bytes}


def check_arguments(
    dataset: object, micro_batch: int | str, join_fn: object, collate_fn: object, batch_size: int | None
) -> None:
    """Refuse what torch's own checks do not know."""
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} is an IterableDataset, which decides by itself what each worker reads: Loader "
            "needs dataset[index]. Give the dataset a __getitem__, or use torch.utils.data.DataLoader."
        )
    if micro_batch != "auto" and (not isinstance(micro_batch, int) or micro_batch < 1):
        raise ConfigError(f"micro_batch={micro_batch!r} must be 'auto', or 1 or more.")
    if join_fn is not None and (collate_fn is None or batch_size is None):
        raise ConfigError(
            "join_fn is the second half of a pair: it joins what collate_fn made of micro-batches. "
            "Give collate_fn too (the default collate is joined by itself), and a batch_size."
        )


def collates_as_torch_does() -> bool:
    """Whether nobody has replaced how the default collate treats tensors, arrays and numbers."""
    return all(
        getattr(function, "__module__", "") == default_collate.__module__
        for kind, function in default_collate_fn_map.items()
        if kind in _LAID_OUT
    )


def start_method_of(context: Any) -> str:
    """The feed's start method for torch's `multiprocessing_context`: 'fork', or 'spawn' for a fresh interpreter."""
    if context is not None:
        method = context.get_start_method()
    else:
        # The first is the default; asking for it directly would fix it for the whole process.
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return "fork" if method == "fork" else "spawn"


T_co = TypeVar("T_co", covariant=True)

COLLATE_MARGIN = 1.25
"""A lone collate_fn may pad: room to begin with, as a multiple of what one sample suggests."""

PIECE_AT_LEAST_S = 0.004


class Loader(DataLoader[T_co]):
    """torch.utils.data.DataLoader for map-style datasets, with the feed behind it.

    Same arguments, attributes, batches and order; see docs/loader.md for what differs. Two more:

    micro_batch   samples that a worker reads at a time; batches do not depend on it
    join_fn       list of what `collate_fn` made of each micro-batch -> batch: with it, workers share the
                  making of a batch also under a custom `collate_fn` (see `join_rows`, `cat_rows`)
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
        self._growth = 1
        self._workshop: Workshop | None = None  # persistent workers,
        self._pass: weakref.ref[Pass] | None = None  # and who uses them
        if self._in_turn and num_workers > 1:
            logger.info(
                "Loader: with a worker_init_fn workers make whole batches in turn; without, they share each batch."
            )
        if not in_order:
            logger.info("Loader: in_order=False is accepted, but batches come in order; a slow sample holds up nobody.")

    def __iter__(self) -> Any:
        if self.num_workers == 0:
            return super().__iter__() if self.join_fn is None else _joined(super().__iter__(), self.join_fn)
        self._warn_of_pinning()
        keys = iter(self.batch_sampler if self.batch_sampler is not None else self.sampler)
        workshop = self._idle_workshop()
        # Drawn at the same moment as in torch, so that a generator gives the same order here and there.
        base_seed = workshop.base_seed if workshop else _draw_seed(self.generator)
        first = next(keys, _NOTHING)
        if first is _NOTHING:
            return iter(())
        batches = map(self._as_list, itertools.chain([first], keys))
        if workshop is None:
            workshop = self._open(base_seed, self._as_list(first))
        return self._begin(workshop, batches)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_slots": None, "_workshop": None, "_pass": None}

    def _begin(self, workshop: Workshop, batches: Iterator[list[Any]]) -> Pass:
        orders = self._orders(workshop, batches)
        run = Pass(
            workshop,
            orders,
            self._assembler,
            length=self.__len__,
            timeout_s=self.timeout,
            finish_batch=pin_batch if self._pins else _as_it_is,
            learn=self._learn,
            at_end=self._take_back,
        )
        workshop.num_passes += 1
        if workshop is self._workshop:
            self._pass = weakref.ref(run)
        return run

    def _orders(self, workshop: Workshop, batches: Iterator[list[Any]]) -> Iterator[Order]:
        epoch, position, most = workshop.num_passes, 0, workshop.slots.ring.spec.batch_size
        for keys in batches:
            micro_batch = max(self._micro_batch_of(len(keys)), -(-len(keys) // most))
            yield Order(keys, micro_batch, workshop.base_seed, epoch, position)
            position += len(keys)

    def _open(self, base_seed: int, first: list[Any]) -> Workshop:
        """Slots, those of an earlier pass if there are some, and new workers."""
        batch_size = self.batch_size or len(first)
        slots, self._slots = self._kept_slots() or self._new_slots(batch_size), None
        slots.want_body(self._body_bytes)
        source = DatasetSource(
            self.dataset,
            self._way,
            self.collate_fn,
            self.worker_init_fn,
            num_workers=self.num_workers,
            base_seed=base_seed,
            table_offset=slots.areas.table_offset,
            in_turn=self._in_turn,
        )
        workshop = Workshop(slots, source, start_method=start_method_of(self.multiprocessing_context))
        workshop.call_up()
        if not self._body_bytes and first:
            margin = 1 if self._way in ("rows", "part") else COLLATE_MARGIN
            learn_size(workshop, Order(first[:1], 1, base_seed, 0, 0, probe=batch_size), margin)
            self._body_bytes = slots.body_bytes
        if self.persistent_workers and self._workshop is None:
            self._workshop = workshop
        return workshop

    def _new_slots(self, batch_size: int) -> Slots:
        micro_batch = self._micro_batch_of(batch_size)
        if self._makes_whole_batches:
            # A worker makes a batch alone: each needs one to fill, beside those that are ready or in use.
            ahead = self.num_workers if self._prefetch is None else self._prefetch * self.num_workers
            num_slots, num_pieces = ahead + 3, 1
        else:
            chosen = choose_slots(max(1, batch_size), self.num_workers)
            num_slots = max(4, chosen if self._prefetch is None else self._prefetch + 2)
            num_pieces = max(4 * self.num_workers, -(-batch_size // micro_batch))
        return Slots(
            num_slots=num_slots,
            num_pieces=num_pieces,
            num_workers=self.num_workers,
            num_lanes=self._num_lanes,
            pinned=self._pins,
        )

    def _kept_slots(self) -> Slots | None:
        """Those of an earlier pass, unless a worker_init_fn was set or removed since."""
        kept = self._slots
        return kept if kept is not None and kept.ring.spec.num_lanes == self._num_lanes else None

    def _idle_workshop(self) -> Workshop | None:
        """Persistent workers that nobody uses now."""
        run = self._pass() if self._pass is not None else None
        if self._workshop is None or (run is not None and not run.has_ended):
            return None
        try:
            self._workshop.foreman.cancel()
            self._workshop.probing.clear()
        except BaseException:
            self._workshop = None
            raise
        return self._workshop

    def _take_back(self, workshop: Workshop, in_peace: bool) -> None:
        """A pass has ended; not in peace if workers may still be at something."""
        self._body_bytes = max(self._body_bytes, workshop.slots.body_bytes)
        if workshop is self._workshop and in_peace:
            return
        if workshop is self._workshop:
            self._workshop = None
        if in_peace:
            workshop.crew.send_home()
            self._slots = workshop.slots
        workshop.close()

    def _micro_batch_of(self, num_samples: int) -> int:
        if self._makes_whole_batches:
            return max(1, num_samples)
        if isinstance(self.micro_batch, int):
            return self.micro_batch
        return min(max(1, num_samples), self._growth * choose_micro_batch(num_samples, self.num_workers))

    def _learn(self, pieces: list[Piece]) -> None:
        """Tiny samples are read in larger micro-batches: a piece costs a millisecond beside its samples."""
        took_s = median(piece.took_s for piece in pieces)
        if took_s < PIECE_AT_LEAST_S and len(pieces) > 1:
            self._growth *= 2
        elif took_s > 4 * PIECE_AT_LEAST_S and self._growth > 1:
            self._growth //= 2

    def _as_list(self, keys: Any) -> list[Any]:
        return list(keys) if self.batch_sampler is not None else [keys]

    @property
    def _way(self) -> Way:
        if self.batch_sampler is None:
            return "single"
        if self.join_fn is not None:
            return "part"
        return "rows" if self.collate_fn is default_collate and collates_as_torch_does() else "whole"

    @property
    def _in_turn(self) -> bool:
        """Whether worker w of n makes the batches w, w + n, ..., with random numbers of its own, as in torch: who
        prepares workers cares what each of them does."""
        return self.worker_init_fn is not None

    @property
    def _num_lanes(self) -> int:
        return self.num_workers if self._in_turn else 1

    @property
    def _makes_whole_batches(self) -> bool:
        return self._in_turn or self._way in ("whole", "single")

    @property
    def _pins(self) -> bool:
        return self.pin_memory and torch.cuda.is_available()

    def _warn_of_pinning(self) -> None:
        if self.pin_memory and not self._pins:
            warnings.warn("pin_memory=True, but there is no CUDA device: batches are not pinned.", stacklevel=3)


_NOTHING = object()


def _draw_seed(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _joined(parts: Iterator[Any], join_fn: Callable[[list[Any]], Any]) -> Iterator[Any]:
    return (join_fn([part]) for part in parts)


def _as_it_is(batch: Any) -> Any:
    return batch
