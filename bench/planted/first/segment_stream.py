"""Segmentation from an endless stream of generated scenes, with a collate function for scenes of different sizes."""

import argparse
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Scenes(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        rng = np.random.default_rng(info.id if info else 0)
        while True:
            height, width = rng.integers(80, 112, 2)
            image = np.full((height, width, 3), rng.integers(0, 100), np.uint8)
            mask = np.zeros((height, width), np.uint8)
            for _ in range(4):
                centre = (int(rng.integers(0, width)), int(rng.integers(0, height)))
                radius, colour = int(rng.integers(6, 20)), tuple(int(c) for c in rng.integers(120, 255, 3))
                cv2.circle(image, centre, radius, colour, -1)
                cv2.circle(mask, centre, radius, 1, -1)
            yield image, mask


def collate(samples):
    height = max(image.shape[0] for image, _ in samples)
    width = max(image.shape[1] for image, _ in samples)
    images = np.zeros((len(samples), height, width, 3), np.float32)
    masks = np.zeros((len(samples), height, width), np.int64)
    for number, (image, mask) in enumerate(samples):
        images[number, : image.shape[0], : image.shape[1]] = image / 255
        masks[number, : mask.shape[0], : mask.shape[1]] = mask
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(masks)


class SmallUNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(width, 4 * width, 3, 2, 1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(4 * width, 4 * width, 3, 1, 1), nn.ReLU())
        self.project = nn.Linear(4 * width, 4 * width)
        self.memory = nn.Parameter(torch.randn(60_000, 4 * width) * 0.01)
        self.head = nn.Conv2d(5 * width, 2, 1)

    def forward(self, x):
        first = self.down1(x)
        deep = self.middle(self.down2(first))
        context = self.project(deep.mean((2, 3))) + self.memory[:64].mean(0)
        deep = F.interpolate(deep + context[:, :, None, None], size=first.shape[2:], mode="bilinear")
        return F.interpolate(self.head(torch.cat((first, deep), 1)), size=x.shape[2:], mode="bilinear")


def save_checkpoint(path, step, model, optimizer):
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = DataLoader(Scenes(), batch_size=8, num_workers=1, collate_fn=collate)
    model = SmallUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    save_interval = 60 if args.fixed else 2
    ticks = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        for step, (images, masks) in enumerate(loader, 1):
            loss = F.cross_entropy(model(images), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % save_interval == 0:
                save_checkpoint(Path(folder) / "last.pt", step, model, optimizer)
            ticks.append(time.perf_counter())
            if step == args.steps:
                break
    print(f"loss {loss.item():.4f}")
    print(f"ms_per_step: {1e3 * (ticks[-1] - ticks[10]) / (len(ticks) - 11):.1f}")


if __name__ == "__main__":
    main()
