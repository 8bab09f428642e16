"""Signs of life: who has been silent for how long?"""

from collections.abc import Sequence

PERIOD_S = 0.5
"""Between two beats of a rank."""
STALL_S = 5.0
"""A judge who comes back later than this was stopped himself."""
LEFT = -1
"""The beat of a rank that has ended as it should."""


class Pulses:
    """Who has been silent for how long? Pure but for the times it is told."""

    def __init__(self, size: int, now_s: float) -> None:
        self._numbers = [0] * size
        self._heard_s = [now_s] * size
        self._looked_s = now_s

    def hear(self, numbers: Sequence[int], now_s: float) -> None:
        for rank, number in enumerate(numbers):
            if number != self._numbers[rank]:
                self._numbers[rank], self._heard_s[rank] = number, now_s

    def silent(self, now_s: float, limit_s: float) -> list[int]:
        """Ranks that said nothing for so long and have not left; asked again and again."""
        # Whoever was stopped himself, such as all of them by Ctrl-Z, has no right to blame others.
        if now_s - self._looked_s > STALL_S:
            self._heard_s = [now_s] * len(self._heard_s)
        self._looked_s = now_s
        return [
            rank
            for rank, heard_s in enumerate(self._heard_s)
            if self._numbers[rank] != LEFT and now_s - heard_s > limit_s
        ]
