"""In which order a loop is looked at, and for how many steps each.

    |warm up|count waits|trace (GPU)|settle (GPU)|  time  |

Each kind of looking disturbs the others, so they take turns, and only undisturbed steps are timed. Compiling kernels
and reading a trace make the loop stand still; meanwhile workers complete every batch they have room for, and the steps
that use those up wait for nothing. They are not timed either.
"""

from typing import NamedTuple


class Turns(NamedTuple):
    """Steps of each kind, in this order, before timing begins."""

    warm_up: int = 2
    counted: int = 2
    """In which waits are counted."""
    traced: int = 2
    """In which kernels are traced; they need a GPU."""
    settled: int = 5
    """On a GPU, until what was made ahead is used up: a feed of ours has four slots, and one batch more on its way."""

    @property
    def counting_ends(self) -> int:
        """Steps after which no more waits are counted, and tracing begins."""
        return self.warm_up + self.counted

    def tracing_ends(self, *, on_device: bool) -> int:
        return self.counting_ends + (self.traced if on_device else 0)

    def timing_begins(self, *, on_device: bool) -> int:
        """Steps before the first that is timed."""
        return self.tracing_ends(on_device=on_device) + (self.settled if on_device else 0)

    def is_counted(self, step: int) -> bool:
        """Steps are numbered from 1."""
        return self.warm_up < step <= self.counting_ends


ALL = Turns()
KERNELS = Turns(counted=0, traced=1, settled=1)
"""On a batch that lies ready: no feed can get ahead, and its waits are known."""
SPEED = Turns(counted=0, traced=0)
"""How fast it is, and nothing else."""
