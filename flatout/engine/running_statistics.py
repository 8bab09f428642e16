"""Batch norm learns in the forward pass already: what a bad batch taught it must be unlearned.

A step whose loss is not finite changes no weight, because the optimizer leaves it out. But running means and variances
have taken the batch in by then, would stay NaN for ever, and the moving average with them. So they are copied before
every forward pass, and put back on the device where the loss turns out bad; the host does not look.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class RunningStatistics:
    """All running means and variances of a network: a few small kernels per step.

    They stay where they are in memory. One block for all of them would save a kernel or two, but torch 2.11 compiles
    code for buffers in the middle of a block that reads other memory than theirs (operators that change them in place).
    """

    def __init__(self, network: nn.Module) -> None:
        self._buffers = [
            buffer
            for module in network.modules()
            if isinstance(module, _BatchNorm)
            for buffer in (module.running_mean, module.running_var)
            if buffer is not None
        ]
        self._kept_N = self._all() if self._buffers else None

    def keep(self) -> None:
        """Before the forward pass."""
        if self._kept_N is not None:
            self._kept_N.copy_(self._all())

    def put_back_if(self, bad: Tensor) -> None:
        """After it: back to what was kept if `bad` is True, a bool with one element on the device."""
        if self._kept_N is not None:
            right_N = torch.where(bad, self._kept_N, self._all())
            torch._foreach_copy_(self._buffers, right_N.split([buffer.numel() for buffer in self._buffers]))

    def _all(self) -> Tensor:
        return torch.cat(self._buffers)
