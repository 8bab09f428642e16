"""Training with several heads on a GPU: no wait inside a step, and a CUDA graph changes nothing but the speed."""

import pytest
import torch

from tests.yolo.head_batches import make_groups, narrow_network
from tests.yolo.train.compare_with_eager import run_and_compare_with_eager, smooth
from tests.yolo.train.fixed_batches import FixedBatches, random_batch
from tests.yolo.train.small_training import make_loop, run_without_waits, tiny_hyp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZE, BATCH = 64, 16
GROUPS = make_groups([[2, 0], [1]], [1.0, 0.5])


def first_network(kind):
    torch.manual_seed(0)
    return narrow_network(kind, GROUPS).cuda().to(memory_format=torch.channels_last)


def given(num_steps: int) -> FixedBatches:
    return FixedBatches(
        [random_batch(n, batch_size=BATCH, size=SIZE, num_classes=3, device="cuda") for n in range(num_steps)]
    )


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("loss_ota", [0, 1])
@pytest.mark.parametrize("kind", ["yolov7-tiny-1b4h", "yolov7-tiny-1b4h-attn"])
def test_nothing_waits_inside_a_step(kind, loss_ota, graphs):
    _, num_intervals = run_without_waits(
        first_network(kind), tiny_hyp(loss_ota=loss_ota), given(24), num_steps=24, batch_size=BATCH, size=SIZE,
        graphs=graphs,
    )  # fmt: skip
    assert num_intervals > 5


@pytest.mark.parametrize("loss_ota", [0, 1])
@pytest.mark.parametrize("kind", ["yolov7-tiny-1b4h", "yolov7-tiny-1b4h-attn"])
def test_a_graph_computes_what_eager_steps_do(kind, loss_ota):
    network = first_network(kind)
    smooth(network)
    loop, _ = make_loop(
        network, tiny_hyp(loss_ota=loss_ota), given(16), num_steps=16, batch_size=BATCH, size=SIZE,
        graphs=True, device="cuda",
    )  # fmt: skip
    assert run_and_compare_with_eager(loop, network) >= 10
