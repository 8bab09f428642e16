"""Every step of a training beside the same step without a CUDA graph, from the same weights.

Comparing two whole trainings would say little: these small networks turn a rounding error into per cents within ten
steps, with graphs or without. One step is no better if its forward passes round differently: an activation on the other
side of its kink changes gradients by per cents. So cuDNN must choose the same kernels for both.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flatout.engine.loop import Loop

ITEMS_RTOL, GRADIENT_RTOL = 1e-3, 1e-3


def run_beside_eager(loop: Loop, network: nn.Module) -> int:
    """Run the loop; its numbers, gradients and running statistics must be those of eager steps. The number of steps
    that a graph has run."""
    work, num_graphed = loop._work, 0

    def both(inputs: Mapping[str, Tensor], *, window_ends: bool) -> Tensor:
        nonlocal num_graphed
        twin = copy.deepcopy(network)
        before = {name: each.grad.clone() for name, each in network.named_parameters() if each.grad is not None}
        had_graph = bool(loop._graphs._graphs)
        numbers = work(dict(inputs), window_ends=window_ends)
        num_graphed += had_graph
        loss, items = loop.job.step(twin, inputs)
        loss.backward()
        torch.testing.assert_close(numbers[: len(items)], items.detach().float(), rtol=ITEMS_RTOL, atol=1e-6)
        for name, parameter in twin.named_parameters():
            if parameter.grad is not None:
                found = network.get_parameter(name).grad
                assert found is not None, name
                found = found - before[name] if name in before else found
                assert_near(found, parameter.grad, name)
        for name, buffer in twin.named_buffers():
            if buffer.is_floating_point():
                assert_near(network.get_buffer(name), buffer, name)
        return numbers

    loop._work = both  # type: ignore[method-assign]
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        loop.run()
    return num_graphed


def assert_near(found: Tensor, wanted: Tensor, name: str) -> None:
    error, size = float((found - wanted).norm()), float(wanted.norm())
    assert error <= GRADIENT_RTOL * size + 1e-6, f"{name}: {error:.2e} off, of {size:.2e}"
