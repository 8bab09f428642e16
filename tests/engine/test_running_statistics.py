"""A bad batch leaves batch-norm statistics unchanged; a good one updates them as usual."""

import copy

import torch
from torch import nn

from flatout.engine.optim import MovingAverage
from flatout.engine.step import RunningStatistics


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5))


def statistics_of(net: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for name, buffer in net.named_buffers() if "running" in name]


def step(net: nn.Module, statistics: RunningStatistics, images: torch.Tensor) -> None:
    statistics.save()
    loss = net(images).square().mean()
    statistics.restore_if(~torch.isfinite(loss))


def test_a_bad_batch_is_undone_and_a_good_one_is_not():
    net, twin = network(), network()
    statistics = RunningStatistics(net)
    good = torch.rand(2, 3, 4, 4)
    for images in (good, good * torch.nan, good * torch.inf, good + 1):
        step(net, statistics, images)
    for images in (good, good + 1):
        twin(images)
    for mine, expected in zip(statistics_of(net), statistics_of(twin), strict=True):
        assert torch.equal(mine, expected)


def test_without_it_a_bad_batch_stays_forever():
    """Negative control."""
    net = network()
    for images in (torch.rand(2, 3, 4, 4) * torch.nan, torch.rand(2, 3, 4, 4)):
        net(images)
    assert any(buffer.isnan().any() for buffer in statistics_of(net))


def test_a_moving_average_that_was_made_before_still_follows():
    net = network()
    average = MovingAverage(net, decay=0.5, ramp=1e-9)
    step(net, RunningStatistics(net), torch.rand(2, 3, 4, 4) + 3)
    average.update()
    for source, mine in zip(statistics_of(net), statistics_of(average.network), strict=True):
        assert not torch.equal(mine, torch.zeros_like(mine))
        assert (source - mine).abs().max() < (source - torch.zeros_like(source)).abs().max() + 1


def test_buffers_stay_at_their_addresses_in_memory():
    """torch 2.11 compiles wrong code for operators that change a buffer which is part of a block."""
    net = network()
    addresses = [buffer.data_ptr() for buffer in net.buffers()]
    step(net, RunningStatistics(net), torch.rand(2, 3, 4, 4))
    assert [buffer.data_ptr() for buffer in net.buffers()] == addresses
    assert all(buffer.untyped_storage().nbytes() == buffer.nbytes for buffer in net.buffers())


def test_states_are_saved_and_loaded_as_before():
    net = network()
    before = copy.deepcopy(net.state_dict())
    statistics = RunningStatistics(net)
    assert net.state_dict().keys() == before.keys()
    step(net, statistics, torch.rand(2, 3, 4, 4))
    net.load_state_dict(before)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    step(net, statistics, torch.rand(2, 3, 4, 4) * torch.nan)
    assert torch.equal(net.state_dict()["1.running_var"], before["1.running_var"])


def test_a_network_without_batch_norm_has_nothing_to_restore():
    net = nn.Conv2d(3, 1, 1)
    step(net, RunningStatistics(net), torch.rand(2, 3, 4, 4) * torch.nan)
