"""The kernels of the loss, in Triton's interpreter, give the numbers and gradients of the torch operations.

TRITON_INTERPRET=1 python -m tests.yolo.interpreted_loss
"""

from dataclasses import replace
from unittest import mock

import torch

from flatout.yolo.loss import Search, on_device
from flatout.yolo.loss.losses import default_balance, torch_head_loss
from tests.triton_interpreter import launch_interpreted
from tests.yolo.test_assign import BATCHES
from tests.yolo.test_loss import OPTIONS, PLAIN

CONFIGS = (PLAIN, OPTIONS, replace(PLAIN, fl_gamma=1.5))


def main() -> None:
    for name in ("ordinary", "empty images", "one class"):
        batch = BATCHES[name]()
        maps = [one_map.detach().requires_grad_() for one_map in batch.maps]
        balance_L = torch.tensor(default_balance(len(batch.maps)))
        for config in CONFIGS:
            matches = on_device.list_on_device(maps, batch.targets, batch.anchors, Search(config.anchor_t))
            found, expected = (
                head_loss(maps, batch.targets, matches, batch.anchors, config, balance_L, 1.0)
                for head_loss in (on_device.device_head_loss, torch_head_loss)
            )
            torch.testing.assert_close(found.items, expected.items, rtol=1e-5, atol=1e-7)
            gradients = (torch.autograd.grad(parts.total, maps) for parts in (found, expected))
            for mine, theirs in zip(*gradients, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)
    check_images_of_a_larger_batch()


def check_images_of_a_larger_batch() -> None:
    """Validations compute the losses of batches that went through the network together: their maps are slices."""
    batch = BATCHES["ordinary"]()
    outcomes = []
    for maps in (batch.maps, [torch.cat((each[:1], each))[1:] for each in batch.maps]):
        matches = on_device.list_on_device(maps, batch.targets, batch.anchors, Search(PLAIN.anchor_t))
        balance_L = torch.tensor(default_balance(len(maps)))
        outcomes.append(
            on_device.device_head_loss(maps, batch.targets, matches, batch.anchors, PLAIN, balance_L, 1.0).items
        )
    torch.testing.assert_close(*outcomes, rtol=1e-6, atol=0)


if __name__ == "__main__":
    few_programs = mock.patch.object(on_device, "PROGRAMS", 4)
    with mock.patch("flatout.kernels.launch", launch_interpreted), few_programs:
        main()
