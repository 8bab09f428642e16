"""Launch Triton kernels with little host overhead.

A Triton launch examines every argument to find the compiled kernel that matches: tens of microseconds, which for a
network of 100 small layers is more than the GPU needs for all of them. A caller that can give a key for what its
arguments depend on (shapes, types, alignment) gets the compiled kernel by that key instead (`launch`, `start`). One
that keeps the kernel itself compiles it once with `prepared` and then starts it with bare addresses.

None of these calls the launch hooks of Triton's own profiler; torch.profiler and Nsight see the launches as usual.
"""

import importlib.util
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.clock import span

HAS_TRITON = importlib.util.find_spec("triton") is not None
ALIGNMENT_BYTES = 16

Grid = tuple[int, int, int]
Start = Callable[..., None]
"""start(stream, *addresses), all of them integers."""

_compiled: dict[Hashable, Any] = {}


def launch(kernel: Any, key: Hashable, grid: Grid, *args: Any, num_warps: int = 4, **compiling: Any) -> None:
    """Start the kernel on the current device.

    Calls with equal `key` must agree in all integers that the kernel is specialised for, in constants, types and
    alignments, and in `compiling`, the options of Triton's compiler.
    """
    device = torch.cuda.current_device()
    name = (kernel, device, key)
    known = _compiled.get(name)
    if known is None:
        with span("kernels"):
            _compiled[name] = kernel[grid](*args, num_warps=num_warps, **compiling)
    else:
        known.run(*grid, stream_of(device), known.function, known.packed_metadata, None, None, None, *args)


def start(kernel: Any, num_programs: int, *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run `num_programs` programs of `kernel(*args, **constants)`; `constants` are its last parameters, in any order.

    For kernels that are not specialised for any integer: the key is derived from the arguments.
    """
    names = kernel.arg_names[len(args) :]
    if len(constants) != len(names):
        raise TypeError(f"{kernel.__name__} takes the constants {', '.join(names)}, not {', '.join(constants)}")
    values = tuple(constants[name] for name in names)
    kinds = tuple((each.dtype, is_aligned(each)) if isinstance(each, Tensor) else type(each) for each in args)
    launch(kernel, (values, kinds, num_warps), (num_programs, 1, 1), *args, *values, num_warps=num_warps)


@dataclass(frozen=True)
class Pointer:
    """The properties of a tensor that Triton needs to compile a kernel for it."""

    dtype: torch.dtype
    is_aligned: bool = True

    def data_ptr(self) -> int:
        return 0 if self.is_aligned else 1


def prepared(kernel: Any, grid: Grid, pointers: Sequence[Pointer], rest: Sequence[Any], num_warps: int = 4) -> Start:
    """Compile kernel(*pointers, *rest) for the current device without starting it; `rest` are numbers and constants.

    The returned function starts it, on that device, with the addresses of tensors that match the pointers. Nothing is
    checked: a tensor of another type, or on the CPU, is read incorrectly instead of being rejected.
    """
    with span("kernels"):
        compiled = kernel.warmup(*pointers, *rest, grid=grid, num_warps=num_warps)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    columns, rows, layers = grid

    def start_again(stream: int, *addresses: int) -> None:
        run(columns, rows, layers, stream, function, metadata, None, None, None, *addresses, *rest)

    return start_again


def stream_of(device: int) -> int:
    """Handle of a device's current stream, for launches; a tenth of the cost of torch.cuda.current_stream()."""
    return torch._C._cuda_getCurrentRawStream(device)


def is_aligned(x: Tensor) -> bool:
    """Whether the data is aligned for wide loads; Triton compiles different code if it is not."""
    return x.data_ptr() % ALIGNMENT_BYTES == 0
