"""The images of each rank in the last step of an epoch."""

from types import SimpleNamespace
from typing import Any

import pytest

from flatout.ranks.world import World
from flatout.yolo.train.input import _plan


@pytest.mark.parametrize("num_images", range(8, 25))
def test_every_rank_has_an_image_in_every_step(num_images: int) -> None:
    for rank in range(3):
        config: Any = SimpleNamespace(batch_size=4, seed=1, world=World(rank, 3))
        images: Any = range(num_images)
        epoch = _plan(images, config, None, sequential=False).epoch(0)
        assert all(len(epoch.step(step).indices) for step in range(epoch.num_steps))
