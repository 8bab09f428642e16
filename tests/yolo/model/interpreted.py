"""Our kernels on small maps in Triton's interpreter, compared with torch's: pooling, copies, sums, convolutions.

TRITON_INTERPRET=1 python -m tests.yolo.model.interpreted
"""

import copy
import ctypes
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.kernels import Pointer
from flatout.yolo.model import convolutions, copies, fused, pooling
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.layers import Conv
from flatout.yolo.model.network import build_network

HALF = torch.float16
"""The interpreter cannot multiply matrices of bfloat16."""


def launch_interpreted(kernel: Any, key: object, grid: tuple[int, ...], *args: Any, num_warps: int = 4) -> None:
    kernel[grid](*args)


def prepared_interpreted(
    kernel: Any, grid: tuple[int, ...], pointers: Sequence[Pointer], rest: Sequence[Any], num_warps: int = 4
) -> Callable[..., None]:
    def start(stream: int, *addresses: int) -> None:
        places = [(ctypes.c_char * 16).from_address(each) for each in addresses]
        tensors = [
            torch.frombuffer(place, dtype=each.dtype, count=1) for place, each in zip(places, pointers, strict=True)
        ]
        kernel[grid](*tensors, *rest)

    return start


def random_map(*shape: int, dtype: torch.dtype = torch.float32, wide: int = 0) -> Tensor:
    """A channels_last map; with `wide`, a slice of one with that many channels."""
    batch, channels, height, width = shape
    generator = torch.Generator().manual_seed(sum(shape) + wide)
    values = torch.randn(batch, height, width, max(wide, channels), generator=generator)
    return values.permute(0, 3, 1, 2)[:, wide and wide - channels :][:, :channels].to(dtype)


def compare(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], xs: Sequence[Tensor], dz_wide: int = 0, limit: float = 0
) -> None:
    """Outputs and gradients differ by at most `limit` of their norm."""
    found, expected = [each.clone().requires_grad_() for each in xs], [each.clone().requires_grad_() for each in xs]
    z, expected_z = ours(*found), theirs(*expected)
    dz = random_map(*expected_z.shape, dtype=expected_z.dtype, wide=dz_wide)
    pairs = [(z, expected_z)]
    gradients = torch.autograd.grad(z, found, dz), torch.autograd.grad(expected_z, expected, dz)
    for one, other in (*pairs, *zip(*gradients, strict=True)):
        assert one.shape == other.shape and one.dtype == other.dtype
        error = float((one.double() - other.double()).norm() / other.double().norm())
        assert error <= limit, (error, one.shape)


def check_pooling() -> None:
    x = random_map(2, 24, 9, 7)
    for k in (5, 9, 13):
        compare(
            lambda x, k=k: pooling.max_pool_same(x, k), lambda x, k=k: F.max_pool2d(x, k, 1, k // 2), [x], limit=1e-6
        )

    def both(x: Tensor) -> Tensor:
        p5 = pooling.max_pool_same(x, 5)
        p9 = pooling.max_pool_same(x, 9, p5, 5)
        return torch.cat((p5, p9, pooling.max_pool_same(x, 13, p9, 9)), 1)

    compare(both, lambda x: torch.cat([F.max_pool2d(x, k, 1, k // 2) for k in (5, 9, 13)], 1), [x], limit=1e-6)
    ties = torch.zeros(1, 16, 6, 5).contiguous(memory_format=torch.channels_last)
    compare(lambda x: pooling.max_pool_same(x, 5), lambda x: F.max_pool2d(x, 5, 1, 2), [ties + 1], limit=1e-6)


def check_copies() -> None:
    maps = [random_map(2, channels, 5, 4) for channels in (16, 40, 16, 16, 24)]
    compare(lambda *xs: copies.concat(xs), lambda *xs: torch.cat(xs, 1), maps)
    compare(lambda *xs: copies.concat(xs), lambda *xs: torch.cat(xs, 1), maps[:2])
    compare(copies.double, lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), maps[:1], 40, limit=1e-6)

    def readers(x: Tensor, num: int, fork: Callable[[Tensor, int], list[Tensor]]) -> Tensor:
        readers = fork(x, num)
        return torch.cat([each * (index + 1) if index else each for index, each in enumerate(readers)], 1)

    for num in (2, 3, 4, 6):
        compare(
            lambda x, num=num: readers(x, num, copies.forked), lambda x, num=num: readers(x, num, lambda x, n: [x] * n),
            maps[1:2], limit=1e-6,
        )  # fmt: skip
    x = random_map(2, 16, 5, 4).requires_grad_()
    one, _ = copies.forked(x, 2)
    one.sum().backward()
    assert x.grad is not None and bool((x.grad == 1).all()), "a reader without a gradient counts nothing"


def check_stem() -> None:
    for stride, shape in ((1, (2, 3, 9, 6)), (2, (2, 3, 9, 6)), (2, (1, 3, 8, 12))):
        x, dtype = random_map(*shape, dtype=HALF), HALF
        conv = nn.Conv2d(3, 32, 3, stride, 1, bias=False)
        weight = conv.weight.detach().to(dtype).to(memory_format=torch.channels_last)
        compare(
            lambda w, x=x, s=stride: convolutions._Stem.apply(x, w, s),
            lambda w, x=x, s=stride: F.conv2d(x, w, None, s, 1), [weight], limit=1e-3,
        )  # fmt: skip


def check_stem_with_norm() -> None:
    norm, act = nn.BatchNorm2d(32, eps=1e-3, momentum=0.03), nn.LeakyReLU(0.1)
    nn.init.normal_(norm.bias)
    x, plain = random_map(2, 3, 10, 6, dtype=HALF), copy.deepcopy(norm)
    weight = (torch.randn(32, 3, 3, 3, generator=torch.Generator().manual_seed(0)) / 5).to(HALF)
    weight = weight.to(memory_format=torch.channels_last)

    def ours(weight: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        z: Tensor = convolutions._StemNormAct.apply(x, weight, 2, gamma, beta, *fused.norm_act_arguments(norm, act)[2:])
        return z

    def theirs(weight: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        y = F.conv2d(x, weight, None, 2, 1)
        return act(F.batch_norm(y.float(), None, None, gamma, beta, True, 0.03, 1e-3)).to(HALF)

    compare(ours, theirs, [weight, norm.weight.detach(), norm.bias.detach()], dz_wide=64, limit=2e-3)
    plain(F.conv2d(x, weight, None, 2, 1).float())
    for mine, expected in zip(norm.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5)


def check_predictions() -> None:
    for num, channels in ((255, 32), (21, 160)):
        weight, bias = random_map(num, channels, 1, 1), torch.linspace(-1, 1, num)
        x = random_map(2, channels, 5, 9, dtype=HALF)
        compare(
            convolutions._Predict.apply, lambda x, w, b: F.conv2d(x, w.half(), b.half()), [x, weight, bias], limit=1e-3
        )


def check_norms() -> None:
    """Of a map, and of two slices of one."""
    norms = [nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03) for channels in (8, 24)]
    acts = (nn.LeakyReLU(0.1), nn.SiLU())
    for each in norms:
        nn.init.uniform_(each.weight, 0.5, 1.5)
        nn.init.normal_(each.bias)
    plain = copy.deepcopy(norms)

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.cat(fused.norm_act_pair(x, (norms[0], norms[1]), acts), 1)

    def theirs(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.cat([a(n(each)) for a, n, each in zip(acts, plain, x.split((8, 24), 1), strict=True)], 1)

    compare(ours, theirs, [random_map(2, 32, 5, 7)], dz_wide=48, limit=1e-5)
    for one, other in zip(norms, plain, strict=True):
        for mine, expected in zip(one.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(mine, expected)
    compare(
        lambda x: fused.norm_act(x, norms[1], acts[1]), lambda x: acts[1](plain[1](x)), [random_map(2, 24, 5, 7)],
        limit=1e-5,
    )  # fmt: skip


def check_network() -> None:
    """All of them in a whole network: sums of gradients, pools that begin with others, pairs of convolutions."""
    torch.manual_seed(0)
    network = build_network(load_config("yolov7-tiny")).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for each in network.modules():
        if isinstance(each, Conv):
            each.act = nn.SiLU()  # Where LeakyReLU has its corner, rounding decides about gradients.
    x = torch.rand(2, 3, 64, 64).to(memory_format=torch.channels_last)
    results = []
    for suits in (lambda x: False, fused.suits_kernels):
        network.zero_grad()
        with mock.patch.object(fused, "suits_kernels", suits):
            outputs = network(x)
        sum(each.square().sum() for each in outputs).backward()
        results.append([*outputs, *(each.grad.clone() for each in network.parameters())])
    for one, other in zip(*results, strict=True):
        assert float((one - other).norm()) <= 1e-3 * float(other.norm()) + 1e-6


def main() -> None:
    with (
        mock.patch.object(pooling, "launch", launch_interpreted),
        mock.patch.object(copies, "launch", launch_interpreted),
        mock.patch.object(fused, "prepared", prepared_interpreted),
        mock.patch.object(fused, "stream_of", return_value=0),
        mock.patch.object(fused, "uses_tanh", return_value=False),
        mock.patch.object(convolutions, "launch", launch_interpreted),
        mock.patch.object(fused, "suits_kernels", lambda x: x.is_contiguous(memory_format=torch.channels_last)),
    ):
        check_pooling()
        check_copies()
        check_norms()
        check_stem()
        check_stem_with_norm()
        check_predictions()
        check_network()


if __name__ == "__main__":
    main()
