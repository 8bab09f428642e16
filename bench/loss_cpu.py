"""Is the batched OTA assignment faster than one image at a time on a CPU too, at every size?

Nine sizes, 320 px, 80 classes, two threads. It is compared with the reference implementation, the twin
(tests/reference/ota_twin.py), which computes the class cost by definition, over targets x candidates x classes of an
image; `closed form` is the twin with a sum over the classes once per candidate. `loss` is the whole batched loss with
its backward pass. All run in turns in one process, times in ms; a ratio is the median of the ratios of neighbouring
turns.

Answer: bench/results/loss_cpu_<machine>_<yyyymm>.md (rewritten with --write).
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import torch

from bench import noise
from bench.detections import Case, make_case
from bench.measure import arguments, facts_line, report
from flatout.yolo.loss import LossConfig, Search, assign_ota, ota_loss
from tests.reference.ota_twin import class_cost_by_definition, class_cost_in_closed_form, twin_assign

BATCHES, BOXES = (4, 16, 64), (4, 16, 60)
TIMES_AT_64 = 5.0


def in_turns(fns: dict[str, Callable[[], object]], turns: int) -> dict[str, np.ndarray]:
    """Milliseconds of each function in each turn."""
    durations: dict[str, list[float]] = {name: [] for name in fns}
    for turn in range(turns + 1):
        for name, fn in fns.items():
            begin = time.perf_counter()
            fn()
            if turn:
                durations[name].append(1e3 * (time.perf_counter() - begin))
    return {name: np.array(each) for name, each in durations.items()}


def sides(case: Case) -> dict[str, Callable[[], object]]:
    """The implementations to compare, and the whole loss with its backward pass."""
    maps, targets, anchors = case
    plain = [one_map.detach() for one_map in maps]

    def loss_and_backward() -> None:
        torch.autograd.grad(ota_loss(*case, LossConfig()).total, maps)

    return {
        "batched": partial(assign_ota, plain, targets, anchors, Search()),
        "twin": partial(twin_assign, plain, targets, *anchors, class_cost=class_cost_by_definition),
        "closed form": partial(twin_assign, plain, targets, *anchors, class_cost=class_cost_in_closed_form),
        "loss and backward": loss_and_backward,
    }


def main() -> int:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(2)
    print(facts_line())
    quiet = noise.listen().line()
    head = f"{'batch':>6}{'boxes':>6}{'batched':>10}{'twin':>10}{'times':>8}{'closed form':>13}{'times':>8}{'loss':>10}"
    lines = [quiet, head]
    numbers, ratios = {}, {}
    for batch_size, boxes in product(BATCHES[:1] if options.quick else BATCHES, BOXES[:1] if options.quick else BOXES):
        turns = 3 if options.quick else 5 if batch_size * boxes > 1000 else 15
        times = in_turns(sides(make_case(batch_size, boxes, 320, device="cpu")), turns)
        middle = {name: float(np.median(each)) for name, each in times.items()}
        ratio, closed = (float(np.median(times[name] / times["batched"])) for name in ("twin", "closed form"))
        ratios[batch_size, boxes] = ratio
        numbers[f"batch {batch_size}, {boxes} boxes"] = {**middle, "ratio": ratio, "ratio to closed form": closed}
        lines.append(
            f"{batch_size:6}{boxes:6}{middle['batched']:10.2f}{middle['twin']:10.1f}{ratio:8.1f}"
            f"{middle['closed form']:13.1f}{closed:8.1f}{middle['loss and backward']:10.1f}"
        )
    slowest, at_64 = min(ratios.values()), [ratio for (batch, _), ratio in ratios.items() if batch == 64]
    lines.append(f"{'PASS' if slowest >= 1 else 'FAIL'}: never slower than the twin (lowest {slowest:.1f}x)")
    if at_64:
        kept = min(at_64) >= TIMES_AT_64
        lines.append(f"{'PASS' if kept else 'FAIL'}: batch 64 at least {TIMES_AT_64:g}x (lowest {min(at_64):.1f}x)")
    report("loss_cpu", "\n".join(lines), numbers, options)
    return int(any("FAIL" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
