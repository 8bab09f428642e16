"""On a GPU: every combination of feed and step trains, and a step does not wait for the device."""

from pathlib import Path

import pytest
import torch

from flatout.feed import FeedConfig
from flatout.ranks.world import World
from flatout.spike.config import DataConfig, LossConfig, ModelConfig, load_config
from flatout.spike.data.clip_set import open_clips
from flatout.spike.input import open_resident_feed, training_plan
from flatout.spike.model import DeblurNet
from flatout.spike.step import DeblurLoss, ToClip, plan_steps, to_float_frames
from flatout.spike.train import TrainOptions, train
from tests.spike.test_train import TINY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("resident", ["true", "false"])
@pytest.mark.parametrize("graphs", ["true", "false"])
@pytest.mark.parametrize("amp", ["bf16", "fp16", "off"])
def test_every_combination_of_feed_and_precision_trains(
    demo: Path, tmp_path: Path, resident: str, graphs: str, amp: str
):
    more = (f"TRAIN.DEVICE_RESIDENT={resident}", f"TRAIN.CUDA_GRAPHS={graphs}", f"TRAIN.AMP={amp}")
    config = load_config(demo, [*TINY, f"LOG.SAVE_DIR={tmp_path / 'run'}", *more])
    result = train(config, TrainOptions(device="0"))
    assert result.evaluation is not None
    assert result.evaluation.psnr > result.evaluation.blurry_psnr


def test_input_and_step_do_not_wait_for_the_device(demo: Path):
    config = DataConfig(ROOT=str(demo.parent), CROP_SIZE=16, CLIP_LEN=2, NUM_VOXEL_BINS=4, VOXEL_NORM="rate")
    clips = open_clips(config, "train", scored=False)
    steps = plan_steps(len(clips), world=1, batch=1, accumulation=1)
    network = DeblurNet(ModelConfig(WIDTH=4, ENC_BLOCKS=(1, 1), DEC_BLOCKS=(1, 1)), channels=4).cuda()
    loss, to_clip = DeblurLoss(LossConfig()).cuda(), ToClip(config)
    plan = training_plan(clips, 1, steps=steps, seed=1, world=World())
    workers = FeedConfig(workers=0, epochs=2, on_error="substitute")
    with open_resident_feed(clips, config, workers, plan, torch.device("cuda", 0), None) as feed:
        batches = feed.batches.epoch(0)

        def step() -> None:
            batch = next(batches)
            loss(network(to_clip(batch.fields)), to_float_frames(batch["sharp"]))[0].backward()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
