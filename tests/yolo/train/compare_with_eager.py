"""Compare every step of a training with the same step without a CUDA graph, from the same weights.

Comparing two whole trainings would say little: in these small networks a rounding error grows to several per cent
within ten steps, with graphs or without. Single steps differ, too, if a rounding error moves an activation to the other
side of its kink: in three of ten steps a change of the weights by 2e-7 changes gradients by more than 0.1 %. Therefore
the networks here are smooth except for max-pooling, where that happens once in about sixty steps.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flatout.engine.loop import Loop

ITEMS_RTOL, GRADIENT_RTOL = 1e-3, 1e-3
TIES, TIE_RTOL = 1, 0.1
"""Steps in which another pixel may be the maximum, and the difference allowed in these."""


def smooth(network: nn.Module) -> None:
    """SiLU in place of LeakyReLU."""
    for name, module in network.named_children():
        if isinstance(module, nn.LeakyReLU):
            setattr(network, name, nn.SiLU())
        else:
            smooth(module)


def run_and_compare_with_eager(loop: Loop, network: nn.Module) -> int:
    """Run the loop and assert that its losses, gradients and running statistics are those of eager steps.

    Returns the number of steps that a graph has run.
    """
    step, num_graphed = loop._training_step, 0
    work = step.forward_backward
    apart: list[tuple[float, str]] = []

    def both(inputs: Mapping[str, Tensor], *, window_ends: bool) -> Tensor:
        nonlocal num_graphed
        twin = copy.deepcopy(network)
        before = {name: each.grad.clone() for name, each in network.named_parameters() if each.grad is not None}
        had_graph = bool(step.graphs._graphs)
        numbers = work(dict(inputs), window_ends=window_ends)
        num_graphed += had_graph
        loss, items = loop.job.step(twin, inputs)
        loss.backward()
        torch.testing.assert_close(numbers[: len(items)], items.detach().float(), rtol=ITEMS_RTOL, atol=1e-6)
        found = {name: each.grad for name, each in network.named_parameters() if each.grad is not None}
        wanted = {name: each.grad for name, each in twin.named_parameters() if each.grad is not None}
        assert found.keys() == wanted.keys()
        apart.append(max((distance(found[name] - before.get(name, 0), wanted[name]), name) for name in wanted))
        for name, buffer in twin.named_buffers():
            if buffer.is_floating_point():
                assert distance(network.get_buffer(name), buffer) <= GRADIENT_RTOL, name
        return numbers

    step.forward_backward = both  # type: ignore[method-assign]
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        loop.run()
    assert max(apart)[0] <= TIE_RTOL, apart
    assert sum(distance > GRADIENT_RTOL for distance, _ in apart) <= TIES, apart
    return num_graphed


def distance(found: Tensor, wanted: Tensor) -> float:
    """Difference relative to the norm of `wanted`."""
    return float((found - wanted).norm()) / (float(wanted.norm()) + 1e-3)
