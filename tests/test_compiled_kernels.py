"""GPU kernels compile for the GPUs that people have, and fit into their shared memory; this needs none of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.kernels import HAS_TRITON

ROOT = Path(__file__).parents[1]
NEEDED = "from tests import compiled_kernels as c; "

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.timeout(600),
]


def compiled(*command: str, cache: Path) -> subprocess.CompletedProcess[str]:
    # In a process of its own: its driver stands in for that of a GPU.
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )  # fmt: skip


@pytest.mark.parametrize("gpu", ["V100", "T4", "RTX 4090", "H200", "RTX 5090"])
def test_every_kernel_compiles_and_fits_into_shared_memory(gpu: str, tmp_path: Path):
    done = compiled("-m", "tests.compiled_kernels", gpu, cache=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_gpu_with_too_little_shared_memory_would_be_noticed(tmp_path: Path):
    small = "c.GPUS['H200'] = c.GPUS['H200']._replace(shared_bytes=8192); c.main('H200')"
    done = compiled("-c", NEEDED + small, cache=tmp_path)
    assert done.returncode != 0
    assert "OutOfResources: out of resource: shared memory" in done.stderr


def test_a_kernel_that_is_not_launched_would_be_noticed(tmp_path: Path):
    without_hashes = "c.PARTS = (c.compile_nms,); c.MODULES = (c.greedy_triton, c.step_hash_triton); c.main('H200')"
    done = compiled("-c", NEEDED + without_hashes, cache=tmp_path)
    assert done.stderr.endswith("AssertionError: not launched: add_words\n")
