"""Pinned batches: really pinned, right after any number of asynchronous copies, and released in the end."""

import pytest
import torch

from flatout.feed.loader import Loader
from tests.feed.loader_datasets import Numbers, as_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Pictures(Numbers):
    def __getitem__(self, index):
        return torch.full((3, 64, 64), float(index)), index


@pytest.mark.parametrize("collate_fn", [None, as_pairs])
def test_every_tensor_is_pinned(collate_fn):
    for batch in Loader(Numbers(40), 4, num_workers=2, pin_memory=True, collate_fn=collate_fn):
        pictures = batch[0] if collate_fn is None else batch["x"]
        assert pictures.is_pinned()


def test_kept_batches_are_pinned_too():
    assert all(pictures.is_pinned() for pictures, _ in list(Loader(Numbers(40), 4, num_workers=2, pin_memory=True)))


def test_a_slot_is_not_filled_anew_while_a_copy_from_it_is_under_way():
    copies = []
    busy = torch.ones(4096, 4096, device="cuda")
    for pictures, labels in Loader(Pictures(512), 16, num_workers=4, pin_memory=True):
        for _ in range(20):
            busy = busy @ busy / 4096  # keeps the stream behind the host
        copies.append((pictures.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)))
    for pictures, labels in copies:
        assert torch.equal(pictures[:, 0, 0, 0], labels.float())
        assert torch.equal(pictures, labels.float()[:, None, None, None].expand_as(pictures))


def test_batches_of_a_closed_loader_can_still_be_copied():
    batches = iter(Loader(Pictures(64), 16, num_workers=2, pin_memory=True))
    kept = [next(batches) for _ in range(2)]
    del batches
    assert all(pictures.cuda(non_blocking=True).mean().item() == labels.float().mean() for pictures, labels in kept)
