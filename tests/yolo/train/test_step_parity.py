"""A training step computes what YOLOv7's does: the same losses, weights and moving average."""

import pytest
import torch
from torch import Tensor, nn

from flatout.engine.loop import Loop
from flatout.yolo.hyp import Hyp
from flatout.yolo.model.layers import MP, SP
from flatout.yolo.model.network import Network
from tests.reference.plain_training import Iteration, PlainTraining, states_of
from tests.yolo.train.compare_with_eager import smooth
from tests.yolo.train.fixed_batches import FixedBatches, random_batch
from tests.yolo.train.small_training import loss_config, make_loop, narrow_network, tiny_hyp

# One thread: rounding may decide which pixel of a pooling window is the largest, and then weights differ visibly.
pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, CLASSES = 64, 3


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest value of each tensor."""
    return max(
        float((found[key].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1e-3))
        for key, value in expected.items()
        if value.is_floating_point()
    )


@pytest.mark.parametrize("loss_ota", [1, 0])
def test_one_step_gives_the_losses_weights_and_average_of_the_plain_twin(loss_ota: int) -> None:
    network, hyp = narrow_network(CLASSES), tiny_hyp(loss_ota=loss_ota)
    loop, found, twin, expected = trained_side_by_side(network, hyp, batch_size=4, num_steps=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    weights, average = states_of(twin)
    assert largest_difference(network.state_dict(), weights) < 1e-5
    assert loop.average is not None
    assert largest_difference(loop.average.network.state_dict(), average) < 1e-5


@pytest.mark.parametrize(("batch_size", "num_steps"), [(32, 6), (64, 3)])
def test_schedule_accumulation_momentum_and_decay_are_those_of_the_plain_twin(batch_size: int, num_steps: int) -> None:
    # Plain loss and a small learning rate, so that rounding neither changes the assignment nor grows from step to step;
    # no kinks, near which processors round differently.
    network, hyp = narrow_network(CLASSES), tiny_hyp(loss_ota=0, lr0=1e-4, warmup_bias_lr=1e-4)
    smooth(network)
    average_instead_of_maximum(network)
    before = {key: value.clone() for key, value in network.named_parameters()}
    _, found, twin, expected = trained_side_by_side(network, hyp, batch_size=batch_size, num_steps=num_steps)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    moved = {key: (value - before[key]).detach() for key, value in network.named_parameters()}
    wanted = {key: (value - before[key]).detach() for key, value in twin.network.named_parameters()}
    scale = max(float(value.abs().max()) for value in wanted.values())
    for key, value in wanted.items():
        torch.testing.assert_close(moved[key], value, rtol=1e-2, atol=1e-3 * scale)


class Average(nn.AvgPool2d):
    """In place of an SP, which may be given the result of a narrower one."""

    def forward(self, x: Tensor, *narrower: object) -> Tensor:
        return super().forward(x)


def average_instead_of_maximum(network: nn.Module) -> None:
    """Replace max-pooling, where rounding may decide which pixel gets the gradient."""
    for name, module in network.named_children():
        if isinstance(module, MP):
            setattr(network, name, nn.AvgPool2d(module.k))
        elif isinstance(module, SP):
            setattr(network, name, Average(module.k, module.s, module.k // 2))
        else:
            average_instead_of_maximum(module)


def trained_side_by_side(
    network: Network, hyp: Hyp, *, batch_size: int, num_steps: int
) -> tuple[Loop, Tensor, PlainTraining, Tensor]:
    """The loop with its mean losses, and the plain twin with its own."""
    twin = PlainTraining(
        network, hyp, loss_config(network, hyp, SIZE), total_batch=batch_size, num_warmup=hyp.warmup_iters or 0
    )
    batches = [random_batch(step, batch_size=batch_size, size=SIZE, num_classes=CLASSES) for step in range(num_steps)]
    loop, end = make_loop(network, hyp, FixedBatches(batches), num_steps=num_steps, batch_size=batch_size, size=SIZE)
    loop.run()
    expected = torch.stack([twin.train(Iteration(batch["images"], batch["targets"])) for batch in batches])
    found = torch.tensor(list(end.reports[0].items.values()), dtype=torch.float64)
    return loop, found, twin, expected.double().mean(0)


def test_weights_really_move() -> None:
    network, hyp = narrow_network(CLASSES), tiny_hyp()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    batches = [random_batch(step, batch_size=64, size=SIZE, num_classes=CLASSES) for step in range(8)]
    loop, _ = make_loop(network, hyp, FixedBatches(batches), num_steps=8, batch_size=64, size=SIZE)
    loop.run()
    assert largest_difference(network.state_dict(), before) > 1e-2
