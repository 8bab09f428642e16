"""What are the weights that come with flatout worth on a small data set of one's own?

BCCD (blood cells; 292 pictures for training, 72 for validation, 320 px wide), yolov7-tiny, size 320, batch 16, 20
epochs with --fast, three seeds: from the weights and from scratch, by the recipe for scratch (its warm-up of 1,000
iterations is longer than the training) and by hyp.finetune.yaml (100 iterations). All run side by side.
Give the data set by --data, as for bench.bccd, and other weights than those that come with flatout by --weights.
Answer: bench/results/finetune_<machine>_<yyyymm>.md and .json with every curve (rewrite them with --write).
"""

import tempfile
from pathlib import Path
from statistics import mean

from bench.bccd import SEEDS, TINY, Curve, read, spread, start, wait
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion

LEAST_MAP50, LEAST_GAIN = 0.88, 0.03
RECIPES = {"long warm-up": TINY, "short warm-up": "data/hyp.finetune.yaml"}
FINE_TUNED, SCRATCH = "fine-tuned", "from scratch"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="data.yaml of the pictures")
    parser.add_argument("--weights", default="yolov7-tiny", help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    print(facts_line(), flush=True)
    seeds = SEEDS[:1] if options.quick else SEEDS
    ways = {
        f"{origin}, {recipe}": ("--hyp", hyp, "--workers", "1", "--fast", *flags)
        for recipe, hyp in RECIPES.items()
        for origin, flags in ((FINE_TUNED, ("--weights", options.weights, "--cfg", "")), (SCRATCH, ()))
    }
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            (way, seed, start(way, flags, seed, options.data, options.epochs, Path(folder)))
            for way, flags in ways.items()
            for seed in seeds
        ]
        ended = [(way, seed) for way, seed, process in runs if wait(process)]
        curves = [read(Path(folder), way, seed) for way, seed in ended]
    criteria = list(judge(curves))
    lines = [f"{'way':30}{'seeds':>6}{'mAP@.5 of best.pt':>22}{'mAP@.5:.95':>22}"]
    for way in dict.fromkeys(curve.way for curve in curves):
        own = [curve.best for curve in curves if curve.way == way]
        map50, map50_95 = zip(*own, strict=True)
        lines.append(f"{way:30}{len(own):6d}{spread(list(map50)):>22}{spread(list(map50_95)):>22}")
    numbers = {
        "curves": [curve._asdict() for curve in curves],
        "criteria": [{"promise": each.promise, "value": each.value, "passed": each.passed} for each in criteria],
    }
    report("finetune", "\n".join([*lines, "", *map(str, criteria)]), numbers, options)
    return int(not all(each.passed for each in criteria))


def judge(curves: list[Curve]) -> list[Criterion]:
    """Fine-tuned well enough, and better than from scratch; each by the better of the two recipes."""
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
        Criterion(promise="fine-tuned - from scratch", value=gain, limit=LEAST_GAIN, unit="", at_most=False),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
