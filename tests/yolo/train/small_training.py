"""A detection training without files: the real loop and step, a small network, batches from a test."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flatout.engine.job import Batches, EpochEnd, EpochReport, IntervalStats, Sections
from flatout.engine.loop import Loop, LoopConfig
from flatout.engine.optim import MovingAverage
from flatout.engine.step import DTYPES, Amp
from flatout.engine.step_hash import HashedStep
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.loss import LossConfig
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.train import prepare
from flatout.yolo.train.step import DetectionJob, DetectionLoss, StepInputs, YoloSchedule, capacity_for


class RecordsReports(EpochEnd):
    """The epoch end of a training that is neither validated nor saved; keeps the reports."""

    def __init__(self) -> None:
        self.reports: list[EpochReport] = []

    def __call__(self, epoch: int, report: EpochReport, sections: Callable[[], Sections]) -> bool:
        self.reports.append(report)
        return False


def tiny_hyp(**changes: Any) -> Hyp:
    """hyp.scratch.tiny.yaml, with a warm-up that ends."""
    return replace(load_hyp(shipped_folder("data") / "hyp.scratch.tiny.yaml"), **{"warmup_iters": 6, **changes})


def narrow_network(num_classes: int = 3, *, seed: int = 0) -> Network:
    """yolov7-tiny with an eighth of its channels."""
    torch.manual_seed(seed)
    config: Any = load_config("yolov7-tiny")
    return build_network({**config, "nc": num_classes, "width_multiple": 0.125})


def loss_config(network: Network, hyp: Hyp, size: int) -> LossConfig:
    head = network.head
    return hyp.loss().scaled(num_layers=head.nl, num_classes=head.nc, image_size_px=size)


def make_loop(
    network: Network,
    hyp: Hyp,
    batches: Batches,
    *,
    num_steps: int,
    batch_size: int,
    size: int,
    amp: Amp = "off",
    graphs: bool = False,
    device: str = "cpu",
    log_every: int = 4,
    tell: Callable[[IntervalStats], None] = lambda tick: None,
    on_hashes: Callable[[list[HashedStep]], None] | None = None,
) -> tuple[Loop, RecordsReports]:
    """One epoch of `num_steps`."""
    end = RecordsReports()
    inputs = StepInputs(dtype=DTYPES[amp], channels_last=device != "cpu", size=size, grid=32, seed=1)
    loss = DetectionLoss(network.head, loss_config(network, hyp, size), ota=hyp.ota)
    loop = Loop(
        job=DetectionJob(inputs, loss, capacity=capacity_for(8, batch_size)),
        network=network,
        optimizer=prepare.optimizer_for(network, hyp, total_batch=batch_size, adam=False),
        schedule=YoloSchedule(hyp, epochs=100, steps_per_epoch=num_steps, total_batch=batch_size),
        batches=batches,
        config=LoopConfig(epochs=1, steps_per_epoch=num_steps, amp=amp, log_every=log_every, graphs=graphs),
        device=torch.device(device),
        epoch_end=end,
        average=MovingAverage(network),
        on_interval=tell,
        on_hashes=on_hashes,
    )
    return loop, end


def run_without_waits(network: Network, hyp: Hyp, batches: Batches, **settings: Any) -> tuple[Loop, int]:
    """Run `make_loop` on a GPU; from the third logged interval on, an error if the host waits for the device.

    Returns the loop and the number of logged intervals.
    """
    num_intervals = 0

    def tell(tick: IntervalStats) -> None:
        nonlocal num_intervals
        num_intervals += 1
        if num_intervals == 3:  # kernels are compiled and the graph is captured by now
            torch.cuda.set_sync_debug_mode("error")

    loop, _ = make_loop(network, hyp, batches, device="cuda", tell=tell, **settings)
    try:
        loop.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return loop, num_intervals
