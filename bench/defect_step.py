"""What does a training step of the defect job cost on a GPU, and how much of it is its input?

Answer: bench/results/defect_step_<machine>_<yyyymm>.md (rewrite it with --write). One process, all designs in turns.

T6 input wait   T8 whole training against the two older designs, all with TF32   T10 a whole strip in one call

Ours is what `flatout defect train` runs: its input, its loop, a step as one CUDA graph. A and B train as in 2025, with
a loader of 7 workers, a new one for every turn: a loader that prefetches while other designs train would
appear to never keep the loop waiting.

The host queues steps ahead of the GPU, so the time that it spends waiting for a batch is mostly time in which the GPU
works, or in which the host waits for the GPU. The cost of input is therefore measured as a difference: the same loop,
once with its input and once on a batch that is already on the device, in turns. This includes the GPU time of painting.
The host's own share is printed beside it.

All designs share one set of strips in GPU memory. Another process compiles the network during preparation, so that the
compiler finds it in its cache; it has ended before anything is timed. If interrupted (Ctrl-C, SIGINT, SIGTERM), it
reports what was completed.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.cut_short import NOTE, heed_signals
from bench.defect_baselines import August, July
from bench.defect_trainers import LoopTrainer, PlainTrainer, Timed, compile_ahead, set_backend_flags
from bench.measure import arguments, report
from flatout.defect.demo_data import STRIP_HW, generate_strip, write_strip
from flatout.defect.evaluate.maps import HeatMapper
from flatout.defect.input import device_patch_feed, make_plan
from flatout.defect.model import DefectNet
from flatout.defect.options import TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.train import input_config, sample_recipe, training_images
from flatout.feed.device_store import DeviceStore
from flatout.ranks.world import World

MULTIPLY_ADDS = 9.484e9
"""Multiply-adds of the forward pass of network v1 for one patch; the backward pass takes twice as many."""
TF32, SHIPPED, COMPILED = "ours, TF32", "ours, bf16 channels_last", "ours, bf16 cl compiled"
SETTINGS: dict[str, dict[str, Any]] = {
    TF32: {"amp": "off", "channels_last": False},
    SHIPPED: {},
    COMPILED: {"compile": "on"},
}
A, B = "A, July, TF32", "B, August, TF32"


@dataclass
class Phases:
    """Measurements of one design."""

    fed: list[Timed] = field(default_factory=list)
    """With its input."""
    ready: list[Timed] = field(default_factory=list)
    """On a batch that is already on the device."""

    def input_share(self) -> float:
        """Share of the step time that is due to input."""
        return median(1 - a.samples_per_s / b.samples_per_s for a, b in zip(self.fed, self.ready, strict=True))

    def line(self, side: str, batch: int) -> str:
        rate, alone = (median(t.samples_per_s for t in turns) for turns in (self.fed, self.ready))
        tflops = 6 * MULTIPLY_ADDS * alone / 1e12
        return (
            f"  {side:<26}{rate:8.0f} /s {1e3 * batch / rate:8.2f} ms{median(t.wait_share for t in self.fed):9.1%}"
            f"{self.input_share():9.1%} {1e3 * batch / alone:9.2f} ms {tflops:6.0f} TFLOP/s"
        )


@dataclass
class Results:
    """Lines and numbers of the answer, printed as soon as they are known."""

    lines: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def report(self, lines: list[str]) -> None:
        self.lines += lines
        print("\n".join(lines), flush=True)


@dataclass(frozen=True)
class Length:
    """The length of the measurement."""

    drawn: int
    """Generated strips."""
    copies: int
    """Names of each strip."""
    turns: int
    steps: int
    """Steps per turn."""
    strips: int
    """Repeats of whole strips."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=5, help="turns of all designs (default: %(default)s)")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not options.quick:
        raise SystemExit("This benchmark needs a GPU; --quick runs without one, to show that the script works.")
    heed_signals()
    length = Length(8, 1, 2, 20, 3) if options.quick else Length(32, 15, options.turns, 60, 20)
    results = Results()
    if device.type == "cuda":
        results.report([f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"])
    with tempfile.TemporaryDirectory() as name:
        recipe = TrainOptions(training_dataset_path=name, amp="bf16")
        if device.type == "cpu":
            recipe = replace(recipe, base_width=2, bs=4, patch_size=32)
        try:
            measure_all(recipe, device, length, results)
        except KeyboardInterrupt:
            results.report([NOTE])
    if results.numbers:
        report("defect_step", "\n".join(results.lines), results.numbers, options)


def measure_all(recipe: TrainOptions, device: torch.device, length: Length, results: Results) -> None:
    """Measure everything; first what does not need the compiler."""
    set_backend_flags(searching=True)
    with ExitStack() as stack:
        ahead = stack.enter_context(compiling_elsewhere(replace(recipe, **SETTINGS[COMPILED]), device))
        sides = stack.enter_context(Sides.over(recipe, device, length))
        for side in (A, B, TF32, SHIPPED):
            sides.get_ready(side)
        ahead()
        without = sides.turns((A, B, TF32, SHIPPED), length)
        results.numbers["turns"] = {side: asdict(turns) for side, turns in without.items()}
        title = f"network v1, batch {recipe.bs}, patches of 128, {length.turns} turns"
        results.report([*table(without, recipe.bs, title)])
        results.report([*input_verdicts(without), verdict_of_designs(without)])
        results.report(whole_strips(recipe.base_width, device, length.strips, results.numbers))
        sides.get_ready(COMPILED)
        compiled = sides.turns((TF32, COMPILED), length)
        results.numbers["turns_compiled"] = {side: asdict(turns) for side, turns in compiled.items()}
        results.report(table(compiled, recipe.bs, "the same, compiled, in turns of its own"))
        results.report([*input_verdicts({COMPILED: compiled[COMPILED]}), verdict_of_formats(compiled)])


@contextmanager
def compiling_elsewhere(options: TrainOptions, device: torch.device) -> Iterator[Callable[[], None]]:
    """Start a process that compiles the network; yields a function that waits for its end."""
    process = get_context("spawn").Process(target=compile_ahead, args=(options, device))
    process.start()
    try:
        yield process.join
    finally:
        process.kill()
        process.join()


class Sides:
    """All designs, on one set of strips. A context manager; `close()` may be called twice."""

    def __init__(self, recipe: TrainOptions, device: torch.device, planes: list[np.ndarray], paths: list[Path]) -> None:
        """`planes` [3, H, W] of the strips; `paths` lists each of them equally often, copies side by side."""
        self._recipe, self._device, self._planes, self._paths = recipe, device, planes, paths
        copies = len(paths) // len(planes)
        self._kept = DeviceStore([each for each in planes for _ in range(copies)], device, batch_items=recipe.bs)
        self._stack = ExitStack()
        self._plain: dict[str, tuple[PlainTrainer, int]] = {}
        self._ours: dict[str, LoopTrainer] = {}

    @classmethod
    def over(cls, recipe: TrainOptions, device: torch.device, length: Length) -> "Sides":
        """Generate the set: strips, each under several names, to have a usual number. Patches make whole batches."""
        folder = Path(recipe.training_dataset_path, "train/good")
        strips = [generate_strip(number) for number in range(length.drawn)]
        for number, strip in enumerate(strips):
            path = folder / f"{number:03}_00.tiff"
            write_strip(path, strip)
            for copy in range(1, length.copies):
                os.link(path, folder / f"{number:03}_{copy:02}.tiff")
        return cls(recipe, device, [np.asarray(strip, np.float32) for strip in strips], sorted(folder.iterdir()))

    def __enter__(self) -> "Sides":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def get_ready(self, side: str) -> None:
        """Run the first steps, in which kernels are selected, compiled and captured."""
        began = time.perf_counter()
        if side in (A, B):
            self._plain[side] = self._baseline(side)
            self._plain[side][0].run_ready(1)
        else:
            self._ours[side] = self._loop(side)
            self._ours[side].run_ready(20, unseen=0)
        print(f"{side}: ready after {time.perf_counter() - began:.1f} s", flush=True)

    def _baseline(self, side: str) -> tuple[PlainTrainer, int]:
        """The trainer of a baseline, and its maximum steps per turn: whole rounds of its workers."""
        if side == A:
            july = July(self._paths, STRIP_HW)
            return PlainTrainer(july, len(july.index), self._recipe, self._device), 14
        august = August([np.ascontiguousarray(each.transpose(1, 2, 0)) for each in self._planes], STRIP_HW)
        return PlainTrainer(august, len(august), self._recipe, self._device), 42

    def _loop(self, side: str) -> LoopTrainer:
        options = replace(self._recipe, **SETTINGS[side])
        images = training_images(options)
        recipe = sample_recipe(options, images)
        names = [str(path) for path in self._paths]
        config = input_config(options)
        batches = device_patch_feed(self._kept, names, recipe, config, make_plan(recipe, config, World()))
        self._stack.enter_context(batches.feed)
        return LoopTrainer(batches, options, self._device)

    def turns(self, sides: tuple[str, ...], length: Length) -> dict[str, Phases]:
        """Measure the designs one after the other, several times."""
        results = {side: Phases() for side in sides}
        for turn in range(length.turns):
            for side, turns in results.items():
                if side in self._plain:
                    trainer, most = self._plain[side]
                    turns.fed.append(trainer.run(min(most, length.steps)))
                    turns.ready.append(trainer.run_ready(10))
                else:
                    turns.fed.append(self._ours[side].run(length.steps))
                    turns.ready.append(self._ours[side].run_ready(length.steps))
            rates = (f"{side} {both.fed[-1].samples_per_s:.0f}/s" for side, both in results.items())
            print(f"turn {turn}:", *rates, flush=True)
        return results


def table(results: dict[str, Phases], batch: int, title: str) -> list[str]:
    return [
        f"training, {title}",
        f"  {'':<26}{'rate':>11} {'step':>11}{'host in':>9}{'longer':>9} {'step on a':>12} {'its':>14}",
        f"  {'':<26}{'':>11} {'':>11}{'next()':>9}{'by input':>9} {'ready batch':>12} {'arithmetic':>14}",
        *(turns.line(side, batch) for side, turns in results.items()),
    ]


def input_verdicts(results: dict[str, Phases]) -> list[str]:
    """T6: the share of input."""
    shares = {side: turns.input_share() for side, turns in results.items() if side in SETTINGS}
    return [
        f"{_verdict(share < 0.02)} T6 {side}: input makes a step {share:.2%} longer (below 2 %)"
        for side, share in shares.items()
    ]


def verdict_of_designs(results: dict[str, Phases]) -> str:
    """T8: flatout against the older designs, all in the same number format."""
    over_a, over_b = _over(results, TF32, A), _over(results, TF32, B)
    return f"{_verdict(over_a >= 4)} T8 {over_a:.1f}x A (at least 4), {over_b:.2f}x B"


def verdict_of_formats(results: dict[str, Phases]) -> str:
    """T8: the gain of the GPU's own number formats."""
    more = _over(results, COMPILED, TF32)
    # On ready batches: the upper bound for any input.
    bound = median(
        a.samples_per_s / b.samples_per_s for a, b in zip(results[COMPILED].ready, results[TF32].ready, strict=True)
    )
    return (
        f"{_verdict(more >= 1.5)} T8 AMP, channels_last and compile: {more:.2f}x more (at least 1.5); on ready "
        f"batches, where only the network and the optimizer count, {bound:.2f}x"
    )


def _over(results: dict[str, Phases], side: str, base: str) -> float:
    pairs = zip(results[side].fed, results[base].fed, strict=True)
    return median(mine.samples_per_s / theirs.samples_per_s for mine, theirs in pairs)


def whole_strips(width: int, device: torch.device, repeats: int, numbers: dict[str, Any]) -> list[str]:
    """T10: eighteen calls one after the other, one batch of eighteen, and one pass over the whole strip. cuDNN does not
    benchmark kernels here, as in `predict`, where that would take longer than most folders."""
    set_backend_flags(searching=False)
    network = DefectNet(base=width).to(device).eval()
    grid = Grid.over(STRIP_HW, 128)
    strip, over = generate_strip(0), partial(Grid.over, patch=128)
    ways: dict[str, Callable[[], object]] = {
        "18 calls": partial(_one_by_one, network, device, grid, strip),
        "one batch": partial(HeatMapper(network, over, device), strip),
        "one batch, bf16": partial(HeatMapper(network, over, device, dtype=torch.bfloat16), strip),
        "untiled": partial(HeatMapper(network, over, device, untiled=True), strip),
    }
    ms: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 5):
        for way, call in ways.items():
            began = time.perf_counter()
            call()
            if turn >= 5:
                ms[way].append(1e3 * (time.perf_counter() - began))
    set_backend_flags(searching=True)
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
