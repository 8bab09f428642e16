"""Reference-style training: epochs, a metric logger, SGD with a step schedule."""

import argparse
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class MetricLogger:
    def __init__(self):
        self.values = defaultdict(lambda: deque(maxlen=20))

    def update(self, **values):
        for name, value in values.items():
            self.values[name].append(value)

    def __str__(self):
        return "  ".join(f"{name}: {sum(v) / len(v):.4f}" for name, v in self.values.items())


class PhotoDataset(Dataset):
    """Photographs with an object; the target is its box."""

    def __init__(self, root):
        self.root = root
        self.boxes = np.load(root / "boxes.npy")

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, index):
        image = cv2.imread(str(self.root / f"{index:04d}.jpg"))
        image = cv2.GaussianBlur(image, (0, 0), 1.5)
        image = cv2.resize(image, (128, 128), interpolation=cv2.INTER_AREA)
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB).astype(np.float32) / 255
        return torch.from_numpy(image.transpose(2, 0, 1)), torch.from_numpy(self.boxes[index])


def make_photos(root, count=160):
    rng = np.random.default_rng(1)
    boxes = np.zeros((count, 4), np.float32)
    for number in range(count):
        image = cv2.resize(rng.integers(0, 255, (20, 30, 3), np.uint8), (480, 320))
        x, y, w, h = rng.integers(0, 300), rng.integers(0, 200), rng.integers(40, 160), rng.integers(40, 110)
        cv2.rectangle(image, (int(x), int(y)), (int(x + w), int(y + h)), (0, 0, 255), -1)
        boxes[number] = x / 480, y / 320, w / 480, h / 320
        cv2.imwrite(str(root / f"{number:04d}.jpg"), image)
    np.save(root / "boxes.npy", boxes)


def build_model():
    layers, channels = [], 3
    for width in (16, 32, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 4))


def train_one_epoch(model, optimizer, loader, epoch, ticks, limit):
    logger = MetricLogger()
    for images, targets in loader:
        loss = F.smooth_l1_loss(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        ticks.append(time.perf_counter())
        if len(ticks) > limit:
            break
    print(f"Epoch [{epoch}]  {logger}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_photos(root)
        workers = 2 if args.fixed else 0
        loader = DataLoader(PhotoDataset(root), args.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
        ticks = [time.perf_counter()]
        epoch = 0
        while len(ticks) <= args.steps:
            train_one_epoch(model, optimizer, loader, epoch, ticks, args.steps)
            schedule.step()
            epoch += 1
    print(f"ms_per_step: {1e3 * (ticks[-1] - ticks[10]) / (len(ticks) - 11):.1f}")


if __name__ == "__main__":
    main()
