"""Ranks: several processes that train together, their devices, signals, and how they end together.

Files:

    launch   Start one process per GPU on this machine, without a launcher: `--device 0,1`
    signals  Signals that stop a training at any point, each answered within seconds
    watch    Ranks monitor each other: one that is gone, stopped or has failed is noticed by all within seconds
    world    Devices and ranks: what `--device` selects, which rank this process is, and the process group of all ranks
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.ranks.launch import free_port, has_launcher, is_first_rank, launch_ranks, run_rank
    from flatout.ranks.signals import LAST_FILES, Interrupts, StopRequested, StopSignals, watched
    from flatout.ranks.world import World, choose_device, choose_devices, make_current, read_world

__getattr__, __dir__ = face(__name__)
