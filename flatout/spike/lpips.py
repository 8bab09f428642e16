"""LPIPS, a learned distance of images, with weights from a file that the user provides. Lower is better, 0 is equal.

    images in 0..1 --> shift and scale --> AlexNet or VGG-16 --> features of five layers, each of unit length per pixel
    --> squared differences, weighted per channel, mean over pixels, sum over layers

R. Zhang et al., The unreasonable effectiveness of deep features as a perceptual metric, CVPR 2018. Its weights are not
part of flatout and are never downloaded. The file is read without running anything in it; with the package `lpips` it
is written by torch.save(lpips.LPIPS(net="alex").state_dict(), "lpips_alex.pth").

Dimension key:  N images   C channels   H W image or feature map
"""

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from flatout.errors import CheckpointError, DataError
from flatout.spike.evaluate import RestoredBatch
from flatout.spike.step import tensors_in, vgg16

SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""Mean and standard deviation of RGB values in -1..1, as the published weights expect."""
EPSILON = 1e-10
"""Added to the length of features, so that features of 0 can be divided by it."""
TAPS = {"alex": (1, 4, 7, 9, 11), "vgg": (3, 8, 15, 22, 29)}
"""Network -> layers whose outputs are compared, by their index in torchvision's `features`."""
LEAST_SIDE = 32
"""Smaller images do not reach the last layer."""


class Lpips(nn.Module):
    """Distances of images, computed by AlexNet or VGG-16, whichever the file holds."""

    def __init__(self, path: str | Path) -> None:
        """CheckpointError that names what is missing if the file does not hold all weights."""
        super().__init__()
        state = _plain_names(tensors_in(Path(path)))
        first = state.get("features.0.weight")
        if first is None:
            raise CheckpointError(
                f"{path}: no weights of LPIPS: net.slice1.0.weight is missing. Use the file that "
                "torch.save(lpips.LPIPS(net='alex').state_dict(), FILE) writes; lpips is a package."
            )
        self.network = "alex" if first.shape[-1] == 11 else "vgg"
        """Which network the file holds: alex or vgg."""
        layers = _alexnet() if self.network == "alex" else vgg16()
        self._taps = TAPS[self.network]
        self.features = nn.Sequential(*list(layers)[: self._taps[-1] + 1])
        for number, tap in enumerate(self._taps):
            width = len(self.features.get_parameter(f"{tap - 1}.weight"))
            self.add_module(f"lin{number}", nn.Conv2d(width, 1, 1, bias=False))
        expected = self.state_dict()
        if missing := [key for key, value in expected.items() if key not in state or state[key].shape != value.shape]:
            raise CheckpointError(f"{path}: {missing[0]} of LPIPS ({self.network}) is missing or has another shape.")
        self.load_state_dict({key: state[key] for key in expected})
        self.register_buffer("_shift", torch.tensor(SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("_scale", torch.tensor(SCALE).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, first_N3HW: Tensor, second_N3HW: Tensor) -> Tensor:
        """Distance of each pair of images, RGB in 0..1, float32 [N]; images must have sides of 32 pixels or more."""
        shift, scale = self.get_buffer("_shift"), self.get_buffer("_scale")
        first, second = ((2 * each.float() - 1 - shift) / scale for each in (first_N3HW, second_N3HW))
        total_N = torch.zeros(len(first), device=first.device)
        for index, layer in enumerate(self.features):
            first, second = layer(first), layer(second)
            if index in self._taps:
                weighted_sum = self.get_submodule(f"lin{self._taps.index(index)}")
                difference = (_unit_length(first) - _unit_length(second)).square()
                total_N = total_N + weighted_sum(difference).mean(dim=(1, 2, 3))
        return total_N


class LpipsMeter:
    """Collects the distances of restored and of blurry frames to the sharp ones, batch by batch."""

    def __init__(self, lpips: Lpips) -> None:
        self._lpips = lpips
        self._distances: list[Tensor] = []

    def __call__(self, restored: RestoredBatch) -> None:
        keep = restored.score_NL.flatten()
        sharp, *others = (
            each.flatten(0, 1)[keep] for each in (restored.sharp, restored.predicted, restored.blur)
        )  # fmt: skip
        if min(sharp.shape[2:]) < LEAST_SIDE:
            raise DataError(f"LPIPS needs frames of {LEAST_SIDE} x {LEAST_SIDE} pixels or more.")
        self._distances.append(torch.stack([self._lpips(each, sharp) for each in others], 1))

    def means(self) -> dict[str, float]:
        """Mean over all frames, as `lpips` and `blurry_lpips`. Waits for the device."""
        lpips, blurry = torch.cat(self._distances).double().mean(0).tolist()
        return {"lpips": lpips, "blurry_lpips": blurry}


def _unit_length(features_NCHW: Tensor) -> Tensor:
    return features_NCHW / (features_NCHW.square().sum(1, keepdim=True).sqrt() + EPSILON)


def _plain_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names `features.N.weight`, with torchvision's N, and `linN.weight`."""
    rules = ((r"^net\.slice\d+\.", "features."), (r"^lin(\d+)\.model\.\d+\.", r"lin\1."))
    plain = {}
    for key, value in state.items():
        for pattern, name in rules:
            key = re.sub(pattern, name, key)
        plain[key] = value
    return plain


def _alexnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(),
    )  # fmt: skip
