"""Training with several heads on a GPU: no wait inside a step, and a CUDA graph changes nothing but the speed."""

import copy

import pytest
import torch

from tests.yolo.head_batches import make_groups, narrow_network
from tests.yolo.train.given_batches import GivenBatches, made_up_batch
from tests.yolo.train.small_training import make_loop, tiny_hyp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZE, BATCH = 64, 16
GROUPS = make_groups([[2, 0], [1]], [1.0, 0.5])


def given(num_steps: int) -> GivenBatches:
    return GivenBatches(
        [made_up_batch(n, batch_size=BATCH, size=SIZE, num_classes=3, device="cuda") for n in range(num_steps)]
    )


@pytest.mark.parametrize("loss_ota", [0, 1])
@pytest.mark.parametrize("kind", ["yolov7-tiny-1b4h", "yolov7-tiny-1b4h-attn"])
def test_a_graph_trains_as_eager_steps_do_and_nothing_waits(kind, loss_ota):
    states = []
    torch.manual_seed(0)
    first = narrow_network(kind, GROUPS)
    for graphs in (False, True):
        network = copy.deepcopy(first).cuda().to(memory_format=torch.channels_last)
        ticks: list[int] = []

        def tell(tick: object, ticks: list[int] = ticks) -> None:
            ticks.append(1)
            if len(ticks) == 3:  # kernels are compiled and the graph is captured by now
                torch.cuda.set_sync_debug_mode("error")

        loop, end = make_loop(
            network, tiny_hyp(loss_ota=loss_ota), given(24), num_steps=24, batch_size=BATCH, size=SIZE,
            graphs=graphs, device="cuda", tell=tell,
        )  # fmt: skip
        try:
            loop.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        states.append((network.state_dict(), end.reports[0].items))
    (eager, eager_items), (graphed, graphed_items) = states
    for name, value in eager_items.items():
        assert graphed_items[name] == pytest.approx(value, rel=1e-3)
    for key, value in eager.items():
        if value.is_floating_point():
            torch.testing.assert_close(graphed[key], value, rtol=2e-2, atol=2e-3)
