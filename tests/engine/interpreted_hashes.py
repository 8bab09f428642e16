"""Hashes by the kernel, in Triton's interpreter, are those by torch operations.

TRITON_INTERPRET=1 python -m tests.engine.interpreted_hashes
"""

from unittest import mock

import torch

from flatout.engine.step_hash import ROW_WORDS, _hash_by_kernels, hash_tensor
from tests.triton_interpreter import launch_interpreted

ROW_BYTES = 8 * ROW_WORDS


def main() -> None:
    torch.manual_seed(0)
    flat = [torch.randint(256, (size,), dtype=torch.uint8) for size in (0, 1, 9, ROW_BYTES, ROW_BYTES + 13, 105)]
    images = torch.rand(3, 3, 48, 80).bfloat16().to(memory_format=torch.channels_last)
    tensors = [*flat, flat[-1][1:], images, torch.rand(7, 6), torch.rand(0, 6)]
    with mock.patch("flatout.kernels.launch", launch_interpreted):
        assert _hash_by_kernels(tensors).tolist() == [hash_tensor(tensor).item() for tensor in tensors]


if __name__ == "__main__":
    main()
