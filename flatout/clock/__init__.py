"""Where time goes and what the machine has: stamped and read by every part, without torch.

Files:

    cgroup           Which limits do control groups (v1 and v2) put on a process?
    clock            Where does the time go? Named stages, stamped wherever work is done
    machine          What may this process use of the machine: cores, memory, shared memory, file descriptors?
    stages           What the stages are called for a person, and what kind of work they are
    worker_registry  Which workers are at work for this process
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.clock.clock import STAGE_DTYPE, StageTime, read_totals
    from flatout.clock.machine import Cores, Descriptors, Memory, Others, Shm, busy_cores, fitting_threads
    from flatout.clock.stages import (
        AHEAD,
        LOG,
        PAUSES,
        PAUSING,
        STAGES,
        Event,
        canonical,
        is_pause,
        kind_of,
        label_of,
        owners,
        place_label,
        stage_apart,
    )
    from flatout.clock.worker_registry import TIMELINE_DTYPE, TracedTotals, want, worker_timelines

__getattr__, __dir__ = face(__name__)
