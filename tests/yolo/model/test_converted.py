"""Fused and deploy networks give the same boxes as the original network, and leave it unchanged."""

import copy

import pytest
import torch

from flatout.yaml_strict import parse_yaml
from flatout.yolo.model.deploy import deploy_config, fused, largest_difference, to_deploy
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.model.spec import parse_model
from tests.yolo.golden_network import fill
from tests.yolo.model.hostile_configs import config
from tests.yolo.model.test_network import narrow, random_images

NAMES = ["yolov7-tiny", "yolov7", "yolov7-w6"]


def filled(name: str, nc: int | None = None) -> Network:
    """A narrow network with weights far from their initial values, in float64, so that differences are not rounding."""
    network = narrow(name, nc=nc)
    fill(network, 3)
    return network.double()


def storages(network: Network) -> set[int]:
    return {value.data_ptr() for value in network.state_dict().values()}


@pytest.mark.parametrize("convert", [fused, to_deploy])
@pytest.mark.parametrize("name", NAMES)
def test_a_conversion_gives_the_same_boxes_and_leaves_the_original_untouched(convert, name):
    network = filled(name, nc=2).train()
    before = copy.deepcopy(network.state_dict())
    converted = convert(network)
    assert not converted.training
    assert network.training
    after = network.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert largest_difference(network, converted) < 1e-9
    # Training one must not change the other.
    assert not storages(network) & storages(converted)


@pytest.mark.parametrize("name", NAMES)
def test_a_deploy_network_keeps_names_and_can_be_fused(name):
    network = filled(name, nc=3)
    network.names = ["bolt", "nut", "washer"]
    deployed = to_deploy(network)
    assert deployed.names == ["bolt", "nut", "washer"]
    assert deployed.names is not network.names
    assert (deployed.nc, deployed.config["nc"], deployed.spec.head.module) == (3, 3, "Detect")
    assert largest_difference(network, fused(deployed)) < 1e-9


def test_a_deploy_network_has_the_anchors_of_the_training():
    network = filled("yolov7-w6", nc=2)
    with torch.no_grad():
        network.head.anchors *= 1.5
        network.head.anchor_grid *= 1.5
    deployed = to_deploy(network)
    assert torch.equal(deployed.head.anchor_grid, network.head.anchor_grid)
    assert torch.equal(deployed.head.anchors, network.head.anchors)
    assert largest_difference(network, deployed) < 1e-9


def test_rows_that_no_box_depends_on_are_left_out_of_the_deploy_form():
    """Here a row without a reader, and the auxiliary row that it reads."""
    rows = {
        5: "[3, 1, Conv, [8, 3, 1]]",
        6: "[5, 1, Conv, [16, 1, 1]]",
        7: "[-4, 1, Conv, [16, 3, 1]]",
        8: "[[7, 4, 5, 4], 1, IAuxDetect, [nc, anchors]]",
    }
    training = parse_model(parse_yaml(config(rows)))
    deploy = parse_model(deploy_config(training))
    assert [row.sources for row in deploy.rows] == [(-1,), (0,), (1,), (2,), (3,), (3,)]
    assert deploy.head.sources == (5, 4)
    network = build_network(training.config).double()
    fill(network, 1)
    assert largest_difference(network, to_deploy(network)) < 1e-9


def test_a_deploy_form_of_a_deploy_form_is_the_same():
    deployed = to_deploy(filled("yolov7-w6"))
    assert to_deploy(deployed).config == deployed.config


def test_a_fused_network_is_not_converted():
    with pytest.raises(ValueError, match="cannot be converted to its deploy form; convert it before fusing"):
        to_deploy(fused(narrow("yolov7-tiny")))


def test_fusing_twice_changes_nothing():
    once = fused(filled("yolov7"))
    twice = fused(once)
    assert list(once.state_dict()) == list(twice.state_dict())
    assert largest_difference(once, twice) == 0


def test_a_fused_network_has_no_batch_norm_left():
    network = fused(filled("yolov7"))
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in network.modules())
    assert torch.isfinite(network(random_images().double()).decoded).all()
