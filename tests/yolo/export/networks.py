"""Small networks whose outputs depend on the image, for the tests of exports."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.yolo.export import ExportOptions, ExportOutcome, export_network
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.weights import Weights, save_weights
from tests.yolo.model.test_network import narrow

SIDE = 64
FEW_ROWS = "few rows"
"""Name of a network with a few rows of every kind: the time of an export grows with the rows."""
CONFIG = {
    "nc": 80,
    "anchors": [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]],
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "RepConv", [16, 3, 2]],
        [-1, 1, "SPPCSPC", [16]],
        [-1, 1, "Conv", [32, 3, 2]],
    ],
    "head": [[-1, 1, "nn.Upsample", ["None", 2, "nearest"]], [[-1, 4], 1, "Concat", [1]],
             [[2, 7, 5], 1, "IDetect", ["nc", "anchors"]]],
}  # fmt: skip


def confident_network(name: str = FEW_ROWS, *, nc: int | None = 3) -> Network:
    """A small network whose boxes and scores depend on the image.

    The outputs of a new network hardly depend on it, so that a mistake in the first layers would not be noticed.
    """
    torch.manual_seed(0)
    network = build_network(CONFIG, nc=nc) if name == FEW_ROWS else narrow(name, nc=nc)
    network.train()
    generator = torch.Generator().manual_seed(5)
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = 1.0
            norm.weight.copy_(0.5 + torch.rand(norm.weight.shape, generator=generator))
            norm.bias.copy_(torch.rand(norm.bias.shape, generator=generator) - 0.5)
        network(torch.from_numpy(pixels(4, (128, 128))))
        for norm in norms:
            # A channel that hardly varied would amplify every rounding error.
            assert norm.running_var is not None
            norm.running_var.clamp_(min=0.3 * float(norm.running_var.mean()))
        for key, value in network.state_dict().items():
            if "implicit" in key:
                value.add_(0.2 * torch.rand(value.shape, generator=generator))
        for conv in network.head.modules():
            if isinstance(conv, torch.nn.Conv2d) and conv.bias is not None:
                conv.bias.copy_(2 * torch.rand(conv.bias.shape, generator=generator) - 1)
    return network.eval()


def exported(network: Network, folder: Path, **options: Any) -> ExportOutcome:
    """Export to `folder`/x.onnx, compared on two images, unless `options` say otherwise."""
    defaults: dict[str, Any] = {"img_size": (SIDE, SIDE), "pictures": 2, "formats": ("onnx",)}
    return export_network(network, ExportOptions(**(defaults | options)), stem=folder / "x")


def saved(network: Network, path: Path) -> Path:
    save_weights(
        path,
        Weights(
            state=network.state_dict(),
            config=network.config,
            names=network.names,
            nc=network.nc,
            kind="stripped",
            format="flatout",
        ),
    )
    return path


def pixels(batch: int = 1, hw: tuple[int, int] = (SIDE, SIDE), *, seed: int = 2) -> np.ndarray:
    """Coarse blocks with fine noise, float32 [B, 3, H, W] in 0..1."""
    rng = np.random.default_rng(seed)
    coarse = rng.random((batch, 3, hw[0] // 16, hw[1] // 16)).repeat(16, 2).repeat(16, 3)
    return (0.75 * coarse + 0.25 * rng.random(coarse.shape)).astype(np.float32)
