"""Which pictures a rank gets in the last step of an epoch."""

from types import SimpleNamespace
from typing import Any

import pytest

from flatout.ranks.world import World
from flatout.yolo.train.input import _plan


@pytest.mark.parametrize("num_pictures", range(8, 25))
def test_every_rank_has_a_picture_in_every_step(num_pictures: int) -> None:
    for rank in range(3):
        config: Any = SimpleNamespace(batch_size=4, seed=1, world=World(rank, 3))
        pictures: Any = range(num_pictures)
        epoch = _plan(pictures, config, None, sequential=False).epoch(0)
        assert all(len(epoch.step(step).indices) for step in range(epoch.num_steps))
