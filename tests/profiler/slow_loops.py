"""Plain PyTorch loops, each slow for one planted reason."""

import cv2
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.clock import machine
from flatout.profiler import watch


class Photos(Dataset):
    """JPEG images much larger than the network's input."""

    def __init__(self, num: int) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (75, 100, 3), dtype=np.uint8)
        self.data = cv2.imencode(".jpg", cv2.resize(noise, (800, 600)))[1]
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = np.asarray(cv2.imdecode(self.data, cv2.IMREAD_COLOR))
        return torch.from_numpy(cv2.resize(image, (32, 32))).permute(2, 0, 1) / 255, index % 2


class Warped(Dataset):
    """Samples that need a lot of arithmetic, none of it decoding, in four functions that take about as long."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        grid = np.linspace(0, 1, 3 * 32 * 32, dtype=np.float32)
        for _ in range(60):
            grid = turned(squeezed(waved(bent(grid, index))))
        return torch.from_numpy(grid.reshape(3, 32, 32)), index % 2


def bent(grid: np.ndarray, index: int) -> np.ndarray:
    return np.sin(grid * 3 + index)


def waved(grid: np.ndarray) -> np.ndarray:
    return np.cos(grid * 5 + 1)


def squeezed(grid: np.ndarray) -> np.ndarray:
    return np.sin(grid * 2 - 1)


def turned(grid: np.ndarray) -> np.ndarray:
    return np.cos(grid * 4 + 2)


def ready_samples(num: int) -> TensorDataset:
    return TensorDataset(torch.rand(num, 3, 32, 32), torch.arange(num) % 2)


def small_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 2))


def train(loader, after_step=lambda logits: None, device="cpu", copy=lambda tensor: tensor):
    """The loop of every tutorial, inside watch()."""
    model = small_network().to(device)
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    with watch(loader, model, optimizer, loss_fn=loss_fn) as watched:
        for images, labels in loader:
            logits = model(copy(images))
            loss = loss_fn(logits, copy(labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(logits)
    return watched


def slow_decode():
    # Lines are sampled every 40 ms: with the four samples of a short loop, two in resize() would change the verdict.
    return train(DataLoader(Photos(800), batch_size=8, num_workers=1))


def too_few_workers():
    # Long enough on a fast machine too: lines are sampled every 40 ms.
    return train(DataLoader(Warped(1920), batch_size=8, num_workers=1))


def item_loop():
    def read_each(logits):
        total = 0.0
        for _ in range(300):
            for value in logits.flatten():
                total += value.item()

    return train(DataLoader(ready_samples(320), batch_size=8), read_each)


def gc_pauses():
    """Keeps every result as Python objects: the collector has more and more of them to visit."""
    history = []

    def keep(logits):
        history.append([{"box": [number]} for number in range(20_000)])

    return train(DataLoader(ready_samples(160), batch_size=8), keep)


def healthy():
    """A loop in which the network takes nearly the whole step, on every core."""
    torch.set_num_threads(machine.cores().usable)
    samples = TensorDataset(torch.rand(48, 3, 128, 128), torch.arange(48) % 2)
    model = nn.Sequential(nn.Conv2d(3, 32, 5), nn.Conv2d(32, 32, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    loader = DataLoader(samples, batch_size=4)
    with watch(loader, model, optimizer, loss_fn=loss_fn) as watched:
        for images, labels in loader:
            loss_fn(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched
