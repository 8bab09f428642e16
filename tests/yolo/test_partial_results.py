"""A validation on several ranks gives what one rank gives: the same scores, losses and confusion, to the last bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.yolo.data.letterbox import rect_batches
from flatout.yolo.evaluate import Evaluate, Outcome
from flatout.yolo.evaluate.run import PartialResult, interleave
from flatout.yolo.evaluate.validation_input import open_validation
from flatout.yolo.train.step import DetectionLoss
from tests.yolo.small_sets import files_of
from tests.yolo.train.small_training import loss_config, narrow_network, tiny_hyp

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 64


@pytest.mark.parametrize("num_ranks", [2, 3, 9])
def test_ranks_together_find_what_one_finds_alone(num_ranks: int, tmp_path: Path) -> None:
    """Some of nine ranks get no batch."""
    images = files_of(tmp_path)
    alone = evaluated(images, rank=0, num_ranks=1, gathered=[])
    partials: list[PartialResult] = []
    for rank in reversed(range(num_ranks)):
        together = evaluated(images, rank=rank, num_ranks=num_ranks, gathered=partials)
    assert together.scores == alone.scores
    assert min(alone.scores.values()) > 0, "zeros would compare nothing"
    np.testing.assert_array_equal(together.evaluation.classes.ap_CK, alone.evaluation.classes.ap_CK)
    assert together.evaluation.num_images == alone.evaluation.num_images == len(images)
    assert alone.evaluation.confusion is not None and together.evaluation.confusion is not None
    np.testing.assert_array_equal(together.evaluation.confusion, alone.evaluation.confusion)


def evaluated(images: Any, *, rank: int, num_ranks: int, gathered: list[PartialResult]) -> Outcome:
    """The outcome of one rank. Rank 0 runs last and gets the partial results that the others put into `gathered`."""
    network = narrow_network(num_classes=2).eval()
    # So that untrained scores are not all equal; correct detections come from the labels (hybrid).
    torch.manual_seed(1)
    for weight in network.head.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    loss = DetectionLoss(network.head, loss_config(network, tiny_hyp(), SIZE), ota=True)

    def gather(partial: PartialResult) -> Sequence[PartialResult]:
        gathered.insert(0, partial)
        return gathered if rank == 0 else []

    with open_validation(
        images, size=SIZE, batch_size=2, workers=0, device="cpu", rank=rank, num_ranks=num_ranks
    ) as batches:
        return Evaluate(names=("bolt", "nut")).run(
            network,
            batches,
            hybrid=True,
            loss=loss.validation,
            confusion=True,
            gather=gather if num_ranks > 1 else None,
        )


def test_every_batch_goes_to_one_rank_in_its_own_shape() -> None:
    rng = np.random.default_rng(3)
    whole = rect_batches(rng.integers(20, 100, (23, 2)), batch_size=4, img_size=64, pad=0.5)
    by_rank = [whole.share(rank, 4) for rank in range(4)]
    batches = [
        [(each.order_N[each.batch_N == batch].tolist(), shape) for batch, shape in enumerate(each.shape_hw_S2.tolist())]
        for each in by_rank
        if each is not None
    ]
    expected = [
        (whole.order_N[whole.batch_N == batch].tolist(), shape)
        for batch, shape in enumerate(whole.shape_hw_S2.tolist())
    ]
    assert interleave(batches) == expected
    assert whole.share(6, 7) is None
