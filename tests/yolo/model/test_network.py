"""Networks: initial weights from a seed, rows that run, memory layout, and weights cast under autocast."""

import gc
import logging
import weakref
from typing import Any

import pytest
import torch

from flatout.yolo.model import network
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.layers import Predictions
from flatout.yolo.model.network import Network, build_network


def narrow(name: str, *, nc: int | None = None, seed: int = 0) -> Network:
    """A shipped network with an eighth of its channels, from a seed."""
    torch.manual_seed(seed)
    config: Any = load_config(name)
    return build_network(config | {"width_multiple": 0.125}, nc=nc)


def random_images(batch: int = 2, side_px: int = 64) -> torch.Tensor:
    return torch.rand(batch, 3, side_px, side_px, generator=torch.Generator().manual_seed(1))


def rows_that_run(network: Network, x: torch.Tensor) -> list[int]:
    seen: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda *call, index=index: seen.append(index))
        for index, layer in enumerate(network.model)
    ]
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return seen


def test_poolings_begin_with_narrower_ones_and_pairs_of_convolutions_are_found():
    # Rows 31 to 33 of yolov7-tiny pool row 30 with kernels of 5, 9 and 13; rows 2 and 3 are 1 x 1 of row 1.
    steps = {step.row: step for step in narrow("yolov7-tiny")._training_steps}
    assert [(steps[row].sources, steps[row].narrower_k) for row in (31, 32, 33)] == [
        ((30,), 0), ((30, 31), 5), ((30, 32), 9)
    ]  # fmt: skip
    pairs = {row: step.twin.row for row, step in steps.items() if step.twin}
    assert pairs == {2: 3, 9: 10, 16: 17, 23: 24, 29: 30, 42: 43, 52: 53, 60: 61, 68: 69}
    assert steps[2].twin.num_readers == 2  # row 4 and the concatenation
    read = [source for step in steps.values() for source in step.sources if source >= 0]
    assert all(step.num_readers == read.count(row) for row, step in steps.items())


def test_a_map_is_released_with_its_last_reader():
    """Evaluation keeps no map that no later row reads."""
    network = narrow("yolov7-tiny").eval()
    maps: dict[int, weakref.ref[torch.Tensor]] = {}
    kept: list[list[int]] = []

    def keep(row: int, output: torch.Tensor) -> None:
        maps[row] = weakref.ref(output)
        kept.append([earlier for earlier, one in maps.items() if one() is not None])

    for row, layer in enumerate(network.model[:-1]):
        layer.register_forward_hook(lambda module, inputs, output, row=row: keep(row, output))
    with torch.no_grad():
        network(random_images())
    readers = {step.row: step.sources for step in network._lead_steps}
    for now, earlier in enumerate(kept):
        assert [row for row in earlier if row < now] == [
            row for row in range(now) if any(row in sources for at, sources in readers.items() if at >= now)
        ]


def test_a_seed_determines_the_weights():
    states = [narrow("yolov7-w6").state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    other = narrow("yolov7-w6", seed=1).state_dict()
    assert not torch.equal(states[0]["model.1.conv.weight"], other["model.1.conv.weight"])


def test_the_statistics_of_a_new_network_are_those_after_one_black_image():
    state = narrow("yolov7-tiny").state_dict()
    for key, value in state.items():
        match key.rpartition(".")[2]:
            case "running_mean":
                assert not value.any()
            case "running_var":
                assert (value == torch.tensor(0.9)).all()
            case "num_batches_tracked":
                assert value == 1


@pytest.mark.parametrize(("nc", "expected"), [(1, 4.094345), (80, -4.880400)])
def test_biases_expect_few_objects(nc, expected):
    network = narrow("yolov7-w6", nc=nc)
    convs = [
        (conv, stride)
        for part in (network.head.m, network.head.m2)
        for conv, stride in zip(part, network.head.strides, strict=True)
    ]
    objectness = {8: -6.684612, 16: -5.298317, 32: -3.912023, 64: -2.525729}
    for conv, stride in convs:
        bias_AO = conv.bias.detach().view(3, nc + 5)
        # The priors are added to the default initialisation, which is within 1 / sqrt(inputs).
        spread = conv.in_channels**-0.5
        assert (bias_AO[:, :4].abs() <= spread).all()
        assert ((bias_AO[:, 4] - objectness[stride]).abs() <= spread).all()
        assert ((bias_AO[:, 5:] - expected).abs() <= spread).all()


def test_another_number_of_classes_is_logged_with_both_values(caplog):
    with caplog.at_level(logging.INFO):
        network = build_network(load_config("yolov7-tiny"), nc=3, where="yolov7-tiny.yaml")
    assert "yolov7-tiny.yaml: nc 80 is replaced by 3" in caplog.text
    assert (network.nc, network.names, network.config["nc"]) == (3, ["0", "1", "2"], 3)


def test_a_network_built_on_the_meta_device_can_load_all_weights():
    made = narrow("yolov7-tiny")
    with torch.device("meta"):
        empty = narrow("yolov7-tiny")
    assert all(value.is_meta for value in empty.state_dict().values())
    empty.load_state_dict(made.state_dict(), assign=True)
    assert all(parameter.requires_grad for parameter in empty.parameters())
    for mode in (True, False):
        outputs = [network.train(mode)(random_images()) for network in (made, empty)]
        raw = outputs if mode else [output.raw for output in outputs]
        assert all(torch.equal(one, other) for one, other in zip(*raw, strict=True))


def test_training_gives_raw_maps_of_lead_and_auxiliary_levels_and_evaluation_boxes_of_the_lead():
    network = narrow("yolov7-w6", nc=4)
    x = random_images(side_px=128)
    sides = [16, 8, 4, 2]
    raw = network.train()(x)
    assert [tuple(each.shape) for each in raw] == [(2, 3, side, side, 9) for side in sides * 2]
    prediction = network.eval()(x)
    assert isinstance(prediction, Predictions)
    assert [each.shape for each in prediction.raw] == [each.shape for each in raw[:4]]
    assert prediction.decoded.shape == (2, 3 * sum(side**2 for side in sides), 9)


def test_auxiliary_rows_run_in_training_only():
    network = narrow("yolov7-w6")
    x = random_images(side_px=128)
    assert rows_that_run(network.train(), x) == list(range(123))
    assert rows_that_run(network.eval(), x) == [*range(118), 122]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", ["yolov7-tiny", "yolov7", "yolov7-e6"])
def test_channels_last_goes_through_every_row(name):
    """Outputs and gradients of every row: a map in the other layout would be copied at the next convolution."""
    network = narrow(name).to(memory_format=torch.channels_last)
    x = random_images(side_px=128).contiguous(memory_format=torch.channels_last)
    other_layout: list[int] = []

    def note(index: int, y: torch.Tensor) -> None:
        # A concatenation's gradients are slices: they have gaps, but the channels of a pixel are contiguous.
        if y.stride(1) != 1:
            other_layout.append(index)

    for index, layer in enumerate(network.model[:-1]):
        layer.register_forward_hook(lambda module, inputs, output, index=index: note(index, output))
        layer.register_full_backward_hook(lambda module, inputs, outputs, index=index: note(index, outputs[0]))
    sum(output.square().mean() for output in network.train()(x)).backward()
    with torch.no_grad():
        network.eval()(x)
    assert other_layout == []


def test_no_layer_changes_its_input_in_place():
    """An in-place activation would make autograd clone, or fail, if its input is needed again."""
    network = narrow("yolov7").train()
    for layer in network.model[:-1]:
        layer.register_forward_pre_hook(lambda module, inputs: versions.append((inputs[0], version_of(inputs[0]))))
    versions: list[tuple[object, list[int]]] = []
    sum(output.square().mean() for output in network(random_images())).backward()
    assert all(version_of(maps) == before for maps, before in versions)


def version_of(maps: torch.Tensor | list[torch.Tensor]) -> list[int]:
    return [each._version for each in (maps if isinstance(maps, list) else [maps])]


def trained_under_autocast(network: Network) -> dict[str, torch.Tensor]:
    """Gradients of a step in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        sum(level.square().mean() for level in network(random_images())).backward()
    return {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", ["yolov7-tiny", "yolov7"])
def test_weights_that_are_cast_together_have_exactly_the_same_gradients(name, monkeypatch):
    together = trained_under_autocast(narrow(name))
    monkeypatch.setattr(network, "_should_cast", lambda device: False)
    one_by_one = trained_under_autocast(narrow(name))
    assert together.keys() == one_by_one.keys() and all(each.dtype == torch.float32 for each in together.values())
    assert all(torch.equal(each, one_by_one[name]) for name, each in together.items())


def test_frozen_weights_get_no_gradients_and_stay_unchanged():
    network = narrow("yolov7-tiny")
    for name, weight in network.named_parameters():
        weight.requires_grad_(not name.startswith("model.0."))
    before = {name: (weight, weight.clone()) for name, weight in network.named_parameters()}
    gradients = trained_under_autocast(network)
    assert not any(name.startswith("model.0.") for name in gradients) and "model.1.conv.weight" in gradients
    for name, weight in network.named_parameters():
        assert weight is before[name][0] and torch.equal(weight, before[name][1])


def test_weights_are_restored_after_an_image_with_the_wrong_number_of_channels():
    network = narrow("yolov7-tiny")
    weights = list(network.parameters())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError):
        network(torch.rand(1, 4, 64, 64))
    assert all(mine is weight for mine, weight in zip(network.parameters(), weights, strict=True))


def test_a_fused_network_shares_no_weight_with_its_original_and_keeps_none_of_it():
    network = narrow("yolov7")
    mine, its = ({each.data_ptr() for each in one.parameters()} for one in (network, fused(network)))
    assert not mine & its
    gone = weakref.ref(network.model[0].conv.weight)
    quick = fused(network)
    del network
    gc.collect()
    assert gone() is None and quick.training is False
