"""Regression on tabular data with embeddings of categories and a deep residual network."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Table(Dataset):
    def __init__(self, rows=60_000, numbers=24, categories=6):
        rng = np.random.default_rng(11)
        self.numbers = torch.from_numpy(rng.standard_normal((rows, numbers)).astype(np.float32))
        self.categories = torch.from_numpy(rng.integers(0, 50, (rows, categories)))
        self.target = self.numbers[:, :3].sum(1) + 0.1 * self.categories[:, 0].float()

    def __len__(self):
        return len(self.target)

    def __getitems__(self, indices):
        index = torch.as_tensor(indices)
        return self.numbers[index], self.categories[index], self.target[index]


class ResidualTable(nn.Module):
    def __init__(self, width=64, depth=24):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(50, 8) for _ in range(6))
        self.enter = nn.Linear(24 + 48, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, numbers, categories):
        embedded = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        hidden = self.enter(torch.cat((numbers, *embedded), 1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    batch_size = 128 if args.fixed else 8
    loader = DataLoader(Table(), batch_size, shuffle=True, collate_fn=lambda batch: batch, drop_last=True)
    model = ResidualTable()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ticks = [time.perf_counter()]
    while len(ticks) <= args.steps:
        for numbers, categories, target in loader:
            loss = F.mse_loss(model(numbers, categories), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ticks.append(time.perf_counter())
            if len(ticks) > args.steps:
                break
    ms = 1e3 * (ticks[-1] - ticks[10]) / (len(ticks) - 11)
    print(f"loss {loss.item():.4f}")
    print(f"ms_per_step: {ms:.1f}")
    print(f"ms_per_sample: {ms / batch_size:.4f}")


if __name__ == "__main__":
    main()
