"""Run a module of tests in Triton's interpreter, which needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.kernels import HAS_TRITON

ROOT = Path(__file__).parents[1]


def launch_interpreted(kernel: Any, key: object, grid: tuple[int, ...], *args: Any, num_warps: int = 4) -> None:
    """`flatout.kernels.launch` for the interpreter, which compiles nothing and has no device."""
    kernel[grid](*args)


needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def check_in_interpreter(module: str) -> None:
    """Check that `python -m MODULE` succeeds there."""
    # In a separate process: Triton decides on import whether it interprets.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("Triton's interpreter cannot count loops with this version of NumPy")
    assert done.returncode == 0, done.stderr
