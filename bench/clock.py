"""What does a `stage()` mark cost, off and on?

Marks are in code that runs for every sample, so a mark that is off must cost less than 0.5 us more than an empty `with`
block. Answer: bench/results/clock_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
from collections.abc import Callable

from bench import noise
from bench.measure import Timing, arguments, facts_line, measure, report
from flatout.clock import clock

OFF_LIMIT_US = 0.5


class Nothing:
    """The cheapest possible context manager in Python."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *exc_info: object) -> None: ...


def empty_blocks(num: int) -> None:
    nothing = Nothing()
    for _ in range(num):
        with nothing:
            pass


def marks(num: int) -> None:
    for _ in range(num):
        with clock.stage("mark"):
            pass


def marks_on(num: int) -> None:
    with clock.recording():
        marks(num)


def main() -> int:
    options = arguments(__doc__).parse_args()
    num, repeats = (2_000, 5) if options.quick else (100_000, 21)
    print(facts_line())
    print(noise.listen().line())
    per_mark = {
        "empty with-block": _each(empty_blocks, num, repeats),
        "stage() off": _each(marks, num, repeats),
        "stage() on": _each(marks_on, num, repeats),
    }
    off_us = 1e6 * (per_mark["stage() off"].median - per_mark["empty with-block"].median)
    verdict = "PASS" if off_us < OFF_LIMIT_US else "FAIL"
    lines = [f"{name:18}{timing.text('ns')}" for name, timing in per_mark.items()]
    lines.append(f"{verdict}: off, a mark adds {off_us:.3f} us to an empty with-block (limit {OFF_LIMIT_US} us)")
    numbers = {"per_mark_s": {name: timing._asdict() for name, timing in per_mark.items()}, "off_us": off_us}
    report("clock", "\n".join(lines), numbers, options)
    return int(verdict == "FAIL" and not options.quick)


def _each(loop: Callable[[int], None], num: int, repeats: int) -> Timing:
    return Timing(*(seconds / num for seconds in measure(lambda: loop(num), warmup=2, repeats=repeats)))


if __name__ == "__main__":
    sys.exit(main())
