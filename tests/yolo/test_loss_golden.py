"""Match lists, losses and gradients of every golden case, on the CPU and on a GPU."""

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from flatout.yolo.loss import rebalance
from flatout.yolo.loss.losses import default_balance
from tests.golden_cases import golden_cases
from tests.yolo.comparing_matches import list_matches
from tests.yolo.loss_cases import LossCase, assign_case, build, loss_cases, loss_of_case

FILES = ("compute_loss", "compute_loss_ota", "compute_loss_aux_ota")
CASES = [
    case
    for name in FILES
    for case in golden_cases(f"yolov7-loss/{name}.json", loss_cases, also=(f"yolov7-loss/{name}.npz",))
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
KNOWN_ARRAYS = re.compile(
    r"targets|plant_(idx|val|cls|clsval)|input_check|loss|loss_items|match(_aux)?_L\d|dynamic_k(_aux)?|grad_stats"
    r"|grad_(idx|val)_P\d"
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_the_match_lists_are_the_golden_ones(case: LossCase, device: str):
    batch = build(case, device)
    for name, matches in assign_case(case, batch).items():
        for layer in range(len(batch.anchors.strides_px)):
            if f"{name}_L{layer}" in case.arrays:
                expected = case.arrays[f"{name}_L{layer}"].astype(np.int64)
                listed = list_matches(matches, layer).cpu().numpy()
                if case.record["kind"] == "std" and device == "cuda":
                    # Sorted by image on a GPU; only the order within an image matters.
                    listed, expected = (each[np.lexsort(each.T[::-1])] for each in (listed, expected))
                np.testing.assert_array_equal(listed, expected)
        dynamic_k = case.arrays.get(name.replace("match", "dynamic_k"))
        if dynamic_k is not None and matches.num_taken_T is not None:
            np.testing.assert_array_equal(matches.num_taken_T.cpu().numpy(), dynamic_k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_the_loss_its_items_and_its_gradients_are_the_golden_ones(case: LossCase, device: str):
    record, arrays = case
    unknown = [name for name in arrays if not KNOWN_ARRAYS.fullmatch(name)]
    assert not unknown, f"no test checks {unknown}"
    batch = build(case, device)
    balance_L = torch.tensor(default_balance(len(record["strides"])), device=device)
    for _ in range(record.get("calls", 1) - 1 if record.get("autobalance") else 0):
        balance_L = rebalance(balance_L, loss_of_case(case, batch, balance_L).obj_L, record["strides"])
    parts = loss_of_case(case, batch, balance_L)
    parts.total.backward()
    if "loss" in arrays:
        torch.testing.assert_close(
            parts.total[None].detach().cpu(), torch.from_numpy(arrays["loss"]), rtol=1e-5, atol=1e-7
        )
    if "loss_items" in arrays:
        torch.testing.assert_close(parts.items.cpu(), torch.from_numpy(arrays["loss_items"]), rtol=1e-5, atol=1e-7)
    if record.get("autobalance") and "balance_after" in record:
        balance_L = rebalance(balance_L, parts.obj_L, record["strides"])
        np.testing.assert_allclose(balance_L.cpu(), record["balance_after"], rtol=1e-5)
    for index, one_map in enumerate(batch.maps):
        assert one_map.grad is not None
        assert_gradient(one_map.grad.cpu(), arrays, index)


def assert_gradient(grad: Tensor, arrays: dict[str, np.ndarray], index: int) -> None:
    """The stored samples within 1e-4 of the largest gradient, the stored norm within 1e-4 of itself."""
    flat = grad.flatten().double().numpy()
    if f"grad_idx_P{index}" in arrays:
        sampled = flat[arrays[f"grad_idx_P{index}"]]
        np.testing.assert_allclose(sampled, arrays[f"grad_val_P{index}"], rtol=0, atol=1e-4 * np.abs(flat).max())
    if "grad_stats" in arrays:
        norm, _, size = arrays["grad_stats"][index]
        np.testing.assert_allclose((np.linalg.norm(flat), np.abs(flat).sum()), (norm, size), rtol=1e-4)
