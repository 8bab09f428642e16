"""Matches, losses and gradients of every golden case of the loss router, on the CPU and on a GPU."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from flatout.yolo.loss import LossConfig, Search, assign_all, plain_router_loss
from flatout.yolo.loss.matches import Anchors
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.spec import parse_model
from flatout.yolo.multihead.head_config import HeadConfig, HeadGroup, head_config_of
from flatout.yolo.multihead.joined_maps import heads_on, route
from tests.golden_cases import golden_cases, golden_root
from tests.yolo.comparing_matches import list_matches
from tests.yolo.head_batches import HeadBatch, by_head, joined
from tests.yolo.loss_cases import LossCase, loss_cases

CASES = golden_cases("yolov7-1b4h/router.json", loss_cases, also=("yolov7-1b4h/router.npz",))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
KNOWN_ARRAYS = re.compile(
    r"targets|loss|loss_items|per_head_box_obj_cls|input_check|match_h\d+_L\d|grad_stats|grad_(idx|val)_h\d+_L\d"
)
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def groups_of(case: LossCase) -> HeadConfig:
    file = golden_root() / "yolov7-1b4h/head_configs.json"
    if not file.exists():
        pytest.skip("head_configs.json, which the case refers to, does not exist")
    written = json.loads(file.read_text())[case.record["config"]]
    return head_config_of(written, where=case.record["config"], full_head=case.record["full_head"])


def build(case: LossCase, groups: HeadConfig, device: str) -> HeadBatch:
    record, arrays = case
    if "targets" not in arrays:
        pytest.skip("no targets are stored for this case")
    head = parse_model(load_config("yolov7-tiny-1b4h")).head
    generator = np.random.Generator(np.random.PCG64(record["seed"]))
    maps = [[draw_map(generator, record, stride, outputs) for stride in head.strides] for outputs in groups.outputs_H]
    for h, rows in enumerate(arrays.get("input_check", ())):
        made = [(each.sum(dtype=np.float64), each.flat[0], each.flat[-1]) for each in maps[h]]
        np.testing.assert_allclose(made, rows, rtol=1e-6, err_msg="the input differs from that of the golden")
    size_px = torch.tensor(head.anchors_px).view(head.num_levels, -1, 2)
    anchors = Anchors((size_px / torch.tensor(head.strides)[:, None, None]).to(device), head.strides)
    tensors = [[torch.from_numpy(each).to(device) for each in one] for one in maps]
    return HeadBatch(joined(tensors), torch.from_numpy(arrays["targets"]).to(device), anchors)


def draw_map(generator: np.random.Generator, record: dict, stride: float, outputs: int) -> np.ndarray:
    side = int(record["img"] / stride)
    one_map = generator.standard_normal((record["B"], 3, side, side, outputs), dtype=np.float32)
    one_map[..., 4] -= 3.0
    one_map[..., 5:] -= 2.0
    return one_map


def config_of(case: LossCase) -> LossConfig:
    return LossConfig(**case.record["hyp"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_the_matches_of_every_head_are_the_golden_ones(case, device):
    groups = groups_of(case)
    batch = build(case, groups, device)
    heads = heads_on(groups, batch.targets.device)
    search = Search(anchor_t=config_of(case).anchor_t)
    matches = assign_all(batch.maps, route(batch.targets, heads), batch.anchors, search, heads)
    checked = 0
    for layer in range(3):
        listed = list_matches(matches, layer).cpu().numpy()
        for head in range(groups.num_heads):
            expected = case.arrays.get(f"match_h{head}_L{layer}")
            if expected is None:
                continue
            own = listed[listed[:, 0] % groups.num_heads == head]
            own[:, 0] //= groups.num_heads
            if device == "cuda":  # sorted by image there; only the order within an image matters
                own, expected = (each[np.lexsort(each.T[::-1])] for each in (own, expected))
            np.testing.assert_array_equal(own, expected)
            checked += 1
    if not checked:
        pytest.skip("no match lists are stored for this case")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_its_gradients_are_the_golden_ones(case, device):
    record, arrays = case
    unknown = [name for name in arrays if not KNOWN_ARRAYS.fullmatch(name)]
    assert not unknown, f"no test checks {unknown}"
    groups = groups_of(case)
    assert list(groups.outputs_H) == record.get("head_no", list(groups.outputs_H))
    batch = build(case, groups, device).with_gradient()
    parts = plain_router_loss(*batch, config_of(case), groups)
    parts.total.backward()
    if "loss" in arrays:
        torch.testing.assert_close(parts.total[None].detach().cpu(), torch.from_numpy(arrays["loss"]), **CLOSE)
    if "loss_items" in arrays:
        torch.testing.assert_close(parts.items.cpu(), torch.from_numpy(arrays["loss_items"]), **CLOSE)
    grads = by_head([each.grad.cpu() for each in batch.maps], groups)
    for head, levels in enumerate(grads):
        for level, grad in enumerate(levels):
            check_gradient(grad, arrays, head, level)


def check_gradient(grad: torch.Tensor, arrays: dict[str, np.ndarray], head: int, level: int) -> None:
    flat = grad.flatten().double().numpy()
    if f"grad_idx_h{head}_L{level}" in arrays:
        sampled = flat[arrays[f"grad_idx_h{head}_L{level}"]]
        expected = arrays[f"grad_val_h{head}_L{level}"]
        np.testing.assert_allclose(sampled, expected, rtol=0, atol=1e-4 * np.abs(flat).max())
    if "grad_stats" in arrays:
        norm, _, largest = arrays["grad_stats"][head, level]
        np.testing.assert_allclose((np.linalg.norm(flat), np.abs(flat).max()), (norm, largest), rtol=1e-4)
        assert flat.sum() == pytest.approx(arrays["grad_stats"][head, level, 1], abs=1e-4 * np.abs(flat).sum())


@pytest.mark.parametrize("case", CASES)
def test_every_head_alone_has_its_golden_terms(case):
    groups = groups_of(case)
    if "per_head_box_obj_cls" not in case.arrays:
        pytest.skip("no terms of single heads are stored for this case")
    batch, config = build(case, groups, "cpu"), replace(config_of(case), box=1.0, obj=1.0, cls=1.0)
    for head, expected in enumerate(case.arrays["per_head_box_obj_cls"]):
        only = [HeadGroup(each.classes, float(index == head)) for index, each in enumerate(groups.heads)]
        items = plain_router_loss(*batch, config, replace(groups, heads=tuple(only))).items[:3]
        torch.testing.assert_close(items, torch.from_numpy(expected).to(items), **CLOSE)
