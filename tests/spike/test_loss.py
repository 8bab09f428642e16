"""Normalisation of the network's input, and the terms of the loss."""

import pytest
import torch

from flatout.errors import CheckpointError, ConfigError
from flatout.spike.config import CharbonnierConfig, LossConfig, PerceptualConfig
from flatout.spike.step import DeblurLoss, Normalise, apply_gain, vgg16


def test_empty_bins_are_zero_as_a_rate_and_meanstd_shifts_and_divides():
    counts = torch.tensor([4.0, 0.0]).view(1, 1, 2, 1, 1)
    frames = torch.tensor([8.0, 0.0]).view(1, 1, 2)
    assert Normalise("rate")(counts, frames).flatten().tolist() == [0.5, 0.0]
    assert Normalise("meanstd", mean=1, std=2)(counts, frames).flatten().tolist() == [1.5, -0.5]
    with pytest.raises(ValueError, match="VOXEL_NORM"):
        Normalise("zscore")


@pytest.mark.parametrize("threshold", [1.0, 2.0, 4.0])
def test_with_gain_the_cameras_threshold_does_not_matter(threshold):
    blur = torch.rand(2, 3, 3, 8, 8)
    light = torch.rand(2, 3, 5, 4, 4)
    assert torch.allclose(apply_gain(light / threshold, blur), apply_gain(light, blur), rtol=1e-5)


def test_terms_are_weighted_and_listed():
    a, b = torch.rand(1, 2, 3, 8, 8), torch.rand(1, 2, 3, 8, 8)
    total, main, perceptual = DeblurLoss(LossConfig(CHARBONNIER=CharbonnierConfig(WEIGHT=3.0)))(a, b)
    assert float(total) == pytest.approx(3 * float(main))
    assert float(perceptual) == 0


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_a_perceptual_term_needs_weights_of_the_users_own(tmp_path, ending):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = {f"features.{key}": value for key, value in vgg16()[:4].state_dict().items()}
    path = tmp_path / f"vgg.{ending}"
    if ending == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    config = PerceptualConfig(WEIGHTS=str(path), LAYERS=("relu1_2",), WEIGHT=0.5)
    loss = DeblurLoss(LossConfig(VGG_PERCEPTUAL=config))
    predicted = torch.rand(1, 1, 3, 8, 8, requires_grad=True)
    total, main, perceptual = loss(predicted, torch.rand(1, 1, 3, 8, 8))
    assert torch.allclose(total, main + 0.5 * perceptual, rtol=1e-5)
    assert perceptual.detach() > 0
    total.backward()
    assert predicted.grad is not None and all(parameter.grad is None for parameter in loss.parameters())


def test_other_files_and_unknown_features_are_refused(tmp_path):
    torch.save({"features.0.weight": torch.zeros(1)}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="no VGG-16 weights"):
        DeblurLoss(LossConfig(VGG_PERCEPTUAL=PerceptualConfig(WEIGHTS=str(tmp_path / "x.pth"))))
    with pytest.raises(ConfigError, match="relu9_9"):
        DeblurLoss(LossConfig(VGG_PERCEPTUAL=PerceptualConfig(WEIGHTS="x", LAYERS=("relu9_9",))))
