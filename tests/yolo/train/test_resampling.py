"""`--image-weights`: what an epoch is drawn by follows from the last validation, and is saved with the training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.yolo.train.scripted_recipe import ScriptedEnds, ScriptedRecipe

NEVER_FOUND = [0.0, 0.0]
MAPS = [0.25, 0.75]


class Weighed(ScriptedRecipe):
    """Notes which scores the pictures of which epoch are drawn by."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, [0.5] * 4, MAPS, epochs=4, image_weights=True, **options)
        self.heard: list[tuple[list[float], int]] = []
        self._weighing: Any = _AsTheyAre()
        self._input: Any = SimpleNamespace(set_weights=lambda maps, epoch: self.heard.append((maps.tolist(), epoch)))


class _AsTheyAre:
    """Scores of classes for weights of pictures."""

    never_found = NEVER_FOUND

    def __call__(self, map_C: np.ndarray) -> np.ndarray:
        return map_C


@pytest.mark.parametrize(("options", "drawn_by"), [({}, MAPS), ({"notest": True}, NEVER_FOUND)])
def test_a_continued_training_draws_by_the_same_scores(
    tmp_path: Path, options: dict[str, bool], drawn_by: list[float]
) -> None:
    first, continued = Weighed(tmp_path, **options), Weighed(tmp_path, **options)
    with ScriptedEnds(first, tmp_path) as ends:
        ends(0)
        state = ends.state
    assert first.heard == [(drawn_by, 1)]
    with ScriptedEnds(continued, tmp_path) as ends:
        ends.epoch_end.load_state(state)
    assert continued.heard == first.heard


def test_nothing_is_drawn_after_the_last_epoch(tmp_path: Path) -> None:
    recipe = Weighed(tmp_path)
    with ScriptedEnds(recipe, tmp_path) as ends:
        ends(3)
    assert recipe.heard == []
