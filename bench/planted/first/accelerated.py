"""Training with an accelerator object that prepares model, optimizer and loader, and accumulates gradients."""

import argparse
import contextlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Accelerator:
    def __init__(self, gradient_accumulation_steps=1):
        self.every, self.count = gradient_accumulation_steps, 0

    def prepare(self, *objects):
        return objects

    @contextlib.contextmanager
    def accumulate(self):
        self.count += 1
        yield

    @property
    def sync_gradients(self):
        return self.count % self.every == 0

    def backward(self, loss):
        (loss / self.every).backward()


class Signals(Dataset):
    """Noisy signals; the target is the number of upward crossings of a threshold, in tenths."""

    def __init__(self, count=2048, length=512, vectorized=False):
        rng = np.random.default_rng(5)
        self.signals = rng.standard_normal((count, length)).cumsum(1).astype(np.float32)
        self.vectorized = vectorized

    def __len__(self):
        return len(self.signals)

    def crossings(self, signal, level):
        if self.vectorized:
            above = signal > level
            return int((above[1:] & ~above[:-1]).sum())
        count = 0
        for before, after in zip(signal[:-1], signal[1:]):
            if before <= level < after:
                count += 1
        return count

    def __getitem__(self, index):
        signal = self.signals[index]
        levels = np.quantile(signal, (0.2, 0.35, 0.5, 0.65, 0.8))
        counts = [self.crossings(signal, level) for level in levels]
        normal = (signal - signal.mean()) / (signal.std() + 1e-6)
        return torch.from_numpy(normal)[None], torch.tensor(counts, dtype=torch.float32) / 10


def build_model():
    return nn.Sequential(
        nn.Conv1d(1, 32, 9, 2, 4), nn.GELU(), nn.Conv1d(32, 64, 9, 2, 4), nn.GELU(), nn.Conv1d(64, 64, 9, 2, 4), nn.GELU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, 5),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    dataset = Signals(vectorized=args.fixed)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=1, drop_last=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ticks = [time.perf_counter()]
    while len(ticks) <= args.steps:
        for signals, targets in loader:
            with accelerator.accumulate():
                loss = F.mse_loss(model(signals), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
                    ticks.append(time.perf_counter())
            if len(ticks) > args.steps:
                break
    print(f"loss {loss.item():.4f}")
    print(f"ms_per_step: {1e3 * (ticks[-1] - ticks[10]) / (len(ticks) - 11):.1f}")


if __name__ == "__main__":
    main()
