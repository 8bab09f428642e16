"""Networks, loss and schedules reproduce the published numbers."""

import math
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from flatout.defect.model import DefectNet, detection_problem
from flatout.defect.step import focal_gamma, focal_loss, step_settings
from flatout.defect.weights import load_network
from flatout.errors import CheckpointError, ConfigError
from tests.defect.golden_files import arrays_split, entries, records
from tests.defect.golden_weights import golden_network
from tests.golden_cases import golden_cases


def named(name: str) -> tuple[str, int]:
    """Version and base width in the name of a golden network."""
    found = re.fullmatch(r"(v\d)_base(\d+).*", name)
    assert found, f"{name} is not the name of a network"
    return found[1], int(found[2])


@pytest.mark.parametrize("case", golden_cases("defect/model.json", entries))
def test_tensors_and_costs_are_the_published_ones(case):
    name, record = case
    version, base = named(name)
    with torch.device("meta"):
        network = DefectNet(version, base)
    state = network.state_dict()
    assert sum(parameter.numel() for parameter in network.parameters()) == record["params"]
    if record.get("buffers") is not None:
        assert sum(buffer.numel() for buffer in network.buffers()) == record["buffers"]
    if record.get("tensors") is not None:
        assert len(state) == record["tensors"]
    if record.get("keys") is not None:
        assert [[key, list(tensor.shape)] for key, tensor in state.items()] == record["keys"]
    if record.get("conv_linear_macs_128") is not None:
        assert macs(network, 128) == record["conv_linear_macs_128"]


def macs(network: nn.Module, side: int) -> int:
    """Multiply-adds of convolutions and linear layers for one patch."""
    total = 0

    def count(module, inputs, output):
        nonlocal total
        total += module.weight.numel() // module.weight.shape[0] * output.numel()

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    network.eval()(torch.empty(1, 3, side, side, device="meta"))
    return total


@pytest.mark.parametrize("case", golden_cases("defect/model_forward.npz", arrays_split))
def test_forward_gives_the_golden_logits(case):
    name, arrays = case
    if not name.endswith("_logits"):
        pytest.skip("a seed, used by the others")
    version, base = named(name)
    network = golden_network(version, base, int(arrays["weights_seed"])).float().eval()
    x = np.random.RandomState(int(arrays["input_seed"])).uniform(0, 1, (1, 3, 64, 64)).astype(np.float32)
    with torch.inference_mode():
        logits = network(torch.from_numpy(x))
    np.testing.assert_allclose(logits.numpy(), arrays[name], rtol=0, atol=1e-4)


def alpha_weights(alpha) -> dict[str, float]:
    """Class weights that correspond to the alpha of older trainers."""
    if alpha is None:
        return {}
    pair = (alpha, 1 - alpha) if isinstance(alpha, float) else tuple(np.array(alpha) / np.sum(alpha))
    return {"weight_background": float(pair[0]), "weight_defect": float(pair[1])}


@pytest.mark.parametrize("case", golden_cases("defect/loss.json", records("cases"), also=("defect/loss.npz",)))
def test_the_loss_has_the_golden_value(case):
    record, arrays = case
    assert record["smooth"] == 1e-5
    mask = torch.from_numpy(arrays["mask"])
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-5)):
        logits = torch.from_numpy(arrays["logits"]).to(dtype)
        loss = focal_loss(logits, mask, gamma=record["gamma"], **alpha_weights(record["alpha"]))
        assert loss.item() == pytest.approx(record["loss"], rel=tolerance)


@pytest.mark.parametrize("case", golden_cases("defect/loss.npz", arrays_split))
def test_the_loss_has_the_golden_gradient(case):
    name, arrays = case
    if not name.startswith("grad_"):
        pytest.skip("an input, used by the others")
    _, alpha, gamma = name.split("_")
    weights = alpha_weights(None if alpha == "none" else int(alpha[1:]) / 10 ** (len(alpha) - 2))
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        logits = torch.from_numpy(arrays["logits"]).to(dtype).requires_grad_()
        focal_loss(logits, torch.from_numpy(arrays["mask"]), gamma=float(gamma[1:]), **weights).backward()
        assert logits.grad is not None
        np.testing.assert_allclose(logits.grad.numpy(), arrays[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.5])
def test_saturated_pixels_give_finite_losses_and_gradients(gamma):
    logits = torch.tensor([-200.0, -40, 0, 40, 200]).repeat(1, 2, 1, 1)
    logits[:, 1] *= -1
    for value in (0, 1):
        given = logits.clone().requires_grad_()
        loss = focal_loss(given, torch.full((1, 1, 1, 5), value), gamma=gamma)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(given.grad).all()


@pytest.mark.parametrize("case", golden_cases("defect/schedule.json", records("cases")))
def test_rates_and_gammas_follow_the_golden_schedule(case):
    record, _ = case
    epochs = record["epochs"]
    schedule = partial(step_settings, record["lr0"], epochs)
    assert [schedule(epoch, 0).lrs[0] for epoch in range(epochs)] == pytest.approx(record["lr"], abs=1e-12)
    gammas = [focal_gamma(record["gamma_start"], record["gamma_end"], epoch, epochs) for epoch in range(epochs)]
    assert gammas == pytest.approx(record["gamma"], abs=1e-12)


@pytest.mark.parametrize("epochs", [1, 2])
def test_trials_of_one_and_two_epochs_keep_the_learning_rate(epochs):
    schedule = partial(step_settings, 1e-3, epochs)
    assert [schedule(epoch, 0).lrs[0] for epoch in range(epochs)] == [1e-3] * epochs


def test_longer_trainings_keep_their_schedule():
    schedule = partial(step_settings, 1.0, 3)
    assert [schedule(epoch, 0).lrs[0] for epoch in range(3)] == [1.0, 1.0, 0.2**2]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_prior_changes_only_the_bias_of_the_last_layer(version):
    torch.manual_seed(0)
    before = DefectNet(version, 8)
    torch.manual_seed(0)
    network = DefectNet(version, 8)
    network.predict_prior(0.01)
    changed = [name for name, tensor in network.state_dict().items() if not tensor.equal(before.state_dict()[name])]
    (bias,) = (network.state_dict()[name] for name in changed)
    assert float(bias[1] - bias[0]) == pytest.approx(math.log(0.01 / 0.99), abs=1e-6)
    with torch.no_grad():
        network.last_layer.weight.zero_()
        heat = torch.softmax(network.eval()(torch.rand(1, 3, 32, 32)), 1)[:, 1]
    assert heat.mean().item() == pytest.approx(0.01, abs=1e-6)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_dead_last_layer_is_noticed(version):
    torch.manual_seed(0)
    network = DefectNet(version, 8).eval()
    x = torch.rand(2, 3, 32, 32)
    is_defect = torch.zeros(2, 32, 32, dtype=torch.bool)
    is_defect[:, 5:9, 5:9] = True
    assert "last layer" not in detection_problem(network, x, is_defect)
    features = network.decoder.get_submodule("db4")
    hook = features.register_forward_hook(lambda module, given, out: out * ~is_defect[:, None])
    problem = detection_problem(network, x, is_defect)
    assert problem == "all inputs of its last layer are 0 at 100% of the pixels of painted defects"
    assert detection_problem(network, x, torch.zeros_like(is_defect)) == "", "without defects nothing can be said"
    hook.remove()
    with torch.no_grad():
        network.last_layer.weight.zero_()
    assert "for every pixel" in detection_problem(network, x, is_defect)


def test_a_network_that_has_not_begun_to_learn_is_noticed():
    torch.manual_seed(0)
    network = DefectNet("v1", 8).eval()
    x = torch.rand(2, 3, 32, 32)
    is_defect = torch.zeros(2, 32, 32, dtype=torch.bool)
    is_defect[:, 5:9, 5:9] = True
    assert "no higher than that of other pixels" in detection_problem(network, x, is_defect)
    higher = is_defect[:, None] * torch.tensor([0.0, 0.3])[:, None, None]
    network.last_layer.register_forward_hook(lambda module, given, out: out + higher)
    assert detection_problem(network, x, is_defect) == ""


class Tolerance(NamedTuple):
    """Relative tolerances for the results of three steps."""

    losses: tuple[float, float, float]
    gradients: float
    total_gradient: float
    running_means: float


# Float32 is promised to 1e-3, which two losses, the total gradient and the running means keep. Exceptions:
# - the third loss. This is a property of the function, not of the arithmetic: in float64, inputs that differ by half a
#   unit of float32's last place (6e-8) change it by up to 9e-4, as Adam has divided by the size of a gradient twice;
# - gradients of the deepest level, off by 2e-3 because a convolution adds 1152 products in float32 before a batch norm
#   over eight values. With only those sums in float64 ("exact sums") and all else in float32, they agree to 1e-5.
TOLERANCES = {
    "float64": Tolerance((1e-6, 1e-6, 1e-6), 1e-6, 1e-6, 1e-6),
    "float32, exact sums": Tolerance((1e-5, 1e-3, 1e-2), 1e-3, 1e-3, 1e-3),
    "float32": Tolerance((1e-5, 1e-3, 1e-2), 5e-3, 1e-3, 1e-3),
}


@pytest.mark.parametrize("arithmetic", TOLERANCES)
@pytest.mark.parametrize("case", golden_cases("defect/train_step.json", entries))
def test_three_adam_steps_give_the_golden_losses(case, arithmetic):
    name, record = case
    version, alpha = re.fullmatch(r"(v\d)_alpha(.+)", name).groups()
    dtype, tolerance = getattr(torch, arithmetic[:7]), TOLERANCES[arithmetic]
    network = golden_network(version, 16, record["weights_seed"]).to(dtype).train()
    if "exact sums" in arithmetic:
        add_exactly(network)
    x = np.random.RandomState(record["input_seed"]).uniform(0, 1, (2, 3, 64, 64))
    mask = torch.zeros(2, 1, 64, 64)
    mask[0, 0, 10:13, 20:25] = 1
    mask[1, 0, 40:43, 5:8] = 1
    weights = alpha_weights(None if alpha == "None" else float(alpha))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = focal_loss(network(torch.from_numpy(x).to(dtype)), mask, gamma=2.0, **weights)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            norms = {key: parameter.grad.norm().item() for key, parameter in network.named_parameters()}
        optimizer.step()
    for loss, golden, allowed in zip(losses, record["losses"], tolerance.losses, strict=True):
        assert loss == pytest.approx(golden, rel=allowed)
    for key, norm in record["grad_norms"].items():
        assert norms[key] == pytest.approx(norm, rel=tolerance.gradients), key
    total = np.linalg.norm(list(norms.values()))
    assert total == pytest.approx(record["total_grad_norm"], rel=tolerance.total_gradient)
    state = network.state_dict()
    for key, norm in record["running_mean_norm_after3"].items():
        assert state[key].norm().item() == pytest.approx(norm, rel=tolerance.running_means), key


def add_exactly(network: nn.Module) -> None:
    """Make convolutions sum in float64 and round once."""

    def forward(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        assert conv.bias is not None
        weight, bias = conv.weight.double(), conv.bias.double()
        return nn.functional.conv2d(x.double(), weight, bias, padding=conv.padding).float()

    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.forward = partial(forward, module)  # type: ignore[method-assign]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_checkpoints_of_older_trainings_load(version, tmp_path: Path):
    network = DefectNet(version, 8)
    path = tmp_path / "BgRemoval_lr0.001_ep30_bs16_128x128_strip.pth"
    torch.save(
        {"model_state_dict": network.state_dict(), "img_height": 128, "img_width": 128, "epoch": 3, "seed": 42}, path
    )
    loaded, weights = load_network(path)
    assert (weights.version, weights.base, weights.patch) == (version, 8, 128)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor)


def test_files_of_other_networks_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "other.pt"
    torch.save({"model_state_dict": {"a.weight": torch.zeros(3)}}, path)
    with pytest.raises(CheckpointError, match=r"other\.pt.*another network"):
        load_network(path)
    state = DefectNet("v1", 8).state_dict()
    del state["decoder.fin_out.0.bias"]
    torch.save({"model_state_dict": state}, path)
    with pytest.raises(CheckpointError, match=r"1 tensors are missing, such as decoder\.fin_out\.0\.bias"):
        load_network(path)


def test_unknown_networks_are_refused():
    with pytest.raises(ConfigError, match="v1"):
        DefectNet("v3")
    with pytest.raises(ConfigError, match="multiple of 8"):
        DefectNet("v2", 12)
