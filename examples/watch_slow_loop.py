"""A plain PyTorch loop that is slow for one reason; the watch around it finds the reason and predicts remedies.

python examples/watch_slow_loop.py
"""

import cv2
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flatout.profiler import watch


class Photos(Dataset):
    """Large JPEG images that are scaled to 64 x 64 pixels for the network."""

    def __init__(self) -> None:
        noise = cv2.resize(np.random.default_rng(0).integers(0, 256, (75, 100, 3), dtype=np.uint8), (1600, 1200))
        self.data = cv2.imencode(".jpg", noise)[1]

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = cv2.imdecode(self.data, cv2.IMREAD_COLOR)
        return torch.from_numpy(cv2.resize(image, (64, 64))).permute(2, 0, 1) / 255, index % 2


if __name__ == "__main__":
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    loader = DataLoader(Photos(), batch_size=8, num_workers=1)
    with watch(loader, model, optimizer, loss_fn=loss_fn) as watched:
        for images, labels in loader:
            loss_fn(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    print(watched.text())
