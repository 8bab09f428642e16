"""Step time as a function of what a step needs of each resource.

A step needs time of the main thread (the consumer), of the workers in parallel, and of all cores together; the
scarcest of the three sets its length.

    step = max(consumer, input / workers, cpu / cores)        with workers
    step = consumer + input                                   without
"""

from dataclasses import dataclass

KEPT_DECODED = 0.06
"""Reading a decoded image from a store takes about this fraction of decoding it (bench/results/store_*.md)."""


@dataclass(frozen=True)
class Demands:
    """What one step needs of each resource, in milliseconds."""

    consumer_ms: float
    """Time of the main thread when batches are always ready."""

    input_ms: float
    """Time of a single worker to make the whole batch."""

    cpu_ms: float
    """CPU time of the main process and the workers together."""

    workers: int
    cores: float

    @property
    def step_ms(self) -> float:
        if self.workers == 0:
            return self.consumer_ms + self.input_ms
        return max(self.consumer_ms, self.input_ms / self.workers, self.cpu_ms / self.cores)
