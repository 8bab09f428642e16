"""Is compiling a network worth its time in this run? And if it cannot be compiled: go on without."""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.engine.job import IntervalStats

logger = logging.getLogger(__name__)

GAIN = 0.05
"""Share of a step that compiling saves beyond our own kernels and CUDA graphs, the least of five cases, rounded down:
bench/results/model_step_h200_*.md."""
COST_S = 15.0
COST_PER_LAYER_S = 0.5
"""What compiling takes, about: a fixed part and one per convolution, on the machine of that benchmark."""
SETTLED_AFTER = 60
"""Steps in which kernels are chosen, compiled and captured: an interval that holds any of them says nothing."""
ENOUGH_INTERVALS = 2
"""Intervals after them; the quickest counts, since a single pause may be in any of them."""


class Decision(NamedTuple):
    """Whether to compile, and the arithmetic."""

    pays: bool
    text: str


def compile_pays(*, step_ms: float, steps_left: int, num_layers: int, gain: float = GAIN) -> Decision:
    """Compare what compiling saves over the rest of the run with what it costs."""
    cost_s = COST_S + COST_PER_LAYER_S * num_layers
    saved_s = gain * step_ms / 1e3 * steps_left
    pays = saved_s > cost_s
    return Decision(
        pays,
        f"compile auto: {steps_left} steps of {step_ms:.1f} ms, about {100 * gain:.0f} % saved = {saved_s:.0f} s; "
        f"compiling costs about {cost_s:.0f} s: {'it pays' if pays else 'it does not pay'}.",
    )


class Compiled(nn.Module):
    """A network that is compiled when it is first called; if that fails, it runs as it is, with one warning.

    A batch with fewer samples than the first, such as an epoch's last one, goes through the network as it is: compiling
    once more for one step per epoch took 77 s on an H200.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that its weights are not registered twice.
        self._plain = (network,)
        self._compiled: Any = torch.compile(network)
        self._is_proven = False
        self._batch_size = 0

    def forward(self, x: Tensor) -> Any:
        self._batch_size = max(self._batch_size, len(x))
        if self._compiled is None or len(x) < self._batch_size:
            return self._plain[0](x)
        if self._is_proven:
            return self._compiled(x)
        try:
            result = self._compiled(x)
        except Exception as error:  # whatever a compiler, or one that is missing, may raise
            self._compiled = None
            logger.warning("The network cannot be compiled (%s): training goes on without.", _first_line(error))
            return self._plain[0](x)
        self._is_proven = True
        logger.info("Model compiled successfully")
        return result


class CompileAuto:
    """`--compile auto`: looks at the intervals of a training until it can tell whether compiling pays, and decides."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._is_decided = False
        self._steps_before = 0
        """Steps of this process when the interval under way began."""
        self._settled_ms: list[float] = []

    def __call__(self, tick: IntervalStats, steps_here: int) -> Compiled | None:
        """The network to call from now on, once it is decided that compiling pays; None: go on as before."""
        is_settled, self._steps_before = self._steps_before >= SETTLED_AFTER, steps_here
        if self._is_decided or not is_settled:
            return None
        self._settled_ms.append(tick.step_ms)
        if len(self._settled_ms) < ENOUGH_INTERVALS:
            return None
        self._is_decided = True
        layers = sum(isinstance(module, nn.Conv2d) for module in self._network.modules())
        decision = compile_pays(step_ms=min(self._settled_ms), steps_left=tick.steps_left, num_layers=layers)
        logger.info("%s", decision.text)
        return Compiled(self._network) if decision.pays else None


def explain(network: nn.Module, x: Tensor) -> str:
    """Where torch.compile would have to leave the graph, and why."""
    report = torch._dynamo.explain(network)(x)
    lines = [
        "DYNAMO EXPLANATION REPORT",
        f"graphs: {report.graph_count}, graph breaks: {report.graph_break_count}, operations: {report.op_count}",
    ]
    for number, reason in enumerate(report.break_reasons, 1):
        where = reason.user_stack[-1] if reason.user_stack else "unknown place"
        lines.append(f"break {number}: {reason.reason} ({where})")
    if not report.graph_break_count:
        lines.append("The whole network is one graph: nothing to mend.")
    return "\n".join(lines)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
