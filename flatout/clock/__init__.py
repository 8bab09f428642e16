"""Where time goes and what the machine has: stamped and read by every part, without torch.

Files:

    cgroup           Which limits do control groups (v1 and v2) put on a process?
    clock            Where does the time go? Named stages, stamped wherever work is done
    machine          What may this process use of the machine: cores, memory, shared memory, file descriptors?
    worker_registry  Which workers are at work for this process
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.clock.clock import (
        AHEAD,
        LOG,
        PAUSES,
        PAUSING,
        STAGE_DTYPE,
        STAGES,
        Event,
        StageTime,
        canonical,
        is_pause,
        kind_of,
        label_of,
        owners,
        place_label,
        read_totals,
        stage_apart,
    )
    from flatout.clock.machine import Cores, Descriptors, Memory, OtherLoad, Shm, busy_cores, fitting_threads
    from flatout.clock.worker_registry import TIMELINE_DTYPE, TracedTotals, want, worker_timelines

__getattr__, __dir__ = face(__name__)
