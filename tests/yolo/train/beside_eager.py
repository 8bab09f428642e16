"""Every step of a training beside the same step without a CUDA graph, from the same weights.

Comparing two whole trainings would say little: these small networks turn a rounding error into per cents within ten
steps, with graphs or without. One step is no better if a rounding error puts an activation on the other side of its
kink: in three of ten steps a change of the weights by 2e-7 changes gradients by more than 0.1 %. Therefore the networks
here are smooth but for their max-pooling, where that happens once in some sixty steps.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flatout.engine.loop import Loop

ITEMS_RTOL, GRADIENT_RTOL = 1e-3, 1e-3
TIES, TIE_RTOL = 1, 0.1
"""Steps in which a maximum may be found at another place, and what that may change."""


def smooth(network: nn.Module) -> None:
    """SiLU in place of LeakyReLU."""
    for name, module in network.named_children():
        if isinstance(module, nn.LeakyReLU):
            setattr(network, name, nn.SiLU())
        else:
            smooth(module)


def run_beside_eager(loop: Loop, network: nn.Module) -> int:
    """Run the loop; its numbers, gradients and running statistics must be those of eager steps. The number of steps
    that a graph has run."""
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
    """Relative to the size of `wanted`."""
    return float((found - wanted).norm()) / (float(wanted.norm()) + 1e-3)
