"""The state that all ranks continue from: the first reads it, the others get it from there.

Their machines need not see the run folder; and what one rank reads, all have, even if the disk is about to fail.
"""

from flatout.engine.distributed import World
from flatout.engine.generations import Generation, Generations


def load_for_all(generations: Generations | None, world: World) -> Generation | None:
    """As `Generations.load`, on every rank; all ask at the same time."""
    saved = generations.load() if generations is not None and world.is_first else None
    told: Generation | None = world.from_first(saved)
    return told
