"""How much do the weights that come with flatout gain on a small data set?

BCCD (blood cells; 292 images for training, 72 for validation, 320 px wide), yolov7-tiny, size 320, batch 16, 20 epochs
with --fast, three seeds: from the weights, and from scratch with the same network and anchors; with the hyp file for
scratch (mosaics, and a warm-up of 1,000 iterations, longer than the training) and with hyp.finetune.yaml and --adam (no
mosaics, 50 iterations). The better of the two hyp files counts on each side.
Give the data set with --data, as for bench.bccd, and other weights with --weights. More flags of train.py go behind --:
on a CPU with bf16, `-- --channels-last --amp bf16` takes a third of the time.
Answer: bench/results/finetune_<machine>_<yyyymm>.md and .json with every curve (rewrite them with --write).
"""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean

from bench.bccd import SEEDS, TINY, Curve, read, spread, start, wait
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.clock import machine

LEAST_MAP50, MIN_GAIN = 0.88, 0.03
RECIPES = {
    "recipe for scratch": ("--hyp", TINY),
    "recipe for fine-tuning": ("--hyp", "data/hyp.finetune.yaml", "--adam"),
}
FINE_TUNED, SCRATCH = "fine-tuned", "from scratch"
NETWORK = "yolov7-tiny-320"
"""Config of the same network, for trainings from scratch."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="data.yaml of the images")
    parser.add_argument("--weights", default="yolov7-tiny", help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=machine.cores().usable, help="trainings (default: %(default)s)")
    parser.add_argument("more", nargs="*", help="more flags of train.py, behind --")
    options = parser.parse_args()
    print(facts_line(), flush=True)
    ways = ways_of(options.weights, options.more)
    seeds = SEEDS[:1] if options.quick else SEEDS
    with tempfile.TemporaryDirectory() as folder:
        train = partial(_train, data=options.data, epochs=options.epochs, project=Path(folder))
        with ThreadPoolExecutor(options.at_once) as pool:
            runs = [pool.submit(train, way, flags, seed) for seed in seeds for way, flags in ways.items()]
        curves = [curve for curve in (run.result() for run in runs) if curve is not None]
    criteria = list(criteria_of(curves))
    numbers = {
        "flags": options.more,
        "curves": [curve._asdict() for curve in curves],
        "criteria": [{"promise": each.promise, "value": each.value, "passed": each.passed} for each in criteria],
    }
    report("finetune", "\n".join([*table(curves, options.more), "", *map(str, criteria)]), numbers, options)
    return int(not all(each.passed for each in criteria))


def ways_of(weights: str, more: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flags of every kind of training: what it starts from, and its hyp file."""
    origins = {FINE_TUNED: ("--weights", weights, "--cfg", ""), SCRATCH: ("--weights", "", "--cfg", NETWORK)}
    return {
        f"{origin}, {recipe}": ("--workers", "1", "--fast", *recipe_flags, *flags, *more)
        for recipe, recipe_flags in RECIPES.items()
        for origin, flags in origins.items()
    }


def _train(way: str, flags: Sequence[str], seed: int, *, data: Path, epochs: int, project: Path) -> Curve | None:
    """The curve of one training; None if it failed, while the others continue."""
    if not wait(start(way, flags, seed, data, epochs, project)):
        return None
    curve = read(project, way, seed)
    print(f"{way}, seed {seed}: mAP@.5 {curve.best[0]:.3f}, mAP@.5:.95 {curve.best[1]:.3f}", flush=True)
    return curve


def table(curves: Sequence[Curve], more: Sequence[str]) -> Iterator[str]:
    if more:
        yield f"with {' '.join(more)}"
        yield ""
    yield f"{'way':40}{'seeds':>6}{'mAP@.5 of best.pt':>22}{'mAP@.5:.95':>22}{'last epoch':>18}"
    for way in sorted({curve.way for curve in curves}):
        own = [curve for curve in curves if curve.way == way]
        map50, map50_95 = ([pair[index] for pair in (curve.best for curve in own)] for index in range(2))
        last = f"{mean(curve.map50[-1] for curve in own):.3f} / {mean(curve.map50_95[-1] for curve in own):.3f}"
        yield f"{way:40}{len(own):6d}{spread(map50):>22}{spread(map50_95):>22}{last:>18}"


def criteria_of(curves: Sequence[Curve]) -> list[Criterion]:
    """Fine-tuning is accurate enough, and better than from scratch; each with the better of the two hyp files."""
    best = {
        origin: max(
            mean(curve.best[0] for curve in curves if curve.way == way)
            for way in {curve.way for curve in curves if curve.way.startswith(origin)}
        )
        for origin in (FINE_TUNED, SCRATCH)
    }
    gain = best[FINE_TUNED] - best[SCRATCH]
    return [
        Criterion(promise="fine-tuned: mean mAP@.5", value=best[FINE_TUNED], limit=LEAST_MAP50, unit="", at_most=False),
        Criterion(promise="fine-tuned - from scratch", value=gain, limit=MIN_GAIN, unit="", at_most=False),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
