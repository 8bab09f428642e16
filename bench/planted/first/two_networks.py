"""A generator and a critic, trained in turns with two optimizers."""

import argparse
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Patterns(Dataset):
    """Stripes of random direction and width, smoothed."""

    def __init__(self, count=4096, size=48):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        y, x = np.mgrid[: self.size, : self.size] / self.size
        angle, frequency = rng.uniform(0, np.pi), rng.uniform(2, 8)
        image = np.sin(2 * np.pi * frequency * (x * np.cos(angle) + y * np.sin(angle)))
        image += 0.1 * rng.standard_normal(image.shape)
        return torch.from_numpy(image.astype(np.float32))[None]


def generator(width=32):
    return nn.Sequential(
        nn.Linear(32, width * 36), nn.Unflatten(1, (width, 6, 6)), nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(width, 1, 3, 1, 1), nn.Tanh(),
    )


def critic(width=32):
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(2 * width * 36, 1),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)) if args.fixed else 6)
    loader = DataLoader(Patterns(), batch_size=16, shuffle=True, num_workers=1, drop_last=True)
    make, judge = generator(), critic()
    optimizer_make = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    ticks = [time.perf_counter()]
    while len(ticks) <= args.steps:
        for real in loader:
            fake = make(torch.randn(len(real), 32))
            loss_judge = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
            optimizer_judge.zero_grad()
            loss_judge.backward()
            optimizer_judge.step()
            loss_make = F.softplus(-judge(fake)).mean()
            optimizer_make.zero_grad()
            loss_make.backward()
            optimizer_make.step()
            ticks.append(time.perf_counter())
            if len(ticks) > args.steps:
                break
    print(f"critic {loss_judge.item():.3f} generator {loss_make.item():.3f}")
    print(f"ms_per_step: {1e3 * (ticks[-1] - ticks[10]) / (len(ticks) - 11):.1f}")


if __name__ == "__main__":
    main()
