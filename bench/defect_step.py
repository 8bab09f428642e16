"""What does a training step of the defect job cost on a GPU, and how much of it is its input?

Answer: bench/results/defect_step_<machine>_<yyyymm>.md (rewrite it with --write). One process, sides in turns.

T6 input wait   T8 whole training against the two older designs, TF32 on all sides   T10 a whole strip in one call

Ours is what `flatout defect train` runs: its input, its loop, a step as one CUDA graph. A and B train as in 2025, with
a loader of 7 workers; a turn of theirs begins when the batches that were ready beforehand are used up, since a loader
that rests while others train would look as if it never kept anybody waiting.

The host queues steps ahead of the GPU, so the time that it spends in asking for a batch is mostly time in which the GPU
works, or in which the host itself is held back by a GPU that is behind. What input costs is therefore measured as the
difference that it makes: the same loop, once with its input and once on a batch that is there already, in turns. That
includes what painting takes from the GPU. The host's own share is printed beside it.
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.defect_baselines import August, July
from bench.defect_trainers import LoopTrainer, PlainTrainer, Timed
from bench.measure import arguments, report
from flatout.defect.demo_data import STRIP_HW, draw_strip, write_strip
from flatout.defect.evaluate.heat_map import HeatMapper
from flatout.defect.model import DefectNet
from flatout.defect.options import TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.strips.items import Strips
from flatout.defect.train.input import find_images, make_recipe, open_input
from flatout.engine.distributed import World

MULTIPLY_ADDS = 9.484e9
"""Of network v1 and a patch, forward; backward takes twice as many."""
TF32, SHIPPED, COMPILED = "ours, TF32", "ours, bf16 channels_last", "ours, bf16 cl compiled"
SETTINGS: dict[str, dict[str, Any]] = {
    TF32: {"amp": "off", "channels_last": False},
    SHIPPED: {},
    COMPILED: {"compile": "on"},
}
A, B = "A, July, TF32", "B, August, TF32"


@dataclass
class Turns:
    """Stretches of one side."""

    fed: list[Timed] = field(default_factory=list)
    ready: list[Timed] = field(default_factory=list)
    """On a batch that is there already."""

    def input_share(self) -> float:
        """Part of a step by which its input makes it longer."""
        return median(1 - a.samples_per_s / b.samples_per_s for a, b in zip(self.fed, self.ready, strict=True))

    def line(self, side: str, batch: int) -> str:
        rate, alone = (median(t.samples_per_s for t in turns) for turns in (self.fed, self.ready))
        tflops = 6 * MULTIPLY_ADDS * alone / 1e12
        return (
            f"  {side:<26}{rate:8.0f} /s {1e3 * batch / rate:8.2f} ms{median(t.wait_share for t in self.fed):9.1%}"
            f"{self.input_share():9.1%} {1e3 * batch / alone:9.2f} ms {tflops:6.0f} TFLOP/s"
        )


def main() -> None:
    options = arguments(__doc__).parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not options.quick:
        raise SystemExit("This benchmark needs a GPU; --quick runs without one, to show that the script works.")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True  # as a training sets it
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _write_set(root / "train/good", drawn=8 if options.quick else 32, copies=1 if options.quick else 15)
        recipe = TrainOptions(training_dataset_path=str(root), amp="bf16")
        if device.type == "cpu":
            recipe = replace(recipe, base_width=2, bs=4, patch_size=32, compile="off")
        lines = [
            *training_speed(recipe, device, 2 if options.quick else 5, 20 if options.quick else 100, numbers),
            *whole_strips(recipe.base_width, device, 3 if options.quick else 20, numbers),
        ]
    report("defect_step", "\n".join(lines), numbers, options)


def _write_set(folder: Path, *, drawn: int, copies: int) -> None:
    """Strips, each under several names: a set of the usual size. Patches make whole batches."""
    for number in range(drawn):
        path = folder / f"{number:03}_00.tiff"
        write_strip(path, draw_strip(number))
        for copy in range(1, copies):
            os.link(path, folder / f"{number:03}_{copy:02}.tiff")


def training_speed(
    recipe: TrainOptions, device: torch.device, turns: int, steps: int, numbers: dict[str, Any]
) -> list[str]:
    """T6 and T8."""
    found = find_images(recipe)
    paths = sorted(Path(recipe.training_dataset_path, "train/good").iterdir())
    drawn = [path for path in paths if path.stem.endswith("_00")]
    images = Strips(drawn)
    july = July(paths, STRIP_HW)
    august = August([np.ascontiguousarray(images[n].transpose(1, 2, 0)) for n in range(len(drawn))], STRIP_HW)
    results = {side: Turns() for side in (A, B, *SETTINGS)}
    plain = {
        A: (PlainTrainer(july, len(july.index), recipe, device), 14),
        B: (PlainTrainer(august, len(august), recipe, device), 60),
    }
    with ExitStack() as stack:
        ours = {}
        for side, settings in SETTINGS.items():
            began = time.perf_counter()
            options = replace(recipe, **settings)
            source = stack.enter_context(open_input(found, make_recipe(options, found), options, device, World()))
            ours[side] = LoopTrainer(source, options, device)
            ours[side].run_ready(20)
            print(f"{side}: ready after {time.perf_counter() - began:.1f} s", flush=True)
        for turn in range(turns):
            for side, (trainer, most) in plain.items():
                results[side].fed.append(trainer.run(min(most, steps)))
                results[side].ready.append(trainer.run_ready(10))
            for side, loop in ours.items():
                results[side].fed.append(loop.run(steps))
                results[side].ready.append(loop.run_ready(steps))
            rates = (f"{side} {both.fed[-1].samples_per_s:.0f}/s" for side, both in results.items())
            print(f"turn {turn}:", *rates, flush=True)
    numbers["turns"] = {side: {"fed": r.fed, "ready": r.ready} for side, r in results.items()}
    return judged(results, recipe.bs)


def judged(results: dict[str, Turns], batch: int) -> list[str]:
    lines = [
        f"training, network v1, batch {batch}, patches of 128",
        f"  {'':<26}{'rate':>11} {'step':>11}{'host in':>9}{'longer':>9} {'step on a':>12} {'its':>14}",
        f"  {'':<26}{'':>11} {'':>11}{'next()':>9}{'by input':>9} {'ready batch':>12} {'arithmetic':>14}",
        *(turns.line(side, batch) for side, turns in results.items()),
    ]
    over_a, over_b = _over(results, TF32, A), _over(results, TF32, B)
    more = _over(results, COMPILED, TF32)
    # On ready batches: the most that any input could reach.
    bound = median(
        a.samples_per_s / b.samples_per_s for a, b in zip(results[COMPILED].ready, results[TF32].ready, strict=True)
    )
    for side in SETTINGS:
        share = results[side].input_share()
        lines.append(f"{_verdict(share < 0.02)} T6 {side}: input makes a step {share:.2%} longer (below 2 %)")
    return [
        *lines,
        f"{_verdict(over_a >= 4)} T8 {over_a:.1f}x A (at least 4), {over_b:.2f}x B",
        f"{_verdict(more >= 1.5)} T8 AMP, channels_last and compile: {more:.2f}x more (at least 1.5); on ready "
        f"batches, where only the network and the optimizer count, {bound:.2f}x",
    ]


def _over(results: dict[str, Turns], side: str, base: str) -> float:
    pairs = zip(results[side].fed, results[base].fed, strict=True)
    return median(mine.samples_per_s / theirs.samples_per_s for mine, theirs in pairs)


def whole_strips(width: int, device: torch.device, repeats: int, numbers: dict[str, Any]) -> list[str]:
    """T10: eighteen calls one after the other, one batch of eighteen, and one pass over the whole strip."""
    network = DefectNet(base=width).to(device).eval()
    grid = Grid.over(STRIP_HW, 128)
    strip = draw_strip(0)
    ways: dict[str, Callable[[], object]] = {
        "18 calls": partial(_one_by_one, network, device, grid, strip),
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
def _one_by_one(network: DefectNet, device: torch.device, grid: Grid, strip: np.ndarray) -> np.ndarray:
    heat = np.zeros(grid.shape_hw, np.float32)
    for row, y in enumerate(grid.ys):
        for column, x in enumerate(grid.xs):
            patch = torch.from_numpy(strip[None, :, y : y + 128, x : x + 128].copy()).to(device) / 255
            tile = torch.softmax(network(patch), 1)[0, 1].cpu().numpy()
            top, bottom, left, right = *grid.y_cuts[row : row + 2], *grid.x_cuts[column : column + 2]
            heat[top:bottom, left:right] = tile[top - y : bottom - y, left - x : right - x]
    return heat


def _verdict(good: bool) -> str:
    return "PASS" if good else "FAIL"


if __name__ == "__main__":
    main()
