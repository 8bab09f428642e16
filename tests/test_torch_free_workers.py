"""The sources that jobs send to their workers work there without torch, which would cost 1.6 s per worker.

Each source is opened as a training opens it, sent to a new interpreter as the feed sends it, and reads a batch there.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.defect.data.items import Strips
from flatout.defect.input import open_input
from flatout.defect.train import input_config, sample_recipe, training_images
from flatout.feed import FeedConfig, Source
from flatout.feed.background_fill import ItemBytes
from flatout.ranks.world import World
from flatout.spike.config import load_config
from flatout.spike.data.clip_set import ClipSet, open_training
from flatout.spike.data.frames import FrameItems
from flatout.spike.input import (
    open_resident_feed,
    open_scoring_feed,
    open_store,
    open_training_feed,
    training_plan,
)
from flatout.spike.step import plan_steps
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu.chroma import Subsampled
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.augment.samples import ResizedImages, SizedImages
from flatout.yolo.augment.source import ValidationSource
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import input as yolo_input
from flatout.yolo.train.autotune import input_choices
from tests.defect.small_runs import small_data, small_options
from tests.old_runs.situations import SITUATIONS
from tests.yolo.small_sets import files_of

ROOT = Path(__file__).parent.parent
MAX_CPU_S = 1.5
"""CPU time of an interpreter that unpickles a source and reads one batch; measured: 0.2 to 0.5 s."""

PROBE = """
import pickle, sys, time
kind, sent = pickle.load(sys.stdin.buffer)
unpickled = pickle.loads(sent)
if kind == "source":
    from flatout.feed import Feed, FeedConfig, Plan
    plan = Plan(num_samples=len(unpickled), batch_size=1, shuffle=False)
    with Feed(unpickled, plan, FeedConfig(workers=0)) as feed:
        next(iter(feed))
elif kind == "items":
    unpickled.decode(0)
print("torch" in sys.modules, time.process_time())
"""


def probe(kind: str, sent: object) -> tuple[bool, float]:
    """Whether a new interpreter that used the object has imported torch, and its CPU time in seconds."""
    pickled = pickle.dumps((kind, pickle.dumps(sent)))
    done = subprocess.run([sys.executable, "-c", PROBE], input=pickled, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    has_torch, cpu_s = done.stdout.split()
    return has_torch == b"True", float(cpu_s)


def check_is_light(sent: object, kind: str = "source") -> None:
    has_torch, cpu_s = probe(kind, sent)
    assert not has_torch, f"a worker that unpickles {type(sent).__name__} and reads a sample imports torch"
    assert cpu_s < MAX_CPU_S


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Holds what the parent process keeps open for its workers."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="module")
def strips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("strips"))


@pytest.fixture(scope="module")
def clips_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    SITUATIONS["spike"].prepare(folder)
    return folder / "clips/demo.yaml"


def defect_source(data: Path, stack: ExitStack, **changes: Any) -> Source:
    options = small_options(data, data / "runs", **changes)
    images = training_images(options)
    samples = sample_recipe(options, images)
    return open_input(images, samples, input_config(options), torch.device("cpu"), World(), stack).feed.source


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="kept in memory"),
        pytest.param({"cache_size": 0}, id="decoded by workers"),
        pytest.param({"cache_size": 1, "group_images": 2}, id="kept by groups"),
        pytest.param({"line_ratio": 0.5, "noise": 2.0}, id="lines and noise"),
        pytest.param({"device_strips": "on"}, id="painted on the device"),
    ],
)
def test_a_training_source_of_defect_needs_no_torch(changes: dict[str, Any], strips: Path, stack: ExitStack):
    check_is_light(defect_source(strips, stack, **changes))


def test_images_that_defect_decodes_for_its_store_and_for_validation_need_no_torch(strips: Path):
    check_is_light(Strips(sorted((strips / "valid").rglob("*.tiff"))), "items")


def clips_of(yaml: Path, *overrides: str) -> tuple[Any, ClipSet, ClipSet]:
    config = load_config(yaml, ["DATA.CROP_SIZE=16", "DATA.NUM_VOXEL_BINS=4", "DATA.CLIP_LEN=2", *overrides])
    training, validation = open_training(config.DATA)
    assert validation is not None
    return config.DATA, training, validation


CPU = torch.device("cpu")


@pytest.mark.parametrize("opener", [open_training_feed, open_resident_feed])
@pytest.mark.parametrize("cache", ["true", "false"])
def test_a_training_source_of_spike_needs_no_torch(opener: Any, cache: str, clips_yaml: Path, stack: ExitStack):
    config, clips, _ = clips_of(clips_yaml, f"DATA.USE_RAM_CACHE={cache}")
    store = open_store(clips, config, budget_bytes=10**8, workers=0)
    assert (store is not None) == (cache == "true")
    steps = plan_steps(len(clips), world=1, batch=2, accumulation=1)
    plan = training_plan(clips, 2, steps=steps, seed=1, world=World())
    opened = opener(clips, config, FeedConfig(workers=0, epochs=1), plan, CPU, store)
    check_is_light(stack.enter_context(opened).batches.feed.source)


@pytest.mark.parametrize("cache", ["true", "false"])
def test_a_validation_source_of_spike_needs_no_torch(cache: str, clips_yaml: Path, stack: ExitStack):
    config, _, clips = clips_of(clips_yaml, f"DATA.USE_RAM_CACHE={cache}")
    store = open_store(clips, config, budget_bytes=10**8, workers=0)
    opened = open_scoring_feed(clips, config, FeedConfig(workers=0), 2, CPU, store)
    check_is_light(stack.enter_context(opened).batches.feed.source)


def test_frames_that_spike_decodes_for_its_store_need_no_torch(clips_yaml: Path):
    check_is_light(FrameItems(clips_of(clips_yaml)[1]), "items")


@pytest.mark.parametrize("kept", [{}, {"fast_dataloader": True}, {"device_augment": True}])
def test_a_training_source_of_yolo_needs_no_torch(kept: dict[str, Any], tmp_path: Path, stack: ExitStack):
    config = yolo_input.InputConfig(
        augment=AugmentConfig(),
        size=64,
        batch_size=4,
        seed=0,
        grid=32,
        epochs=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
        world=World(),
    )
    images = files_of(tmp_path)
    choices = input_choices(images, config, TrainOptions(workers=0, **kept).asked, torch.nn.Identity())
    batches, _ = yolo_input.open_input(images, config, choices, stack)
    check_is_light(batches.feed.source)


def test_a_validation_source_of_yolo_needs_no_torch(tmp_path: Path):
    images = files_of(tmp_path)
    resized = ResizedImages(images, size=64, augment=False)
    check_is_light(ValidationSource(images, resized, size=64, largest_hw=(128, 128)))


@pytest.mark.parametrize("kept", [SizedImages, Subsampled])
def test_images_that_are_decoded_while_yolo_trains_need_no_torch(kept: Any, tmp_path: Path):
    images = files_of(tmp_path)
    resized = ResizedImages(images, size=64, augment=True)
    check_is_light(ItemBytes(kept(resized, resized_wh(images.size_wh_N2, 64)), images.paths))


def test_the_probe_notices_torch():
    has_torch, _ = probe("value", torch.device("cpu"))
    assert has_torch
