"""Start a Triton kernel at little cost to the host.

A Triton launch examines every argument to find the compiled kernel that suits them: tens of microseconds, which for a
network of 100 small layers is more than the GPU needs for all of them. A caller that can name what its arguments
depend on (shapes, types, alignment) gets the compiled kernel by that name instead.
"""

import importlib.util
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
ALIGNMENT_BYTES = 16

_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any, key: Hashable, grid: tuple[int, int, int], *args: Any, num_warps: int = 4, **compiling: Any
) -> None:
    """Start the kernel on the current device. Calls with equal `key` must agree in all whole numbers that the kernel is
    specialised for, in constants, types and alignments, and in `compiling`, options of Triton's compiler."""
    name = (kernel, torch.cuda.current_device(), key)
    known = _compiled.get(name)
    if known is None:
        _compiled[name] = kernel[grid](*args, num_warps=num_warps, **compiling)
    else:
        known[grid](*args)


def start(kernel: Any, num_programs: int, *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run `num_programs` programs of `kernel(*args, **constants)`; `constants` are its last parameters, in order.

    For kernels that are specialised for no whole number: the key follows from the arguments.
    """
    values = tuple(constants.values())
    kinds = tuple((each.dtype, is_aligned(each)) if isinstance(each, Tensor) else type(each) for each in args)
    launch(kernel, (values, kinds, num_warps), (num_programs, 1, 1), *args, *values, num_warps=num_warps)


def is_aligned(x: Tensor) -> bool:
    """Does the data begin where wide loads may begin? Triton compiles other code if not."""
    return x.data_ptr() % ALIGNMENT_BYTES == 0
