"""Batch norm learns in the forward pass already: what a bad batch taught it must be unlearned.

A step whose loss is not finite changes no weight, because the optimizer leaves it out. But running means and variances
have taken the batch in by then, would stay NaN for ever, and the moving average with them. So they are copied before
every forward pass, and put back on the device where the loss turns out bad; the host does not look.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class RunningStatistics:
    """All running means and variances of a network, moved into one block of memory: two small kernels per step.

    The network's buffers stay the same tensors, and become views of the block. Make this when the network is on its
    device; loading a state later is fine, moving the network is not.
    """

    def __init__(self, network: nn.Module) -> None:
        buffers = [
            buffer
            for module in network.modules()
            if isinstance(module, _BatchNorm)
            for buffer in (module.running_mean, module.running_var)
            if buffer is not None
        ]
        self._all_N = torch.cat([buffer.detach().reshape(-1) for buffer in buffers]) if buffers else None
        self._kept_N = self._all_N.clone() if self._all_N is not None else None
        offset = 0
        for buffer in buffers:
            assert self._all_N is not None
            # Through .data the tensor itself stays: whoever holds it, such as a moving average, goes on seeing it.
            buffer.data = self._all_N[offset : offset + buffer.numel()].view_as(buffer)
            offset += buffer.numel()

    def keep(self) -> None:
        """Before the forward pass."""
        if self._kept_N is not None and self._all_N is not None:
            self._kept_N.copy_(self._all_N)

    def put_back_if(self, bad: Tensor) -> None:
        """After it: back to what was kept if `bad` is True, a bool with one element on the device."""
        if self._kept_N is not None and self._all_N is not None:
            torch.where(bad, self._kept_N, self._all_N, out=self._all_N)
