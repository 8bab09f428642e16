"""A step as one CUDA graph: the host launches it once instead of a thousand kernels.

Small batches are bound by launches, not by the GPU. A graph needs fixed shapes and fixed places in memory, so inputs
are copied into buffers of its own; rows of a ragged input are filled up to a capacity.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

EAGER_RUNS = 3
"""Of every form before it is captured: kernels are chosen and compiled in them."""
MOST_GRAPHS = 4
"""Forms of inputs that get a graph of their own, such as an epoch's short last batch."""

Inputs = Mapping[str, Tensor]
Work = Callable[[Inputs], Tensor]


class Padding(NamedTuple):
    """How a ragged input is brought to a fixed number of rows."""

    capacity: int
    value: float
    """Of every entry in the rows that are not there."""


class GraphedWork:
    """`work` on inputs of one form, captured; its result is overwritten by the next call.

    What `work` changes in place (gradients, statistics) must stay where it is in memory. Capturing runs nothing.
    """

    def __init__(
        self,
        work: Work,
        inputs: Inputs,
        paddings: Mapping[str, Padding],
        *,
        pool: Any = None,
    ) -> None:
        """Run `work` eagerly a few times before: kernels are chosen and compiled then.

        `pool` is the memory of another graph, if the two never run at the same time and nobody reads the other's
        result after this one has run.
        """
        self._fillings = paddings
        self._form = form_of(inputs, paddings)
        self._inputs = {name: _buffer(tensor, paddings.get(name)) for name, tensor in inputs.items()}
        self._load(inputs)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=pool, stream=torch.cuda.current_stream()):
            self._result = work(self._inputs)

    @property
    def pool(self) -> Any:
        """Of memory, to share with further graphs."""
        return self._graph.pool()

    def suits(self, inputs: Inputs) -> bool:
        """Have these inputs the form that was captured? Whether there is room in it says `has_room`."""
        return form_of(inputs, self._fillings) == self._form

    def __call__(self, inputs: Inputs) -> Tensor:
        self._load(inputs)
        self._graph.replay()
        return self._result

    def _load(self, inputs: Inputs) -> None:
        for name, tensor in inputs.items():
            buffer = self._inputs[name]
            filling = self._fillings.get(name)
            if filling is not None:
                buffer[len(tensor) :].fill_(filling.value)
            buffer[: len(tensor)].copy_(tensor)


class Graphs:
    """Graphs of one piece of work, one per form of its inputs. They share their memory, as one runs at a time."""

    def __init__(
        self, work: Work, paddings: Mapping[str, Padding], *, wanted: bool, simplify: Callable[[], bool] = lambda: False
    ) -> None:
        """`simplify` is called when the work cannot be captured. It returns whether it has put work in its place that
        was captured before."""
        self.wanted = wanted
        """Whether steps are captured; False for good once that has failed."""
        self._simplify = simplify
        self._work = work
        self._fillings = paddings
        self._graphs: list[GraphedWork] = []
        self._num_runs: Counter[str] = Counter()

    def find(self, inputs: Inputs) -> GraphedWork | None:
        """The graph for inputs of this form, captured once the form has come up often enough; None: run it eagerly."""
        if not self.wanted or not has_room(inputs, self._fillings):
            return None
        for graph in self._graphs:
            if graph.suits(inputs):
                return graph
        form = str(form_of(inputs, self._fillings))
        self._num_runs[form] += 1
        if self._num_runs[form] <= EAGER_RUNS or len(self._graphs) == MOST_GRAPHS:
            return None
        return self._capture(inputs)

    def forget(self) -> None:
        """The work is another one from now on."""
        self._graphs.clear()
        self._num_runs.clear()

    def _capture(self, inputs: Inputs) -> GraphedWork | None:
        pool = self._graphs[0].pool if self._graphs else None
        try:
            graph = GraphedWork(self._work, inputs, self._fillings, pool=pool)
        except RuntimeError as error:
            self.forget()  # and with them their memory
            if self._simplify():
                return None
            self.wanted = False
            logger.warning(
                "A step cannot be captured as a CUDA graph (%s): the host launches every kernel, which is slower for "
                "small batches.",
                str(error).splitlines()[0],
            )
            return None
        self._graphs.append(graph)
        return graph


def has_room(inputs: Inputs, paddings: Mapping[str, Padding]) -> bool:
    """Do the rows of all ragged inputs fit? A step with more is no reason to capture anything."""
    return all(len(inputs[name]) <= filling.capacity for name, filling in paddings.items())


def form_of(inputs: Inputs, paddings: Mapping[str, Padding]) -> dict[str, tuple[object, ...]]:
    """Shapes and dtypes; of ragged inputs, those of a row."""
    return {
        name: (tuple(tensor.shape)[1 if name in paddings else 0 :], tensor.dtype) for name, tensor in inputs.items()
    }


def _buffer(tensor: Tensor, filling: Padding | None) -> Tensor:
    if filling is None:
        return torch.empty_like(tensor)
    return tensor.new_empty((filling.capacity, *tensor.shape[1:]))
