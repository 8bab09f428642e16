"""Whole trainings, each with one thing that can be changed: what bench/profiler_predictions.py predicts on a GPU.

Observed and tried out by the same code as `flatout profile yolo` uses. Pictures are JPEG files of 320 x 240.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import torch
from torch import Tensor

from flatout.profile_cli.engine_training import Switch
from flatout.profile_cli.one_batch import one_batch
from flatout.profile_cli.yolo import YoloTraining
from flatout.profiler.limits import USUAL, median_ms
from flatout.profiler.outcome import Profile
from flatout.profiler.verdict import Trial, remedy_of
from flatout.yolo.assign import Anchors
from flatout.yolo.loss import LossConfig, LossParts, ota_loss
from flatout.yolo.train import loss_choice
from tests.reference.ota_twin import class_cost_by_definition, twin_assign, twin_loss

CLASSES, BOXES, DISTINCT = 80, 8, 64
Loss = Callable[..., LossParts]


@dataclass(frozen=True)
class Size:
    """How large the trainings are."""

    side_px: int = 320
    batch: int = 384
    small_batch: int = 128
    twin_batch: int = 16
    steps: int = 8
    """Timed."""
    workers: int = 16
    device: str = "0"

    @property
    def num_pictures(self) -> int:
        """So many that no epoch ends while steps are timed."""
        return (self.steps + 12) * self.batch


QUICK = Size(side_px=64, batch=8, small_batch=4, twin_batch=4, steps=4, workers=1, device="cpu")


def write_pictures(folder: Path, size: Size) -> Path:
    """A data set of few distinct pictures under many names; returns its YAML."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (DISTINCT, 15, 20, 3), dtype=np.uint8)
    files = [cv2.imencode(".jpg", cv2.resize(each, (320, 240)))[1].tobytes() for each in coarse]
    for split, num in (("train", size.num_pictures), ("val", DISTINCT)):
        images, labels = (folder / kind / split for kind in ("images", "labels"))
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for number in range(num):
            (images / f"{number}.jpg").write_bytes(files[number % DISTINCT])
            box_B4 = np.concatenate((rng.uniform(0.3, 0.7, (BOXES, 2)), rng.uniform(0.05, 0.4, (BOXES, 2))), 1)
            lines = [f"{rng.integers(CLASSES)} {' '.join(f'{x:.4f}' for x in row)}\n" for row in box_B4]
            (labels / f"{number}.txt").write_text("".join(lines))
    yaml = folder / "data.yaml"
    places = f"train: {folder / 'images' / 'train'}\nval: {folder / 'images' / 'val'}\n"
    yaml.write_text(f"{places}nc: {CLASSES}\nnames: {[f'c{number}' for number in range(CLASSES)]}\n")
    return yaml


def training(yaml: Path, size: Size, *flags: str, batch: int | None = None) -> YoloTraining:
    """`flatout profile yolo` with these flags, of yolov7-tiny."""
    common = ["--data", str(yaml), "--cfg", "yolov7-tiny", "--weights", "", "--hyp", "data/hyp.scratch.tiny.yaml"]
    common += ["--img", str(size.side_px), "--batch", str(batch or size.batch), "--noautoanchor"]
    common += ["--device", size.device, "--workers", str(size.workers)]
    return YoloTraining.from_flags([*common, *flags], num_steps=size.steps)


@dataclass(frozen=True)
class Case:
    """A training, the options that are changed in it, and who predicts the changed speed (img/s) from its profile."""

    before: YoloTraining
    switch: Mapping[str, Any]
    predict: Callable[["Case", Profile], float]
    loss_before: Loss | None = None
    """A loss that stands in the place of batched OTA before the change."""

    def run(self) -> tuple[float, float, float]:
        """Before, predicted, measured: images per second."""
        with losing_by(self.loss_before):
            profile = self.before.observe()
        predicted = self.predict(self, profile)
        after = self.before.with_switch(self.switch).observe()
        return profile.ledger.images_per_s, predicted, after.ledger.images_per_s


def cases(yaml: Path, size: Size) -> dict[str, Case]:
    """Dearest last. A CPU compiles for minutes what it then trains in seconds."""
    classic, fed = training(yaml, size), training(yaml, size, "--device-augment")
    small = training(yaml, size, "--device-augment", batch=size.small_batch)
    twin = training(yaml, size, "--device-augment", batch=size.twin_batch)
    batch = {"batch_size": size.batch}
    compiled = {"compile": Case(fed, {"compile": "on"}, by_one_batch)} if size.device != "cpu" else {}
    return {
        "GPU augmentation": Case(classic, {"device_augment": True}, by_verdict("augment on the GPU")),
        "channels_last": Case(fed, {"channels_last": True}, by_one_batch),
        f"batch {size.small_batch} -> {size.batch}": Case(small, batch, by_one_batch),
        "plain OTA twin -> batched OTA": Case(twin, {}, by_loss_alone, loss_before=plain_twin),
        **compiled,
    }


def by_verdict(what: str) -> Callable[[Case, Profile], float]:
    """The speed that the verdict promises for the remedy of this name; one that is not offered changes nothing."""

    def predict(case: Case, profile: Profile) -> float:
        chosen = next((remedy for remedy in profile.verdict.remedies if remedy.what == what), None)
        return chosen.images_per_s if chosen else profile.ledger.images_per_s

    return predict


def by_one_batch(case: Case, profile: Profile) -> float:
    """From the network's part of the step alone, on one batch, both ways: what `flatout profile` tries."""
    with one_batch(1):
        now = case.before.compute()
    trial = case.before.trial("tried", Switch("-", case.switch), now)
    return remedy_of(profile.measurement, trial).images_per_s


def by_loss_alone(case: Case, profile: Profile) -> float:
    """From the loss alone, both ways, on outputs as large as the network's."""
    options = case.before.options
    device = torch.device("cpu" if options.device == "cpu" else "cuda")
    maps, targets, anchors = made_up(options.batch_size, options.img_size[0], device)
    config = LossConfig()
    now_ms, then_ms = (
        median_ms(partial(loss, maps, targets, anchors, config), USUAL) for loss in (plain_twin, ota_loss)
    )
    trial = Trial(what="tried", change="-", stage="loss+assign", then_ms=then_ms / now_ms, is_share=True)
    return remedy_of(profile.measurement, trial).images_per_s


def plain_twin(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, config: LossConfig, balance_L: Tensor | None = None
) -> LossParts:
    """OTA image by image, in the place of `ota_loss`."""
    plain = [one_map.detach() for one_map in maps]
    lists = twin_assign(plain, targets_T6, *anchors, class_cost=class_cost_by_definition).lists
    total, items = twin_loss(maps, targets_T6, lists, anchors[0], config)
    return LossParts(total, items, items[1:2])


@contextmanager
def losing_by(loss: Loss | None) -> Iterator[None]:
    """Trainings in the block use this loss instead of batched OTA."""
    if loss is None:
        yield
        return
    with mock.patch.object(loss_choice, "ota_loss", loss):
        yield


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


class OutOfTime(BaseException):
    """Not an Exception: a training that survives whatever a compiler raises must not survive this."""


def run_all(folder: Path, size: Size, *, seconds: float) -> Iterator[tuple[str, tuple[float, float, float] | None]]:
    """Case after case; None for those that were not done after so many seconds."""
    logging.getLogger("flatout").setLevel(logging.WARNING)
    end_s = time.monotonic() + seconds
    for name, case in cases(write_pictures(folder, size), size).items():
        try:
            with _no_longer_than(end_s - time.monotonic()):
                row = case.run()
        except OutOfTime:
            yield name, None
        else:
            yield name, row


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
