"""Batches with pin_memory=True are pinned, correct after any number of asynchronous copies, and finally released."""

import pytest
import torch

from flatout.feed.loader import Loader
from tests.feed.loader_datasets import Numbers, as_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Images(Numbers):
    def __getitem__(self, index):
        return torch.full((3, 64, 64), float(index)), index


@pytest.mark.parametrize("collate_fn", [None, as_pairs])
def test_every_tensor_is_pinned(collate_fn):
    for batch in Loader(Numbers(40), 4, num_workers=2, pin_memory=True, collate_fn=collate_fn):
        images = batch[0] if collate_fn is None else batch["x"]
        assert images.is_pinned()


def test_kept_batches_are_pinned_too():
    assert all(images.is_pinned() for images, _ in list(Loader(Numbers(40), 4, num_workers=2, pin_memory=True)))


def test_a_slot_is_not_refilled_while_a_copy_from_it_is_in_progress():
    copies = []
    busy = torch.ones(4096, 4096, device="cuda")
    for images, labels in Loader(Images(512), 16, num_workers=4, pin_memory=True):
        for _ in range(20):
            busy = busy @ busy / 4096  # makes the stream lag behind the host
        copies.append((images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)))
    for images, labels in copies:
        assert torch.equal(images[:, 0, 0, 0], labels.float())
        assert torch.equal(images, labels.float()[:, None, None, None].expand_as(images))


def test_batches_of_a_closed_loader_can_still_be_copied():
    batches = iter(Loader(Images(64), 16, num_workers=2, pin_memory=True))
    kept = [next(batches) for _ in range(2)]
    del batches
    assert all(images.cuda(non_blocking=True).mean().item() == labels.float().mean() for images, labels in kept)
