"""Is drawing keyed numbers cheap?

A micro-batch of 24 samples with 64 numbers each: one call of `keyed_uniform` against the usual way to get keyed
numbers, a generator per sample. A single shared generator is the lower bound, but its numbers depend on earlier draws.
Answer: bench/results/philox_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import numpy as np

from bench import noise
from bench.measure import arguments, facts_line, measure, report
from flatout.feed.plan import keyed_bits, keyed_generator, keyed_uniform

SEED, EPOCH, NUM_SAMPLES, NUM_NUMBERS = 7, 3, 24, 64
POSITIONS = np.arange(1000, 1000 + NUM_SAMPLES)
SHARED = np.random.default_rng(SEED)


def keyed() -> np.ndarray:
    return keyed_uniform(SEED, EPOCH, POSITIONS, NUM_NUMBERS)


def generator_from_keyed_bits() -> np.ndarray:
    """What `SampleSource` does for its `rng`."""
    bits = keyed_bits(SEED, EPOCH, POSITIONS, 2)
    return np.stack([keyed_generator(row).random(NUM_NUMBERS) for row in bits])


def generator_per_sample() -> np.ndarray:
    return np.stack([np.random.default_rng((SEED, EPOCH, int(p))).random(NUM_NUMBERS) for p in POSITIONS])


def shared_generator() -> np.ndarray:
    return SHARED.random((NUM_SAMPLES, NUM_NUMBERS))


def main() -> None:
    options = arguments(__doc__).parse_args()
    repeats = 20 if options.quick else 1000
    print(facts_line())
    print(noise.listen().line())
    ways = (keyed, generator_from_keyed_bits, generator_per_sample, shared_generator)
    timings = {way.__name__: measure(way, warmup=10, repeats=repeats) for way in ways}
    baseline = timings["generator_per_sample"].median
    lines = [
        f"{name:28}{timing.text('us'):42}{timing.median / NUM_SAMPLES * 1e6:7.2f} us/sample"
        f"{baseline / timing.median:8.1f}x"
        for name, timing in timings.items()
    ]
    text = f"{NUM_SAMPLES} samples x {NUM_NUMBERS} numbers (last column: speed against a generator per sample)\n"
    numbers = {"seconds": {name: timing._asdict() for name, timing in timings.items()}}
    report("philox", text + "\n".join(lines), numbers, options)


if __name__ == "__main__":
    main()
