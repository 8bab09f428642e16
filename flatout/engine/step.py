"""One training step, from a batch on the device to updated weights: precision, batch norm, optimizer, CUDA graphs.

    inputs --> forward, loss, backward --(where an accumulation window ends)--> optimizer, moving average

Forward, loss and backward run as one CUDA graph if that is enabled and the shapes have occurred before; the short last
batch of an epoch runs without, and without kernels being tuned for it. Gradients are
checked on the device before every optimizer step; if any is not finite, the optimizer's kernel changes nothing. In
float16 the loss is also scaled, so that small gradients do not underflow. Nothing here waits for the device.

Dimension key:  N running means and variances, concatenated
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatout.clock import clock, cpu_features
from flatout.engine.graphs import Graphs, without_tuning
from flatout.engine.job import Job
from flatout.engine.optim import MovingAverage, parameters_of, step_unless
from flatout.errors import ConfigError
from flatout.ranks import World

logger = logging.getLogger(__name__)

Amp = Literal["off", "fp16", "bf16"]
DTYPES: dict[str, torch.dtype] = {"off": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the loss scale is doubled (torch's own defaults)."""


# Precision


class Precision:
    """Autocast and loss scaling of one training."""

    def __init__(self, amp: Amp, device: torch.device) -> None:
        if amp not in DTYPES:
            raise ConfigError(f"amp={amp!r} is unknown: use {', '.join(map(repr, DTYPES))}.")
        if amp == "fp16" and device.type != "cuda":
            raise ConfigError("amp='fp16' needs a GPU: on the CPU use 'off' or 'bf16'.")
        self.amp = amp
        self.device = device
        self.dtype = DTYPES[amp]
        first = FIRST_SCALE if amp == "fp16" else 1.0
        self._scale = torch.full((), first, device=device)
        self._inverse = torch.full((), 1 / first, device=device)
        self._streak = torch.zeros((), dtype=torch.int32, device=device)
        self.found_bad = torch.zeros((), device=device)
        """On the device: 1 if a gradient of the last optimizer step was not finite."""

    def autocast(self, *, cached: bool = True) -> AbstractContextManager[object]:
        """Use `cached=False` while a CUDA graph is captured: a cached cast would not become part of the graph."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.amp != "off", cache_enabled=cached)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self._scale if self.amp == "fp16" else loss

    def check(self, gradients: Iterable[Tensor]) -> Tensor:
        """Undo the loss scaling in place; returns `found_bad`, on the device."""
        self.found_bad.zero_()
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for gradient in gradients:
            groups.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for group in groups.values():
            torch._amp_foreach_non_finite_check_and_unscale_(group, self.found_bad, self._inverse)
        return self.found_bad

    def update(self) -> None:
        """Update the loss scale after an optimizer step: halve it on overflow, double it after a long success."""
        if self.amp == "fp16":
            torch._amp_update_scale_(self._scale, self._streak, self.found_bad, 2.0, 0.5, GROWTH_INTERVAL)
            torch.reciprocal(self._scale, out=self._inverse)

    def state_dict(self) -> dict[str, Any]:
        return {"amp": self.amp, "scale": float(self._scale), "streak": int(self._streak)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss scale. A run that continues in another precision starts with that precision's own scale."""
        if state.get("amp", self.amp) != self.amp:
            return
        self._scale.fill_(state["scale"])
        self._streak.fill_(state["streak"])
        torch.reciprocal(self._scale, out=self._inverse)


CPU_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instruction sets with products of bf16 numbers: of x86 processors, and of ARM ones."""


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 by instructions of its own; converting to float32 and back takes longer."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and not CPU_BF16.isdisjoint(cpu_features())


def default_amp(device: torch.device) -> Amp:
    """bf16 if the GPU supports it natively, else fp16; off on the CPU, where results are expected to be exact."""
    if device.type != "cuda":
        return "off"
    return "bf16" if has_native_bf16(device) else "fp16"


# Batch norm
#
# A step whose loss is not finite changes no weight, because the optimizer skips it. But batch norm updates its running
# means and variances in the forward pass: they would stay NaN forever, and the moving average with them. So they are
# copied before every forward pass and restored, on the device, if the loss is not finite.


class RunningStatistics:
    """Saves and restores all running means and variances of a network, with a few small kernels per step.

    They stay at their addresses in memory. One block for all of them would save a kernel or two, but for buffers inside
    a block torch 2.11 compiles code that reads other memory than theirs (operators that change them in place).
    """

    def __init__(self, network: nn.Module) -> None:
        self._buffers = [
            buffer
            for module in network.modules()
            if isinstance(module, _BatchNorm)
            for buffer in (module.running_mean, module.running_var)
            if buffer is not None
        ]
        self._saved_N = self._all() if self._buffers else None

    def save(self) -> None:
        """Copy the current values; call before the forward pass."""
        if self._saved_N is not None:
            self._saved_N.copy_(self._all())

    def restore_if(self, bad: Tensor) -> None:
        """Restore the saved values if `bad`, a bool with one element on the device, is True; call after the forward
        pass."""
        if self._saved_N is not None:
            right_N = torch.where(bad, self._saved_N, self._all())
            torch._foreach_copy_(self._buffers, right_N.split([buffer.numel() for buffer in self._buffers]))

    def _all(self) -> Tensor:
        return torch.cat(self._buffers)


# The step


class Step:
    """The training step: forward and backward, and the update of network, optimizer and moving average."""

    def __init__(
        self,
        job: Job,
        network: nn.Module,
        forward: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: MovingAverage | None,
        *,
        precision: Precision,
        clip_norm: float | None,
        graphs: bool,
        world: World,
    ) -> None:
        """`forward` is the network as it is called; `network` holds the weights."""
        self._job, self._forward, self._optimizer, self._average = job, forward, optimizer, average
        self._precision, self._clip_norm, self._world = precision, clip_norm, world
        self._statistics = RunningStatistics(network)
        self.graphs = Graphs(
            partial(self._compute, cached=False),
            job.paddings,
            enabled=graphs and world.size == 1 and precision.device.type == "cuda",
            simplify=self._revert_forward,
        )
        self._forward_before: nn.Module | None = None
        self.has_reverted = False
        """Whether a step through a forward of `use_forward` could not be captured, so that it is not used any more."""
        self._stream = torch.cuda.Stream(precision.device) if self.graphs.enabled else None
        self._unchecked = torch.zeros((), device=precision.device)

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """Run the block on a stream of its own: a graph cannot be captured on the default stream, and must be captured
        on the stream its gradients were created on."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def use_forward(self, forward: nn.Module) -> None:
        """Call the network through `forward` from the next step on; as before, if its steps cannot be captured, unless
        it is the one before."""
        self._forward_before = None if forward is self._forward_before else self._forward
        self._forward = forward
        self.graphs.clear()

    def _revert_forward(self) -> bool:
        """Undo `use_forward`, if it was used; returns whether it was.

        A graph of the plain network is faster than a compiled one whose kernels the host launches one by one: on an
        H200, yolov7-tiny at 256 px took 11 ms instead of 42 (bench/results/coco256_first_try_h200_202611.md).
        """
        if self._forward_before is None:
            return False
        self._forward, self._forward_before = self._forward_before, None
        self.has_reverted = True
        logger.warning(
            "A step of the compiled network cannot be captured as a CUDA graph: training goes on uncompiled."
        )
        return True

    def __call__(self, inputs: dict[str, Tensor], *, window_ends: bool) -> Tensor:
        """A step, with the update of the weights where an accumulation window ends. Returns the numbers that the job
        reports, then 1 if the loss, and 1 if a gradient is not finite: float32 [items + 2] on the device."""
        numbers = self.forward_backward(inputs, window_ends=window_ends)
        found_bad = self.optimizer_step() if window_ends else self._unchecked
        return torch.cat((numbers, found_bad.reshape(1)))

    def forward_backward(self, inputs: dict[str, Tensor], *, window_ends: bool) -> Tensor:
        """Forward, loss and backward. Returns the numbers that the job reports and, as the last, 1 if the loss is not
        finite: float32 [items + 1] on the device, overwritten by the next call."""
        if (graph := self.graphs.find(inputs)) is not None:
            with clock.stage("train.graph"):
                return graph(inputs)
        untuned = without_tuning() if self.graphs.is_short(inputs) else nullcontext()
        with self._without_sync(not window_ends), untuned:
            return self._compute(inputs)

    def optimizer_step(self) -> Tensor:
        """Update weights and moving average. If a gradient is not finite, weights stay as they are, and the result, on
        the device, is not 0."""
        with clock.stage("train.optimizer"):
            parameters = parameters_of(self._optimizer)
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            found_bad = self._precision.check(gradients)
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, self._clip_norm, foreach=True)
            step_unless(self._optimizer, found_bad)
            self._precision.update()
            self.clear_gradients()
        if self._average is not None:
            with clock.stage("train.average"):
                self._average.update()
        return found_bad

    def clear_gradients(self) -> None:
        """Zero the gradients in place if a graph adds to them there; otherwise drop them, which saves a pass."""
        self._optimizer.zero_grad(set_to_none=not self.graphs.enabled)

    def _compute(self, inputs: Mapping[str, Tensor], *, cached: bool = True) -> Tensor:
        self._statistics.save()
        with self._precision.autocast(cached=cached):
            loss, items = self._job.step(self._forward, inputs)
        with clock.stage("train.backward"):
            self._precision.scaled(loss * self._world.size).backward()
        bad = ~torch.isfinite(loss.detach()).reshape(1)
        self._statistics.restore_if(bad)
        return torch.cat((items.detach().float(), bad.float()))

    def _without_sync(self, inside_window: bool) -> AbstractContextManager[object]:
        """Ranks all-reduce their gradients once per accumulation window, not inside of it."""
        if inside_window and self._world.size > 1:
            no_sync: AbstractContextManager[object] = self._forward.no_sync()  # type: ignore[operator]
            return no_sync
        return nullcontext()
