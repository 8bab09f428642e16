"""A module with hooks and a small trainer that calls them."""

import argparse
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scans(Dataset):
    """Scanned pages, shown to the network at 96 x 96."""

    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*.jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        page = cv2.imread(str(self.files[index]), cv2.IMREAD_GRAYSCALE)
        page = cv2.resize(page, (96, 96), interpolation=cv2.INTER_AREA)
        return torch.from_numpy(page)[None].float() / 255, index % 4


class PageClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 24, 5, 2, 2), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU(), nn.Conv2d(48, 64, 3, 2, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        pages, labels = batch
        return F.cross_entropy(self(pages), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Trainer:
    def __init__(self, max_steps, callbacks=()):
        self.max_steps, self.callbacks, self.global_step = max_steps, callbacks, 0

    def _call(self, hook, *args):
        for callback in self.callbacks:
            getattr(callback, hook, lambda *a: None)(self, *args)

    def fit(self, module, loader):
        optimizer = module.configure_optimizers()
        self._call("on_train_start", module)
        while self.global_step < self.max_steps:
            for batch_idx, batch in enumerate(loader):
                self._call("on_train_batch_start", module)
                loss = module.training_step(batch, batch_idx)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.global_step += 1
                self._call("on_train_batch_end", loss.detach())
                if self.global_step >= self.max_steps:
                    break
        self._call("on_train_end", module)


class Clock:
    def __init__(self):
        self.ticks = []

    def on_train_batch_end(self, trainer, loss):
        self.ticks.append(time.perf_counter())


def write_pages(folder, size, count=48):
    rng = np.random.default_rng(3)
    for number in range(count):
        page = cv2.resize(rng.integers(100, 255, (40, 40), np.uint8), (size, size), interpolation=cv2.INTER_CUBIC)
        cv2.putText(page, str(number % 4), (size // 4, size // 2), 0, size / 200, 0, 4)
        cv2.imwrite(str(Path(folder) / f"{number:03d}.jpg"), page)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_pages(folder, 192 if args.fixed else 1600)
        loader = DataLoader(Scans(folder), batch_size=12, shuffle=True, num_workers=2, persistent_workers=True)
        clock = Clock()
        Trainer(args.steps, [clock]).fit(PageClassifier(), loader)
    print(f"ms_per_step: {1e3 * (clock.ticks[-1] - clock.ticks[9]) / (len(clock.ticks) - 10):.1f}")


if __name__ == "__main__":
    main()
