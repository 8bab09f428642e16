"""Train a session-based recommender (GRU4Rec style: predict the next item of a click session) on generated sessions.

The loop is written the way Accelerate scripts are: prepare, backward and log go through one small helper object.
"""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Runner:
    """Minimal stand-in for an accelerator object on a single CPU process."""

    def __init__(self, max_grad_norm, log_every):
        self.max_grad_norm = max_grad_norm
        self.log_every = log_every
        self.step = 0

    def prepare(self, *objects):
        for item in objects:
            if isinstance(item, nn.Module):
                item.train()
        return objects

    def backward(self, loss):
        loss.backward()

    def clip(self, parameters):
        nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)

    def log(self, loss):
        if self.step % self.log_every == 0:
            print(f"step {self.step}  loss {loss.item():.4f}")
        self.step += 1


class SessionRecommender(nn.Module):
    def __init__(self, items, dim, hidden, layers):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.drop = nn.Dropout(0.1)
        self.gru = nn.GRU(dim, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, dim)
        self.bias = nn.Parameter(torch.zeros(items))

    def forward(self, sessions):
        state, _ = self.gru(self.drop(self.items(sessions)))
        return F.linear(self.out(state), self.items.weight, self.bias)


class SessionStore:
    """All click sessions in one tensor; iterating yields shuffled batches without end."""

    def __init__(self, sessions, batch_size, seed):
        self.sessions = sessions
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            order = torch.randperm(len(self.sessions), generator=self.generator)
            for chunk in order.split(self.batch_size):
                if len(chunk) == self.batch_size:
                    batch = self.sessions[chunk]
                    yield batch[:, :-1], batch[:, 1:]


def make_sessions(count, length, items, seed):
    """Users drift through item space: the next click is near the last one, now and then anywhere."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.randint(-3, 4, (count, length), generator=generator)
    restarts = torch.randint(0, items, (count, length), generator=generator)
    keep = torch.rand(count, length, generator=generator) < 0.05
    jumps = torch.where(keep, restarts, jumps)
    return jumps.cumsum(1) % items


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    batch_size = 32 if args.fixed else 4

    sessions = make_sessions(6000, args.length + 1, args.items, args.seed)
    runner = Runner(max_grad_norm=5.0, log_every=20)
    model = SessionRecommender(args.items, 32, args.hidden, args.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    model, optimizer, batches = runner.prepare(model, optimizer, SessionStore(sessions, batch_size, args.seed))

    start = time.perf_counter()
    for step, (clicks, following) in enumerate(batches):
        if step == args.steps:
            break
        if step == 10:
            start = time.perf_counter()
        scores = model(clicks)
        loss = F.cross_entropy(scores.flatten(0, 1), following.flatten())
        runner.backward(loss)
        runner.clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        runner.log(loss)
    ms = 1000 * (time.perf_counter() - start) / max(1, args.steps - 10)
    print(f"ms_per_sample: {ms / batch_size:.4f}")
    print(f"ms_per_step: {ms:.2f}")


if __name__ == "__main__":
    main()
