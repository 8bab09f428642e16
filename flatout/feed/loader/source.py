"""The worker's side of a Loader: fetch samples, collate them, and hand over a part of a batch.

Tensors are written into the slot's body, everything else is pickled. There are three cases: rows under torch's default
collate; micro-batches made by a collate_fn with a join_fn; and whole batches made by a collate_fn without one.
"""

import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from flatout.feed.loader.batch_parts import (
    BatchPart,
    BatchRequest,
    Hole,
    Leaf,
    PartHead,
    PartKind,
    TensorHole,
    decode_request,
    dump_with_holes,
    fingerprint,
    layout_of,
    leaf_of,
    pack_error,
    views,
    write_rows,
)
from flatout.feed.loader.slots import SlotBuffers
from flatout.feed.ring import Ring
from flatout.feed.source import Out, Rows

# From samples to a batch part


class BodyRegion(NamedTuple):
    """The part of a body that a micro-batch may write."""

    memory: np.ndarray
    """The whole body."""

    num_rows: int
    """Rows of the batch."""

    begin: int
    """First row of the micro-batch."""

    agree_on_layout: Callable[[int], bool]
    """Whether the batch uses this layout; see SlotBuffers.agree_on_layout."""


def write_default_collated(samples: Sequence[Any], region: BodyRegion) -> BatchPart:
    """Collate samples like torch's default collate, with the rows written to their final place."""
    values_by_leaf: list[Sequence[Any]] = []

    def collect(values: Sequence[Any], *, collate_fn_map: object = None) -> Hole:
        values_by_leaf.append(values)
        return Hole(len(values_by_leaf) - 1, isinstance(values, tuple))

    # Torch's own traversal of the containers, so that the result is the same as torch's.
    skeleton = collate(samples, collate_fn_map=dict.fromkeys(default_collate_fn_map, collect))
    found = [leaf_of(values) for values in values_by_leaf]
    leaves = tuple(leaf if isinstance(leaf, Leaf) else None for leaf in found)
    paths = {hole.number: path for path, hole in _holes(skeleton, "")}
    in_place = [leaf for leaf in leaves if leaf is not None]
    nbytes = layout_of(in_place, region.num_rows).nbytes
    if nbytes > len(region.memory):
        return _pickled(PartKind.SAMPLES, list(samples), _why_too_small(region), nbytes)
    if not region.agree_on_layout(fingerprint(leaves, repr(paths))):
        return _pickled(PartKind.SAMPLES, list(samples), _why_laid_out_differently(found, paths), nbytes)
    numbers = [number for number, leaf in enumerate(leaves) if leaf is not None]
    for leaf, rows, number in zip(in_place, _rows(region, in_place, len(samples)), numbers, strict=True):
        write_rows(leaf, values_by_leaf[number], rows)
    messages = tuple(
        f"sample{paths.get(number, '')} is sent by pickle: {why}"
        for number, why in enumerate(found)
        if isinstance(why, str)
    )
    head = PartHead(leaves, dump_with_holes(skeleton, lambda each: each if isinstance(each, Hole) else None), messages)
    pickled_values = {number: list(values_by_leaf[number]) for number, leaf in enumerate(leaves) if leaf is None}
    return BatchPart(PartKind.ROWS, pickle.dumps(head), pickle.dumps(pickled_values), nbytes)


def write_collated(value: Any, region: BodyRegion, *, num_samples: int | None) -> BatchPart:
    """Write what a collate_fn returned.

    With a join_fn, that is a micro-batch of `num_samples`: its tensors with one row per sample become adjacent. Without
    one (None), it is a whole batch: each of its tensors is the only row of a leaf.
    """
    if num_samples is None:
        region = region._replace(num_rows=1, begin=0)
    leaves: list[Leaf] = []
    sources: list[Tensor | np.ndarray] = []
    holes: dict[int, TensorHole] = {}  # by id: a tensor that appears twice stays one tensor
    kept: list[Any] = []  # otherwise an id could be reused

    def hole_for(each: Any) -> TensorHole | None:
        if id(each) not in holes and isinstance(each, Tensor | np.ndarray):
            source, back = _in_memory_order(each)
            leaf = leaf_of([source])
            if isinstance(leaf, Leaf) and (num_samples is None or leaf.shape[:1] == (num_samples,)):
                holes[id(each)] = TensorHole(len(leaves), back)
                leaves.append(leaf if num_samples is None else leaf._replace(shape=leaf.shape[1:]))
                sources.append(source)
                kept.append(each)
        return holes.get(id(each))

    pickled = dump_with_holes(value, hole_for)
    nbytes = layout_of(leaves, region.num_rows).nbytes
    if nbytes > len(region.memory):
        return _pickled(PartKind.COLLATED, value, _why_too_small(region), nbytes)
    if not region.agree_on_layout(fingerprint(leaves)):
        why = "the micro-batches of one batch differ in shape or dtype"
        return _pickled(PartKind.COLLATED, value, why, nbytes)
    for source, rows in zip(sources, _rows(region, leaves, 1 if num_samples is None else num_samples), strict=True):
        _copy(source, rows[0] if num_samples is None else rows)
    return BatchPart(PartKind.COLLATED, pickle.dumps(PartHead(tuple(leaves), b"", ())), pickled, nbytes)


def _in_memory_order(value: Tensor | np.ndarray) -> tuple[Tensor | np.ndarray, tuple[int, ...]]:
    """The value with its dimensions in memory order, and the permutation back; () if they are already in order.

    A batch in channels_last format, for example, stays in channels_last.
    """
    if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided or value.is_contiguous():
        return value, ()
    strides = value.stride()
    dims = sorted(range(value.ndim), key=lambda dim: -strides[dim])
    permuted = value.permute(dims)
    if not permuted.is_contiguous():
        return value, ()
    return permuted, tuple(dims.index(dim) for dim in range(value.ndim))


def _copy(source: Tensor | np.ndarray, target: Tensor) -> None:
    if isinstance(source, Tensor):
        target.copy_(source)
    else:
        np.copyto(target.numpy(), source)


def _rows(region: BodyRegion, leaves: Sequence[Leaf], num_rows: int) -> list[Tensor]:
    """The rows of a micro-batch in each leaf."""
    tensors, _ = views(region.memory, leaves, region.num_rows)
    return [tensor[region.begin : region.begin + num_rows] for tensor in tensors]


def _why_too_small(region: BodyRegion) -> str:
    """Why a batch does not fit; "" while the first sample is still being read."""
    return "batches are larger than the room reserved for them" if len(region.memory) else ""


def _pickled(kind: PartKind, content: Any, why: str, body_bytes: int) -> BatchPart:
    """A part that is not stored in the slot, but sent by pickle; `why` is logged, unless it is empty."""
    what = "a batch is sent by pickle and collated by the trainer"
    if kind == PartKind.COLLATED:
        what = "the result of collate_fn is sent by pickle"
    head = PartHead((), b"", (f"{what}: {why}",) if why else ())
    return BatchPart(kind, pickle.dumps(head), pickle.dumps(content), body_bytes)


def _holes(value: Any, path: str) -> list[tuple[str, Hole]]:
    """Every hole of a collated skeleton, with its path: "['image']", "[1][0]"."""
    if isinstance(value, Hole):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [hole for key in value for hole in _holes(value[key], f"{path}[{key!r}]")]
    return [hole for number, each in enumerate(value) for hole in _holes(each, f"{path}[{number}]")]


def _why_laid_out_differently(found: Sequence[Leaf | str], paths: Mapping[int, str]) -> str:
    for number, leaf in enumerate(found):
        if isinstance(leaf, str) and "change" in leaf:
            return f"sample{paths.get(number, '')}: {leaf}"
    return "samples of one batch differ in structure, shape or dtype"


# Random numbers in datasets that draw them from the global generators of torch, numpy or random.
#
# A sample's numbers must not depend on which worker reads it, so the global generators are seeded before each sample.
# That takes 20 microseconds, which is much for a dataset that draws nothing: it is only done once the dataset has been
# seen to draw. If batches are assigned round-robin, workers are seeded once, as in torch.

T = TypeVar("T")


def seed_everything(seed: int) -> None:
    """Seed the global generators of random, torch and numpy; `seed` is below 2**64."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002 - datasets use it


def seed_as_torch(base_seed: int, worker: int) -> None:
    """Seed the global generators as torch's DataLoader does when a worker starts."""
    seed_everything(base_seed + worker)
    np.random.seed(torch_worker._generate_state(base_seed, worker))  # noqa: NPY002 - datasets use it


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Restore the state of the global generators at the end of the block."""
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def _draw_from_all() -> tuple[float, float, float]:
    return random.random(), float(torch.rand(())), float(np.random.random_sample())  # noqa: NPY002


class DrawDetector:
    """Detects whether a call draws random numbers from the global generators.

    It uses the worker's own seed: a dataset may use torch.initial_seed(), without drawing, to seed a generator of its
    own, which must not be the same in every worker.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        seed_everything(seed)
        self._untouched = _draw_from_all()

    def drew(self, call: Callable[[], T]) -> tuple[T, bool]:
        """The call's result, and whether it drew from one of the generators."""
        seed_everything(self._seed)
        result = call()
        # Cheaper than comparing states: a generator that was not used returns the known first number.
        return result, _draw_from_all() != self._untouched


# The dataset as a source

CollateMode = Literal["rows", "part", "whole", "single"]
"""Default collate; collate_fn with join_fn; collate_fn alone; no batching (batch_size=None)."""

PART = "part"
PART_BYTES = 4096
"""Memory reserved per part at first; a part without strings or other objects takes a tenth of it."""


@dataclass(eq=False, repr=False)
class DatasetSource:
    """The source behind a Loader. A row of its ring is a batch part, identified by `encode_position`."""

    fields = {PART: Rows(1, np.uint8, expected=PART_BYTES)}

    dataset: Any
    collate_mode: CollateMode
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], object] | None
    num_workers: int
    base_seed: int
    table_offset: int
    round_robin: bool
    _pickled_dataset: bytes | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"dataset": None, "_pickled_dataset": pickle.dumps(self.dataset)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        num_threads = threading.active_count()
        self.dataset = pickle.loads(state["_pickled_dataset"])
        # One copy for all workers, unless unpickling it starts threads: those do not survive the fork of a worker.
        if threading.active_count() == num_threads:
            self._pickled_dataset = None

    def enter_worker(self, worker: int, ring: Ring) -> None:
        """Called once in each worker process, before its first `read`."""
        self._worker, self._ring = worker, ring
        self._buffers = SlotBuffers(ring.arena, self.table_offset, ring.spec.num_slots)
        self._init_error: bytes | None = None
        torch.set_num_threads(1)
        if self._pickled_dataset is not None:
            self.dataset = pickle.loads(self._pickled_dataset)
        seed = self.base_seed + worker
        self._kept: dict[int, tuple[BatchRequest, bytes]] = {}
        self._draw_detector: DrawDetector | None = DrawDetector(seed)
        seed_as_torch(self.base_seed, worker)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker, num_workers=self.num_workers, seed=seed, dataset=self.dataset
        )
        if self.worker_init_fn is not None:
            try:
                self.worker_init_fn(worker)
            except Exception as error:  # the user's function; its error is raised in the trainer
                self._init_error = pack_error(error, worker=worker, doing="in worker_init_fn")

    def __len__(self) -> int:
        return 1  # unused: nothing is substituted, and a dataset needs no length if its sampler has one

    def where(self, index: int) -> str:
        return f"dataset[{index}]"

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"position": positions}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for row, where in enumerate(draws["position"].tolist()):
            slot, number = divmod(where, POSITIONS_PER_SLOT)
            pickled = self._pickled_round_robin(slot) if self.round_robin else self._pickled(slot, number)
            out[PART].put(row, np.frombuffer(pickled, np.uint8)[:, None])

    def _pickled_round_robin(self, slot: int) -> bytes:
        """A whole batch. If it did not fit into the scratch, it is requested again; making it again would draw again,
        so it is kept."""
        request = decode_request(self._buffers.request(slot))
        kept_request, pickled = self._kept.pop(slot, (None, b""))
        if kept_request != request:
            with untouched_generators() if request.probe else nullcontext():
                pickled = self._pickled(slot, 0)
        if len(pickled) > PART_BYTES:
            self._kept[slot] = request, pickled
        return pickled

    def _pickled(self, slot: int, number: int) -> bytes:
        begin_s = time.perf_counter()
        part = self._make_part(slot, number)
        return pickle.dumps(tuple(part._replace(took_s=time.perf_counter() - begin_s)))

    def _make_part(self, slot: int, number: int) -> BatchPart:
        request = decode_request(self._buffers.request(slot))
        begin = number * request.micro_batch
        end = min(begin + request.micro_batch, len(request.keys))
        if self._init_error is not None:
            return BatchPart(PartKind.ERROR, b"", self._init_error)
        self._current_key: Any = None
        try:
            samples = self._fetch(request, begin, end)
            self._current_key = None
            region = BodyRegion(
                self._buffers.body(slot),
                request.probe or len(request.keys),
                begin,
                lambda layout: self._buffers.agree_on_layout(slot, layout),
            )
            part = self._collate(samples, request, region)
            # Only the size of a probe is needed; a large sample would not fit into the scratch.
            return part._replace(head=b"", content=b"") if request.probe else part
        except (Exception, SystemExit) as error:  # the dataset is the user's code; its errors go to the trainer
            if isinstance(error, SystemExit):  # raised in the trainer, it would end the training without a message
                error = RuntimeError(f"the dataset called sys.exit({error.code!r})")
            doing = "collating a batch" if self._current_key is None else f"reading dataset[{self._current_key!r}]"
            return BatchPart(PartKind.ERROR, b"", pack_error(error, worker=self._worker, doing=doing))

    def _collate(self, samples: Any, request: BatchRequest, region: BodyRegion) -> BatchPart:
        if self.collate_mode == "rows":
            return write_default_collated(samples, region)
        if not self.round_robin:
            seed_everything(request.step_seed())
        collated = self.collate_fn(samples)
        if self.collate_mode == "part":
            return write_collated(collated, region, num_samples=len(samples))
        part = write_collated(collated, region, num_samples=None)
        return part._replace(body_bytes=part.body_bytes * max(1, request.probe))

    def _fetch(self, request: BatchRequest, begin: int, end: int) -> Any:
        """The samples `begin` to `end` of a request, one micro-batch.

        Each is seeded by its position, except with round-robin workers or in a data set that draws no random numbers.
        """
        keys = request.keys[begin:end]
        if not keys or type(keys[0]) is not int:  # others are recorded one by one
            self._ring.note_item(self._worker, request.position + begin)
        if self.round_robin:
            return self._read_keys(keys)
        if self._draw_detector is not None:
            try:
                samples, drew = self._draw_detector.drew(lambda: self._read_keys(keys))
            except Exception:  # the user's code; not swallowed: the samples are read again below, with their own seeds
                pass
            else:
                if not drew:
                    return samples
                self._draw_detector = None  # it draws random numbers: every sample is seeded from now on
        fetched = []
        for key, seed in zip(keys, request.seeds(begin, end), strict=True):
            seed_everything(seed)
            fetched.append(self._read_keys([key]))
        return fetched[0] if self.collate_mode == "single" else [sample for samples in fetched for sample in samples]

    def _read_keys(self, keys: list[Any]) -> Any:
        if self.collate_mode == "single":
            self._current_key = keys[0]
            return self.dataset[keys[0]]
        if getattr(self.dataset, "__getitems__", None):
            self._current_key = keys[0] if len(keys) == 1 else keys
            return self.dataset.__getitems__(keys)
        samples = []
        for key in keys:
            self._current_key = key
            if type(key) is int:
                self._ring.note_item(self._worker, key)
            samples.append(self.dataset[key])
        return samples


POSITIONS_PER_SLOT = 2**32


def encode_position(slot: int, number: int) -> int:
    """Slot and part number as one integer, used as the position of a row."""
    return slot * POSITIONS_PER_SLOT + number
