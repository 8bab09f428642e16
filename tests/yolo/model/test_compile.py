"""torch.compile traces each network as one graph, in training and in evaluation, with the same results."""

import copy
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from flatout.yolo.model.network import build_network
from tests.yolo.model.test_network import narrow, random_images, trained_under_autocast
from tests.yolo.model.test_spec import small

CASES = [(name, training) for name in ("yolov7-tiny", "yolov7", "yolov7-w6") for training in (True, False)]


@pytest.fixture(scope="module")
def checks() -> Iterator[dict[tuple[str, bool], Future[None]]]:
    """All checks, two at a time, because each takes seconds."""
    pool = ProcessPoolExecutor(2, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
    yield {case: pool.submit(check_that_it_is_one_graph, *case) for case in CASES}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'training' if case[1] else 'evaluation'}")
def test_a_network_is_one_graph(case, checks):
    checks[case].result()


def check_that_it_is_one_graph(name: str, training: bool) -> None:
    network = narrow(name, nc=2).train(training)
    x = random_images(side_px=128)
    # A copy, so that both are in their first training step: batch norms update their statistics.
    compiled = torch.compile(copy.deepcopy(network), fullgraph=True, backend="eager")
    expected, found = network(x), compiled(x)
    if not training:
        torch.testing.assert_close(found.decoded, expected.decoded, rtol=0, atol=0)
        expected, found = expected.raw, found.raw
    # Not a bare assert: pytest does not rewrite asserts in this process.
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_weights_are_cast_by_one_operator_in_each_direction_with_the_same_gradients():
    torch.manual_seed(0)
    network, num_casts = build_network(small()).train(), []

    def count(graph: fx.GraphModule, example_inputs: object) -> object:
        num_casts.append(sum(node.target is torch.ops.flatout.copied.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    twin = copy.deepcopy(network)
    twin.compile(fullgraph=True, backend=aot_autograd(fw_compiler=count, bw_compiler=count))
    expected, found = trained_under_autocast(network), trained_under_autocast(twin)
    assert num_casts == [1, 1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())
