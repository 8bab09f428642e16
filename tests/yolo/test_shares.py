"""A validation by several ranks finds what one finds: the same scores, losses and confusion, to the last bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.yolo.data.letterbox import rect_batches
from flatout.yolo.evaluate import Evaluate, Outcome
from flatout.yolo.evaluate.run import Share, in_turn
from flatout.yolo.evaluate.validation_input import open_validation
from flatout.yolo.train.step import DetectionLoss
from tests.yolo.small_sets import files_of
from tests.yolo.train.small_training import loss_config, narrow_network, tiny_hyp

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 64


@pytest.mark.parametrize("num_ranks", [2, 3, 9])
def test_ranks_together_find_what_one_finds_alone(num_ranks: int, tmp_path: Path) -> None:
    """Of nine ranks some have nothing to do."""
    images = files_of(tmp_path)
    alone = judged(images, rank=0, num_ranks=1, told=[])
    shares: list[Share] = []
    for rank in reversed(range(num_ranks)):
        together = judged(images, rank=rank, num_ranks=num_ranks, told=shares)
    assert together.scores == alone.scores
    assert min(alone.scores.values()) > 0, "or nothing would be compared"
    np.testing.assert_array_equal(together.evaluation.classes.ap_CK, alone.evaluation.classes.ap_CK)
    assert together.evaluation.num_images == alone.evaluation.num_images == len(images)
    assert alone.evaluation.confusion is not None and together.evaluation.confusion is not None
    np.testing.assert_array_equal(together.evaluation.confusion, alone.evaluation.confusion)


def judged(images: Any, *, rank: int, num_ranks: int, told: list[Share]) -> Outcome:
    """What a rank finds; the first one comes last and hears what all others have `told`."""
    network = narrow_network(num_classes=2).eval()
    # So that untrained scores are not all alike; what is right comes from the labels (hybrid).
    torch.manual_seed(1)
    for weight in network.head.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    loss = DetectionLoss(network.head, loss_config(network, tiny_hyp(), SIZE), ota=True)

    def join(share: Share) -> Sequence[Share]:
        told.insert(0, share)
        return told if rank == 0 else []

    with open_validation(
        images, size=SIZE, batch_size=2, workers=0, device="cpu", rank=rank, num_ranks=num_ranks
    ) as batches:
        return Evaluate(names=("bolt", "nut")).run(
            network, batches, hybrid=True, loss=loss.validation, confusion=True, join=join if num_ranks > 1 else None
        )


def test_every_batch_is_dealt_to_one_rank_in_its_own_shape() -> None:
    rng = np.random.default_rng(3)
    whole = rect_batches(rng.integers(20, 100, (23, 2)), batch_size=4, img_size=64, pad=0.5)
    shares = [whole.share(rank, 4) for rank in range(4)]
    dealt = [
        [
            (share.order_N[share.batch_N == batch].tolist(), shape)
            for batch, shape in enumerate(share.shape_hw_S2.tolist())
        ]
        for share in shares
        if share is not None
    ]
    expected = [
        (whole.order_N[whole.batch_N == batch].tolist(), shape)
        for batch, shape in enumerate(whole.shape_hw_S2.tolist())
    ]
    assert in_turn(dealt) == expected
    assert whole.share(6, 7) is None
