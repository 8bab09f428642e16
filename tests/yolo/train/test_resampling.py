"""`--image-weights`: image weights follow from the scores of the last validation and are saved with the training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.yolo.train.scripted_recipe import ScriptedEnds, ScriptedRecipe

NEVER_FOUND = [0.0, 0.0]
MAPS = [0.25, 0.75]


class WeightedRecipe(ScriptedRecipe):
    """Records the scores by which the images of each epoch are drawn."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, [0.5] * 4, MAPS, epochs=4, image_weights=True, **options)
        self.recorded: list[tuple[list[float], int]] = []
        self._image_weights: Any = _IdentityWeights()
        self._batches: Any = SimpleNamespace(epoch=self._begin_pass, feed=SimpleNamespace(set_weights=self._record))

    def _begin_pass(self, epoch: int) -> None:
        self._pass = epoch

    def _record(self, maps: np.ndarray) -> None:
        self.recorded.append((maps.tolist(), self._pass))


class _IdentityWeights:
    """Returns the scores of the classes as image weights."""

    initial_map = NEVER_FOUND

    def __call__(self, map_C: np.ndarray) -> np.ndarray:
        return map_C


@pytest.mark.parametrize(("options", "drawn_by"), [({}, MAPS), ({"notest": True}, NEVER_FOUND)])
def test_a_continued_training_draws_by_the_same_scores(
    tmp_path: Path, options: dict[str, bool], drawn_by: list[float]
) -> None:
    first, continued = WeightedRecipe(tmp_path, **options), WeightedRecipe(tmp_path, **options)
    with ScriptedEnds(first, tmp_path) as ends:
        ends(0)
        state = ends.state
    assert first.recorded == [(drawn_by, 1)]
    with ScriptedEnds(continued, tmp_path) as ends:
        ends.epoch_end.load_state(state)
    assert continued.recorded == first.recorded


def test_nothing_is_drawn_after_the_last_epoch(tmp_path: Path) -> None:
    recipe = WeightedRecipe(tmp_path)
    with ScriptedEnds(recipe, tmp_path) as ends:
        ends(3)
    assert recipe.recorded == []
