"""On a GPU: blocking copies and waits are named with their lines, and device times are right."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.clock import clock
from flatout.profiler import watch
from flatout.profiler.observe.device_times import DeviceClock
from flatout.profiler.observe.recorder import StepRecorder
from flatout.profiler.observe.speed_of_light import measure_machine
from flatout.profiler.observe.waits import WaitCounter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Large(torch.utils.data.Dataset):
    """Samples so large that their copy to the GPU takes time, made once."""

    def __init__(self, num: int, side: int) -> None:
        self.sample = torch.rand(3, side, side)
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.sample, index % 2


def many_small_layers(width: int = 64, depth: int = 40) -> nn.Module:
    """A network whose kernels take about as long as launching them, so that a wait per step costs time."""
    layers = [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU()) for _ in range(depth)
    ]
    return nn.Sequential(nn.Conv2d(3, width, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))


def train(loader, model, copy, after_step=lambda loss: None):
    # Objects of earlier tests must not be collected in a forked worker: they could not release the GPU there.
    gc.collect()
    model = model.cuda()
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    with watch(loader, model, optimizer, loss_fn=loss_fn) as watched:
        for images, labels in loader:
            loss = loss_fn(model(copy(images)), copy(labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(loss)
    return watched


def test_a_blocking_copy_is_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 7, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    loader = DataLoader(Large(64 * 30, 512), batch_size=64, num_workers=4)
    watched = train(loader, model, lambda tensor: tensor.cuda())
    causes = [watched.verdict.cause, *(finding.cause for finding in watched.verdict.others)]
    assert "blocking copy" in causes, watched.text()
    assert any("pin_memory=True" in remedy.change for remedy in watched.verdict.remedies)


def test_a_log_line_that_waits_is_named():
    samples = TensorDataset(torch.rand(32 * 40, 3, 32, 32).cuda(), (torch.arange(32 * 40) % 2).cuda())
    running = []
    loader = DataLoader(samples, batch_size=32)
    watched = train(loader, many_small_layers(), lambda tensor: tensor, lambda loss: running.append(loss.item()))
    assert any("loss.item()" in site.text for site in watched.measurement.waits), watched.text()
    assert watched.measurement.device_busy_ms < watched.ledger.step_ms
    causes = [watched.verdict.cause, *(finding.cause for finding in watched.verdict.others)]
    assert {"logging sync", "kernel launches", "host-device waits"} & set(causes), watched.text()


@pytest.mark.parametrize("steps_per_pass", [3, 5])
def test_a_validation_between_passes_is_neither_counted_nor_traced(steps_per_pass):
    """Passes of 3 steps: one ends while waits are counted; of 5: one ends while kernels are traced."""
    num = 8 * steps_per_pass
    loader = DataLoader(TensorDataset(torch.rand(num, 64).cuda(), (torch.arange(num) % 2).cuda()), batch_size=8)
    model, large = nn.Linear(64, 2).cuda(), torch.rand(4096, 4096, device="cuda")
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    with watch(loader, model, optimizer, loss_fn=loss_fn) as watched:
        for _ in range(5):
            for images, labels in loader:
                loss_fn(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(50):
                validated = large @ large
            ended.record()
            validated[0, 0].item()
    assert not any("validated" in site.text for site in watched.measurement.waits), watched.text()
    assert watched.measurement.device_busy_ms < 0.5 * began.elapsed_time(ended), watched.text()
    if steps_per_pass == 3:
        assert any("validated" in site.text for site in watched.measurement.waits_between)


def test_every_wait_is_counted_with_its_line():
    numbers = torch.arange(5.0, device="cuda")
    waits = WaitCounter()
    with waits.counting():
        for number in numbers:
            number.item()
        numbers[numbers > 2].sum()
    waits.num_steps = 1
    sites = {site.text: site.per_step for site in waits.sites()}
    assert sites["number.item()"] == 5
    assert sites["numbers[numbers > 2].sum()"] >= 1
    assert torch.cuda.get_sync_debug_mode() == 0


def test_device_events_measure_the_device_not_the_host():
    large = torch.rand(4096, 4096, device="cuda")
    device = DeviceClock()
    recorder = StepRecorder(device=device)
    with recorder.recording():
        for _ in range(5):
            with clock.stage("forward"):
                for _ in range(20):
                    large @ large
            clock.step_ended(1)
    steps = device.read(skip=1)
    assert steps.names == ("forward",)
    assert (steps.self_ms[:, 0] <= steps.wall_ms * 1.01).all()
    host_ms = recorder.steps().self_ns[1:, 0].mean() / 1e6
    assert steps.self_ms.mean() > host_ms  # the host only queues work
    assert len(steps.timeline) == 5


def test_a_gpu_has_a_speed():
    speed = measure_machine()
    assert speed.to_device_gb_s > 1 and speed.device_copy_gb_s > speed.to_device_gb_s
    assert 0.5 < speed.launch_us < 100
