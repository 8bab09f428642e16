"""LPIPS is computed as published, from a file that cannot run anything."""

import pickle

import numpy as np
import pytest
import torch

import flatout.spike
from flatout.__main__ import main
from flatout.errors import CheckpointError
from flatout.spike.evaluate import RestoredBatch
from flatout.spike.lpips import Lpips, LpipsMeter
from tests.spike.test_train import TINY

WIDTHS = {"alex": (64, 192, 384, 256, 256), "vgg": (64, 128, 256, 512, 512)}
SLICES = {
    "alex": {
        1: [(0, 3, 64, 11)], 2: [(3, 64, 192, 5)], 3: [(6, 192, 384, 3)], 4: [(8, 384, 256, 3)], 5: [(10, 256, 256, 3)],
    },
    "vgg": {
        1: [(0, 3, 64, 3), (2, 64, 64, 3)],
        2: [(5, 64, 128, 3), (7, 128, 128, 3)],
        3: [(10, 128, 256, 3), (12, 256, 256, 3), (14, 256, 256, 3)],
        4: [(17, 256, 512, 3), (19, 512, 512, 3), (21, 512, 512, 3)],
        5: [(24, 512, 512, 3), (26, 512, 512, 3), (28, 512, 512, 3)],
    },
}  # fmt: skip
"""Convolutions (index, inputs, outputs, side) of each part of the networks, as the package lpips divides them."""


def random_state(net):
    """Random weights under the names of the package lpips."""
    torch.manual_seed(1)
    state = {"scaling_layer.shift": torch.zeros(1, 3, 1, 1)}
    for part, convolutions in SLICES[net].items():
        for index, inputs, outputs, side in convolutions:
            scale = (2 / (inputs * side * side)) ** 0.5
            state[f"net.slice{part}.{index}.weight"] = torch.randn(outputs, inputs, side, side) * scale
            state[f"net.slice{part}.{index}.bias"] = torch.randn(outputs) * 0.1
    for number, width in enumerate(WIDTHS[net]):
        state[f"lin{number}.model.1.weight"] = torch.rand(1, width, 1, 1)
    return state


@pytest.fixture(scope="module")
def alex(tmp_path_factory):
    path = tmp_path_factory.mktemp("lpips") / "alex.pth"
    torch.save(random_state("alex"), path)
    return path


def by_hand(state, first, second):
    """LPIPS of AlexNet of one pair in 0..1, in float64 and step by step."""
    total = 0.0
    shift, scale = (torch.tensor(x).double().view(3, 1, 1) for x in ([-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]))
    images = [(2 * x.double() - 1 - shift) / scale for x in (first, second)]
    maps = [x[None] for x in images]
    strides, paddings, pooled = (4, 1, 1, 1, 1), (2, 2, 1, 1, 1), (False, True, True, False, False)
    for number, (part, ((index, *_),)) in enumerate(SLICES["alex"].items()):
        weight, bias = (state[f"net.slice{part}.{index}.{name}"].double() for name in ("weight", "bias"))
        if pooled[number]:
            maps = [torch.nn.functional.max_pool2d(x, 3, 2) for x in maps]
        maps = [torch.nn.functional.conv2d(x, weight, bias, strides[number], paddings[number]).relu() for x in maps]
        unit = [x[0].numpy() / (np.sqrt((x[0].numpy() ** 2).sum(0)) + 1e-10) for x in maps]
        channel = state[f"lin{number}.model.1.weight"].double().numpy().reshape(-1, 1, 1)
        total += float((channel * (unit[0] - unit[1]) ** 2).sum(0).mean())
    return total


def test_it_is_the_published_computation(alex):
    first, second = torch.rand(2, 3, 40, 48), torch.rand(2, 3, 40, 48)
    found = Lpips(alex)(first, second)
    expected = [by_hand(random_state("alex"), a, b) for a, b in zip(first, second, strict=True)]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4)


def test_equal_images_have_distance_0_and_both_orders_the_same(alex):
    lpips = Lpips(alex)
    first, second = torch.rand(1, 3, 32, 32), torch.rand(1, 3, 32, 32)
    assert float(lpips(first, first)) == 0 and float(lpips(first, second)) == float(lpips(second, first)) > 0


def test_the_file_says_which_network_it_holds(tmp_path, alex):
    torch.save(random_state("vgg"), tmp_path / "vgg.pth")
    assert Lpips(tmp_path / "vgg.pth").network == "vgg" and Lpips(alex).network == "alex"


def test_files_without_these_weights_are_refused_and_nothing_in_them_is_run(tmp_path):
    state = random_state("alex")
    del state["lin3.model.1.weight"]
    torch.save(state, tmp_path / "part.pth")
    with pytest.raises(CheckpointError, match=r"part\.pth: lin3\.weight of LPIPS \(alex\) is missing"):
        Lpips(tmp_path / "part.pth")
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"other\.pth: no weights of LPIPS.*lpips\.LPIPS"):
        Lpips(tmp_path / "other.pth")

    class Bad:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    (tmp_path / "bad.pth").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(CheckpointError):
        Lpips(tmp_path / "bad.pth")
    assert not (tmp_path / "written").exists()


def test_only_scored_frames_count(alex):
    lpips = Lpips(alex)
    frames = torch.rand(3, 1, 2, 3, 32, 32)
    meter = LpipsMeter(lpips)
    meter(RestoredBatch([0], *frames, torch.tensor([[True, False]])))
    blur, sharp, predicted = frames[:, 0, :1]
    means = meter.means()
    assert means["lpips"] == pytest.approx(float(lpips(predicted, sharp)))
    assert means["blurry_lpips"] == pytest.approx(float(lpips(blur, sharp)))


def test_the_command_reports_it_only_when_weights_are_given(demo, alex, tmp_path, capsys):
    model = flatout.spike.load(demo, device="cpu")
    overrides = dict(each.split("=") for each in TINY) | {"TRAIN.EPOCHS": 1, "LOG.SAVE_DIR": tmp_path / "run"}
    model.train(overrides)
    words = ["spike", "test", "--weights", str(model.weights), "--device", "cpu"]
    assert main(words) == 0 and "LPIPS" not in capsys.readouterr().out
    assert main([*words, "--lpips", str(alex), "--output", str(tmp_path / "out")]) == 0
    assert "LPIPS 0." in capsys.readouterr().out
    assert model.evaluate(lpips=alex).lpips == pytest.approx(model.evaluate(lpips=alex).blurry_lpips, rel=0.5)
