"""Train a small convolutional image classifier from a folder of PNG files (timm style: folder data set and loader)."""
import argparse
import pathlib
import tempfile
import time

import cv2
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

CLASSES = 8


class ImageFolder(Dataset):
    """One sub-folder per class."""

    def __init__(self, root, crop):
        self.crop = crop
        self.samples = [(str(p), int(p.parent.name)) for p in sorted(pathlib.Path(root).glob("*/*.png"))]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        image = cv2.imread(path, cv2.IMREAD_COLOR)
        top = int(torch.randint(image.shape[0] - self.crop + 1, ()))
        left = int(torch.randint(image.shape[1] - self.crop + 1, ()))
        image = image[top:top + self.crop, left:left + self.crop]
        if torch.rand(()) < 0.5:
            image = cv2.flip(image, 1)
        return torch.from_numpy(np.ascontiguousarray(image)), label


def write_folder(root, per_class, size, seed):
    """Images: a class-dependent stripe pattern over a smooth random background, with grain."""
    rng = np.random.default_rng(seed)
    ys, xs = np.mgrid[:size, :size].astype(np.float32) / size
    for label in range(CLASSES):
        folder = pathlib.Path(root) / str(label)
        folder.mkdir()
        angle = np.pi * label / CLASSES
        stripes = np.sin(40 * (xs * np.cos(angle) + ys * np.sin(angle)))[..., None] * 30
        for i in range(per_class):
            coarse = rng.uniform(60, 190, size=(5, 5, 3)).astype(np.float32)
            image = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC) + stripes
            image += rng.normal(0, 6, size=image.shape)
            cv2.imwrite(str(folder / f"{i:04d}.png"), image.clip(0, 255).astype(np.uint8))


def conv_bn(c_in, c_out, kernel, stride):
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))


def create_model(width=16):
    return nn.Sequential(
        conv_bn(3, width, 9, 8), conv_bn(width, 2 * width, 3, 2), conv_bn(2 * width, 2 * width, 3, 1),
        conv_bn(2 * width, 4 * width, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))


def create_loader(dataset, batch_size, steps, workers, seed):
    """One pass yields `steps` batches: the data set is shuffled again whenever it is used up."""
    sampler = RandomSampler(dataset, num_samples=steps * batch_size, generator=torch.Generator().manual_seed(seed))
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=workers)


def train(model, loader, steps, lr):
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1) * 255
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1) * 255
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=2e-5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps + 1)
    model.train()
    start = time.perf_counter()
    for step, (images, labels) in enumerate(loader):
        images = images.permute(0, 3, 1, 2).float().sub_(mean).div_(std)
        loss = criterion(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step == 9:
            start = time.perf_counter()
        if step % 20 == 0:
            print(f"Train: [{step:>4d}/{steps}]  Loss: {loss.item():.4f}  LR: {scheduler.get_last_lr()[0]:.4f}")
    return 1000 * (time.perf_counter() - start) / max(1, steps - 10)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--img-size", type=int, default=320)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    with tempfile.TemporaryDirectory() as root:
        write_folder(root, per_class=32, size=352, seed=args.seed)
        dataset = ImageFolder(root, args.img_size)
        loader = create_loader(dataset, args.batch_size, args.steps, 2 if args.fixed else 0, args.seed)
        ms = train(create_model(), loader, args.steps, args.lr)
    print(f"ms_per_step: {ms:.2f}")


if __name__ == "__main__":
    main()
