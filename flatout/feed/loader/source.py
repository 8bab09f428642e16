"""A torch dataset as the workers see it: fetch samples, collate, hand over a piece of a batch."""

import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker

from flatout.feed.loader.batch_parts import Form, Order, Piece, decode, pack_error
from flatout.feed.loader.collating import Room, lay_part, lay_rows, lay_whole
from flatout.feed.loader.slot_buffers import Areas
from flatout.feed.ring import Ring
from flatout.feed.source import Out, Rows

# Random numbers in datasets that take them from torch, numpy or random without saying so.
#
# A sample's numbers must not depend on which worker reads it, so the global generators are seeded
# before each sample. That takes 20 microseconds, much for a dataset that draws nothing: it is done
# only once the dataset was seen to draw. Where workers take turns, they are seeded once, as in torch.

T = TypeVar("T")


def seed_everything(seed: int) -> None:
    """Seed the generators that a dataset finds without asking; a seed below 2**64."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002 - datasets use it


def seed_as_torch(base_seed: int, worker: int) -> None:
    """Seed the same generators as torch's DataLoader does when a worker starts."""
    seed_everything(base_seed + worker)
    np.random.seed(torch_worker._generate_state(base_seed, worker))  # noqa: NPY002 - datasets use it


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Leave the generators in the state they had before."""
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def _draw_from_all() -> tuple[float, float, float]:
    return random.random(), float(torch.rand(())), float(np.random.random_sample())  # noqa: NPY002


class DrawWatch:
    """Notices whether something drew random numbers.

    Its seed is the worker's own: a dataset may ask for torch.initial_seed() without drawing, to seed a
    generator of its own, which must not be the same in every worker.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        seed_everything(seed)
        self._untouched = _draw_from_all()

    def drew(self, call: Callable[[], T]) -> tuple[T, bool]:
        """The call's result, and whether one of the generators moved meanwhile."""
        seed_everything(self._seed)
        result = call()
        # Cheaper than comparing states: an untouched generator gives the known first number.
        return result, _draw_from_all() != self._untouched


Way = Literal["rows", "part", "whole", "single"]
"""Default collate; collate_fn of a pair; lone collate_fn; no batching (batch_size=None)."""

PIECE = "piece"
PIECE_BYTES = 4096
"""Room for a piece at first; a piece without strings and the like takes a tenth of it."""


class DatasetSource:
    """The source behind a Loader. A row of its ring is a piece of a batch; positions say which (see `place_of`)."""

    fields = {PIECE: Rows(1, np.uint8, expected=PIECE_BYTES)}

    def __init__(
        self,
        dataset: Any,
        way: Way,
        collate_fn: Callable[[Any], Any],
        worker_init_fn: Callable[[int], object] | None,
        *,
        num_workers: int,
        base_seed: int,
        table_offset: int,
        in_turn: bool,
    ) -> None:
        self.dataset = dataset
        self._way = way
        self._collate_fn = collate_fn
        self._worker_init_fn = worker_init_fn
        self._num_workers = num_workers
        self.base_seed = base_seed
        self._table_offset = table_offset
        self._in_turn = in_turn
        self._unopened: bytes | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"dataset": None, "_unopened": pickle.dumps(self.dataset)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        num_threads = threading.active_count()
        self.dataset = pickle.loads(state["_unopened"])
        # One copy for all workers, unless opening it starts threads: those do not survive the fork of a worker.
        if threading.active_count() == num_threads:
            self._unopened = None

    def enter_worker(self, worker: int, ring: Ring) -> None:
        """Called once in each worker process, before it reads."""
        self._worker, self._ring = worker, ring
        self._areas = Areas(ring.arena, self._table_offset, ring.spec.num_slots)
        self._failed_start: bytes | None = None
        torch.set_num_threads(1)
        if self._unopened is not None:
            self.dataset = pickle.loads(self._unopened)
        seed = self.base_seed + worker
        self._kept: dict[int, tuple[Order, bytes]] = {}
        self._draws: DrawWatch | None = DrawWatch(seed)
        seed_as_torch(self.base_seed, worker)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker, num_workers=self._num_workers, seed=seed, dataset=self.dataset
        )
        if self._worker_init_fn is not None:
            try:
                self._worker_init_fn(worker)
            except Exception as error:
                self._failed_start = pack_error(error, worker=worker, doing="in worker_init_fn")

    def __len__(self) -> int:
        return 1  # of no use here: nothing is substituted, and a dataset needs no length if its sampler has one

    def where(self, index: int) -> str:
        return f"dataset[{index}]"

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"place": positions}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for row, place in enumerate(draws["place"].tolist()):
            slot, number = divmod(place, PLACES_PER_SLOT)
            pickled = self._pickled_in_turn(slot) if self._in_turn else self._pickled(slot, number)
            out[PIECE].put(row, np.frombuffer(pickled, np.uint8)[:, None])

    def _pickled_in_turn(self, slot: int) -> bytes:
        """A whole batch. One that did not fit where pieces go is asked for again; made again, it would draw again."""
        order = decode(self._areas.order(slot))
        kept_order, pickled = self._kept.pop(slot, (None, b""))
        if kept_order != order:
            with untouched_generators() if order.probe else nullcontext():
                pickled = self._pickled(slot, 0)
        if len(pickled) > PIECE_BYTES:
            self._kept[slot] = order, pickled
        return pickled

    def _pickled(self, slot: int, number: int) -> bytes:
        begin_s = time.perf_counter()
        piece = self._piece(slot, number)
        return pickle.dumps(tuple(piece._replace(took_s=time.perf_counter() - begin_s)))

    def _piece(self, slot: int, number: int) -> Piece:
        order = decode(self._areas.order(slot))
        begin = number * order.micro_batch
        end = min(begin + order.micro_batch, len(order.keys))
        if self._failed_start is not None:
            return Piece(Form.ERROR, b"", self._failed_start)
        self._at: Any = None
        try:
            samples = self._fetch(order, begin, end)
            self._at = None
            room = Room(
                self._areas.body(slot), order.probe or len(order.keys), begin, lambda lay: self._areas.agree(slot, lay)
            )
            piece = self._collate(samples, order, room)
            # Of a probe only its size is wanted; a large sample would not fit where pieces go.
            return piece._replace(head=b"", content=b"") if order.probe else piece
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit):  # raised again by the trainer, it would end the training without a word
                error = RuntimeError(f"the dataset called sys.exit({error.code!r})")
            doing = "collating a batch" if self._at is None else f"reading dataset[{self._at!r}]"
            return Piece(Form.ERROR, b"", pack_error(error, worker=self._worker, doing=doing))

    def _collate(self, samples: Any, order: Order, room: Room) -> Piece:
        if self._way == "rows":
            return lay_rows(samples, room)
        if not self._in_turn:
            seed_everything(order.step_seed())
        collated = self._collate_fn(samples)
        if self._way == "part":
            return lay_part(collated, len(samples), room)
        piece = lay_whole(collated, room)
        return piece._replace(body_bytes=piece.body_bytes * max(1, order.probe))

    def _fetch(self, order: Order, begin: int, end: int) -> Any:
        """The samples of a piece. Unless workers take turns, random numbers follow a sample's place in the stream."""
        keys = order.keys[begin:end]
        self._note(keys, order, begin)
        if self._in_turn:
            return self._read_keys(keys)
        if self._draws is not None:
            try:
                samples, drew = self._draws.drew(lambda: self._read_keys(keys))
            except Exception:
                pass  # not swallowed: read again with a seed of its own, a sample fails always, or never
            else:
                if not drew:
                    return samples
                self._draws = None  # it draws random numbers: every sample gets its seed from now on
        fetched = []
        for key, seed in zip(keys, order.seeds(begin, end), strict=True):
            seed_everything(seed)
            fetched.append(self._read_keys([key]))
        return fetched[0] if self._way == "single" else [sample for samples in fetched for sample in samples]

    def _read_keys(self, keys: list[Any]) -> Any:
        if self._way == "single":
            self._at = keys[0]
            return self.dataset[keys[0]]
        if getattr(self.dataset, "__getitems__", None):
            self._at = keys[0] if len(keys) == 1 else keys
            return self.dataset.__getitems__(keys)
        samples = []
        for key in keys:
            self._at = key
            if type(key) is int:
                self._ring.note_item(self._worker, key)
            samples.append(self.dataset[key])
        return samples

    def _note(self, keys: list[Any], order: Order, begin: int) -> None:
        if not keys or type(keys[0]) is not int:
            self._ring.note_item(self._worker, order.position + begin)


PLACES_PER_SLOT = 2**32


def place_of(slot: int, number: int) -> int:
    """Slot and piece in one number, as a row's position says it."""
    return slot * PLACES_PER_SLOT + number
