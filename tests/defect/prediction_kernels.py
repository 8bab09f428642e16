"""Compares the kernels of the rewritten network with torch; as a program, in Triton's interpreter.

The interpreter has to be enabled before Triton is imported, which needs a separate process.
"""

from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = [(2, 8, 6, 10), (3, 16, 4, 4), (1, 64, 2, 2), (1, 8, 32, 48)]


def check(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Raise AssertionError if a kernel differs from torch."""
    from flatout.defect.evaluate.network_triton import add_bias_relu_, max_pool, upsample

    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=generator).to(device, dtype).contiguous(memory_format=torch.channels_last)
        bias = torch.randn(shape[1], generator=generator).to(device)
        _same(max_pool(x), F.max_pool2d(x, 2), 0)
        _same(upsample(x), F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), tolerance)
        _same(add_bias_relu_(x.clone(memory_format=torch.preserve_format), bias), _plain(x, bias), tolerance)


def _plain(x: Tensor, bias: Tensor) -> Tensor:
    return F.relu(x.float() + bias[:, None, None]).to(x.dtype)


def _same(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


if __name__ == "__main__":
    from flatout.defect.evaluate import network_triton

    def start(kernel, num_programs, *args, **constants):
        kernel[(num_programs,)](*args, **constants)

    # The launcher asks for the current GPU.
    with mock.patch.object(network_triton, "start", start):
        check("cpu", torch.float32, 1e-6)
