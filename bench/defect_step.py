"""What does a training step of the defect job cost on a GPU, and how much of it is waiting for samples?

Answer: bench/results/defect_step_<machine>_<yyyymm>.md (rewrite it with --write). One process, sides in turns.

T6 input wait   T8 whole training against the two older designs, TF32 on all sides   T10 a whole strip in one call
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bench.defect_baselines import August, July
from bench.measure import arguments, report
from flatout.defect.demo_data import STRIP_HW, draw_strip, write_strip
from flatout.defect.evaluate.heat_map import HeatMapper
from flatout.defect.loss import focal_loss
from flatout.defect.model import DefectNet
from flatout.defect.options import TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.strips.items import Strips
from flatout.defect.train.input import find_images, make_recipe, open_input
from flatout.engine.compiling import Compiled
from flatout.engine.distributed import World
from flatout.engine.optim import make_optimizer

BATCH, WORKERS = 16, 7
Batch = tuple[torch.Tensor, torch.Tensor]


class Samples(Dataset):
    """A baseline as an ordinary data set, with NumPy's global generator in every worker, as it was."""

    def __init__(self, side: July | August, num: int) -> None:
        self._side, self._num = side, num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Batch:
        planes, mask = self._side(index, np.random.mtrand._rand)
        return torch.from_numpy(planes), torch.from_numpy(mask)


def main() -> None:
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a GPU.")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    num_images, steps, turns = (8, 10, 2) if options.quick else (64, 60, 5)
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(num_images):
            write_strip(root / f"train/good/{number:04}.tiff", draw_strip(number))
        lines = [*training_speed(root, steps, turns, numbers), *whole_strips(5 if options.quick else 50, numbers)]
    report("defect_step", "\n".join(lines), numbers, options)


def training_speed(root: Path, steps: int, turns: int, numbers: dict[str, Any]) -> list[str]:
    """T6 and T8."""
    paths = sorted((root / "train/good").iterdir())
    strips = Strips(paths)
    images = [np.ascontiguousarray(strips[number].transpose(1, 2, 0)) for number in range(len(paths))]
    july, august = July(paths, STRIP_HW), August(images, STRIP_HW)
    options = TrainOptions(training_dataset_path=str(root), bs=BATCH, num_workers=2)
    found = find_images(options)
    device = torch.device("cuda", 0)
    with open_input(found, make_recipe(options, found), options, device, World()) as ours:
        shared = _ours(ours.batches)  # one stream for all: a second pass over a feed ends the first
        sides = {
            "A, July, TF32": Trainer(_loader(july, len(july.index)), amp=False),
            "B, August, TF32": Trainer(_loader(august, len(august)), amp=False),
            "ours, TF32": Trainer(shared, amp=False, scale=255),
            "ours, bf16 channels_last": Trainer(shared, amp=True, scale=255),
            "ours, bf16 cl compiled": Trainer(shared, amp=True, scale=255, compiled=True),
        }
        rates: dict[str, list[float]] = {side: [] for side in sides}
        waits: dict[str, list[float]] = {side: [] for side in sides}
        for side, trainer in sides.items():
            trainer.run(3 if side.startswith("A") else 10)
        for _ in range(turns):
            for side, trainer in sides.items():
                rate, wait = trainer.run(max(3, steps // 10) if side.startswith("A") else steps)
                rates[side].append(rate)
                waits[side].append(wait)
    numbers["samples_per_s"], numbers["wait_share"] = rates, waits
    lines = [
        f"training, network v1, batch {BATCH}, patches of 128: samples/s, share of the time spent waiting for input"
    ]
    lines += [f"  {side:<26} {median(rates[side]):9.0f} /s   {median(waits[side]):6.1%}" for side in sides]
    over_a = _over(rates, "ours, TF32", "A, July, TF32")
    over_b = _over(rates, "ours, TF32", "B, August, TF32")
    more = _over(rates, "ours, bf16 cl compiled", "ours, TF32")
    lines += [
        f"{_verdict(median(waits['ours, TF32']) < 0.02)} T6 input wait {median(waits['ours, TF32']):.2%} (below 2 %)",
        f"{_verdict(over_a >= 4)} T8 {over_a:.1f}x A (at least 4), {over_b:.2f}x B; "
        f"{_verdict(more >= 1.5)} AMP, channels_last and compile: {more:.2f}x more (at least 1.5)",
    ]
    return lines


class Trainer:
    """A network, an optimizer, and batches that never end."""

    def __init__(self, batches: Iterator[Batch], *, amp: bool, scale: float = 1, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self._network = DefectNet().cuda().train()
        if amp:
            self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._forward = Compiled(self._network) if compiled else self._network
        self._optimizer = make_optimizer("adam", [list(self._network.parameters())], lr=1e-3, momentum=0.9, decays=[0])
        self._batches, self._amp, self._scale = batches, amp, scale

    def run(self, steps: int) -> tuple[float, float]:
        """Samples per second, and the share of the time in which the host waited for a batch."""
        torch.cuda.synchronize()
        began, waited, count = time.perf_counter(), 0.0, 0
        for _ in range(steps):
            asked = time.perf_counter()
            images, masks = next(self._batches)
            waited += time.perf_counter() - asked
            images, masks = images.cuda(non_blocking=True), masks.cuda(non_blocking=True)
            if self._amp:
                images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cuda", torch.bfloat16, enabled=self._amp):
                loss = focal_loss(self._forward(images / self._scale), masks, gamma=2.0)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            count += len(images)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return count / seconds, waited / seconds


def whole_strips(repeats: int, numbers: dict[str, Any]) -> list[str]:
    """T10: eighteen calls one after the other, one batch of eighteen, and one pass over the whole strip."""
    device = torch.device("cuda", 0)
    network = DefectNet().cuda().eval()
    grid = Grid.over(STRIP_HW, 128)
    strip = draw_strip(0)
    ways: dict[str, Callable[[], object]] = {
        "18 calls": partial(_one_by_one, network, grid, strip),
        "one batch": partial(HeatMapper(network, grid, device), strip),
        "one batch, bf16": partial(HeatMapper(network, grid, device, dtype=torch.bfloat16), strip),
        "untiled": partial(HeatMapper(network, grid, device, untiled=True), strip),
    }
    ms: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 5):
        for way, call in ways.items():
            began = time.perf_counter()
            call()
            if turn >= 5:
                ms[way].append(1e3 * (time.perf_counter() - began))
    numbers["strip_ms"] = ms
    gain = median(a / b for a, b in zip(ms["18 calls"], ms["one batch, bf16"], strict=True))
    lines = ["a whole strip, from host memory to a heat map in host memory"]
    lines += [f"  {way:<26} {median(values):8.2f} ms" for way, values in ms.items()]
    return [*lines, f"{_verdict(gain >= 4)} T10 one batch, bf16: {gain:.1f}x over 18 calls (at least 4)"]


@torch.inference_mode()
def _one_by_one(network: DefectNet, grid: Grid, strip: np.ndarray) -> np.ndarray:
    heat = np.zeros(grid.shape_hw, np.float32)
    for row, y in enumerate(grid.ys):
        for column, x in enumerate(grid.xs):
            patch = torch.from_numpy(strip[None, :, y : y + 128, x : x + 128].copy()).cuda() / 255
            tile = torch.softmax(network(patch), 1)[0, 1].cpu().numpy()
            top, bottom, left, right = *grid.y_cuts[row : row + 2], *grid.x_cuts[column : column + 2]
            heat[top:bottom, left:right] = tile[top - y : bottom - y, left - x : right - x]
    return heat


def _loader(side: July | August, num: int) -> Iterator[Batch]:
    while True:
        yield from DataLoader(Samples(side, num), BATCH, shuffle=True, num_workers=WORKERS)


def _ours(batches: Any) -> Iterator[Batch]:
    epoch = 0
    while True:
        for batch in batches.epoch(epoch):
            yield batch["images"], batch["masks"]
        epoch += 1


def _over(rates: dict[str, list[float]], side: str, base: str) -> float:
    return median(mine / theirs for mine, theirs in zip(rates[side], rates[base], strict=True))


def _verdict(good: bool) -> str:
    return "PASS" if good else "FAIL"


if __name__ == "__main__":
    main()
