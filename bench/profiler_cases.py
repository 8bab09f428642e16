"""Small trainings on the CPU for bench/profiler_predictions.py, each with one setting that can be changed.

A training is a loop with the engine's marks over a feed of JPEG files; network and loss are those of yolov7-tiny.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from flatout import Feed, FeedConfig, Field, Plan, SampleSource, Store, StoreConfig
from flatout.clock import clock
from flatout.profiler.observe.engine_steps import EngineObservation
from flatout.profiler.outcome import Profile
from flatout.yolo.load_network import start_network
from flatout.yolo.loss import Anchors, LossConfig, ota_loss
from flatout.yolo.model.network import Network
from tests.reference.ota_twin import class_cost_by_definition, twin_assign, twin_loss

CFG = Path(__file__).parents[1] / "cfg" / "training" / "yolov7-tiny.yaml"
CLASSES, BOXES = 80, 16


class Photos:
    """JPEG files of 640 x 480, and how they are decoded."""

    parameters = "bench photos, v1"

    def __init__(self, folder: Path, num: int) -> None:
        self.paths = [str(folder / f"{number}.jpg") for number in range(num)]
        noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
        for number, path in enumerate(self.paths):
            cv2.imwrite(path, np.roll(cv2.resize(noise, (640, 480)), number, 0))

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> str:
        return self.paths[index]

    where = path

    def decode(self, index: int) -> np.ndarray:
        return np.asarray(cv2.imread(self.paths[index]))


class Training(SampleSource):
    """Source of samples: photos, decoded or from a store, blurred and scaled to the network's input size."""

    def __init__(self, photos: Photos, store: Store | None, size: int, blurs: int) -> None:
        self.fields = {"images": Field((3, size, size))}
        self.photos, self.store, self.size, self.blurs = photos, store, size, blurs

    def __len__(self) -> int:
        return len(self.photos)

    def where(self, index: int) -> str:
        return self.photos.where(index)

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        if self.store is not None:
            image = self.store[index]
        else:
            with clock.stage("decode"):
                image = self.photos.decode(index)
        with clock.stage("augment"):
            for _ in range(self.blurs):
                image = cv2.GaussianBlur(image, (9, 9), rng.uniform(1, 2))
            image = cv2.resize(image, (self.size, self.size))
        return {"images": image.transpose(2, 0, 1)}


@dataclass(frozen=True)
class Setting:
    """Settings of one training."""

    folder: Path
    size: int = 128
    batch_size: int = 8
    workers: int = 1
    blurs: int = 1
    keeps_decoded: bool = False
    channels_last: bool = False
    twin_loss: bool = False
    trains_network: bool = True
    """False: a step only sleeps for 10 ms, so that only the input matters."""

    def changed(self, **changes: Any) -> "Setting":
        return replace(self, **changes)


class Parts:
    """Network, optimizer and targets of a training."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.network: Network = start_network(CFG, None, nc=CLASSES).network.train()
        if setting.channels_last:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.network.parameters(), 1e-4)
        generator = torch.Generator().manual_seed(1)
        targets = torch.rand(BOXES * setting.batch_size, 6, generator=generator)
        targets[:, 0] = torch.arange(setting.batch_size).repeat_interleave(BOXES)
        targets[:, 1] = (targets[:, 1] * CLASSES).floor()
        targets[:, 4:] = targets[:, 4:] * 0.4 + 0.05
        self.targets = targets
        head = self.network.head
        self.anchors = Anchors(head.anchors, tuple(head.strides))

    def forward(self, images: Tensor) -> list[Tensor]:
        inputs = images.float() / 255
        if self.setting.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return list(self.network(inputs))

    def loss(self, maps: Sequence[Tensor]) -> Tensor:
        if self.setting.twin_loss:
            plain = [one_map.detach() for one_map in maps]
            lists = twin_assign(plain, self.targets, *self.anchors, class_cost=class_cost_by_definition).lists
            return twin_loss(maps, self.targets, lists, self.anchors[0], LossConfig())[0]
        return ota_loss(maps, self.targets, self.anchors, LossConfig()).total

    def step(self, images: Tensor) -> None:
        with clock.stage("train.forward"):
            maps = self.forward(images)
        with clock.stage("train.loss"):
            loss = self.loss(maps)
        with clock.stage("train.backward"):
            loss.backward()
        with clock.stage("train.optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()


@contextmanager
def open_feed(setting: Setting, num_photos: int = 64) -> Iterator[Feed]:
    """The feed of a training."""
    with ExitStack() as stack:
        photos = Photos(setting.folder, num_photos)
        store = None
        if setting.keeps_decoded:
            store = stack.enter_context(Store.open(photos, StoreConfig(folder=setting.folder / "store")))
        source = Training(photos, store, setting.size, setting.blurs)
        plan = Plan(num_samples=num_photos, batch_size=setting.batch_size, seed=1)
        yield stack.enter_context(Feed(source, plan, FeedConfig(workers=setting.workers)))


def observe(setting: Setting, num_steps: int) -> Profile:
    """Run a training until `num_steps` steps were timed; returns its profile."""
    observation = EngineObservation(images_per_step=setting.batch_size, num_steps=num_steps)
    step = Parts(setting).step if setting.trains_network else idle_step
    with open_feed(setting) as feed, observation.observing():
        batches = endless(feed)
        for _ in range(observation.total_steps):
            with clock.stage("train.wait"):
                batch = next(batches)
            step(torch.from_numpy(batch["images"]))
    return observation.profile


def idle_step(images: Tensor) -> None:
    """A step that does not use the CPU."""
    with clock.stage("train.forward"):
        sleep(0.01)


def endless(feed: Feed) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from feed.epoch(epoch)
        epoch += 1


def time_alternating(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of several functions, called alternately, so that all are disturbed alike."""
    durations: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            begin_s = perf_counter()
            work()
            if number:  # the first round warms up
                durations[name].append(1e3 * (perf_counter() - begin_s))
    return {name: float(np.median(each)) for name, each in durations.items()}
