"""What does it cost a training to be observed? Limit: 1 % of the step.

The same steps with and without a recorder, a sampler and gc callbacks, in turn: a short step (10 ms) that holds as
many marks as a training step of ours. Answer: bench/results/profiler_overhead_<machine>_<yyyymm>.md (--write).
"""

import sys
import time

import numpy as np
import torch

from bench import noise
from bench.measure import arguments, facts_line, report, summarize
from flatout.profiler import clock
from flatout.profiler.recorder import StepRecorder
from flatout.profiler.sampler import Sampler

LIMIT = 0.01
STAGES = ("feed.wait", "train.wait", "train.inputs", "train.loss", "train.forward", "train.backward", "train.optimizer")


def step(matrix: torch.Tensor) -> None:
    """About 10 ms of torch and a little Python, in seven stages."""
    for name in STAGES:
        with clock.stage(name):
            matrix @ matrix
            sum(range(200))
    clock.step_ended(1)


def timed(matrix: torch.Tensor, num_steps: int) -> float:
    begin_s = time.process_time()
    for _ in range(num_steps):
        step(matrix)
    # CPU time, not wall time: what is asked is what looking costs, not who else is on this machine.
    return (time.process_time() - begin_s) / num_steps


def observed(matrix: torch.Tensor, num_steps: int) -> float:
    recorder = StepRecorder()
    with recorder.recording():
        sampler = Sampler(label=lambda: recorder.innermost.name if recorder.innermost else None)
        try:
            return timed(matrix, num_steps)
        finally:
            sampler.close()


def main() -> int:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    rounds, num_steps = (2, 5) if options.quick else (15, 40)
    print(facts_line())
    print(noise.listen().line())
    matrix = torch.rand(440, 440)
    timed(matrix, num_steps), observed(matrix, num_steps)
    pairs = [(timed(matrix, num_steps), observed(matrix, num_steps)) for _ in range(rounds)]
    plain, seen = (summarize(side) for side in zip(*pairs, strict=True))
    overhead = float(np.median([after / before - 1 for before, after in pairs]))
    verdict = "PASS" if overhead < LIMIT else "FAIL"
    lines = [
        f"a step without  {plain.text()} of CPU",
        f"a step observed {seen.text()} of CPU",
        f"{verdict}: observing costs {overhead:.2%} of a step (median of {rounds} pairs; limit {LIMIT:.0%})",
    ]
    report("profiler_overhead", "\n".join(lines), {"overhead": overhead, "pairs_s": pairs}, options)
    return int(verdict == "FAIL" and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
