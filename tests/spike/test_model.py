"""The network `stacked`: what it takes and gives, and that every spike reaches it."""

import pytest
import torch

from flatout.errors import ConfigError
from flatout.spike.config import ModelConfig
from flatout.spike.model import Clip, DeblurNet, network_from


def stacked(**keys):
    values = {"KIND": "stacked", "WIDTH": 4, "ENC_BLOCKS": (1,), "MIDDLE_BLOCKS": 1, "DEC_BLOCKS": (1,), **keys}
    return ModelConfig(**values)


def randomised(network):
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network.eval()


@pytest.mark.parametrize(("size", "ratio"), [((24, 36), 2), ((22, 30), 2), ((18, 27), 3), ((15, 21), 1)])
def test_it_is_initially_the_identity_for_frames_of_any_size(size, ratio):
    network = DeblurNet(stacked(), channels=5, ratio=ratio)
    blur = torch.rand(2, 3, 3, *size)
    spikes = torch.rand(2, 3, 5, size[0] // ratio, size[1] // ratio)
    assert torch.equal(network(Clip(blur, spikes)), blur)


def test_every_bin_of_spikes_changes_the_result():
    network = randomised(DeblurNet(stacked(), channels=6))
    spikes = torch.rand(1, 1, 6, 8, 12, requires_grad=True)
    network(Clip(torch.rand(1, 1, 3, 16, 24), spikes)).square().sum().backward()
    assert (spikes.grad.abs().sum((0, 1, 3, 4)) > 0).all()


def test_frames_of_a_clip_do_not_affect_each_other_unless_they_are_mixed():
    blur, spikes = torch.rand(1, 3, 3, 16, 16), torch.rand(1, 3, 5, 8, 8)
    other = blur.clone()
    other[:, 2] = 0
    for temporal in (False, True):
        network = randomised(DeblurNet(stacked(TEMPORAL=temporal), channels=5))
        first, second = (network(Clip(each, spikes))[:, 1] for each in (blur, other))
        assert torch.equal(first, second) is not temporal


def test_without_spikes_it_is_of_nearly_the_same_size_and_ignores_them():
    sizes = []
    for uses in (True, False):
        network = randomised(
            DeblurNet(stacked(USE_SPIKE=uses, WIDTH=32, ENC_BLOCKS=(3,), DEC_BLOCKS=(3,)), channels=28)
        )
        sizes.append(sum(parameter.numel() for parameter in network.parameters()))
        blur = torch.rand(1, 1, 3, 16, 16)
        first, second = (network(Clip(blur, torch.full((1, 1, 28, 8, 8), level))) for level in (0.1, 0.9))
        assert torch.equal(first, second) is not uses
    assert 0.9 < sizes[1] / sizes[0] < 1


def test_a_network_is_built_again_from_its_spec_and_old_specs_are_of_the_kind_branch():
    network = randomised(DeblurNet(stacked(), channels=5))
    again = network_from(network.spec)
    again.load_state_dict(network.state_dict())
    clip = Clip(torch.rand(1, 1, 3, 16, 16), torch.rand(1, 1, 5, 8, 8))
    assert torch.equal(again.eval()(clip), network(clip))
    old = DeblurNet(ModelConfig(WIDTH=4, ENC_BLOCKS=(1, 1), DEC_BLOCKS=(1, 1)), channels=5)
    spec = {**old.spec, "model": {key: value for key, value in old.spec["model"].items() if key != "KIND"}}
    network_from(spec).load_state_dict(old.state_dict())


def test_only_the_kind_branch_needs_two_levels():
    stacked(ENC_BLOCKS=(1,), DEC_BLOCKS=(1,))
    with pytest.raises(ConfigError, match="at least 2 levels, because the spike branch joins at the second"):
        ModelConfig(ENC_BLOCKS=(1,), DEC_BLOCKS=(1,))
    with pytest.raises(ConfigError, match=r"at least 1 level$"):
        stacked(ENC_BLOCKS=(), DEC_BLOCKS=())
