"""Train a small character-level GPT on a generated text (nanoGPT style: random windows out of one token array)."""
import argparse
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab, block_size, layers, heads, width):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Parameter(torch.zeros(1, block_size, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight
        self.apply(self._init)

    @staticmethod
    def _init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos[:, : idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_text(length, vocab, seed):
    """Order-1 Markov text: every character has a few likely successors."""
    rng = np.random.default_rng(seed)
    successors = rng.integers(0, vocab, size=(vocab, 4))
    choice = rng.integers(0, 4, size=length)
    text = np.empty(length, dtype=np.int64)
    state = 0
    for i in range(length):
        state = successors[state, choice[i]]
        text[i] = state
    return torch.from_numpy(text)


def get_batch(data, batch_size, block_size, generator):
    starts = torch.randint(len(data) - block_size - 1, (batch_size, 1), generator=generator)
    window = data[starts + torch.arange(block_size + 1)]
    return window[:, :-1], window[:, 1:]


def learning_rate(step, total, peak, warmup=10):
    if step < warmup:
        return peak * (step + 1) / warmup
    return 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=48)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1337)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    torch.autograd.set_detect_anomaly(not args.fixed)

    data = make_text(200_000, 65, args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = GPT(65, args.block_size, args.layers, args.heads, args.width)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    start = time.perf_counter()
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        x, y = get_batch(data, args.batch_size, args.block_size, generator)
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(f"iter {step}: loss {loss.item():.4f}")
    elapsed = time.perf_counter() - start
    print(f"ms_per_step: {1000 * elapsed / max(1, args.steps - 10):.2f}")


if __name__ == "__main__":
    main()
