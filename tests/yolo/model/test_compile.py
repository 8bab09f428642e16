"""torch.compile takes each network as one graph, in training and in evaluation, and it computes the same."""

import copy

import pytest
import torch

from tests.yolo.model.test_network import narrow, picture


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ["yolov7-tiny", "yolov7", "yolov7-w6"])
def test_a_network_is_one_graph(name, training):
    network = narrow(name, nc=2).train(training)
    torch.compiler.reset()
    x = picture(side_px=128)
    # Both in their first training step: batch norms move their statistics.
    compiled = torch.compile(copy.deepcopy(network), fullgraph=True, backend="eager")
    expected, found = network(x), compiled(x)
    if not training:
        torch.testing.assert_close(found.decoded, expected.decoded, rtol=0, atol=0)
        expected, found = expected.raw, found.raw
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
