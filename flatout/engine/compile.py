"""torch.compile: whether it pays within a run, and falling back to the plain network where compiling fails."""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from flatout.clock import span
from flatout.engine.job import IntervalStats

logger = logging.getLogger(__name__)

GAIN = 0.05
"""Share of the step time that compiling saves beyond our own kernels and CUDA graphs: the smallest of five measured
cases, rounded down (bench/results/model_step_h200_*.md)."""
COST_S = 15.0
COST_PER_LAYER_S = 0.5
"""Approximate time to compile, fixed and per convolution, on the machine of that benchmark."""
WARMUP_STEPS = 60
"""Steps in which kernels are chosen, compiled and captured; intervals that contain any of them are not used."""
FEW_WAITS = 0.01
"""Share of an interval that may be spent waiting for items that are read only once, at the start."""
MIN_INTERVALS = 2
"""Intervals needed after warm-up. The fastest is used, since any of them may contain a pause."""


P = ParamSpec("P")
R = TypeVar("R")


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator like `torch.compiler.disable`: torch.compile does not trace into the function.

    It does not import torch's compiler, which takes a second or more, before anything is compiled.
    """
    disabled: Callable[P, R] = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: P.args, **names: P.kwargs) -> R:
        return disabled(*args, **names) if torch.compiler.is_compiling() else function(*args, **names)

    return call


class CompileDecision(NamedTuple):
    """Whether to compile, and the calculation as text."""

    pays: bool
    text: str


def compile_pays(*, step_ms: float, steps_left: int, num_layers: int, gain: float = GAIN) -> CompileDecision:
    """Compare the time that compiling saves in the rest of the run with the time it costs."""
    cost_s = COST_S + COST_PER_LAYER_S * num_layers
    saved_s = gain * step_ms / 1e3 * steps_left
    pays = saved_s > cost_s
    return CompileDecision(
        pays,
        f"compile auto: {steps_left} steps of {step_ms:.1f} ms, about {100 * gain:.0f} % saved = {saved_s:.0f} s; "
        f"compiling costs about {cost_s:.0f} s: {'it pays' if pays else 'it does not pay'}.",
    )


class Compiled(nn.Module):
    """A network that is compiled on its first call; if that fails, it runs uncompiled, with one warning.

    A batch smaller than the largest one so far, such as the last of an epoch, runs uncompiled: compiling again for one
    step per epoch took 77 s on an H200.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        # A tuple keeps nn.Module from registering the weights twice.
        self._plain = (network,)
        self._compiled: Any = torch.compile(network)
        self._has_compiled = False
        self._batch_size = 0

    def forward(self, x: Tensor) -> Any:
        self._batch_size = max(self._batch_size, len(x))
        if self._compiled is None or len(x) < self._batch_size:
            return self._plain[0](x)
        if self._has_compiled:
            return self._compiled(x)
        try:
            with span("compile"):
                result = self._compiled(x)
        except Exception as error:  # compilers, and missing ones, raise errors of any type
            self._compiled = None
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            logger.warning("The network cannot be compiled (%s): training goes on uncompiled.", reason)
            return self._plain[0](x)
        self._has_compiled = True
        logger.info("Model compiled successfully")
        return result


class CompileAuto:
    """`--compile auto`: measures the step time over some intervals and decides whether compiling pays.

    If it does, it measures the compiled steps as well: the gain was an estimate, and steps that did not become faster
    are run uncompiled again.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._is_decided = False
        self._warm_from = WARMUP_STEPS
        """Steps of this process after which an interval can be used."""
        self._steps_before = 0
        """Steps of this process before the current interval."""
        self._settled_ms: list[float] = []
        self._plain_ms: float | None = None
        """The step time before compiling."""

    def __call__(self, stats: IntervalStats, steps_here: int) -> nn.Module | None:
        """The network to call from now on, compiled or again as it is; None: no change."""
        is_settled, self._steps_before = self._steps_before >= self._warm_from, steps_here
        if self._is_decided or not is_settled or stats.fill_wait_ms > FEW_WAITS * stats.step_ms:
            return None
        self._settled_ms.append(stats.step_ms)
        if len(self._settled_ms) < MIN_INTERVALS:
            return None
        step_ms = min(self._settled_ms)
        self._settled_ms.clear()
        if self._plain_ms is not None:
            return self._judge(self._plain_ms, step_ms)
        layers = sum(isinstance(module, nn.Conv2d) for module in self._network.modules())
        decision = compile_pays(step_ms=step_ms, steps_left=stats.steps_left, num_layers=layers)
        logger.info("%s", decision.text)
        if not decision.pays:
            self._is_decided = True
            return None
        self._plain_ms, self._warm_from = step_ms, steps_here + WARMUP_STEPS
        return Compiled(self._network)

    def _judge(self, plain_ms: float, compiled_ms: float) -> nn.Module | None:
        self._is_decided = True
        text = f"compile auto: a step takes {compiled_ms:.1f} ms compiled, {plain_ms:.1f} ms before"
        if compiled_ms < plain_ms:
            logger.info("%s: %.0f %% saved.", text, 100 * (1 - compiled_ms / plain_ms))
            return None
        logger.info("%s: training goes on uncompiled.", text)
        return self._network


def explain(network: nn.Module, x: Tensor) -> str:
    """A report of the graph breaks of torch.compile, with their reasons."""
    report = torch._dynamo.explain(network)(x)
    lines = [
        "DYNAMO EXPLANATION REPORT",
        f"graphs: {report.graph_count}, graph breaks: {report.graph_break_count}, operations: {report.op_count}",
    ]
    for number, reason in enumerate(report.break_reasons, 1):
        where = reason.user_stack[-1] if reason.user_stack else "unknown location"
        lines.append(f"break {number}: {reason.reason} ({where})")
    if not report.graph_break_count:
        lines.append("The whole network is one graph: nothing to fix.")
    return "\n".join(lines)
