"""Whole trainings, each with one thing that can be changed: what bench/profiler_predictions.py predicts on a GPU.

Observed and tried out by the same code as `flatout profile yolo` uses. A training that several cases begin or end with
is looked at once. What came after a change is timed and nothing else; most of the seconds go into starting trainings
and compiling their kernels.
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

from bench.profiler_cases import in_turns
from bench.profiler_training_files import BOXES, CLASSES, write_pictures, write_small_network
from flatout.profiler.observe.limits import drain
from flatout.profiler.observe.observation import ALL
from flatout.profiler.outcome import Profile
from flatout.profiler.verdict import Trial, remedy_of
from flatout.profiler.verdict.predict_step import StepNumbers, StepPrediction, remedy_of_end_to_end
from flatout.runs.profiled import RepeatedBatch, Switch
from flatout.yolo.commands.train import COMMAND
from flatout.yolo.loss import Anchors, LossConfig, LossParts, ota_loss
from flatout.yolo.profile import YoloTraining
from flatout.yolo.train import step
from tests.reference.ota_twin import class_cost_by_definition, twin_assign, twin_loss

Loss = Callable[..., LossParts]
BEFORE = ALL._replace(counted=0, traced=1)
"""How a training is looked at: no prediction here asks for its waits."""


@dataclass(frozen=True)
class Size:
    """How large the trainings are."""

    side_px: int = 320
    batch: int = 768
    """So large that the device is the limit: where the host is, a machine whose speed varies decides."""
    small_batch: int = 64
    fed_batch: int = 128
    """Where few workers are the limit."""
    twin_batch: int = 8
    steps: int = 16
    """Timed."""
    workers: int = 16
    few_workers: int = 2
    more_workers: int = 4
    device: str = "0"

    @property
    def num_pictures(self) -> int:
        """So many that no epoch ends before the last timed step, a warm-up of six included."""
        return (BEFORE.timing_begins(on_device=True) + 4 + self.steps + 2) * self.batch


QUICK = Size(
    side_px=64, batch=8, small_batch=4, fed_batch=8, twin_batch=4, steps=4, workers=2, few_workers=1, more_workers=2,
    device="cpu",
)  # fmt: skip


def training(yaml: Path, size: Size, *flags: str, batch: int, workers: int, cfg: str = "yolov7-tiny") -> YoloTraining:
    """`flatout profile yolo` with these flags."""
    common = ["--data", str(yaml), "--cfg", cfg, "--weights", "", "--hyp", "data/hyp.scratch.tiny.yaml"]
    # A run so short that it begins at once: longer ones first try out cuDNN's kernels.
    common += ["--img", str(size.side_px), "--batch", str(batch), "--noautoanchor", "--epochs", "30"]
    common += ["--device", size.device, "--workers", str(workers)]
    return YoloTraining.from_flags(COMMAND, [*common, *flags], num_steps=size.steps)


class Seen:
    """Trainings that were looked at: many cases end where others begin."""

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
    """A training, the options that are changed in it, and who predicts the changed speed (img/s) from its profile."""

    before: YoloTraining
    switch: Mapping[str, Any]
    predict: Callable[["Case", Profile], float]
    loss_before: Loss | None = None
    """A loss that stands in the place of batched OTA before the change."""

    def run(self, seen: Seen) -> tuple[float, float, float]:
        """Before, predicted, measured: images per second."""
        profile = seen.profile(self.before, self.loss_before)
        predicted = self.predict(self, profile)
        return profile.ledger.images_per_s, predicted, seen.speed(self.before.with_switch(self.switch))


def cases(folder: Path, size: Size) -> dict[str, Case]:
    """Dearest last. Without channels_last a GPU's network is so slow that no input is the limit; a CPU compiles for
    minutes what it then trains in seconds."""
    yaml, small_network = write_pictures(folder, size.num_pictures), write_small_network(folder)
    last = partial(training, yaml, size, "--channels-last")
    few, crowd = last(batch=size.fed_batch, workers=size.few_workers), last(batch=size.batch, workers=size.workers)
    fed = partial(last, "--device-augment", workers=size.workers)
    plain = training(yaml, size, "--device-augment", batch=size.batch, workers=size.workers)
    small = fed(batch=size.small_batch, cfg=str(small_network))
    compiled = {"compile, 8 layers": Case(small, {"compile": "on"}, by_whole)} if size.device != "cpu" else {}
    return {
        f"workers {size.few_workers} -> {size.more_workers}": Case(
            few, {"workers": size.more_workers}, by_workers(size.more_workers)
        ),
        "store off -> on": Case(few, {"cache_images": True}, by_verdict("keep pictures decoded")),
        "GPU augmentation": Case(crowd, {"device_augment": True}, by_whole),
        f"batch {size.small_batch} -> {size.batch}": Case(
            fed(batch=size.small_batch), {"batch_size": size.batch}, by_whole
        ),
        "plain OTA twin -> batched OTA": Case(fed(batch=size.twin_batch), {}, by_loss_alone, loss_before=plain_twin),
        "channels_last": Case(plain, {"channels_last": True}, by_one_batch),
        **compiled,
    }


def by_verdict(what: str) -> Callable[[Case, Profile], float]:
    """The speed that the verdict promises for the remedy of this name; one that is not offered changes nothing."""

    def predict(case: Case, profile: Profile) -> float:
        chosen = next((remedy for remedy in profile.verdict.remedies if remedy.what == what), None)
        return chosen.images_per_s if chosen else profile.ledger.images_per_s

    return predict


def by_workers(workers: int) -> Callable[[Case, Profile], float]:
    """The model of the verdict, for so many workers as the case has and not for as many as it would advise."""

    def predict(case: Case, profile: Profile) -> float:
        numbers = StepNumbers(profile.measurement)
        return 1e3 * numbers.images / StepPrediction(numbers).with_workers(workers)

    return predict


def by_one_batch(case: Case, profile: Profile) -> float:
    """From the network's part of the step alone, on one batch, both ways: what `flatout profile` tries."""
    now = case.before.shorter().compute(RepeatedBatch())
    trial = case.before.trial("tried", Switch("-", case.switch), now)
    return remedy_of(profile.measurement, trial).images_per_s


def by_whole(case: Case, profile: Profile) -> float:
    """From network and input, each by itself with the change made: what `flatout profile` does with --fast. Where every
    core is busy, what the network takes beside the workers does not tell what it takes without them; and where launches
    are the limit, what it takes for a small batch does not tell what it takes for a large one."""
    whole = case.before.whole_trial("tried", Switch("-", case.switch))
    print(
        f"  tried: network {whole.compute_ms:.1f} ms (kernels {whole.device_ms:.1f}), input {whole.input_ms:.1f} ms "
        f"(kernels {whole.beside_ms:.1f})"
    )
    return remedy_of_end_to_end(StepNumbers(profile.measurement), whole).images_per_s


def by_loss_alone(case: Case, profile: Profile) -> float:
    """From the loss and its backward pass alone, both ways, on made-up outputs as large as the network's, and from how
    much longer the loss takes in the training than there."""
    options = case.before.options
    device = torch.device("cpu" if options.device == "cpu" else "cuda")
    maps, targets, anchors = made_up(options.batch_size, options.img_size[0], device)
    now, then = loss_times((plain_twin, ota_loss), maps, targets, anchors)
    n = StepNumbers(profile.measurement)
    longer = n.host_ms("loss", "assign") / now.forward_ms
    saved_ms = longer * (now.forward_ms + now.backward_ms - then.forward_ms - then.backward_ms)
    print(f"  tried: {now} -> {then}, in the training {longer:.2f} times as long")
    stages = ("loss", "assign", "backward")
    then_ms = max(0.0, n.host_ms(*stages) - saved_ms)
    trial = Trial(what="tried", change="-", stage="+".join(stages), then_ms=then_ms)
    return remedy_of(profile.measurement, trial).images_per_s


class LossTimes(NamedTuple):
    """Of a loss by itself."""

    forward_ms: float
    backward_ms: float


def loss_times(losses: Sequence[Loss], maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors) -> list[LossTimes]:
    """In turns: a host whose speed varies by a third within seconds would give a backward pass of no time at all."""
    leaves = [one_map.requires_grad_() for one_map in maps]
    works: dict[str, Callable[[], object]] = {}
    for number, loss in enumerate(losses):
        forward = partial(loss, leaves, targets_T6, anchors, LossConfig())
        works[f"forward {number}"] = partial(_drained, forward)
        works[f"both {number}"] = partial(_drained, partial(_forward_and_backward, forward, leaves))
    ms = in_turns(works, turns=9)
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
    """OTA image by image, in the place of `ota_loss`."""
    plain = [one_map.detach() for one_map in maps]
    lists = twin_assign(plain, targets_T6, *anchors, class_cost=class_cost_by_definition).lists
    total, items = twin_loss(maps, targets_T6, lists, anchors[0], config)
    return LossParts(total, items, items[1:2])


def made_up(batch: int, side_px: int, device: torch.device) -> tuple[list[Tensor], Tensor, Anchors]:
    """Outputs, targets (16 per mosaic, as four pictures of 8 leave about) and anchors of a detection head."""
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


class Done(NamedTuple):
    """A case that was run, or not."""

    name: str
    row: tuple[float, float, float] | None
    """Before, predicted, measured; None: see `why`."""
    seconds: float
    why: str = ""
    """Why it is left out."""


class OutOfTime(BaseException):
    """Not an Exception: a training that survives whatever a compiler raises must not survive this."""


def run_all(folder: Path, size: Size, *, seconds: float) -> Iterator[Done]:
    """Case after case, for so many seconds; stores and label caches go with the folder."""
    logging.getLogger("flatout").setLevel(logging.WARNING)
    began_s, seen = time.monotonic(), Seen()
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        for name, case in cases(folder, size).items():
            case_began_s, row, why = time.monotonic(), None, ""
            try:
                with _no_longer_than(began_s + seconds - case_began_s):
                    row = case.run(seen)
            except OutOfTime:
                why = f"not done after {seconds:.0f} s"
            except Exception as error:  # the other cases are worth having
                traceback.print_exc()
                why = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            yield Done(name, row, time.monotonic() - case_began_s, why)


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
