"""On a GPU: images are kept and painted in its memory, a step is one graph, and nothing waits for the device."""

from contextlib import ExitStack

import pytest
import torch

from flatout.defect.input import open_input
from flatout.defect.options import TrainOptions
from flatout.defect.train import input_config, sample_recipe, train, training_images
from flatout.ranks.world import World
from tests.defect.small_runs import small_data, small_options

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("settings", [{}, {"defect_mode": "board", "shift_px": 2.0, "noise": 3.0, "line_ratio": 0.2}])
def test_batches_made_on_the_gpu_equal_those_of_workers_and_nothing_waits(settings, tmp_path):
    data = small_data(tmp_path / "strips")
    device = torch.device("cuda", 0)
    batches = {}
    for side in ("off", "on"):
        options = small_options(data, tmp_path, device_strips=side, gpu_id=0, psf_pool_size=8, **settings)
        images = training_images(options)
        samples = sample_recipe(options, images)
        with ExitStack() as stack:
            source = open_input(images, samples, input_config(options), device, World(), stack)
            stream = source.epoch(1)
            batches[side] = [(batch["images"].clone(), batch["masks"].clone()) for batch in stream]
            if side == "on":
                again = source.epoch(2)
                next(again)
                torch.cuda.set_sync_debug_mode("error")
                try:
                    next(again)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
    for (images_a, masks_a), (images_b, masks_b) in zip(batches["off"], batches["on"], strict=True):
        torch.testing.assert_close(images_a, images_b, rtol=0, atol=2e-3)
        # A difference of exactly the visibility threshold may fall on either side of it.
        assert (masks_a != masks_b).float().mean() < 1e-4


@pytest.mark.parametrize("graphs", [False, True])
def test_a_training_on_the_gpu_learns(graphs, tmp_path):
    data = small_data(tmp_path / "strips")
    options = small_options(data, tmp_path / "runs", gpu_id=0, epochs=30, graphs=graphs, base_width=16)
    result = train(options)
    assert result.finished
    assert result.last_loss < 0.02


def test_a_training_stopped_on_the_gpu_continues(tmp_path):
    data = small_data(tmp_path / "strips")
    options: TrainOptions = small_options(data, tmp_path / "runs", gpu_id=0, stop_after=4)
    first = train(options)
    again = train(small_options(data, tmp_path / "runs", gpu_id=0))
    assert not first.finished and again.finished and first.folder == again.folder
