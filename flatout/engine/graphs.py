"""CUDA graphs of training steps: the host launches a graph once instead of a thousand kernels.

Small batches are bound by kernel launches, not by the GPU. A graph needs fixed shapes and fixed memory addresses, so
inputs are copied into its own buffers; ragged inputs are padded to a fixed number of rows.

A batch that is shorter than others, the last of an epoch, is never captured, nor are kernels chosen for it by trying
them out (`without_tuning`): either takes longer than all the steps that it would make faster.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.clock import span

logger = logging.getLogger(__name__)

EAGER_RUNS = 3
"""Eager runs of each input signature before it is captured: kernels are chosen and compiled during them."""
MAX_GRAPHS = 4
"""Input signatures that get a graph of their own, such as those of several image sizes."""

Inputs = Mapping[str, Tensor]
StepFunction = Callable[[Inputs], Tensor]
Signature = frozenset[tuple[str, tuple[int, ...], torch.dtype]]


class Padding(NamedTuple):
    """How a ragged input is padded to a fixed number of rows."""

    capacity: int
    """Rows after padding."""
    value: float
    """Fills the padding rows."""


class GraphedStep:
    """`step` captured for inputs of one signature; its result is overwritten by the next call.

    What `step` changes in place (gradients, statistics) must stay at its address in memory. Capturing runs nothing.
    """

    def __init__(
        self,
        step: StepFunction,
        inputs: Inputs,
        paddings: Mapping[str, Padding],
        *,
        pool: Any = None,
    ) -> None:
        """Run `step` eagerly a few times first, so that kernels are chosen and compiled.

        `pool` is the memory of another graph. Share it only if the two never run at the same time and the other's
        result is not read after this one has run.
        """
        self._paddings = paddings
        self._inputs = {name: _buffer(tensor, paddings.get(name)) for name, tensor in inputs.items()}
        self._load(inputs)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Of this thread alone: another one may be copying items to the device meanwhile (feed/background_fill.py).
        mode = "thread_local"
        with torch.cuda.graph(self._graph, pool, torch.cuda.current_stream(), capture_error_mode=mode):
            self._result = step(self._inputs)

    @property
    def pool(self) -> Any:
        """The memory pool, to be shared with further graphs."""
        return self._graph.pool()

    def __call__(self, inputs: Inputs) -> Tensor:
        self._load(inputs)
        self._graph.replay()
        return self._result

    def _load(self, inputs: Inputs) -> None:
        for name, tensor in inputs.items():
            buffer = self._inputs[name]
            padding = self._paddings.get(name)
            if padding is not None:
                buffer[len(tensor) :].fill_(padding.value)
            buffer[: len(tensor)].copy_(tensor)


@dataclass(eq=False, repr=False)
class Graphs:
    """The graphs of one step function, one per input signature. They share memory, as only one runs at a time."""

    step: StepFunction
    paddings: Mapping[str, Padding]
    enabled: bool
    """Whether steps are captured; stays False once capturing has failed."""
    simplify: Callable[[], bool] = lambda: False
    """Called when the step cannot be captured; returns whether it has switched back to a step that was captured
    before."""

    def __post_init__(self) -> None:
        self._graphs: dict[Signature, GraphedStep] = {}
        self._num_runs: Counter[Signature] = Counter()
        self._most_samples = 0

    def is_short(self, inputs: Inputs) -> bool:
        """Whether an earlier step had more samples than these inputs have."""
        samples = num_samples(inputs, self.paddings)
        self._most_samples = max(self._most_samples, samples)
        return samples < self._most_samples

    def find(self, inputs: Inputs) -> GraphedStep | None:
        """The graph for these inputs, captured once their signature was seen often enough; None: run eagerly."""
        if not self.enabled or self.is_short(inputs) or not fits(inputs, self.paddings):
            return None
        signature = signature_of(inputs, self.paddings)
        if signature in self._graphs:
            return self._graphs[signature]
        self._num_runs[signature] += 1
        if self._num_runs[signature] <= EAGER_RUNS or len(self._graphs) == MAX_GRAPHS:
            return None
        return self._capture(signature, inputs)

    def clear(self) -> None:
        """Drop all graphs, because the step computes something else from now on."""
        self._graphs.clear()
        self._num_runs.clear()

    def _capture(self, signature: Signature, inputs: Inputs) -> GraphedStep | None:
        pool = next(iter(self._graphs.values())).pool if self._graphs else None
        try:
            with span("capture"):
                graph = GraphedStep(self.step, inputs, self.paddings, pool=pool)
        except RuntimeError as error:
            self.clear()  # frees their memory
            if self.simplify():
                return None
            self.enabled = False
            logger.warning(
                "A step cannot be captured as a CUDA graph (%s): training goes on, and the host launches every kernel, "
                "which is slower for small batches. To skip this attempt: --no-graphs (yolo), --graphs false (defect), "
                "TRAIN.CUDA_GRAPHS=false (spike).",
                str(error).splitlines()[0],
            )
            return None
        self._graphs[signature] = graph
        return graph


def fits(inputs: Inputs, paddings: Mapping[str, Padding]) -> bool:
    """Whether all ragged inputs fit into their padded size; a larger step runs eagerly."""
    return all(len(inputs[name]) <= padding.capacity for name, padding in paddings.items())


def num_samples(inputs: Inputs, paddings: Mapping[str, Padding]) -> int:
    """Rows of the inputs that are not ragged: a sample each. 0 if all are ragged."""
    return max((len(tensor) for name, tensor in inputs.items() if name not in paddings), default=0)


@contextmanager
def without_tuning() -> Iterator[None]:
    """In the block cuDNN takes the kernels that it expects to be the fastest, instead of trying out all of them."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def signature_of(inputs: Inputs, paddings: Mapping[str, Padding]) -> Signature:
    """Shapes and dtypes of inputs; for ragged inputs, the shape of one row."""
    return frozenset(
        (name, tuple(tensor.shape)[1 if name in paddings else 0 :], tensor.dtype) for name, tensor in inputs.items()
    )


def _buffer(tensor: Tensor, padding: Padding | None) -> Tensor:
    if padding is None:
        return torch.empty_like(tensor)
    return tensor.new_empty((padding.capacity, *tensor.shape[1:]))
