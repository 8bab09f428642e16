"""Start a Triton kernel at little cost to the host.

A Triton launch examines every argument to find the compiled kernel that suits them: tens of microseconds, which for a
network of 100 small layers is more than the GPU needs for all of them. A caller that can name what its arguments
depend on (shapes, types, alignment) gets the compiled kernel by that name instead. One that also keeps what belongs to
the name has the kernel `prepared` once and then starts it with bare addresses.

Neither calls the launch hooks of Triton's own profiler; torch.profiler and Nsight see these launches like any other.
"""

import importlib.util
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
ALIGNMENT_BYTES = 16

Grid = tuple[int, int, int]
Start = Callable[..., None]
"""start(stream, *addresses), both as whole numbers."""

_compiled: dict[Hashable, Any] = {}


def launch(kernel: Any, key: Hashable, grid: Grid, *args: Any, num_warps: int = 4, **compiling: Any) -> None:
    """Start the kernel on the current device. Calls with equal `key` must agree in all whole numbers that the kernel is
    specialised for, in constants, types and alignments, and in `compiling`, options of Triton's compiler."""
    device = torch.cuda.current_device()
    name = (kernel, device, key)
    known = _compiled.get(name)
    if known is None:
        _compiled[name] = kernel[grid](*args, num_warps=num_warps, **compiling)
    else:
        known.run(*grid, stream_of(device), known.function, known.packed_metadata, None, None, None, *args)


def start(kernel: Any, num_programs: int, *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run `num_programs` programs of `kernel(*args, **constants)`; `constants` are its last parameters, in order.

    For kernels that are specialised for no whole number: the key follows from the arguments.
    """
    values = tuple(constants.values())
    kinds = tuple((each.dtype, is_aligned(each)) if isinstance(each, Tensor) else type(each) for each in args)
    launch(kernel, (values, kinds, num_warps), (num_programs, 1, 1), *args, *values, num_warps=num_warps)


@dataclass(frozen=True)
class Pointer:
    """What Triton asks of a tensor when it compiles a kernel for it."""

    dtype: torch.dtype
    is_aligned: bool = True

    def data_ptr(self) -> int:
        return 0 if self.is_aligned else 1


def prepared(kernel: Any, grid: Grid, pointers: Sequence[Pointer], rest: Sequence[Any], num_warps: int = 4) -> Start:
    """Compile kernel(*pointers, *rest) for the current device, without starting it; `rest` are numbers and constants.

    The result starts it, on that device, with the addresses of tensors that are as the pointers say. Nothing is looked
    at on the way, so a tensor of another type, or on the CPU, is read wrongly and not refused.
    """
    compiled = kernel.warmup(*pointers, *rest, grid=grid, num_warps=num_warps)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    columns, rows, layers = grid

    def start_again(stream: int, *addresses: int) -> None:
        run(columns, rows, layers, stream, function, metadata, None, None, None, *addresses, *rest)

    return start_again


def stream_of(device: int) -> int:
    """The current stream of a device, as launches take it: a tenth of the cost of torch.cuda.current_stream()."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def is_aligned(x: Tensor) -> bool:
    """Does the data begin where wide loads may begin? Triton compiles other code if not."""
    return x.data_ptr() % ALIGNMENT_BYTES == 0
