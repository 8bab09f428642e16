"""Train a keyword classifier on log-spectrograms of generated one-second sounds (convolutions, then a transformer)."""
import argparse
import json
import math
import os
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

RATE, KEYWORDS = 8000, 12


class SpokenKeywords(Dataset):
    """Waveforms are kept as int16; an item is a randomly shifted log-spectrogram."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(KEYWORDS, (count,), generator=generator)
        time_axis = torch.arange(RATE) / RATE
        base = 200 + 120 * self.labels.float()[:, None] + 20 * torch.rand(count, 1, generator=generator)
        sweep = 1 + 0.3 * time_axis * torch.where(self.labels % 2 == 0, 1.0, -1.0)[:, None]
        wave = torch.sin(2 * math.pi * base * sweep * time_axis) * torch.hann_window(RATE)
        wave += 0.1 * torch.randn(count, RATE, generator=generator)
        self.waves = (wave.clamp(-2, 2) * 16000).to(torch.int16)
        self.window = torch.hann_window(256)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        shift = int(torch.randint(-800, 801, ()))
        wave = self.waves[index].roll(shift).float() / 16000
        spectrum = torch.stft(wave, 256, hop_length=125, window=self.window, return_complex=True)
        return spectrum.abs()[:128, :64].square().add_(1e-5).log_(), self.labels[index]


class KeywordNet(nn.Module):
    def __init__(self, width=224, layers=3):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(128, width, 5, stride=2, padding=2), nn.GELU(), nn.Conv1d(width, width, 5, stride=2, padding=2))
        self.pos = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, KEYWORDS)

    def forward(self, spectrogram):
        x = self.stem(spectrogram).transpose(1, 2) + self.pos
        return self.head(self.norm(self.encoder(x).mean(1)))


class RunLog:
    """Writes one JSON line per record."""

    def __init__(self, file):
        self.file = file

    def scalars(self, step, **values):
        self._write({"step": step, **values})

    def tensors(self, step, model):
        record = {"step": step}
        for name, parameter in model.named_parameters():
            for kind, tensor in (("weight", parameter.detach()), ("grad", parameter.grad)):
                counts, edges = np.histogram(tensor.numpy(), bins=64)
                record[f"{kind}/{name}"] = {
                    "norm": tensor.norm().item(), "mean": tensor.mean().item(), "std": tensor.std().item(),
                    "counts": counts.tolist(), "edges": edges.tolist()}
        self._write(record)

    def _write(self, record):
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def train(args, log):
    dataset = SpokenKeywords(1500, args.seed)
    sampler = RandomSampler(dataset, num_samples=args.steps * args.batch_size)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=1)
    model = KeywordNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    tensors_every = 100 if args.fixed else 1
    start = time.perf_counter()
    for step, (spectrograms, labels) in enumerate(loader):
        logits = model(spectrograms)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % tensors_every == 0:
            log.tensors(step, model)
        if step % 20 == 0:
            accuracy = (logits.argmax(1) == labels).float().mean().item()
            log.scalars(step, loss=loss.item(), accuracy=accuracy)
            print(f"step {step}  loss {loss.item():.4f}  acc {accuracy:.2f}")
        if step == 9:
            start = time.perf_counter()
    return 1000 * (time.perf_counter() - start) / max(1, args.steps - 10)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "run.jsonl"), "w") as file:
            ms = train(args, RunLog(file))
    print(f"ms_per_step: {ms:.2f}")


if __name__ == "__main__":
    main()
