"""Out of GPU memory: the message suggests a batch size that would fit (F27)."""

import pytest
import torch

from flatout.engine.loop import fitting_batch, out_of_memory_error

GIB = 2**30


@pytest.mark.parametrize(
    ("batch_size", "used", "total", "fits"),
    [(64, 40 * GIB, 20 * GIB, 28), (64, 20 * GIB, 20 * GIB, 57), (64, 0, 0, 32), (1, 0, 0, 1), (2, 900 * GIB, GIB, 1)],
)
def test_what_fits_is_in_proportion_with_a_tenth_left_free(batch_size: int, used: int, total: int, fits: int):
    assert fitting_batch(batch_size, used=used, total=total) == fits


def test_a_batch_that_did_not_fit_is_never_suggested_again():
    assert all(fitting_batch(size, used=1, total=GIB) < size for size in range(2, 100))


def test_the_message_names_the_batch_the_memory_and_a_remedy():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...")
    raised = out_of_memory_error(error, batch_size=16, device=torch.device("cpu"))
    assert raised.exit_code == 5
    for words in ("out of GPU memory with 16 ", "1536 MiB more", "a batch size of 8", "The last checkpoint is kept"):
        assert words in str(raised)


def test_half_precision_is_suggested_only_where_it_is_off():
    error = torch.OutOfMemoryError("CUDA out of memory.")
    suggestions = {
        amp: str(out_of_memory_error(error, batch_size=16, device=torch.device("cpu"), amp=amp))
        for amp in ("off", "bf16", "fp16")
    }
    assert {amp: "--amp bf16" in text for amp, text in suggestions.items()} == {
        "off": True,
        "bf16": False,
        "fp16": False,
    }


def test_the_suggested_batch_is_divisible_by_the_ranks():
    raised = out_of_memory_error(torch.OutOfMemoryError("..."), batch_size=30, device=torch.device("cpu"), ranks=4)
    assert "a batch size of 12" in str(raised)
