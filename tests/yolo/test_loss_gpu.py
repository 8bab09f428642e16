"""On a GPU: the kernels agree with the torch operations, are reproducible to the bit, and never make the host wait."""

import logging

import pytest
import torch
from torch import Tensor

from flatout.yolo.loss import (
    Anchors,
    LossConfig,
    LossParts,
    Search,
    assign_all,
    assign_ota,
    aux_ota_loss,
    ota_loss,
    plain_loss,
)
from flatout.yolo.loss.losses import default_balance, torch_head_loss
from flatout.yolo.loss.ota import list_candidates
from tests.yolo.comparing_matches import assert_same_matches, list_matches
from tests.yolo.detection_batch import DetectionBatch, awkward, make_batch
from tests.yolo.test_assign import BATCHES, SEARCHES
from tests.yolo.test_loss import OPTIONS, PLAIN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def on_gpu(batch: DetectionBatch, dtype: torch.dtype = torch.float32) -> DetectionBatch:
    maps, targets, anchors = batch
    moved = [one_map.detach().to("cuda", dtype).requires_grad_() for one_map in maps]
    return DetectionBatch(moved, targets.cuda(), Anchors(anchors.size_LA2.cuda(), anchors.strides_px))


def step(batch: DetectionBatch, config: LossConfig = PLAIN, loss=ota_loss) -> tuple[LossParts, list[Tensor]]:
    parts = loss(*batch, config)
    return parts, list(torch.autograd.grad(parts.total, batch.maps))


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
def test_the_kernels_give_the_matches_of_the_reference(make, search: Search):
    batch = make()
    for each in (batch, batch._replace(targets=awkward(batch.targets, seed=len(batch.targets)))):
        assert_same_matches(assign_ota(*on_gpu(each), search), each, search)


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
def test_the_kernels_list_the_same_candidates(make):
    batch = make()
    batch = batch._replace(targets=awkward(batch.targets, seed=3))
    here, there = list_candidates(*batch, Search()), assign_all(*on_gpu(batch), Search())
    for layer in range(len(batch.maps)):
        found, expected = (list_matches(each, layer).cpu() for each in (there, here))
        # The kernels sort by image: a stable sort by image gives the same order.
        assert torch.equal(found, expected[torch.argsort(expected[:, 0], stable=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [PLAIN, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("assign", [assign_all, assign_ota])
@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
def test_loss_and_gradients_of_the_kernels_are_those_of_the_torch_operations(make, assign, config, dtype):
    batch = on_gpu(make(), dtype)
    batch = batch._replace(targets=awkward(batch.targets.cpu(), seed=5).cuda())
    matches = assign(*batch, Search(config.anchor_t))
    balance_L = torch.tensor(default_balance(len(batch.maps)), device="cuda")
    expected = torch_head_loss(batch.maps, batch.targets, matches, batch.anchors, config, balance_L, 1.0)
    expected_grads = torch.autograd.grad(expected.total, batch.maps)
    parts, grads = step(batch, config, plain_loss if assign is assign_all else ota_loss)
    torch.testing.assert_close(parts.items, expected.items, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(parts.total, expected.total, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(parts.obj_L, expected.obj_L, rtol=1e-5, atol=1e-7)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for found, wanted in zip(grads, expected_grads, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("layout", ["channels last", "channels first", "with gaps"])
def test_maps_of_any_memory_order_give_the_same_loss_and_gradients_in_their_order(layout: str):
    batch = on_gpu(make_batch([6, 9, 0, 4], num_classes=7, seed=3))
    _, expected = step(batch)
    permuted = batch._replace(maps=[_with_layout(one_map.detach(), layout).requires_grad_() for one_map in batch.maps])
    parts, grads = step(permuted)
    torch.testing.assert_close(parts.total, ota_loss(*batch, PLAIN).total)
    for found, wanted, one_map in zip(grads, expected, permuted.maps, strict=True):
        assert torch.equal(found, wanted)
        assert layout == "with gaps" or found.stride() == one_map.stride()


def _with_layout(one_map: Tensor, layout: str) -> Tensor:
    match layout:
        case "channels last":
            return one_map.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
        case "channels first":
            return one_map.permute(0, 1, 4, 2, 3).contiguous().permute(0, 1, 3, 4, 2)
    return torch.nn.functional.pad(one_map, (0, 3))[..., :-3]


def test_the_same_input_gives_the_same_bits():
    batch = on_gpu(make_batch([50] * 8, height=160, width=160, num_classes=20, seed=4), torch.float16)
    first, first_grads = step(batch)
    for _ in range(5):
        again, again_grads = step(batch)
        assert torch.equal(first.total, again.total)
        assert torch.equal(first.items, again.items)
        assert all(torch.equal(one, other) for one, other in zip(first_grads, again_grads, strict=True))


def test_padding_changes_nothing():
    batch = on_gpu(make_batch([3, 0, 8], num_classes=9, seed=5))
    padding = torch.full((37, 6), -1.0, device="cuda")
    padded = batch._replace(targets=torch.cat((padding[:5], batch.targets, padding)))
    (parts, grads), (again, again_grads) = step(batch), step(padded)
    torch.testing.assert_close(parts.items, again.items)
    assert all(torch.equal(one, other) for one, other in zip(grads, again_grads, strict=True))


def test_more_classes_than_a_kernel_holds_at_once():
    batch = make_batch([4, 7], num_classes=300, seed=6)
    assert_same_matches(assign_ota(*on_gpu(batch), Search()), batch, Search())
    (parts, grads), here = step(on_gpu(batch)), batch._replace(maps=[each.requires_grad_() for each in batch.maps])
    expected, expected_grads = step(here)
    torch.testing.assert_close(parts.items.cpu(), expected.items, rtol=1e-5, atol=1e-7)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def losses(batch: DetectionBatch):
    """Run every loss, forward and backward, as a training step does."""
    step(batch)
    step(batch, loss=plain_loss)
    step(batch, OPTIONS)
    aux = [one_map.detach().clone().requires_grad_() for one_map in batch.maps]
    aux_ota_loss(batch.maps, aux, batch.targets, batch.anchors, PLAIN).total.backward()


def test_no_step_waits_for_the_device():
    batches = [on_gpu(make_batch([num] * 4, seed=num), torch.float16) for num in (0, 1, 3, 9, 16, 17)]
    losses(batches[0])
    losses(batches[1])
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            losses(batch)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_a_trace_of_20_steps_shows_no_wait_and_no_copy_from_the_host():
    batches = [on_gpu(make_batch([num] * 4, seed=num), torch.float16) for num in range(20)]
    for batch in batches[:3]:
        losses(batch)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for batch in batches:
            losses(batch)
    names = {event.name for event in profile.events()}
    assert any("take_columns" in name for name in names)
    waits = [name for name in names if "ynchronize" in name or "Memcpy HtoD" in name or "Memcpy DtoH" in name]
    # The profiler itself waits once at its end.
    assert set(waits) <= {"cudaDeviceSynchronize"}
    assert sum(event.name == "cudaDeviceSynchronize" for event in profile.events()) <= 1


def test_the_number_of_kernels_does_not_depend_on_the_batch():
    def count(batch: DetectionBatch) -> int:
        step(batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(batch)
            torch.cuda.synchronize()
        return sum(event.device_type.name == "CUDA" for event in profile.events())

    few, many = (on_gpu(make_batch(boxes, height=64, width=64, seed=7)) for boxes in ([2] * 2, [40] * 64))
    assert count(few) == count(many)


def test_a_step_can_be_captured_in_a_cuda_graph_and_replayed_on_other_targets():
    batch = on_gpu(make_batch([6, 3, 9], num_classes=5, seed=8))
    other = on_gpu(make_batch([1, 12, 2], num_classes=5, seed=9))
    targets = torch.full((64, 6), -1.0, device="cuda")
    static = DetectionBatch(batch.maps, targets, batch.anchors)
    step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts, grads = step(static)
    for rows in (batch.targets, other.targets):
        targets.fill_(-1)
        targets[: len(rows)] = rows
        graph.replay()
        expected, expected_grads = step(static._replace(targets=rows))
        torch.testing.assert_close(parts.items, expected.items)
        assert all(torch.equal(one, wanted) for one, wanted in zip(grads, expected_grads, strict=True))


def test_a_compiled_step_gives_the_same_loss():
    batch = on_gpu(make_batch([6, 3, 9], num_classes=5, seed=10))
    scale = torch.tensor(1.5, device="cuda", requires_grad=True)

    def forward(maps: list[Tensor], targets: Tensor) -> Tensor:
        return ota_loss([one_map * scale for one_map in maps], targets, batch.anchors, PLAIN).total * 2

    expected = torch.autograd.grad(forward(batch.maps, batch.targets), [scale, *batch.maps])
    found = torch.autograd.grad(torch.compile(forward)(batch.maps, batch.targets), [scale, *batch.maps])
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted)


def test_a_crowd_in_a_batch_of_16_costs_less_than_a_second_and_two_gigabytes():
    batch = on_gpu(make_batch([5000] + [16] * 15, height=640, width=640, num_classes=80, seed=11), torch.float16)
    step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step(batch)
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) < 1000
    assert torch.cuda.max_memory_allocated() - before < 2e9


def test_maps_that_the_kernels_do_not_support_are_computed_by_torch_with_a_warning(caplog: pytest.LogCaptureFixture):
    batch = on_gpu(make_batch([4, 2], seed=12), torch.float64)
    with caplog.at_level(logging.WARNING, logger="flatout.yolo.loss.kernel_support"):
        parts, _ = step(batch)
    assert "float64" in caplog.text
    single, _ = step(on_gpu(make_batch([4, 2], seed=12)))
    torch.testing.assert_close(parts.items, single.items)
