"""Batches rendered on the device equal those of workers, byte for byte."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flatout.errors import ConfigError
from flatout.feed import FeedConfig
from flatout.ranks.world import World
from flatout.spike.config import AugmentConfig, DataConfig
from flatout.spike.data.clip_set import open_clips
from flatout.spike.data.decode import decode, map_stream
from flatout.spike.input import open_resident_feed, open_store, open_training_feed, training_plan
from flatout.spike.step import plan_steps
from tests.spike.test_source import damaged_tree

FIELDS = ("blur", "sharp", "spikes", "spike_frames", "score")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = ["cpu", CUDA]


def feeds(config: DataConfig, device: str, *, cached: bool = False):
    """Two feeds of the same batches: made by workers, and rendered on the device."""
    clips = open_clips(config, "train", scored=False)
    steps = plan_steps(len(clips), world=1, batch=3, accumulation=1)
    plan = training_plan(clips, 3, steps=steps, seed=5, world=World())
    workers = FeedConfig(workers=0, epochs=2, on_error="substitute")
    for open_feed in (open_training_feed, open_resident_feed):
        store = (
            open_store(clips, replace(config, USE_RAM_CACHE=True), budget_bytes=10**8, workers=0) if cached else None
        )
        yield open_feed(clips, config, workers, plan, torch.device(device), store)


def check_equal(config: DataConfig, device: str, **keys) -> None:
    by_workers, on_device = feeds(config, device, **keys)
    with by_workers as workers, on_device as resident:
        for epoch in range(2):
            for ours, theirs in zip(resident.batches.epoch(epoch), workers.batches.epoch(epoch), strict=True):
                assert ours.indices.tolist() == theirs.indices.tolist()
                for name in FIELDS:
                    assert torch.equal(ours[name].cpu(), theirs[name].cpu()), (epoch, ours.step, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bins", [1, 5, 24, 30])
def test_the_device_makes_the_same_batches_as_workers(demo: Path, device: str, bins: int):
    augment = AugmentConfig(REVERSE=0.5)
    config = DataConfig(ROOT=str(demo.parent), CROP_SIZE=12, CLIP_LEN=3, NUM_VOXEL_BINS=bins, AUGMENT=augment)
    check_equal(config, device)


def test_trimmed_cached_and_unflipped_uint8_streams_agree_too(demo: Path, tmp_path: Path):
    import shutil

    config = DataConfig(ROOT=str(demo.parent), CROP_SIZE=16, CLIP_LEN=2, NUM_VOXEL_BINS=4, SPIKE_TRIM=(3, 2))
    check_equal(config, "cpu", cached=True)
    clips = open_clips(config, "train", scored=False)
    shutil.copytree(demo.parent, tmp_path / "tree")
    for number, frame in enumerate(clips.frames):
        layout = clips.layout_of(number)
        content = decode(map_stream(frame.spike, layout), layout).tobytes()
        (tmp_path / "tree" / Path(frame.spike).relative_to(demo.parent)).write_bytes(content)
    check_equal(replace(config, ROOT=str(tmp_path / "tree"), SPIKE_FORMAT="uint8"), "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", [False, True])
def test_a_damaged_file_is_replaced_as_by_workers(demo: Path, tmp_path: Path, device: str, cached: bool):
    tree, _ = damaged_tree(demo, tmp_path, "scene_00/sharp/000003")
    check_equal(DataConfig(ROOT=str(tree), CROP_SIZE=16, CLIP_LEN=2, NUM_VOXEL_BINS=4), device, cached=cached)


def test_what_the_device_cannot_render_is_refused(demo: Path):
    config = DataConfig(ROOT=str(demo.parent), CROP_SIZE=16, CLIP_LEN=2, NUM_VOXEL_BINS=4)
    for changes, problem in (
        ({"SPIKE_REPR": "window"}, "SPIKE_REPR"),
        ({"CROP_SIZE": 15}, "exact crops"),
        ({"CROP_SIZE": None}, "CROP_SIZE"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_equal(replace(config, **changes), "cpu")
