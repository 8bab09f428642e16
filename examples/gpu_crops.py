"""Random crops of a resident data set, rendered on the GPU (or the CPU) while the step before trains.

    python examples/gpu_crops.py

The pictures are decoded once and kept on the device; workers only draw numbers. What a batch shows
follows from (seed, epoch, step), as with any feed: it can be resumed at any step.
"""

import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flatout import DeviceFeed, DeviceStore, Feed, FeedConfig, Field, Out, Plan
from flatout.feed.device_store import Sources
from flatout.feed.plan import keyed_uniform


class Crops:
    """Where to cut a square out of each picture, and whether to flip it: three numbers per sample."""

    fields = {"items": Field((), np.int64), "crop": Field((3,), np.int64)}

    def __init__(self, heights: np.ndarray, widths: np.ndarray, size: int) -> None:
        self.heights = heights
        self.widths = widths
        self.size = size

    def __len__(self) -> int:
        return len(self.heights)

    def where(self, index: int) -> str:
        return f"picture {index}"

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"uniform": keyed_uniform(seed, epoch, positions, 3)}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        y, x, flip = draws["uniform"].T
        out["items"][:] = indices
        out["crop"][:, 0] = y * (self.heights[indices] - self.size + 1)
        out["crop"][:, 1] = x * (self.widths[indices] - self.size + 1)
        out["crop"][:, 2] = flip < 0.5


def render_crops(sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
    """Cut, flip and scale to -1..1: uint8 pictures [H, W, C] of any size -> out["image"] [B, C, S, S]."""
    image = out["image"]
    num_channels, size = image.shape[1], image.shape[2]
    y_B, x_B, flip_B = params["crop"].unbind(1)
    step = torch.arange(size, device=image.device)
    row_BS = y_B[:, None] + step
    column_BS = x_B[:, None] + torch.where(flip_B[:, None] > 0, size - 1 - step, step)
    width_B11 = sources.shapes[:, 1, None, None]
    pixel_BSS = row_BS[:, :, None] * width_B11 + column_BS[:, None, :]
    first_BSS = sources.offsets[:, None, None] + pixel_BSS * num_channels
    for channel in range(num_channels):
        value = sources.data[first_BSS + channel]
        image[:, channel] = value.to(image.dtype).mul_(2 / 255).sub_(1)


def draw_pictures(num_pictures: int, size: int) -> list[np.ndarray]:
    """Noise of different sizes, [H, W, 3] uint8."""
    rng = np.random.default_rng(0)
    sides = rng.integers(size, size + size // 4 + 1, (num_pictures, 2))
    return [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in sides]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pictures, size = draw_pictures(2000, size=64), 48
    heights, widths = (np.array([picture.shape[axis] for picture in pictures]) for axis in (0, 1))
    store = DeviceStore(pictures, device)
    print(store)
    plan = Plan(num_samples=len(pictures), batch_size=200, seed=1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(1)
    )
    with Feed(Crops(heights, widths, size), plan, FeedConfig(workers=1)) as feed:
        batches = DeviceFeed(feed, store, render_crops, {"image": ((3, size, size), torch.float32)})
        model.to(device)
        for epoch in range(3):
            begin_s = time.perf_counter()
            for batch in batches:
                loss = model(batch["image"]).square().mean()
                loss.backward()
            print(f"epoch {epoch}: {len(pictures) / (time.perf_counter() - begin_s):.0f} pictures/s, {loss.item():.4f}")


if __name__ == "__main__":
    main()
