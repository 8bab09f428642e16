"""The network of an observed loop by itself: other batch sizes, other numbers of threads, slow settings switched off.

Only a comparison tells whether a step is mostly overhead: how much longer does a batch of twice the size take? The
forward calls of one observed step are repeated on copies of their modules, with the batch as it was and with the batch
repeated, and a backward pass from the sum of the results. Weights, buffers and random numbers of the training stay as
they are.
"""

import copy
import logging
import os
import random
import statistics
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flatout.profiler.measurement import NetworkRun

logger = logging.getLogger(__name__)

BUDGET_S = 4.0
"""Time for all runs together, once there are enough of them."""
MIN_ROUNDS, MAX_ROUNDS = 3, 8
MAX_RUN_MS = 1000
"""A network that takes longer is not run."""
MAX_GROWN_MS = 400
"""Batches are enlarged up to about this time."""
GROWTH = (2, 4, 8, 16)
"""Batch sizes to try, relative to the present one."""
MAX_CALLS = 8
"""A step with more forward calls than this is not repeated: it is no simple loop."""

ANOMALY = "anomaly detection"
NO_ONEDNN = "oneDNN switched off"
DOUBLE = "64-bit weights"
UNNEEDED = "unneeded gradients"


class ForwardCall(NamedTuple):
    """A call of a module in an observed step."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def network_runs(calls: Sequence[ForwardCall], images: float, optimizers: Iterable[Any]) -> list[NetworkRun]:
    """Times of the calls of one step, first as they were; empty if they cannot be repeated.

    `images`: samples in the batch of that step; tensors of this length are repeated to make a larger one.
    `optimizers`: all that update weights in the loop; what none of them updates needs no gradient.
    """
    import torch

    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if has_ranks or not 0 < len(calls) <= MAX_CALLS:
        return []
    try:
        with _undisturbed():
            return _runs(calls, int(images), _updated(optimizers))
    # Whatever a foreign module may raise when it is copied or called again: the profile does without these runs.
    except Exception as error:
        logger.info("the network could not be run by itself: %s: %s", type(error).__name__, error)
        return []


def slow_settings() -> list[str]:
    """Settings of torch that slow every network down and are easily left switched on."""
    import torch

    found = [ANOMALY] if torch.is_anomaly_enabled() else []
    is_switched_off = torch.backends.mkldnn.is_available() and not torch._C._get_mkldnn_enabled()
    return [*found, NO_ONEDNN] if is_switched_off else found


class _Variant(NamedTuple):
    """The calls of a step in one setting, and how to switch that on."""

    run: NetworkRun
    calls: list[ForwardCall]
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext


def _variants(
    calls: Sequence[ForwardCall], images: int, now_ms: float, unneeded: Sequence[Sequence[str]]
) -> Iterator[_Variant]:
    """The settings to compare, the present one first; `now_ms` is about the time of that one.

    `unneeded`: for each call, the parameters of its module that get gradients for nothing.
    """
    import torch

    threads = torch.get_num_threads()
    now = NetworkRun(ms=now_ms, images=images, threads=threads)
    yield _Variant(now, list(calls))
    for name in slow_settings():
        yield _Variant(replace(now, without=name), list(calls), partial(_without, name))
    if any(weight.dtype == torch.float64 for call in calls for weight in call.module.parameters()):
        single = _map_tensors(calls, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
        yield _Variant(replace(now, without=DOUBLE), _on_copies(single, change=lambda module: module.float()))
    if any(unneeded):
        frozen = _on_copies(calls)
        for call, names in zip(frozen, unneeded, strict=True):
            for name in names:
                call.module.get_parameter(name).requires_grad_(False)
        yield _Variant(replace(now, without=UNNEEDED, detail=_examples(unneeded)), frozen)
    on_cpu = not any(tensor.is_cuda for call in calls for tensor in _tensors((call.args, call.kwargs)))
    for other in _other_threads(threads) if on_cpu else ():
        yield _Variant(replace(now, threads=other), list(calls), partial(_with_threads, other))
    lengths = _batch_lengths(calls, images)
    for factor in GROWTH if lengths else ():
        if now_ms * factor <= MAX_GROWN_MS:
            larger = _map_tensors(calls, partial(_repeated, lengths=lengths, factor=factor))
            yield _Variant(replace(now, images=images * factor), larger)


def _batch_lengths(calls: Sequence[ForwardCall], images: int) -> set[int]:
    """First dimensions of the calls' tensors that are a batch: all images of the step, or, if a module is called
    several times, an equal share of them for each call (gradient accumulation). Empty: nothing to enlarge."""
    times = Counter(id(call.module) for call in calls).values()
    whole_or_shares = {images // count for count in {1, *times} if images and images % count == 0}
    found = {tensor.shape[0] for call in calls for tensor in _tensors((call.args, call.kwargs)) if tensor.dim()}
    return whole_or_shares & found


def _updated(optimizers: Iterable[Any]) -> set[int] | None:
    """Ids of all parameters that optimizers update; None: unknown, because one of them is no torch optimizer."""
    try:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return {id(weight) for group in groups for weight in group["params"]}
    except (AttributeError, KeyError, TypeError):
        return None


def _unneeded(module: Any, updated: set[int] | None) -> list[str]:
    """Names of parameters that get gradients, but are not among those that optimizers update."""
    if not updated:
        return []
    return [name for name, weight in module.named_parameters() if weight.requires_grad and id(weight) not in updated]


def _examples(unneeded: Sequence[Sequence[str]]) -> str:
    names = list(dict.fromkeys(name for each in unneeded for name in each))
    shown = ", ".join(names[:2])
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown


def _runs(calls: Sequence[ForwardCall], images: int, updated: set[int] | None) -> list[NetworkRun]:
    """The settings by turns, so that other programs disturb all of them alike; of each the median run counts.

    Not the fastest: threads that wait for each other are fast now and then, and a loop has the mean of all steps.
    """
    began_s = time.perf_counter()
    copies = _on_copies(calls)
    _time_ms(copies)  # warms up
    now_ms = _time_ms(copies)
    if now_ms > MAX_RUN_MS:
        return []
    unneeded = [_unneeded(call.module, updated) for call in calls]
    variants = list(_variants(copies, images, now_ms, unneeded))
    times_ms: list[list[float]] = [[] for _ in variants]
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - began_s > BUDGET_S:
            break
        for variant, durations_ms in zip(variants, times_ms, strict=True):
            with variant.setting():
                if variant.run.threads != variants[0].run.threads:
                    _time_ms(variant.calls)  # the threads of other settings are still spinning
                durations_ms.append(_time_ms(variant.calls))
    # The first run with another batch size or setting allocates memory and chooses kernels.
    return [replace(variant.run, ms=statistics.median(ms[1:])) for variant, ms in zip(variants, times_ms, strict=True)]


def _other_threads(threads: int) -> list[int]:
    """Numbers of threads to compare: one, and one per core that this process may use."""
    cores = len(os.sched_getaffinity(0))
    # Whoever limits the threads from outside has a reason; only a script's own limit is questioned.
    is_limited = os.environ.get("OMP_NUM_THREADS") == str(threads)
    return [other for other in sorted({1, cores}) if other != threads and not (other > threads and is_limited)]


def _time_ms(calls: Sequence[ForwardCall]) -> float:
    """Time of forward and backward of all calls."""
    import torch

    on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
    begin_s = time.perf_counter()
    for module, args, kwargs in calls:
        # A sum: how long backward takes does not depend on the loss.
        ends = _differentiable(module(*args, **kwargs))
        if ends:
            torch.stack([tensor.sum().float() for tensor in ends]).sum().backward()
    if on_device:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin_s)


def _on_copies(calls: Sequence[ForwardCall], change: Callable[[Any], Any] = lambda module: module) -> list[ForwardCall]:
    """The calls, on one (changed) copy of each module."""
    modules = {id(call.module): call.module for call in calls}
    copies = {key: change(_copy_of(module)) for key, module in modules.items()}
    return [call._replace(module=copies[id(call.module)]) for call in calls]


def _copy_of(module: Any) -> Any:
    """A copy with weights of its own; its hooks, the profiler's among them, are left out instead of being copied."""
    hooks = [each for name, each in vars(module).items() if name.startswith("_forward") and "hook" in name]
    without_hooks: dict[int, Any] = {id(each): OrderedDict() for each in hooks}
    twin = copy.deepcopy(module, without_hooks)
    twin.zero_grad(set_to_none=True)
    return twin


def _differentiable(output: Any) -> list[Any]:
    """Tensors to begin a backward pass with: a loss that the module computes itself, or else all of its outputs."""
    tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    return [tensor for tensor in tensors if tensor.dim() == 0] or tensors


def _repeated(tensor: Any, *, lengths: set[int], factor: int) -> Any:
    if tensor.dim() == 0 or tensor.shape[0] not in lengths:
        return tensor
    return tensor.repeat(factor, *[1] * (tensor.dim() - 1))


def _tensors(part: Any) -> Iterator[Any]:
    if hasattr(part, "is_floating_point"):
        yield part
    elif isinstance(part, dict | list | tuple):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _tensors(each)


def _map_tensors(calls: Sequence[ForwardCall], change: Callable[[Any], Any]) -> list[ForwardCall]:
    return [ForwardCall(call.module, _mapped(call.args, change), _mapped(call.kwargs, change)) for call in calls]


def _mapped(part: Any, change: Callable[[Any], Any]) -> Any:
    """Lists, tuples and dicts with every tensor changed; other objects as they are."""
    if hasattr(part, "is_floating_point"):
        return change(part)
    if isinstance(part, dict):
        return {key: _mapped(each, change) for key, each in part.items()}
    if isinstance(part, list):
        return [_mapped(each, change) for each in part]
    if type(part) is tuple:
        return tuple(_mapped(each, change) for each in part)
    return part


def detached(call: ForwardCall) -> ForwardCall:
    """The call without the graphs of its inputs, so that keeping it does not keep them; inputs that got gradients still
    do."""
    (kept,) = _map_tensors([call], lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
    return kept


@contextmanager
def kept_calls(modules: Iterable[Any], is_wanted: Callable[[], bool]) -> Iterator[list[ForwardCall]]:
    """The forward calls of some modules inside the block, with gradients, at times when they are wanted."""
    import torch

    calls: list[ForwardCall] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_wanted() and torch.is_grad_enabled():
            calls.append(detached(ForwardCall(module, args, kwargs)))

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        yield calls


# Settings


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave every random number generator as it was."""
    import torch

    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the script's, not ours
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.enable_grad())
        stack.callback(random.setstate, python)
        stack.callback(np.random.set_state, numpy)
        yield


@contextmanager
def _with_threads(threads: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _without(setting: str) -> AbstractContextManager[Any]:
    """A context in which a slow setting is switched off."""
    import torch

    if setting == ANOMALY:
        return torch.autograd.set_detect_anomaly(False)
    return torch.backends.mkldnn.flags(enabled=True)
