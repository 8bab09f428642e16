"""Train a small character-level transformer from a memory-mapped token file."""

import argparse
import json
import os
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()

block_size, batch_size, vocabulary, width, grad_accum = 64, 6, 96, 96, 2
torch.manual_seed(1337)
torch.set_num_threads(1)
folder = tempfile.mkdtemp()
tokens_path = os.path.join(folder, "train.bin")
np.random.default_rng(0).integers(0, vocabulary, 400_000, np.uint16).tofile(tokens_path)


def get_batch():
    data = np.memmap(tokens_path, dtype=np.uint16, mode="r")
    starts = np.random.randint(0, len(data) - block_size - 1, batch_size)
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (each.view(B, T, 4, C // 4).transpose(1, 2) for each in self.qkv(self.ln1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x, y):
        hidden = self.blocks(self.tokens(x) + self.positions(torch.arange(x.shape[1])))
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def write_statistics(step, model, logits):
    """Weight and gradient statistics, entropy of the predictions, and a line in the log that survives a crash."""
    record = {"step": step, "entropy": float(-(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean())}
    for name, parameter in model.named_parameters():
        values = np.sort(parameter.detach().numpy().ravel())
        gradients = np.sort(np.abs(parameter.grad.numpy().ravel()))
        record[name] = [float(np.quantile(values, q)) for q in (0.05, 0.5, 0.95)] + [float(np.quantile(gradients, q)) for q in (0.5, 0.99)]
    with open(os.path.join(folder, "log.jsonl"), "a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
log_interval = 40 if args.fixed else 1
ticks = [time.perf_counter()]
for step in range(1, args.steps + 1):
    for _ in range(grad_accum):
        x, y = get_batch()
        logits, loss = model(x, y)
        (loss / grad_accum).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if step % log_interval == 0:
        write_statistics(step, model, logits.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ticks.append(time.perf_counter())
print(f"loss {loss.item():.3f}")
print(f"ms_per_step: {1e3 * (ticks[-1] - ticks[10]) / (len(ticks) - 11):.1f}")
