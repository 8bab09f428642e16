"""All GPU kernels of the package, compiled by Triton for a GPU that need not be there. Nothing is run.

python -m tests.compiled_kernels "RTX 4090"

Launches them with tensors of the CPU, as the package would with those of a GPU, through a driver that compiles, but
loads and starts nothing: what a kernel should have written is zero. Fails if the compiler refuses a kernel, if one
needs more shared memory than the GPU has, or if a kernel of the package was not launched.
"""

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flatout import kernels
from flatout.defect import render_triton as defect_render
from flatout.defect.evaluate import network_triton
from flatout.engine import step_hash_triton
from flatout.engine.step_hash import _hash_by_kernels
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu import labels_triton, paste_triton, render_triton
from flatout.yolo.augment.gpu.labels_torch import DeviceLabels
from flatout.yolo.augment.gpu.source import ParameterSource
from flatout.yolo.label_audit import kernels as audit_kernels
from flatout.yolo.loss import (
    LossConfig,
    LossParts,
    kernels_assign,
    kernels_loss,
    kernels_math,
    losses,
    ota_loss,
    ota_router_loss,
    plain_loss,
)
from flatout.yolo.model import convolution_kernels, convolutions, copies, fused, fused_kernels
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network
from flatout.yolo.nms import greedy_triton
from tests.defect import two_renderers as defect_renderers
from tests.yolo.augment import two_renderers
from tests.yolo.augment.scenes import busy_set, image_set_of, written
from tests.yolo.detection_batch import make_batch
from tests.yolo.head_batches import make_groups, make_head_batch
from tests.yolo.two_label_sums import NUM_LABELS, STEPS

MODULES: tuple[ModuleType, ...] = (
    defect_render, network_triton, step_hash_triton, labels_triton, paste_triton, render_triton, audit_kernels,
    kernels_assign, kernels_loss, kernels_math, convolution_kernels, fused_kernels, greedy_triton,
)  # fmt: skip
"""All modules with kernels."""


class Gpu(NamedTuple):
    """What the compiler has to know."""

    capability: int
    shared_bytes: int
    """Most shared memory of a program."""
    half: torch.dtype
    """The half precision of its trainings."""


GPUS = {
    "V100": Gpu(70, 98_304, torch.float16),
    "T4": Gpu(75, 65_536, torch.float16),
    "RTX 4090": Gpu(89, 101_376, torch.bfloat16),
    "H200": Gpu(90, 232_448, torch.bfloat16),
    "RTX 5090": Gpu(120, 101_376, torch.bfloat16),
}


class CompilingDriver:
    """A driver of Triton for a GPU that is not there."""

    def __init__(self, gpu: Gpu) -> None:
        self.utils = self
        self._gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._gpu.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._gpu.shared_bytes}

    def load_binary(self, *binary: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spilled registers, most threads."""
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *launch: None


def cleared(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **more: make(*args, **more).zero_()


def fake_gpu(gpu: Gpu) -> ExitStack:
    """The package takes tensors of the CPU for those of this GPU where it chooses kernels."""
    stack = ExitStack()
    driver.set_active(CompilingDriver(gpu))
    for target, name, value in (
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device", nullcontext),
        # Tables of the loss and of the renderers are read by the host, or used as indices.
        (torch, "empty", cleared(torch.empty)),
        (torch, "empty_like", cleared(torch.empty_like)),
        (kernels, "stream_of", lambda device: 0),
        (fused, "stream_of", lambda device: 0),
        (fused, "suits_kernels", lambda x: x.is_contiguous(memory_format=torch.channels_last)),
        (fused, "_has_tanh", lambda device: gpu.capability >= 75),
        (losses, "can_use_kernels", lambda maps: True),
    ):
        stack.enter_context(mock.patch.object(target, name, value))
    return stack


def compile_network(half: torch.dtype) -> None:
    """Training steps in half precision and without it, with LeakyReLU and SiLU; then what only other networks need."""
    for name, dtype in (("yolov7-tiny", half), ("yolov7-tiny", None), ("yolov7", half)):
        config: Any = load_config(name)
        network = build_network({**config, "nc": 80, "width_multiple": 0.25 if name == "yolov7" else 1.0})
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.rand(2, 3, 64, 64).to(dtype or torch.float32, memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            maps = network(x)
        sum(each.float().sum() for each in maps).backward()
    x = torch.rand(2, 16, 8, 8, dtype=half).to(memory_format=torch.channels_last).requires_grad_()
    torch.cat(copies.forked(x, 6)).sum().backward()
    weight = torch.rand(32, 3, 3, 3, dtype=half).to(memory_format=torch.channels_last).requires_grad_()
    image = torch.rand(2, 3, 8, 8, dtype=half).to(memory_format=torch.channels_last)
    convolutions._Stem.apply(image, weight, 2).sum().backward()


def compile_loss(half: torch.dtype) -> None:
    """Assignment, loss and gradient, for one head and several."""
    one, groups = make_batch([3, 0, 5], num_classes=80), make_groups([(0, 2), (1, 3, 4), (5,)])
    several = make_head_batch([3, 0, 5], groups)
    focal = LossConfig(fl_gamma=1.5, label_smoothing=0.1)
    ways: list[tuple[Callable[..., LossParts], Any, torch.dtype, LossConfig, tuple[object, ...]]] = [
        (plain_loss, one, half, LossConfig(), ()),
        (ota_loss, one, half, focal, ()),
        (ota_loss, one, torch.float32, LossConfig(), ()),
        (ota_router_loss, several, half, LossConfig(), (groups,)),
    ]
    for loss, batch, dtype, config, more in ways:
        maps = [each.to(dtype).requires_grad_() for each in batch.maps]
        loss(maps, batch.targets, batch.anchors, config, *more).total.sum().backward()


def compile_label_sums(half: torch.dtype) -> None:
    for name in ("plain", "focal", "heads, ota"):
        step = STEPS[name]()
        total_TK, confused_T = torch.zeros(NUM_LABELS + 1, 6), torch.zeros(NUM_LABELS + 1, dtype=torch.int32)
        maps = [each.to(half) for each in step.maps]
        audit_kernels.add_on_device(
            total_TK, confused_T, maps, step.assigned, step.label_T1, step.anchors, step.config
        )  # fmt: skip


def compile_nms(half: torch.dtype) -> None:
    greedy_triton.greedy_kernel(torch.rand(9, 4), torch.tensor([4, 5]), 0.5, 300)


def compile_hashes(half: torch.dtype) -> None:
    _hash_by_kernels([torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(5, 6), torch.zeros(3, dtype=half)])


def compile_augmentation(half: torch.dtype) -> None:
    """Images, pasted and copied objects, labels: of all kinds that an input can ask for."""
    two_renderers.rendered("perspective", render_triton.TritonRender, torch.uint8, "cpu", num=2)
    two_renderers.rendered("mixed", render_triton.TritonRender, half, "cpu", num=2, recolor=False)
    for subsampled in (False, True):
        two_renderers.pasted(paste_triton.paste_objects, half, "cpu", subsampled=subsampled)
        render = render_triton.TritonRender(subsampled=subsampled)
        two_renderers.copied(paste_triton.fill_polygons, render, half, "cpu", subsampled=subsampled)
    image_set = image_set_of(*busy_set(12, seed=3, polygons="some"))
    for perspective in (0.0, 0.001):
        config = AugmentConfig(mixup=0.5, paste_in=0.5, perspective=perspective)
        source = ParameterSource(image_set, config, size=64, defer_labels=True)
        draws = source.draw(2, 0, np.arange(4), np.arange(4))
        params = {name: torch.from_numpy(array) for name, array in written(source, np.arange(4), draws).items()}
        finish = labels_triton.TritonLabels(DeviceLabels.of(image_set.labels, "cpu"), perspective=perspective > 0)
        finish(params["targets"], params, (64, 64), torch.zeros(1, dtype=torch.int32))


def compile_defect(half: torch.dtype) -> None:
    for name in defect_renderers.RECIPES:
        defect_renderers.by_both(name, "cpu", num=6, channels_last=name == "standard")
    for dtype in (half, torch.float32):
        for channels in (8, 64):
            x = torch.rand(2, channels, 16, 16).to(dtype, memory_format=torch.channels_last)
            network_triton.add_bias_relu_(network_triton.upsample(network_triton.max_pool(x)), torch.zeros(channels))


PARTS: tuple[Callable[[torch.dtype], None], ...] = (
    compile_network, compile_loss, compile_label_sums, compile_nms, compile_hashes, compile_augmentation,
    compile_defect,
)  # fmt: skip


def kernels_of(modules: tuple[ModuleType, ...]) -> set[str]:
    """Names of the functions that no other one of them calls."""
    functions = {
        name: each for module in modules for name, each in vars(module).items() if isinstance(each, JITFunction)
    }
    texts = {name: each.src.split(":", 1)[1] for name, each in functions.items()}
    return {
        name
        for name in functions
        if not any(re.search(rf"\b{name}\(", text) for caller, text in texts.items() if caller != name)
    }


def main(name: str) -> None:
    gpu, compiled = GPUS[name], set[str]()
    compile_kernel = JITFunction._do_compile

    def note(kernel: JITFunction, *request: Any, **more: Any) -> Any:
        compiled.add(kernel.__name__)
        return compile_kernel(kernel, *request, **more)

    with fake_gpu(gpu), mock.patch.object(JITFunction, "_do_compile", note):
        for compile_part in PARTS:
            compile_part(gpu.half)
    missing = kernels_of(MODULES) - compiled
    assert not missing, f"not launched: {', '.join(sorted(missing))}"
    print(f"{len(compiled)} kernels compiled for {name}")


if __name__ == "__main__":
    main(sys.argv[1])
