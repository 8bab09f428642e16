"""Train a small image classifier on JPEG files, with validation accuracy."""

import argparse
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--fixed", action="store_true")


class ImageFolder(Dataset):
    def __init__(self, root, start, stop):
        self.files = sorted(root.glob("*.jpg"))[start:stop]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path = self.files[index]
        image = cv2.imread(str(path))[:, :, ::-1]
        image = cv2.resize(image, (64, 64), interpolation=cv2.INTER_AREA)
        if np.random.rand() < 0.5:
            image = image[:, ::-1]
        tensor = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).float() / 255
        return tensor, int(path.stem.split("_")[1])


def write_images(root, count=512):
    rng = np.random.default_rng(0)
    for number in range(count):
        label = number % 10
        image = rng.integers(0, 255, (96, 96, 3), np.uint8)
        cv2.circle(image, (48, 48), 5 + 4 * label, (255, 255, 255), -1)
        cv2.imwrite(str(root / f"{number:05d}_{label}.jpg"), image)


def create_model(width=24):
    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

    return nn.Sequential(block(3, width), block(width, 2 * width), block(2 * width, 4 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    correct = total = 0
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum().item()
        total += len(labels)
    model.train()
    return correct / total


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root)
        train_loader = DataLoader(ImageFolder(root, 0, 320), args.batch_size, shuffle=True, num_workers=args.workers, drop_last=True)
        val_loader = DataLoader(ImageFolder(root, 320, 512), 64)
        val_interval = 40 if args.fixed else 2
        model = create_model()
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
        criterion = nn.CrossEntropyLoss()
        step, times, accuracy = 0, [time.perf_counter()], 0.0
        while step < args.steps:
            for images, labels in train_loader:
                loss = criterion(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % val_interval == 0:
                    accuracy = validate(model, val_loader)
                times.append(time.perf_counter())
                if step == args.steps:
                    break
    print(f"accuracy {accuracy:.3f}")
    print(f"ms_per_step: {1e3 * (times[-1] - times[10]) / (len(times) - 11):.1f}")


if __name__ == "__main__":
    main()
