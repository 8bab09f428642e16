"""Train a small anchor-free detector (one box per grid cell) on generated scenes with a COCO-like annotation file."""
import argparse
import json
import os
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SIZE, STRIDE, CLASSES = 96, 8, 3


class SceneDetection(Dataset):
    """Images in one memory-mapped array, boxes in a COCO-like JSON file. Both are opened on first use."""

    def __init__(self, root, split):
        self.root, self.images, self.boxes = root, None, None
        self.ids = np.loadtxt(os.path.join(root, f"{split}.txt"), dtype=int).tolist()

    def _open(self):
        self.images = np.load(os.path.join(self.root, "images.npy"), mmap_mode="r")
        with open(os.path.join(self.root, "instances.json")) as f:
            annotations = json.load(f)["annotations"]
        self.boxes = {}
        for ann in annotations:
            self.boxes.setdefault(ann["image_id"], []).append([*ann["bbox"], ann["category_id"]])

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        if self.images is None:
            self._open()
        image = torch.from_numpy(self.images[self.ids[index]].copy())
        boxes = torch.tensor(self.boxes[self.ids[index]])
        if torch.rand(()) < 0.5:
            image = image.flip(2)
            boxes[:, 0] = SIZE - boxes[:, 0] - boxes[:, 2]
        cells = SIZE // STRIDE
        heat, target = torch.zeros(CLASSES, cells, cells), torch.zeros(5, cells, cells)
        centre = boxes[:, :2] + boxes[:, 2:4] / 2
        col, row = (centre / STRIDE).long().clamp(0, cells - 1).unbind(1)
        heat[boxes[:, 4].long(), row, col] = 1
        target[:2, row, col] = (centre / STRIDE - torch.stack([col, row], 1)).T
        target[2:4, row, col] = (boxes[:, 2:4] / SIZE).T
        target[4, row, col] = 1
        return image, heat, target


def write_scenes(root, count, train_count, objects, seed):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 60, size=(count, 3, SIZE, SIZE), dtype=np.uint8)
    annotations = []
    for image_id in range(count):
        for _ in range(objects):
            w, h = rng.integers(8, 30, size=2).tolist()
            x, y = rng.integers(0, SIZE - w), rng.integers(0, SIZE - h)
            category, outline = int(rng.integers(CLASSES)), (rng.random(24) * 20 + float(x)).tolist()
            images[image_id, category, y:y + h, x:x + w] = 220
            annotations.append({
                "id": len(annotations), "image_id": image_id, "category_id": category, "iscrowd": 0,
                "bbox": [float(x), float(y), float(w), float(h)], "area": float(w * h), "segmentation": [outline]})
    np.save(os.path.join(root, "images.npy"), images)
    with open(os.path.join(root, "instances.json"), "w") as f:
        json.dump({"annotations": annotations}, f)
    np.savetxt(os.path.join(root, "train.txt"), rng.permutation(count)[:train_count], fmt="%d")


class Detector(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        layers, c_in = [], 3
        for c_out, stride in [(width, 2), (width * 2, 2), (width * 2, 1), (width * 3, 2), (width * 3, 1)]:
            layers += [nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)]
            c_in = c_out
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(c_in, CLASSES + 4, 1)

    def forward(self, images):
        out = self.head(self.body(images.float().div(127.5).sub(1)))
        return out[:, :CLASSES], out[:, CLASSES:]


def detection_loss(scores, boxes, heat, target):
    classification = F.binary_cross_entropy_with_logits(scores, heat, reduction="sum") / heat.sum().clamp(min=1)
    offset, mask = target.split([4, 1], 1)
    regression = (F.smooth_l1_loss(boxes, offset, reduction="none") * mask).sum() / mask.sum().clamp(min=1)
    return classification + 5 * regression


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("-j", "--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        write_scenes(root, count=2200, train_count=64, objects=5, seed=args.seed)
        dataset = SceneDetection(root, "train")
        loader = DataLoader(dataset, args.batch_size, True, num_workers=args.workers, persistent_workers=args.fixed)
        model = Detector()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        step, start = 0, time.perf_counter()
        while step < args.steps:
            for images, heat, target in loader:
                loss = detection_loss(*model(images), heat, target)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                step += 1
                if step == 10:
                    start = time.perf_counter()
                if step == args.steps:
                    break
            print(f"[{step}/{args.steps}]  loss: {loss.item():.4f}")
        ms = 1000 * (time.perf_counter() - start) / max(1, args.steps - 10)
        del loader  # ends the workers before the folder goes away
    print(f"ms_per_step: {ms:.2f}")


if __name__ == "__main__":
    main()
