"""A torch dataset as the workers see it: fetch samples, collate, hand over a piece of a batch.

From samples to a piece of a batch, in a worker: tensors into the body, the rest into a pickle.

Three ways: rows under torch's default collate; the parts of a (collate_fn, join_fn) pair; and a
whole batch made by a lone collate_fn.
"""

import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from flatout.feed.loader.batch_parts import (
    Form,
    Head,
    Hole,
    Leaf,
    Order,
    Piece,
    TensorHole,
    decode,
    dump_with_holes,
    fingerprint,
    leaf_of,
    pack_error,
    place,
    view,
    write_rows,
)
from flatout.feed.loader.slots import Areas
from flatout.feed.ring import Ring
from flatout.feed.source import Out, Rows

Shape = tuple[int, ...]


class Room(NamedTuple):
    """The part of a body that a micro-batch may write."""

    memory: np.ndarray
    """The whole body."""

    num_rows: int
    """Of the batch."""

    begin: int
    """First row of the micro-batch."""

    agree: Callable[[int], bool]
    """Whether the batch is laid out like this; see Areas.agree."""


def lay_rows(samples: Sequence[Any], room: Room) -> Piece:
    """What torch's default collate would do, with the rows written in their place."""
    parts: list[Sequence[Any]] = []

    def catch(values: Sequence[Any], *, collate_fn_map: object = None) -> Hole:
        parts.append(values)
        return Hole(len(parts) - 1, isinstance(values, tuple))

    # Torch's own walk through the containers, so that they come out as they do there.
    skeleton = collate(samples, collate_fn_map=dict.fromkeys(default_collate_fn_map, catch))
    found = [leaf_of(values) for values in parts]
    leaves = tuple(leaf if isinstance(leaf, Leaf) else None for leaf in found)
    paths = {hole.number: path for path, hole in _holes(skeleton, "")}
    in_place = [leaf for leaf in leaves if leaf is not None]
    placed = place(in_place, room.num_rows)
    if placed.nbytes > len(room.memory):
        return _carried(samples, _too_small(room), placed.nbytes)
    if not room.agree(fingerprint(in_place, repr(paths))):
        return _carried(samples, _text_of_change(found, paths), placed.nbytes)
    numbers = [number for number, leaf in enumerate(leaves) if leaf is not None]
    for leaf, offset, number in zip(in_place, placed.offsets, numbers, strict=True):
        rows = _rows(room, leaf, offset, len(samples))
        write_rows(leaf, parts[number], rows)
    told = tuple(
        f"sample{paths.get(number, '')} is carried by pickle: {why}"
        for number, why in enumerate(found)
        if isinstance(why, str)
    )
    head = Head(leaves, dump_with_holes(skeleton, _hole_or_none), told)
    carried = {number: list(parts[number]) for number, leaf in enumerate(leaves) if leaf is None}
    return Piece(Form.ROWS, pickle.dumps(head), pickle.dumps(carried), placed.nbytes)


def lay_part(part: Any, num_samples: int, room: Room) -> Piece:
    """A micro-batch made by the collate_fn of a pair: tensors with a row per sample go side by side."""

    def row_shape(shape: Shape) -> Shape | None:
        return shape[1:] if shape[:1] == (num_samples,) else None

    return _lay_collated(part, room, row_shape, num_samples)


def lay_whole(batch: Any, room: Room) -> Piece:
    """A batch made by a lone collate_fn: every tensor of it is the single row of a leaf."""
    return _lay_collated(batch, room._replace(num_rows=1, begin=0), lambda shape: shape, 1)


def _lay_collated(value: Any, room: Room, row_shape: Callable[[Shape], Shape | None], num_rows: int) -> Piece:
    leaves: list[Leaf] = []
    sources: list[Tensor | np.ndarray] = []
    holes: dict[int, TensorHole] = {}  # by id: a tensor that appears twice comes back as one
    kept: list[Any] = []  # or an id could be used again

    def hole_for(each: Any) -> TensorHole | None:
        if id(each) not in holes and isinstance(each, Tensor | np.ndarray):
            source, back = _in_memory_order(each)
            leaf = leaf_of([source])
            shape = row_shape(leaf.shape) if isinstance(leaf, Leaf) else None
            if shape is not None and isinstance(leaf, Leaf):
                holes[id(each)] = TensorHole(len(leaves), back)
                leaves.append(leaf._replace(shape=shape))
                sources.append(source)
                kept.append(each)
        return holes.get(id(each))

    pickled = dump_with_holes(value, hole_for)
    placed = place(leaves, room.num_rows)
    if placed.nbytes > len(room.memory):
        return _part_carried(value, _too_small(room), placed.nbytes)
    if not room.agree(fingerprint(leaves)):
        return _part_carried(value, "the parts of one batch differ in shape or dtype", placed.nbytes)
    for leaf, offset, source in zip(leaves, placed.offsets, sources, strict=True):
        rows = _rows(room, leaf, offset, num_rows)
        _copy(source, rows if rows.ndim == source.ndim else rows[0])
    return Piece(Form.PART, pickle.dumps(Head(tuple(leaves), b"", ())), pickled, placed.nbytes)


def _in_memory_order(value: Tensor | np.ndarray) -> tuple[Tensor | np.ndarray, tuple[int, ...]]:
    """The value with its dimensions as they lie in memory, and how to permute them back; () if they lie in order.

    So that a batch in channels_last, say, arrives in channels_last.
    """
    if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided or value.is_contiguous():
        return value, ()
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda dim: -strides[dim])
    permuted = value.permute(order)
    if not permuted.is_contiguous():
        return value, ()
    return permuted, tuple(order.index(dim) for dim in range(value.ndim))


def _copy(source: Tensor | np.ndarray, target: Tensor) -> None:
    if isinstance(source, Tensor):
        target.copy_(source)
    else:
        np.copyto(target.numpy(), source)


def _rows(room: Room, leaf: Leaf, offset: int, num_rows: int) -> Tensor:
    return view(room.memory, offset, leaf, room.num_rows)[0][room.begin : room.begin + num_rows]


def _too_small(room: Room) -> str:
    """What to say of a batch that does not fit; nothing while the first sample is still being read."""
    return "batches are larger than the room kept for them" if len(room.memory) else ""


def _carried(samples: Sequence[Any], why: str, body_bytes: int) -> Piece:
    told = (f"a batch is carried by pickle and collated by the trainer: {why}",) if why else ()
    head = Head((), b"", told)
    return Piece(Form.SAMPLES, pickle.dumps(head), pickle.dumps(list(samples)), body_bytes)


def _part_carried(value: Any, why: str, body_bytes: int) -> Piece:
    told = (f"what collate_fn made is carried by pickle: {why}",) if why else ()
    head = Head((), b"", told)
    return Piece(Form.PART, pickle.dumps(head), pickle.dumps(value), body_bytes)


def _hole_or_none(value: Any) -> Hole | None:
    return value if isinstance(value, Hole) else None


def _holes(value: Any, path: str) -> list[tuple[str, Hole]]:
    """Every hole of a collated skeleton, with the way to it: "['image']", "[1][0]"."""
    if isinstance(value, Hole):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [hole for key in value for hole in _holes(value[key], f"{path}[{key!r}]")]
    return [hole for number, each in enumerate(value) for hole in _holes(each, f"{path}[{number}]")]


def _text_of_change(found: Sequence[Leaf | str], paths: Mapping[int, str]) -> str:
    for number, leaf in enumerate(found):
        if isinstance(leaf, str) and "change" in leaf:
            return f"sample{paths.get(number, '')}: {leaf}"
    return "samples of one batch differ in structure, shape or dtype"


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
        for row, where in enumerate(draws["place"].tolist()):
            slot, number = divmod(where, PLACES_PER_SLOT)
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
