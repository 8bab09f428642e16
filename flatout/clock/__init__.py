"""Stage times and machine resources, used by all parts of the package. Does not import torch.

Files:

    cgroup           Limits that control groups (v1 and v2) set for a process
    clock            Named stages: how long each part of the work takes
    machine          Cores, memory, shared memory and file descriptors that this process may use
    spans            Spans: the parts of a run's wall time, from the command to its end
    worker_registry  The workers of this process's open feeds: their stage times, CPU time and timelines
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.clock.cgroup import system_text
    from flatout.clock.clock import (
        AHEAD,
        ALL_PAUSES,
        LOG,
        PAUSES,
        STAGE_DTYPE,
        STAGES,
        Event,
        StageTime,
        canonical,
        is_pause,
        kind_of,
        label_of,
        owners,
        pause_stage,
        place_label,
        read_totals,
    )
    from flatout.clock.machine import (
        Cores,
        Descriptors,
        Memory,
        OtherLoad,
        Shm,
        busy_cores,
        cpu_features,
        fitting_threads,
    )
    from flatout.clock.spans import Part, Spans, span
    from flatout.clock.worker_registry import TIMELINE_DTYPE, TracedTotals, want, worker_timelines

__getattr__, __dir__ = face(__name__)
