"""Which renderer paints on a device: one Triton kernel where there is Triton and a GPU, else plain torch."""

import functools
import logging

import torch

from flatout.defect.patches import Grid
from flatout.defect.render_torch import PatchRenderer
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.kernels import Kernels
from flatout.engine.launch import HAS_TRITON

logger = logging.getLogger(__name__)


def renderer_for(grid: Grid, config: SynthConfig, kernels: Kernels, device: torch.device) -> PatchRenderer:
    """A renderer of the parameters of `source.ParameterSource`; all give the same bits."""
    if device.type == "cuda":
        if HAS_TRITON:
            from flatout.defect.render_triton import TritonRenderer

            return TritonRenderer(grid, config, kernels, device)
        say_what_is_missing()
    return PatchRenderer(grid, config, kernels, device)


@functools.cache
def say_what_is_missing() -> None:
    """Once, to people with a GPU and no Triton."""
    logger.warning(
        "Triton is not installed: patches are painted on the GPU by some two hundred torch operations instead of one "
        "kernel, and small batches wait for them. `pip install triton` mends it."
    )
