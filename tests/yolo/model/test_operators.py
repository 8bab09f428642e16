"""The operators for torch.compile, with torch functions in place of our kernels, so that they run on any machine."""

import copy
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.yolo.model import convolutions, fused
from flatout.yolo.model.convolutions import convolve, predict
from flatout.yolo.model.layers import MP, SP, Conv

EPS = 1e-3


def silu_of_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.batch_norm(x, None, None, weight, bias, True, 0.0, EPS))


def norm_act_forward(x, weight, bias, running_mean, running_var, counter, momentum, eps, act, slope):
    assert (eps, act) == (EPS, fused.ACTS[nn.SiLU])
    F.batch_norm(x, running_mean, running_var, None, None, True, momentum, eps)
    counter += 1
    return silu_of_norm(x, weight, bias), torch.cat((weight, bias, weight, bias))


def norm_act_backward(dz, x, saved, act, slope):
    weight, bias = saved.chunk(4)[:2]
    return gradients_of(silu_of_norm, (x, weight, bias), dz)


def gradients_of(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dz: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = tuple(each.detach().requires_grad_() for each in inputs)
        return torch.autograd.grad(function(*leaves), leaves, dz)


def window_forward(x):
    # Our kernel stores which of 25 pixels it was. This one stores the whole input, and its number in place of the taps.
    seen_maps.append(x)
    tap = torch.full_like(x, len(seen_maps) - 1, dtype=torch.uint8)
    return F.max_pool2d(x, 5, 1, 2), tap, tap.clone()


def window_backward(dz, tap_x, tap_y):
    return gradients_of(lambda x: F.max_pool2d(x, 5, 1, 2), (seen_maps[int(tap_x.flatten()[0])],), dz)[0]


seen_maps: list[Tensor] = []
FAKE_KERNELS: dict[str, Callable[..., object]] = {
    "norm_act_forward": norm_act_forward,
    "norm_act_backward": norm_act_backward,
    "max_pool_halve_forward": lambda x: F.max_pool2d(x, 2, 2),
    "max_pool_halve_backward": lambda dz, x: gradients_of(lambda x: F.max_pool2d(x, 2, 2), (x,), dz)[0],
    "max_pool_window_forward": window_forward,
    "max_pool_window_backward": window_backward,
    "stem_forward": lambda x, weight, stride: F.conv2d(x, weight, None, stride, 1),
    "stem_weight_gradient": lambda dy, x, stride: gradients_of(
        lambda weight: F.conv2d(x, weight, None, stride, 1), (x.new_empty(dy.shape[1], 3, 3, 3),), dy
    )[0].contiguous(memory_format=torch.channels_last),
    "predictions": lambda x, weight, bias: F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype)),
    "predictions_backward": lambda dy, x, weight: gradients_of(
        lambda x, weight, bias: F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype)),
        (x, weight, weight.new_zeros(len(weight))),
        dy,
    ),
}


@pytest.fixture
def fake_kernels(monkeypatch) -> Iterator[list[str]]:
    """Registers the fake kernels for the CPU, and returns the names of those that ran, in order."""
    ran: list[str] = []

    def noted(name: str) -> Callable[..., object]:
        def run(*args: object) -> object:
            ran.append(name)
            return FAKE_KERNELS[name](*args)

        return run

    monkeypatch.setattr(fused, "suits_kernels", lambda x: torch.compiler.is_compiling())
    with torch.library._scoped_library("flatout", "IMPL") as library:
        for name in FAKE_KERNELS:
            library.impl(name, noted(name), "CPU")
        torch.compiler.reset()
        seen_maps.clear()
        yield ran


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training_steps_are_those_of_torch(fake_kernels, backend):
    torch.manual_seed(0)
    network = nn.Sequential(Conv(3, 8, 3), MP(), Conv(8, 4, 1), SP(5)).to(memory_format=torch.channels_last).train()
    for each in network.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.eps = EPS
    twin = copy.deepcopy(network)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    x = torch.rand(2, 3, 12, 10).to(memory_format=torch.channels_last)
    for _ in range(2):
        ran_before = len(fake_kernels)
        expected, found = network(x), compiled(x)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert fake_kernels[ran_before:] == [
            "norm_act_forward", "max_pool_halve_forward", "norm_act_forward", "max_pool_window_forward",
            "max_pool_window_backward", "norm_act_backward", "max_pool_halve_backward", "norm_act_backward",
        ]  # fmt: skip
    for (name, one), other in zip(network.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-4, msg=name)
    for (name, one), other in zip(network.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_convolutions_are_those_of_torch_too(fake_kernels, backend):
    torch.manual_seed(0)
    network = nn.ModuleList([nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.Conv2d(16, 21, 1)])
    network.to(memory_format=torch.channels_last)
    x = torch.rand(2, 3, 12, 10).to(memory_format=torch.channels_last)

    def run(first: nn.Conv2d, last: nn.Conv2d) -> Tensor:
        assert last.bias is not None
        with torch.autocast("cpu", torch.bfloat16):
            return predict(convolve(x, first), last.weight, last.bias)

    gradients = []
    for call in (run, torch.compile(run, fullgraph=True, backend=backend)):
        network.zero_grad()
        y = call(*network)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        gradients.append([y.detach(), *(each.grad for each in network.parameters())])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-1)
    assert fake_kernels == ["stem_forward", "predictions", "predictions_backward", "stem_weight_gradient"]


def test_cuda_accepts_the_grids_of_predictions_for_any_number_of_pixels(monkeypatch):
    """It limits all axes but the first to 65,535."""
    grids = []
    monkeypatch.setitem(sys.modules, "flatout.yolo.model.convolution_kernels", mock.MagicMock())
    monkeypatch.setattr(convolutions, "launch", lambda kernel, key, grid, *rest, **options: grids.append(grid))
    x = torch.empty(600, 160, 128, 128, dtype=torch.half, device="meta").to(memory_format=torch.channels_last)
    weight, bias = torch.empty(255, 160, 1, 1, device="meta"), torch.empty(255, device="meta")
    y = convolutions.predictions(x, weight, bias)
    convolutions.predictions_backward(y, x, weight)
    assert len(grids) == 3 and max(grids)[0] > 100_000
    assert all(max(rows, layers) <= 65_535 for _, rows, layers in grids)


def test_operators_in_compiled_code_have_no_derivative():
    # It would cost the host a second Python call at every layer (fused.py).
    for name in FAKE_KERNELS:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"flatout::{name}", "Autograd")
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"flatout::{name}", "AutogradCUDA")
