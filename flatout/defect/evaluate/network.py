"""A trained network, rewritten for prediction: the same function in fewer operations.

    convolution, batch norm, ReLU   --> convolution that does the work of the batch norm; bias and ReLU as one kernel
    input of three channels         --> of 16 bytes per pixel; the further channels are zeros, with weights of zero
    pooling, upsampling             --> kernels that read and write every value once

Narrow networks are bound by memory and by the number of kernels, not by arithmetic. The kernels are Triton's; without a
GPU or Triton, torch does the same.

Dimension key:  B images   C channels   H W image
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from flatout.defect.data.items import PLANES
from flatout.defect.model import DefectNet
from flatout.kernels import HAS_TRITON

PIXEL_BYTES = 16
"""Pixels of this size are copied as one value, and cuDNN has fast convolutions for them."""

MAX_CHANNELS = 1024
"""Channels of a pixel that the kernel for upsampling can read together."""


def for_prediction(network: DefectNet, dtype: torch.dtype) -> DefectNet:
    """The network in evaluation mode, changed in place; its input has PIXEL_BYTES per pixel, in `dtype`."""
    for module in network.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.MaxPool2d) and child.kernel_size == child.stride == 2:
                setattr(module, name, MaxPool())
            elif isinstance(child, nn.Upsample):
                setattr(module, name, Upsample())
        if isinstance(module, nn.Sequential):
            _fold(module)
    first = network.encoder.block1[0]  # type: ignore[index]
    assert isinstance(first, ConvRelu)
    first.widen_input(PIXEL_BYTES // dtype.itemsize)
    return network


def _fold(block: nn.Sequential) -> None:
    layers = list(block)
    for number, (conv, norm, act) in enumerate(zip(layers, layers[1:], layers[2:], strict=False)):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and isinstance(act, nn.ReLU):
            block[number] = ConvRelu(fuse_conv_bn_eval(conv, norm))
            block[number + 1], block[number + 2] = nn.Identity(), nn.Identity()


class ConvRelu(nn.Module):
    """A convolution and ReLU."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        if not _suits_kernels(x, written=x.numel() // x.shape[1] * self.conv.out_channels):
            return F.relu(self.conv(x), inplace=True)
        from flatout.defect.evaluate.network_triton import add_bias_relu_

        assert self.conv.bias is not None
        out = F.conv2d(x, self.conv.weight, None, self.conv.stride, self.conv.padding)
        return add_bias_relu_(out.contiguous(memory_format=torch.channels_last), self.conv.bias)

    def widen_input(self, channels: int) -> None:
        """Make it take further channels, which it ignores."""
        weight = self.conv.weight
        if channels > weight.shape[1]:
            padding = weight.new_zeros(weight.shape[0], channels - weight.shape[1], *weight.shape[2:])
            self.conv.weight = nn.Parameter(torch.cat((weight.detach(), padding), 1))
            self.conv.in_channels = channels


class MaxPool(nn.Module):
    """The highest of 2 x 2 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        if not _suits_kernels(x, written=x.numel() // 4) or x.shape[2] % 2 or x.shape[3] % 2:
            return F.max_pool2d(x, 2)
        from flatout.defect.evaluate.network_triton import max_pool

        return max_pool(x)


class Upsample(nn.Module):
    """Twice the size, bilinear; corners stay corners."""

    def forward(self, x: Tensor) -> Tensor:
        if not _suits_kernels(x, written=4 * x.numel()) or x.shape[1].bit_count() != 1 or x.shape[1] > MAX_CHANNELS:
            return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        from flatout.defect.evaluate.network_triton import upsample

        return upsample(x)


def input_channels(network: nn.Module) -> int:
    """Channels of the input of a network; of one without convolutions, the planes."""
    return next((each.in_channels for each in network.modules() if isinstance(each, nn.Conv2d)), PLANES)


def finest_channels(network: nn.Module) -> int:
    """Channels of its largest feature maps."""
    return next((each.out_channels for each in network.modules() if isinstance(each, nn.Conv2d)), 1)


def _suits_kernels(x: Tensor, *, written: int) -> bool:
    """Whether the kernels can read `x` and write so many values, which they number with 32 bits."""
    is_here = x.is_cuda and x.get_device() == torch.cuda.current_device()
    is_small = max(x.numel(), written) < 1 << 31
    return HAS_TRITON and is_here and is_small and x.is_contiguous(memory_format=torch.channels_last)
