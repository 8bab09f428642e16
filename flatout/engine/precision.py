"""In which number format a step computes, and how a step that went wrong is left out.

Gradients are checked on the device before every optimizer step. If any is not finite, the optimizer's kernel changes
nothing; nobody waits to learn of it. In float16 the loss is also multiplied, so that small gradients survive.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from flatout.errors import ConfigError

Amp = Literal["off", "fp16", "bf16"]
DTYPES: dict[str, torch.dtype] = {"off": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the loss is multiplied by twice as much (torch's own defaults)."""


class Precision:
    """Autocast and loss scaling of one training."""

    def __init__(self, amp: Amp, device: torch.device) -> None:
        if amp not in DTYPES:
            raise ConfigError(f"amp={amp!r} is unknown: use {', '.join(map(repr, DTYPES))}.")
        if amp == "fp16" and device.type != "cuda":
            raise ConfigError("amp='fp16' needs a GPU: on the CPU use 'off' or 'bf16'.")
        self.amp = amp
        self.device = device
        self.dtype = DTYPES[amp]
        first = FIRST_SCALE if amp == "fp16" else 1.0
        self._scale = torch.full((), first, device=device)
        self._inverse = torch.full((), 1 / first, device=device)
        self._streak = torch.zeros((), dtype=torch.int32, device=device)
        self.found_bad = torch.zeros((), device=device)
        """1 if a gradient of the last optimizer step was not finite."""

    def autocast(self, *, cached: bool = True) -> AbstractContextManager[object]:
        """`cached=False` while a CUDA graph is captured: a cast made before would not be part of it."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.amp != "off", cache_enabled=cached)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self._scale if self.amp == "fp16" else loss

    def check(self, gradients: Iterable[Tensor]) -> Tensor:
        """Undo the scaling in place; returns `found_bad`, on the device."""
        self.found_bad.zero_()
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for gradient in gradients:
            groups.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for group in groups.values():
            torch._amp_foreach_non_finite_check_and_unscale_(group, self.found_bad, self._inverse)
        return self.found_bad

    def update(self) -> None:
        """After an optimizer step: half the scale if it overflowed, twice after long success."""
        if self.amp == "fp16":
            torch._amp_update_scale_(self._scale, self._streak, self.found_bad, 2.0, 0.5, GROWTH_INTERVAL)
            torch.reciprocal(self._scale, out=self._inverse)

    def state_dict(self) -> dict[str, Any]:
        return {"amp": self.amp, "scale": float(self._scale), "streak": int(self._streak)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A run that goes on in another format, such as a GPU's on the CPU, begins with that format's own scale."""
        if state.get("amp", self.amp) != self.amp:
            return
        self._scale.fill_(state["scale"])
        self._streak.fill_(state["streak"])
        torch.reciprocal(self._scale, out=self._inverse)


def default_fast_amp(device: torch.device) -> Amp:
    """bf16 where the GPU computes in it, else fp16; nothing on the CPU."""
    if device.type != "cuda":
        return "off"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
