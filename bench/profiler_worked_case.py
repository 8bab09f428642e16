"""How much faster does a slow loop become by following the profiler, and how accurate are its predictions?

A plain PyTorch loop (like those of tests/profiler/slow_loops.py) with two planted bottlenecks; after each verdict the
best remedy is applied by hand, as a reader would do it. Used by docs/profiler.md.

Answer: bench/results/profiler_worked_case_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench import noise
from bench.measure import arguments, facts_line, report
from flatout.profiler import watch
from flatout.profiler.outcome import Profile

CLASSES = 192


class Photos(Dataset[tuple[Tensor, int]]):
    """JPEG images of 1200 x 900, scaled to 96 x 96 for the network; decoded each time, or once."""

    def __init__(self, num: int, *, keep_decoded: bool) -> None:
        noise_image = np.random.default_rng(0).integers(0, 256, (75, 100, 3), dtype=np.uint8)
        self.data = cv2.imencode(".jpg", cv2.resize(noise_image, (1200, 900)))[1]
        self.num = num
        self.kept = [self._decode() for _ in range(16)] if keep_decoded else None

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        small = self.kept[index % 16] if self.kept is not None else self._decode()
        return torch.from_numpy(small).permute(2, 0, 1) / 255, index % 2

    def _decode(self) -> np.ndarray:
        return cv2.resize(np.asarray(cv2.imdecode(self.data, cv2.IMREAD_COLOR)), (96, 96))


class Loop(NamedTuple):
    """A version of the loop."""

    what: str
    keep_decoded: bool = False
    reads_each: bool = True
    """Counts hits with `.item()`, image by image and class by class."""


LOOPS = (
    Loop("as it was"),
    Loop("decoded images cached", keep_decoded=True),
    Loop("hits counted in one operation", keep_decoded=True, reads_each=False),
)


def run(loop: Loop, num_steps: int) -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten())
    model.append(nn.LazyLinear(CLASSES))
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    loader = DataLoader(Photos(16 * num_steps, keep_decoded=loop.keep_decoded), batch_size=16, num_workers=1)
    count: Callable[[Tensor, Tensor], object] = count_each if loop.reads_each else count_at_once
    with watch(loader, model, optimizer, loss_fn=loss_fn) as watched:
        for images, labels in loader:
            logits = model(images)
            loss_fn(logits, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            count(logits, labels)
    return watched


def count_each(logits: Tensor, labels: Tensor) -> int:
    hits = 0
    for row, label in zip(logits, labels, strict=True):
        for value in row:
            hits += int(value.item() > 0 and label.item() > 0)
    return hits


def count_at_once(logits: Tensor, labels: Tensor) -> Tensor:
    return ((logits > 0) & (labels[:, None] > 0)).sum()


class LoopResult(NamedTuple):
    """Result of one run of one version."""

    images_per_s: float
    promised: float
    """Predicted speed with the best remedy; the same speed if there is none."""
    cause: str
    best: str


def observe_loop(loop: Loop, num_steps: int) -> LoopResult:
    profile = run(loop, num_steps)
    best, speed = profile.verdict.best, profile.ledger.images_per_s
    return LoopResult(speed, best.images_per_s if best else speed, profile.verdict.cause, best.line() if best else "")


def main() -> int:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    num_steps, rounds = (12, 1) if options.quick else (40, 5)
    print(facts_line())
    lines = [noise.listen().line(), f"medians of {rounds} rounds, in which the versions alternate"]
    results = [[observe_loop(loop, num_steps) for loop in LOOPS] for _ in range(rounds)]
    numbers: dict[str, Any] = {}
    for number, loop in enumerate(LOOPS):
        runs = [each[number] for each in results]
        speed = float(np.median([each.images_per_s for each in runs]))
        line = f"{loop.what:32}{speed:8.0f} img/s"
        if number:
            # Neighbours in time: the prediction of the version before, and the speed of this one.
            errors = [each[number - 1].promised / each[number].images_per_s - 1 for each in results]
            promised = float(np.median([each[number - 1].promised for each in results]))
            line += f"   predicted {promised:.0f}; off by {np.median(errors):+.0%} (median of pairs)"
        causes = [each.cause for each in runs]
        middle = sorted(runs)[rounds // 2]
        lines += [line, f"  verdicts: {', '.join(causes)}"] + ([f"  best: {middle.best}"] if middle.best else [])
        numbers[loop.what] = [each._asdict() for each in runs]
    report("profiler_worked_case", "\n".join(lines), numbers, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
