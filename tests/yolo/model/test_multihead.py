"""Detection layers with several heads: one convolution for all, boxes in the classes of the data set."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from flatout.errors import ConfigError
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.deploy import fused, to_deploy
from flatout.yolo.model.info import count_gflops
from flatout.yolo.model.layers import decode_level
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.multihead.head_config import HeadConfig, contiguous_heads
from flatout.yolo.multihead.training import HeadChoice
from tests.yolo.head_batches import make_groups, narrow_network

GROUPS = make_groups([[5, 0], [2], [1, 4, 3]])
CONFIGS = ["yolov7-tiny-1b4h", "yolov7-tiny-1b4h-attn"]


def network_with(groups: HeadConfig | None = GROUPS, config_name: str = CONFIGS[0], nc: int = 6) -> Network:
    torch.manual_seed(0)
    return narrow_network(config_name, groups, nc=nc)


@torch.no_grad()
@pytest.mark.parametrize("config_name", CONFIGS)
@pytest.mark.parametrize("full_head", [False, True])
def test_joined_maps_are_the_maps_of_every_heads_own_convolutions(config_name, full_head):
    head = network_with(replace(GROUPS, full_head=full_head), config_name).head.train()
    xs = [torch.randn(2, head.heads[0][level].in_channels, 8 >> level, 8 >> level) for level in range(3)]
    for h, maps in enumerate(head.by_head(head(xs))):
        for level, one_map in enumerate(maps):
            x = head.attentions[h][level](xs[level]) if config_name.endswith("attn") else xs[level]
            alone = head.heads[h][level](x).unflatten(1, (3, -1)).permute(0, 1, 3, 4, 2)
            torch.testing.assert_close(one_map, alone)


@torch.no_grad()
def test_boxes_are_concatenated_head_by_head_in_the_classes_of_the_data_set():
    network = network_with().eval()
    decoded, raw = network(torch.rand(2, 3, 64, 64))
    per_head = decoded.shape[1] // 3
    for h, (maps, part) in enumerate(zip(network.head.by_head(raw), decoded.split(per_head, 1), strict=True)):
        levels = zip(maps, network.head.anchor_grid, network.head.strides, strict=True)
        local = torch.cat([decode_level(*level) for level in levels], 1)
        classes = GROUPS.heads[h].classes
        others = [5 + each for each in range(6) if each not in classes]
        torch.testing.assert_close(part[..., :5], local[..., :5])
        assert (part[..., others] == 0).all()
        if len(classes) > 1:
            torch.testing.assert_close(part[..., [5 + each for each in classes]], local[..., 5:])


@torch.no_grad()
@pytest.mark.parametrize("full_head", [False, True])
def test_the_score_of_a_head_with_one_class_is_its_objectness(full_head):
    x = torch.rand(1, 3, 64, 64)
    groups = replace(GROUPS, full_head=full_head)
    ours = network_with(groups).eval()(x).decoded
    theirs = network_with(replace(groups, single_class_logit=True)).eval()(x).decoded
    per_head = ours.shape[1] // 3
    one_class = slice(per_head, 2 * per_head)
    assert (ours[:, one_class, 5 + 2] == 1).all()
    assert (theirs[:, one_class, 5 + 2] < 1).all()
    ours[:, one_class, 5 + 2] = theirs[:, one_class, 5 + 2]
    assert torch.equal(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("config_name", CONFIGS)
def test_fused_and_deployed_networks_give_the_same_boxes(config_name):
    network = network_with(config_name=config_name).eval()
    x = torch.rand(1, 3, 64, 64)
    for other in (fused(network), to_deploy(network)):
        torch.testing.assert_close(other(x).decoded, network(x).decoded, rtol=1e-4, atol=1e-3)


def test_biases_expect_few_objects_and_depend_on_the_heads_own_number_of_classes():
    fresh = {}
    for classes in (1, 2, 3):
        head = network_with(make_groups([[0], [1, 2], [3, 4, 5]])).head
        conv = head.heads[classes - 1][1]
        fresh[classes] = conv.bias.detach().view(3, -1)
        limit = 1 / math.sqrt(conv.in_channels)
        assert (fresh[classes][:, 4] - math.log(8 / (640 / 16) ** 2)).abs().max() <= limit
        assert (fresh[classes][:, 5:] - math.log(0.6 / (classes - 0.99))).abs().max() <= limit


def test_without_a_head_configuration_there_are_four_blocks_of_classes():
    network = build_network(load_config(CONFIGS[0]))
    assert [group.classes for group in network.head.groups.heads] == [
        tuple(range(first, first + 20)) for first in range(0, 80, 20)
    ]


def test_the_config_of_a_network_rebuilds_its_heads():
    network = network_with()
    again = build_network(network.config)
    assert again.head.groups == GROUPS
    assert [each.shape for each in again.state_dict().values()] == [e.shape for e in network.state_dict().values()]


def test_operations_of_all_heads_are_counted_once():
    one, plain, attention = (count_gflops(build_network(load_config(name))) for name in ("yolov7-tiny", *CONFIGS))
    # 45 outputs more per cell: 3 * (4 * 25 - 85) channels at strides 8, 16 and 32 of 128, 256 and 512 channels.
    more = 2e-9 * 45 * sum((640 // stride) ** 2 * channels for stride, channels in ((8, 128), (16, 256), (32, 512)))
    assert plain - one == pytest.approx(more, rel=1e-6)
    assert plain < attention < plain + 0.5


def test_any_config_with_one_head_can_be_given_several():
    config = load_config("yolov7-tiny") | {"nc": 6, "width_multiple": 0.125}
    for attention, module in ((False, "MultiHeadDetect"), (True, "MultiHeadDetectAttention")):
        given = HeadChoice(GROUPS, attention).applied_to(config, where="tiny")
        assert build_network(given).spec.head.module == module
    assert config["head"][-1][2] == "IDetect"


def contiguous_full(nc: int, heads: int) -> HeadConfig:
    return replace(contiguous_heads(nc, heads), full_head=True)


@pytest.mark.parametrize(
    ("config", "groups", "message"),
    [
        (
            {"nc": 5},
            GROUPS,
            "head_config assigns 6 classes, but the network has 5. Use --head-config with a file",
        ),
        ({"head_config": {"nc": 6}}, None, "head_config: head_assignments is missing"),
        ({"nc": 9_000}, contiguous_full(9_000, 900), "more than 4,000,000,000 parameters"),
    ],
)
def test_heads_that_do_not_fit_are_refused(config, groups, message):
    with pytest.raises(ConfigError, match=message):
        build_network(load_config(CONFIGS[0]) | {"nc": 6} | config, heads=groups)


def test_a_head_configuration_for_a_single_head_is_refused():
    with pytest.raises(ConfigError, match="IDetect has one head; head_config is for MultiHeadDetect"):
        build_network(load_config("yolov7-tiny") | {"nc": 6}, heads=GROUPS)


def test_auxiliary_outputs_and_several_heads_exclude_each_other():
    with pytest.raises(ConfigError, match="w6: its detection layer IAuxDetect has auxiliary outputs"):
        HeadChoice(GROUPS).applied_to(load_config("yolov7-w6"), where="w6")


@pytest.mark.parametrize("config_name", CONFIGS)
def test_the_layer_compiles_without_a_graph_break(config_name):
    head = network_with(config_name=config_name).head
    xs = [torch.randn(2, head.heads[0][level].in_channels, 8 >> level, 8 >> level) for level in range(3)]
    for training in (True, False):
        module = head.train(training)
        torch.compiler.reset()
        found, expected = torch.compile(module, fullgraph=True, backend="eager")(xs), module(xs)
        for one, other in zip(*((found, expected) if module.training else (found[:1], expected[:1])), strict=True):
            assert torch.equal(one, other)


def test_gradients_reach_every_head_and_only_where_they_should():
    head = network_with().head.train()
    xs = [torch.randn(1, head.heads[0][level].in_channels, 4, 4) for level in range(3)]
    head.by_head(head(xs))[1][2].sum().backward()
    touched = {name for name, value in head.named_parameters() if value.grad is not None and value.grad.any()}
    assert touched == {"heads.1.2.weight", "heads.1.2.bias"}
    assert isinstance(head.heads[1][2], nn.Conv2d)
