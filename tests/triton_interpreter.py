"""Run a module of tests in Triton's interpreter, which needs no GPU."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.kernels import HAS_TRITON

ROOT = Path(__file__).parents[1]


def launch_interpreted(kernel: Any, key: object, grid: tuple[int, ...], *args: Any, num_warps: int = 4) -> None:
    """`flatout.kernels.launch` for the interpreter, which compiles nothing and has no device."""
    kernel[grid](*args)


def needs_triton(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that calls `check_in_interpreter`: skipped without Triton, and it may take minutes."""
    return pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")(pytest.mark.timeout(600)(test))


def check_in_interpreter(module: str) -> None:
    """Check that `python -m MODULE` succeeds there."""
    # In a separate process: Triton decides on import whether it interprets.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.triton_interpreter", module]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _count_loops_with_any_numpy() -> None:
    """Triton's interpreter counts loops by arrays of one element, which are no integers for NumPy from 2.4 on."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    _count_loops_with_any_numpy()
    runpy.run_module(sys.argv[1], run_name="__main__")
