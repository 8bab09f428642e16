"""GFLOPS of a network for one image, for networks of any shape."""

from typing import Any

import pytest
import torch
from torch import nn

from flatout.yolo.model.deploy import fused
from flatout.yolo.model.info import COUNTED_PX, count_gflops
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.model.spec import PROBE_PX, parse_model, small_side

ANCHORS = [[10, 13], [30, 61]]
DEEP: dict[str, Any] = {
    "nc": 2,
    "anchors": ANCHORS,
    "backbone": [[-1, 1, "Conv", [8, 3, 8]], *([-1, 1, "Conv", [8, 3, 2]] for _ in range(5))],
    "head": [
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 4], 1, "Concat", [1]],
        [-1, 1, "nn.Upsample", [None, 8, "nearest"]],
        [[-1, 1], 1, "Concat", [1]],
        [[0, 9], 1, "IDetect", ["nc", "anchors"]],
    ],
}
"""Predicts boxes at strides 8 and 16 from a map of stride 256 among others, which would be empty for smaller images."""
ALL_MODULES: dict[str, Any] = {
    "nc": 2,
    "anchors": ANCHORS,
    "backbone": [
        [-1, 1, "ReOrg", []],
        [-1, 1, "Conv", [16, [1, 3], 2, [0, 1], 4]],
        [-1, 3, "Conv", [16, 3, 1]],
        [-1, 1, "DownC", [32]],
        [-1, 2, "RepConv", [32]],
    ],
    "head": [
        [-1, 1, "SPPCSPC", [24]],
        [-1, 2, "SP", [3, 2]],
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[4, 7, 4, 7], 1, "IAuxDetect", ["nc", "anchors"]],
    ],
}


def counted(network: Network, side_px: int) -> float:
    """GFLOPS counted from the actual outputs of a network's modules while it trains on two images."""
    pairs = []

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Conv2d):
            pairs.append(output.numel() * module.weight[0].numel())
        elif isinstance(module, nn.BatchNorm2d | nn.Upsample):
            pairs.append(output.numel() * (4 if isinstance(module, nn.BatchNorm2d) else 1))

    network = network.train()
    for module in network.modules():
        module.register_forward_hook(count)
    outputs = network(torch.rand(2, network.spec.channels, side_px, side_px))
    # The convolutions of the detection layer are not called as modules.
    convs = [*network.head.m, *getattr(network.head, "m2", [])]
    pairs += [raw.numel() * conv.in_channels for raw, conv in zip(outputs, convs, strict=False)]
    return 2e-9 * (COUNTED_PX / side_px) ** 2 * sum(pairs) / 2


@pytest.mark.parametrize("make", [lambda network: network, fused], ids=["as trained", "fused"])
@pytest.mark.parametrize(("config", "side_px"), [(DEEP, 256), (ALL_MODULES, 32)], ids=["deep", "all modules"])
def test_the_cost_is_counted_on_the_smallest_image_that_the_network_can_read(config, side_px, make):
    network = make(build_network(config))
    assert small_side(network.spec, 32) == side_px
    with torch.no_grad():
        assert count_gflops(network) == pytest.approx(counted(network, side_px), rel=1e-12)


@pytest.mark.parametrize("at_least_px", [8, 100, 256, 512])
def test_an_image_of_the_size_that_configs_are_checked_for_is_always_large_enough(at_least_px):
    assert small_side(parse_model(DEEP), at_least_px) == PROBE_PX
