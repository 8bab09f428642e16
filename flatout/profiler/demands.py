"""How long is a step, given what it asks of each resource?

A step needs time of the main thread (the consumer), of the workers side by side, and of all cores together; the
scarcest of them sets its length.

    step = max(consumer, input / workers, cpu / cores)        with workers
    step = consumer + input                                   without
"""

from dataclasses import dataclass

KEPT_DECODED = 0.06
"""Reading a decoded picture from a store costs about this share of decoding it (bench/results/store_*.md)."""


@dataclass(frozen=True)
class Demands:
    """What one step asks of each resource, in milliseconds."""

    consumer_ms: float
    input_ms: float
    """Of one worker, if it made the whole batch."""

    cpu_ms: float
    workers: int
    cores: float

    @property
    def step_ms(self) -> float:
        if self.workers == 0:
            return self.consumer_ms + self.input_ms
        return max(self.consumer_ms, self.input_ms / self.workers, self.cpu_ms / self.cores)
