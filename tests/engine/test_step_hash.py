"""Hashes of what a step is trained on."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatout.engine import step_hash
from flatout.engine.step_hash import ROW_WORDS, HashLog, hash_inputs, hash_tensor
from tests.triton_interpreter import check_in_interpreter, needs_triton


def reference(tensor: Tensor) -> int:
    """The same hash by Python's integers, word by word."""
    content = tensor.contiguous().numpy().tobytes()
    column = step_hash._weights(ROW_WORDS, 1, torch.device("cpu")).tolist()
    row = step_hash._weights(1 << 14, 2, torch.device("cpu")).tolist()
    num_words = len(content) // 8
    words = np.frombuffer(content[: 8 * num_words], np.int64).tolist()
    total = column[0] * len(content)
    total += sum(word * column[at % ROW_WORDS] * row[at // ROW_WORDS] for at, word in enumerate(words))
    total += (
        sum(byte * column[at] for at, byte in enumerate(content[8 * num_words :])) * row[num_words // ROW_WORDS + 1]
    )
    return total % 2**64


def hashed(tensor: Tensor) -> int:
    return int(hash_tensor(tensor)) % 2**64


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 100, 8 * ROW_WORDS, 8 * ROW_WORDS + 8, 3 * 8 * ROW_WORDS + 21])
def test_a_hash_is_the_weighted_sum_of_all_words(num_bytes: int):
    tensor = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert hashed(tensor) == reference(tensor)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16])
def test_any_changed_element_and_any_swap_changes_the_hash(dtype: torch.dtype):
    images = (torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)) * 255).to(dtype)
    seen = {hashed(images)}
    for at in [(0, 0, 0, 0), (1, 2, 31, 31), (0, 1, 7, 30)]:
        changed = images.clone()
        changed[at] = 255 - changed[at]
        seen.add(hashed(changed))
    seen |= {hashed(images.flip(0)), hashed(images.flip(3)), hashed(images.transpose(2, 3))}
    assert len(seen) == 7


def test_a_longer_tensor_that_ends_in_zeros_has_another_hash():
    targets = torch.rand(5, 6)
    assert hashed(targets) != hashed(torch.cat((targets, torch.zeros(1, 6))))


def test_channels_last_images_are_hashed_where_they_lie():
    images = torch.rand(2, 3, 8, 16)
    by_pixel = images.contiguous(memory_format=torch.channels_last)
    assert hashed(by_pixel) == hashed(images.permute(0, 2, 3, 1).contiguous())


def test_a_gpu_multiplies_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch):
    words_RC = torch.randint(-(2**62), 2**62, (5, ROW_WORDS))
    weight_C = step_hash._weights(ROW_WORDS, 1, torch.device("cpu"))
    monkeypatch.setattr(step_hash, "ROWS_AT_ONCE", 2)
    parts = torch.cat([(part * weight_C).sum(1) for part in words_RC.split(2)])
    assert torch.equal(parts, step_hash._row_sums(words_RC, weight_C))


def test_kernels_run_on_the_gpu_of_the_tensors(monkeypatch: pytest.MonkeyPatch):
    entered = list[str]()

    @contextmanager
    def making_current(device: str) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    monkeypatch.setattr(step_hash, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "device", making_current)
    monkeypatch.setattr(step_hash, "_hash_by_kernels", lambda tensors: list(entered))
    there: Any = SimpleNamespace(is_cuda=True, device="cuda:1")
    assert hash_inputs({"images": there, "targets": there}) == ["cuda:1"]


def test_hashes_are_in_the_order_of_names_and_come_with_their_steps():
    log = HashLog(2, torch.device("cpu"))
    steps = [{"targets": torch.full((2,), float(step)), "images": torch.arange(8) + step} for step in range(5)]
    found = []
    for number, inputs in enumerate(steps):
        log.put(3, number, inputs)
        if number % 2:
            found += log.swap()
    found += log.drain()
    assert [(each.epoch, each.step) for each in found] == [(3, step) for step in range(5)]
    for each, inputs in zip(found, steps, strict=True):
        assert each.hashes == (hashed(inputs["images"]), hashed(inputs["targets"]))
        assert [value % 2**64 for value in hash_inputs(inputs).tolist()] == list(each.hashes)


def test_a_log_without_steps_returns_none():
    assert HashLog(2, torch.device("cpu")).drain() == []


@pytest.mark.parametrize("begin", [1, 2, 3])
def test_a_tensor_may_begin_anywhere_in_its_memory(begin: int):
    values = torch.rand(50)
    assert hashed(values[begin:]) == hashed(values[begin:].clone())


@needs_triton
def test_the_kernel_makes_the_same_hashes_in_the_interpreter():
    check_in_interpreter("tests.engine.interpreted_hashes")
