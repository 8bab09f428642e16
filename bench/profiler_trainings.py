"""Whole trainings for bench/profiler_predictions.py on a GPU, each with one setting that can be changed.

They are observed and tried by the code of `flatout profile yolo`. A training that several cases begin or end with is
observed once. The changed training is only timed; most of the time goes into starting trainings and compiling kernels.
"""

import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.profiler_cases import time_alternating
from bench.profiler_training_files import BOXES, CLASSES, write_images, write_small_network
from flatout.profiler.observe.limits import drain
from flatout.profiler.observe.observation import ALL_PHASES
from flatout.profiler.outcome import Profile
from flatout.profiler.verdict import Trial, remedy_of
from flatout.profiler.verdict.predict_step import StepNumbers, remedy_of_end_to_end
from flatout.runs.profiled import RepeatedBatch, Switch
from flatout.yolo.commands.train import COMMAND
from flatout.yolo.loss import Anchors, LossConfig, LossParts, ota_loss
from flatout.yolo.profile import YoloTraining
from flatout.yolo.train import step
from tests.reference.ota_twin import class_cost_by_definition, twin_assign, twin_loss

Loss = Callable[..., LossParts]
BEFORE = ALL_PHASES._replace(counted=0, traced=1)
"""Phases before the change; waits are not counted, because no prediction here uses them."""


@dataclass(frozen=True)
class Size:
    """Sizes of the trainings."""

    side_px: int = 320
    batch: int = 768
    """So large that the device is the limit: the speed of the host varies too much."""
    small_batch: int = 64
    fed_batch: int = 128
    """Batch of the trainings with few workers."""
    twin_batch: int = 8
    steps: int = 16
    """Timed steps."""
    workers: int = 16
    few_workers: int = 2
    more_workers: int = 4
    device: str = "0"

    @property
    def num_images(self) -> int:
        """So many that no epoch ends before the last timed step, including a warm-up of six steps."""
        return (BEFORE.timing_begins + 4 + self.steps + 2) * self.batch


QUICK = Size(
    side_px=64, batch=8, small_batch=4, fed_batch=8, twin_batch=4, steps=4, workers=2, few_workers=1, more_workers=2,
    device="cpu",
)  # fmt: skip


def training(yaml: Path, size: Size, *flags: str, batch: int, workers: int, cfg: str = "yolov7-tiny") -> YoloTraining:
    """The training that `flatout profile yolo` would run with these flags."""
    common = ["--data", str(yaml), "--cfg", cfg, "--weights", "", "--hyp", "data/hyp.scratch.tiny.yaml"]
    # So few epochs that training begins at once: longer runs first benchmark cuDNN's kernels.
    common += ["--img", str(size.side_px), "--batch", str(batch), "--noautoanchor", "--epochs", "30"]
    common += ["--device", size.device, "--workers", str(workers)]
    return YoloTraining.from_flags(COMMAND, [*common, *flags], num_steps=size.steps)


class ObservedTrainings:
    """Results of observed trainings: many cases end with the training that others begin with."""

    def __init__(self) -> None:
        self._profiles: dict[YoloTraining, Profile] = {}
        self._speeds: dict[YoloTraining, float] = {}

    def profile(self, training: YoloTraining, loss: Loss | None) -> Profile:
        if loss is not None:
            with mock.patch.object(step, "ota_loss", loss):
                return training.observe(BEFORE)
        if training not in self._profiles:
            self._profiles[training] = training.observe(BEFORE)
        return self._profiles[training]

    def speed(self, training: YoloTraining) -> float:
        if training not in self._speeds:
            self._speeds[training] = training.speed()
        return self._speeds[training]


@dataclass(frozen=True)
class Case:
    """A training, the options to change, and the function that predicts the changed speed (img/s) from its profile."""

    before: YoloTraining
    switch: Mapping[str, Any]
    predict: Callable[["Case", Profile], float]
    loss_before: Loss | None = None
    """A loss that replaces batched OTA before the change."""

    def run(self, observed: ObservedTrainings) -> tuple[float, float, float]:
        """Images per second before, predicted and measured."""
        profile = observed.profile(self.before, self.loss_before)
        predicted = self.predict(self, profile)
        return profile.ledger.images_per_s, predicted, observed.speed(self.before.with_switch(self.switch))


def cases(folder: Path, size: Size) -> dict[str, Case]:
    """All cases, the slowest last. Without channels_last the network on a GPU is so slow that no input is the limit; on
    a CPU, compiling takes minutes for a training of seconds."""
    yaml, small_network = write_images(folder, size.num_images), write_small_network(folder)
    last = partial(training, yaml, size, "--channels-last")
    few, crowd = last(batch=size.fed_batch, workers=size.few_workers), last(batch=size.batch, workers=size.workers)
    fed = partial(last, "--device-augment", workers=size.workers)
    plain = training(yaml, size, "--device-augment", batch=size.batch, workers=size.workers)
    small = fed(batch=size.small_batch, cfg=str(small_network))
    compiled = {"compile, 8 layers": Case(small, {"compile": "on"}, by_end_to_end)} if size.device != "cpu" else {}
    return {
        f"workers {size.few_workers} -> {size.more_workers}": Case(
            few, {"workers": size.more_workers}, by_workers(size.more_workers)
        ),
        "store off -> on": Case(few, {"cache_images": True}, by_verdict("cache decoded images")),
        "GPU augmentation": Case(crowd, {"device_augment": True}, by_end_to_end),
        f"batch {size.small_batch} -> {size.batch}": Case(
            fed(batch=size.small_batch), {"batch_size": size.batch}, by_end_to_end
        ),
        "plain OTA twin -> batched OTA": Case(fed(batch=size.twin_batch), {}, by_loss_alone, loss_before=plain_twin),
        "channels_last": Case(plain, {"channels_last": True}, by_one_batch),
        **compiled,
    }


def by_verdict(what: str) -> Callable[[Case, Profile], float]:
    """Predicts the speed that the verdict gives for the remedy of this name; no change if it is not offered."""

    def predict(case: Case, profile: Profile) -> float:
        chosen = next((remedy for remedy in profile.verdict.remedies if remedy.what == what), None)
        return chosen.images_per_s if chosen else profile.ledger.images_per_s

    return predict


def by_workers(workers: int) -> Callable[[Case, Profile], float]:
    """Predicts by the model of the verdict, for the number of workers of the case instead of the advised one."""

    def predict(case: Case, profile: Profile) -> float:
        numbers = StepNumbers(profile.measurement)
        return 1e3 * numbers.images / numbers.with_workers(workers)

    return predict


def by_one_batch(case: Case, profile: Profile) -> float:
    """Predict from the network's part of the step on one batch, with and without the change, as `flatout profile`."""
    now = case.before.shorter().compute(RepeatedBatch())
    trial = case.before.trial("tried", Switch("-", case.switch), now)
    return remedy_of(profile.measurement, trial).images_per_s


def by_end_to_end(case: Case, profile: Profile) -> float:
    """Predict from network and input, each by itself with the change made, as `flatout profile` does for --fast.

    Where every core is busy, the network's time next to the workers does not tell its time without them; and where
    launches are the limit, its time for a small batch does not tell that for a large one.
    """
    trial = case.before.end_to_end_trial("tried", Switch("-", case.switch))
    print(
        f"  tried: network {trial.compute_ms:.1f} ms (kernels {trial.device_ms:.1f}), input {trial.input_ms:.1f} ms "
        f"(kernels {trial.input_device_ms:.1f})"
    )
    return remedy_of_end_to_end(StepNumbers(profile.measurement), trial).images_per_s


def by_loss_alone(case: Case, profile: Profile) -> float:
    """Predict from the loss and its backward pass alone, with and without the change, on random outputs as large as the
    network's, and from how much longer the loss takes in the training than there."""
    options = case.before.options
    device = torch.device("cpu" if options.device == "cpu" else "cuda")
    maps, targets, anchors = random_outputs(options.batch_size, options.img_size[0], device)
    now, then = loss_times((plain_twin, ota_loss), maps, targets, anchors)
    n = StepNumbers(profile.measurement)
    ratio = n.host_ms("loss", "assign") / now.forward_ms
    saved_ms = ratio * (now.forward_ms + now.backward_ms - then.forward_ms - then.backward_ms)
    print(f"  tried: {now} -> {then}, in the training {ratio:.2f} times as long")
    stages = ("loss", "assign", "backward")
    then_ms = max(0.0, n.host_ms(*stages) - saved_ms)
    trial = Trial(what="tried", change="-", stage="+".join(stages), then_ms=then_ms)
    return remedy_of(profile.measurement, trial).images_per_s


class LossTimes(NamedTuple):
    """Times of a loss by itself."""

    forward_ms: float
    backward_ms: float


def loss_times(losses: Sequence[Loss], maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors) -> list[LossTimes]:
    """Times of several losses, measured alternately: on a host whose speed varies by a third within seconds, a backward
    pass could otherwise come out as taking no time."""
    leaves = [one_map.requires_grad_() for one_map in maps]
    works: dict[str, Callable[[], object]] = {}
    for number, loss in enumerate(losses):
        forward = partial(loss, leaves, targets_T6, anchors, LossConfig())
        works[f"forward {number}"] = partial(_drained, forward)
        works[f"both {number}"] = partial(_drained, partial(_forward_and_backward, forward, leaves))
    ms = time_alternating(works, rounds=9)
    return [
        LossTimes(ms[f"forward {number}"], max(0.0, ms[f"both {number}"] - ms[f"forward {number}"]))
        for number in range(len(losses))
    ]


def _forward_and_backward(forward: Callable[[], LossParts], leaves: Sequence[Tensor]) -> None:
    torch.autograd.grad(forward().total, leaves)


def _drained(work: Callable[[], object]) -> None:
    work()
    drain()


def plain_twin(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, config: LossConfig, balance_L: Tensor | None = None
) -> LossParts:
    """OTA image by image, with the signature of `ota_loss`."""
    plain = [one_map.detach() for one_map in maps]
    lists = twin_assign(plain, targets_T6, *anchors, class_cost=class_cost_by_definition).lists
    total, items = twin_loss(maps, targets_T6, lists, anchors[0], config)
    return LossParts(total, items, items[1:2])


def random_outputs(batch: int, side_px: int, device: torch.device) -> tuple[list[Tensor], Tensor, Anchors]:
    """Outputs, targets (16 per mosaic, about as many as four images with 8 boxes give) and anchors of a head."""
    generator = torch.Generator().manual_seed(0)
    strides = (8.0, 16.0, 32.0)
    maps = [
        torch.randn(batch, 3, side_px // int(s), side_px // int(s), 5 + CLASSES, generator=generator) for s in strides
    ]
    targets = torch.rand(2 * BOXES * batch, 6, generator=generator)
    targets[:, 0] = torch.arange(batch).repeat_interleave(2 * BOXES)
    targets[:, 1] = (targets[:, 1] * CLASSES).floor()
    targets[:, 4:] = targets[:, 4:] * 0.4 + 0.05
    anchors_L32 = torch.tensor([[1.5, 2.0], [2.0, 3.5], [4.0, 4.0]]).expand(3, 3, 2).contiguous()
    return [each.to(device) for each in maps], targets.to(device), Anchors(anchors_L32.to(device), strides)


class CaseResult(NamedTuple):
    """The result of a case, or why it was left out."""

    name: str
    row: tuple[float, float, float] | None
    """Images per second before, predicted and measured; None: left out, see `why`."""
    seconds: float
    why: str = ""
    """Why it was left out."""


class OutOfTime(BaseException):
    """The time limit is reached. Not an Exception: a training that tolerates errors of a compiler must not catch it."""


def run_all(folder: Path, size: Size, *, seconds: float) -> Iterator[CaseResult]:
    """Run all cases within `seconds`; stores and label caches are in the folder and removed with it."""
    logging.getLogger("flatout").setLevel(logging.WARNING)
    began_s, observed = time.monotonic(), ObservedTrainings()
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        for name, case in cases(folder, size).items():
            case_began_s, row, why = time.monotonic(), None, ""
            try:
                with _no_longer_than(began_s + seconds - case_began_s):
                    row = case.run(observed)
            except OutOfTime:
                why = f"not finished after {seconds:.0f} s"
            except Exception as error:  # broad: the other cases should still run
                traceback.print_exc()
                why = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            yield CaseResult(name, row, time.monotonic() - case_began_s, why)


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    def stop(*args: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
