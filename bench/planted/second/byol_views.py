"""Self-supervised pre-training of a small residual network on generated images with two views (BYOL style)."""
import argparse
import contextlib
import copy
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Residual(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.skip = nn.Conv2d(c_in, c_out, 1, stride, bias=False) if stride > 1 or c_in != c_out else nn.Identity()

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.skip(x), inplace=True)


def mlp(d_in, d_hidden, d_out):
    return nn.Sequential(
        nn.Linear(d_in, d_hidden, bias=False), nn.BatchNorm1d(d_hidden), nn.ReLU(inplace=True),
        nn.Linear(d_hidden, d_out),
    )


class Encoder(nn.Module):
    """Backbone followed by the projection head."""

    def __init__(self, width=32, dim=128):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), Residual(width, width, 1), Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.projector = mlp(4 * width, 256, dim)

    def forward(self, x):
        return self.projector(self.backbone(x))


class BYOL(nn.Module):
    def __init__(self, dim=128, momentum=0.99):
        super().__init__()
        self.online = Encoder(dim=dim)
        self.predictor = mlp(dim, 256, dim)
        self.target = copy.deepcopy(self.online)
        self.momentum = momentum

    def trainable_parameters(self):
        return [*self.online.parameters(), *self.predictor.parameters()]

    @torch.no_grad()
    def update_target(self):
        torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), 1 - self.momentum)

    def forward(self, view_a, view_b, target_context):
        views = torch.cat([view_a, view_b])
        prediction = self.predictor(self.online(views))
        with target_context:
            projection = self.target(torch.cat([view_b, view_a]))
        return 2 - 2 * F.cosine_similarity(prediction, projection).mean()


def make_images(count, size, generator):
    """Smooth random textures as uint8."""
    coarse = torch.rand(count, 3, 6, 6, generator=generator)
    return F.interpolate(coarse, size=size, mode="bicubic", align_corners=False).clamp(0, 1).mul(255).to(torch.uint8)


def random_view(images, generator):
    """Random affine crop with flip, then brightness and contrast, for the whole batch at once."""
    n = len(images)
    angle = (torch.rand(n, generator=generator) - 0.5) * 0.6
    scale = 0.6 + 0.4 * torch.rand(n, generator=generator)
    flip = torch.where(torch.rand(n, generator=generator) < 0.5, -1.0, 1.0)
    shift = (torch.rand(n, 2, generator=generator) - 0.5) * 0.4
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    theta = torch.stack([
        torch.stack([cos * flip, -sin, shift[:, 0]], 1), torch.stack([sin * flip, cos, shift[:, 1]], 1)], 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    view = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    contrast = 0.7 + 0.6 * torch.rand(n, 1, 1, 1, generator=generator)
    brightness = 0.3 * (torch.rand(n, 1, 1, 1, generator=generator) - 0.5)
    return view.sub_(0.5).mul_(contrast).add_(brightness)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    images = make_images(2048, 32, generator)
    model = BYOL()
    optimizer = torch.optim.SGD(model.trainable_parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    start = time.perf_counter()
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        optimizer.param_groups[0]["lr"] = 0.5 * args.lr * (1 + math.cos(math.pi * step / args.steps))
        index = torch.randint(len(images), (args.batch_size,), generator=generator)
        batch = images[index].float().div_(255)
        view_a, view_b = random_view(batch, generator), random_view(batch, generator)
        loss = model(view_a, view_b, torch.no_grad() if args.fixed else contextlib.nullcontext())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        model.update_target()
        if step % 20 == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    elapsed = time.perf_counter() - start
    print(f"ms_per_step: {1000 * elapsed / max(1, args.steps - 10):.2f}")


if __name__ == "__main__":
    main()
