"""Several processes as one training: which device and rank this one is, how ranks meet, and how they end together.

Files:

    launch   One process per GPU without a launcher: `--device 0,1` starts them here, on this machine
    signals  Signals that ask a training to end, wherever it is, and what is answered within seconds
    watch    Ranks look after each other: one that is gone, stopped or has failed is noticed by all within seconds
    world    Which of several processes is this one? Started by torchrun, by an older launcher, or alone
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.ranks.launch import launch_ranks
    from flatout.ranks.signals import LAST_FILES, Interrupts, StopRequested, StopSignals, watched
    from flatout.ranks.world import World, choose_device, choose_devices, make_current, read_world

__getattr__, __dir__ = face(__name__)
