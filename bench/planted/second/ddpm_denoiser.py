"""Train a small diffusion denoiser (DDPM noise prediction with a U-Net) on generated shapes, with a mini trainer."""
import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResBlock(nn.Module):
    def __init__(self, c_in, c_out, c_time):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.time = nn.Linear(c_time, c_out)
        self.norm2 = nn.GroupNorm(8, c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(emb)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width=32, c_time=64):
        super().__init__()
        self.register_buffer("freq", torch.exp(-math.log(1e4) * torch.arange(c_time // 2) / (c_time // 2)))
        self.embed = nn.Sequential(nn.Linear(c_time, c_time), nn.SiLU(), nn.Linear(c_time, c_time), nn.SiLU())
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.enc1 = ResBlock(width, width, c_time)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.enc2 = ResBlock(2 * width, 2 * width, c_time)
        self.mid = ResBlock(2 * width, 2 * width, c_time)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.dec = ResBlock(2 * width, width, c_time)
        self.out = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x, t):
        angle = t[:, None] * self.freq
        emb = self.embed(torch.cat([angle.sin(), angle.cos()], 1))
        skip = self.enc1(self.stem(x), emb)
        h = self.mid(self.enc2(self.down(skip), emb), emb)
        return self.out(self.dec(torch.cat([self.up(h), skip], 1), emb))


class Diffusion(nn.Module):
    """Training module: the network, the noise schedule and the loss of one batch."""

    def __init__(self, timesteps=400, lr=2e-4):
        super().__init__()
        self.lr, self.timesteps = lr, timesteps
        self.net = UNet()
        alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.04, timesteps), 0)
        self.register_buffer("signal", alpha_bar.sqrt())
        self.register_buffer("noise", (1 - alpha_bar).sqrt())

    def training_step(self, x):
        t = torch.randint(self.timesteps, (len(x),))
        eps = torch.randn_like(x)
        noisy = self.signal[t].view(-1, 1, 1, 1) * x + self.noise[t].view(-1, 1, 1, 1) * eps
        return F.mse_loss(self.net(noisy, t.float()), eps)

    def configure_optimizer(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class Trainer:
    def __init__(self, max_steps, num_threads, log_every=20):
        self.max_steps = max_steps
        self.log_every = log_every
        torch.set_num_threads(num_threads)

    def fit(self, module, batches):
        optimizer = module.configure_optimizer()
        module.train()
        start = time.perf_counter()
        for step in range(self.max_steps):
            if step == 10:
                start = time.perf_counter()
            loss = module.training_step(next(batches))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if step % self.log_every == 0:
                print(f"step={step} train_loss={loss.item():.4f}")
        return 1000 * (time.perf_counter() - start) / max(1, self.max_steps - 10)


def make_shapes(count, size, generator):
    """Filled ellipses with a random centre and radii, values in [-1, 1]."""
    axis = torch.linspace(-1, 1, size)
    cy, cx = (torch.rand(2, count, 1, 1, generator=generator) - 0.5)
    ry, rx = 0.2 + 0.4 * torch.rand(2, count, 1, 1, generator=generator)
    distance = ((axis[None, :, None] - cy) / ry) ** 2 + ((axis[None, None, :] - cx) / rx) ** 2
    return (1.5 - 2 * distance).clamp(-1, 1).unsqueeze(1)


def batches_of(data, batch_size, generator):
    while True:
        yield from data[torch.randperm(len(data), generator=generator)].split(batch_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    data = make_shapes(4096, args.size, generator)
    trainer = Trainer(max_steps=args.steps, num_threads=2 if args.fixed else 6)
    ms = trainer.fit(Diffusion(), batches_of(data, args.batch_size, generator))
    print(f"ms_per_step: {ms:.2f}")


if __name__ == "__main__":
    main()
