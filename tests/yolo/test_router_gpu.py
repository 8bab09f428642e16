"""On a GPU: the kernels agree with the torch operations for several heads, are reproducible, and never make it wait."""

import pytest
import torch

from flatout.yolo.loss import Anchors, LossConfig, Search, assign_ota
from flatout.yolo.loss.losses import as_images, default_balance, torch_head_loss
from flatout.yolo.loss.ota import list_candidates, torch_assign_ota
from flatout.yolo.multihead.head_config import HeadConfig
from flatout.yolo.multihead.joined_maps import heads_on, route
from tests.yolo.detection_batch import awkward
from tests.yolo.head_batches import HeadBatch, make_groups, make_head_batch
from tests.yolo.test_router import GROUPS, LOSSES, OPTIONS, PLAIN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LAYOUTS = {"channels last": torch.channels_last, "channels first": torch.contiguous_format}


def on_gpu(batch: HeadBatch, dtype: torch.dtype = torch.float32, layout=torch.channels_last) -> HeadBatch:
    maps, targets, anchors = batch
    moved = [each.detach().to("cuda", dtype, memory_format=layout).requires_grad_() for each in maps]
    return HeadBatch(moved, targets.cuda(), Anchors(anchors.size_LA2.cuda(), anchors.strides_px))


def by_torch(batch: HeadBatch, config: LossConfig, groups: HeadConfig, *, ota: bool):
    heads = heads_on(groups, batch.targets.device)
    maps, routed = as_images(batch.maps, heads, batch.anchors), route(batch.targets, heads)
    search = Search(config.anchor_t)
    if ota:
        matches = torch_assign_ota(maps, routed, batch.anchors, search, heads.own_HP)
    else:
        matches = list_candidates(maps, routed, batch.anchors, search)
    balance_L = torch.tensor(default_balance(3), device="cuda")
    return torch_head_loss(maps, routed, matches, batch.anchors, config, balance_L, 1.0, heads)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [PLAIN, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_the_kernels_give_the_same_as_the_torch_operations(groups, loss, config, dtype, layout):
    batch = make_head_batch([5, 9, 0, 7], groups, seed=1)
    batch = on_gpu(batch._replace(targets=awkward(batch.targets, seed=5)), dtype, layout)
    parts = LOSSES[loss](*batch, config, groups)
    expected = by_torch(batch, config, groups, ota=loss == "ota")
    torch.testing.assert_close(parts.items, expected.items, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(parts.total, expected.total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts.obj_L, expected.obj_L, rtol=1e-5, atol=1e-7)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    grads = (torch.autograd.grad(each, batch.maps) for each in (parts.total, expected.total))
    for one_map, found, wanted in zip(batch.maps, *grads, strict=True):
        assert found.dtype == dtype and found.stride() == one_map.stride()
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_same_input_gives_the_same_bits(loss: str):
    groups = GROUPS["uneven, unsorted, weighted"]
    batch = on_gpu(make_head_batch([50] * 8, groups, height=160, width=160, seed=4), torch.float16)
    results = []
    for _ in range(4):
        parts = LOSSES[loss](*batch, PLAIN, groups)
        results.append((parts.items, *torch.autograd.grad(parts.total, batch.maps)))
    assert all(torch.equal(one, other) for again in results[1:] for one, other in zip(results[0], again, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_never_makes_the_host_wait_and_can_be_captured(loss: str):
    groups = make_groups([list(range(first, first + 20)) for first in range(0, 80, 20)])
    batch = on_gpu(make_head_batch([8] * 4, groups, seed=5), torch.float16)

    def step():
        parts = LOSSES[loss](*batch, PLAIN, groups)
        return parts.items, torch.autograd.grad(parts.total, batch.maps)

    expected = step()[0].clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
    with torch.cuda.graph(graph, stream=stream):
        items, _ = step()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(items, expected)


def test_a_head_is_matched_with_its_own_targets_only():
    groups = make_groups([[0, 1], [2, 3]])
    batch = on_gpu(make_head_batch([9, 9], groups, seed=6))
    heads = heads_on(groups, batch.targets.device)
    matches = assign_ota(batch.maps, route(batch.targets, heads), batch.anchors, Search(), heads)
    taken = matches.target_M >= 0
    head_of_target = batch.targets[:, 1].long() // 2
    assert torch.equal(matches.image_M[taken] % 2, head_of_target[matches.target_M[taken].long()].int())
