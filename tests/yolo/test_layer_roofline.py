"""bench/layer_roofline.py: what it takes for the operations of a step, and the arithmetic of its roofline."""

from collections import Counter

import pytest
import torch

from bench import layer_roofline as bench
from bench.measure import Timing
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network


@pytest.fixture(scope="module")
def operations() -> Counter[bench.Operation]:
    network = build_network(load_config("yolov7-tiny")).train()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.rand(2, 3, 64, 64, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    return bench.record(network, images)


def of_kind(operations: Counter[bench.Operation], kind: str) -> Counter[bench.Operation]:
    return Counter({each: count for each, count in operations.items() if each.kind == kind})


def test_every_layer_of_the_network_is_recorded(operations):
    counts = {kind: of_kind(operations, kind).total() for kind in bench.PASSES}
    # 55 convolutions with a norm, and one per level of the head.
    assert counts["convolution"] == 58
    assert counts["norm + act"] == 55
    assert (counts["max-pool"], counts["upsample"], counts["implicit"]) == (6, 2, 3)
    assert (counts["weight casts"], counts["optimizer"]) == (1, 1)


def test_only_the_first_convolution_needs_no_gradient_of_its_input(operations):
    stem = [each for each in operations if not each.learns_input and each.kind == "convolution"]
    assert [each.inputs for each in stem] == [((2, 3, 64, 64),)]
    assert [work.name for work in bench.passes_of(stem[0], "cpu")] == ["forward", "wgrad"]


def test_a_map_with_several_readers_costs_a_sum_of_gradients(operations):
    # Rows of yolov7-tiny that the next one and a concatenation read: 30, and its narrower poolings; 24 and 25.
    sums = of_kind(operations, "gradient sum")
    (pyramid,) = [each for each in sums if each.settings == (0, 1024)]
    assert pyramid.output == (2, 256, 2, 2) and sums[pyramid] == 5


@pytest.mark.parametrize("kind", sorted(bench.PASSES))
def test_every_kind_of_operation_of_the_network_runs_alone(kind, operations):
    for operation in list(of_kind(operations, kind))[:2]:
        for work in bench.passes_of(operation, "cpu"):
            work.prepare()()
            assert work.bytes_now >= work.bytes_once > 0


def test_a_convolution_counts_its_bytes_and_flops_once():
    settings = bench.ConvSettings((64, 32, 3, 3), False, (2, 2), (1, 1), (1, 1), 1)
    operation = bench._conv_operation((2, 32, 8, 8), (2, 64, 4, 4), settings)
    forward, dgrad, wgrad = bench.passes_of(operation, "cpu")
    assert forward.bytes_once == 2 * (2 * 32 * 64 + 2 * 64 * 16 + 64 * 32 * 9)
    assert forward.flops == dgrad.flops == wgrad.flops == 2 * (2 * 64 * 16) * (32 * 9)


def test_the_roofline_is_the_longer_of_both_and_the_gap_counts_every_occurrence():
    ceilings = bench.Ceilings(bytes_per_s=1e9, flops_per_s=1e12)
    assert ceilings.floor_ms(2_000_000, 10**9) == pytest.approx(2.0)
    assert ceilings.floor_ms(2_000_000, 5 * 10**9) == pytest.approx(5.0)
    operation = bench.Operation("concat", "of 2", ((1, 1, 2, 2),) * 2, (1, 2, 2, 2))
    work = bench.Pass("forward", 2_000_000, lambda: lambda: None)
    row = bench.row_of(operation, 3, work, Timing(0.005, 0.004, 0.006), ceilings)
    assert row.gap_ms == pytest.approx(3 * (5.0 - 2.0))


def test_channels_are_padded_to_the_next_multiples():
    assert bench.padded_counts(3) == [4, 8, 16]
    assert bench.padded_counts(255) == [256]
    assert bench.padded_counts(64) == []


def test_alternatives_do_the_same_passes(operations):
    pointwise = next(each for each in of_kind(operations, "convolution") if each.what == "1x1")
    names = [work.name for work in bench.passes_of(pointwise, "cpu")]
    alternatives = [*bench.common_alternatives(pointwise, "cpu"), *bench.rare_alternatives(pointwise, "cpu")]
    assert alternatives[0].name == "as matmul"
    assert all([work.name for work in each.passes] == names for each in alternatives)
    for work in alternatives[0].passes:
        work.prepare()()
