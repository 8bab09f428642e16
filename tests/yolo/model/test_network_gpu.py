"""On a CUDA device: nothing in a step makes the host wait, and all maps stay channels_last."""

import pytest
import torch

from flatout.yolo.model.network import Network
from tests.yolo.model.test_network import narrow

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def on_device(name: str) -> tuple[Network, torch.Tensor]:
    network = narrow(name, nc=4).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(4, 3, 256, 256, device="cuda").contiguous(memory_format=torch.channels_last)
    return network, x


def train_step(network: Network, x: torch.Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = sum(output.float().square().mean() for output in network.train()(x))
    loss.backward()


@torch.no_grad()
def predict(network: Network, x: torch.Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        network.eval()(x)


@pytest.mark.parametrize("run", [train_step, predict])
@pytest.mark.parametrize("name", ["yolov7-tiny", "yolov7-w6"])
def test_nothing_waits_for_the_device(name, run):
    network, x = on_device(name)
    run(network, x)  # Kernels are chosen and compiled in the first step, which may wait.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run(network, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["yolov7-tiny", "yolov7-w6"])
def test_no_map_leaves_channels_last(name):
    network, x = on_device(name)
    other_layout: list[int] = []
    for index, layer in enumerate(network.model[:-1]):
        layer.register_forward_hook(
            lambda module, inputs, output, index=index: other_layout.append(index) if output.stride(1) != 1 else None
        )
    train_step(network, x)
    predict(network, x)
    assert other_layout == []
