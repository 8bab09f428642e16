"""A trace of whole steps: it ends where a pause between steps begins, and begins anew if nothing was traced by then."""

from flatout.profiler.device_trace import DeviceTrace, DeviceWork


class StepTrace:
    """The trace that runs, if any, and what the last one told."""

    def __init__(self) -> None:
        self.work: DeviceWork | None = None
        """Per step; None: nothing was traced."""
        self._trace: DeviceTrace | None = None

    @property
    def is_running(self) -> bool:
        return self._trace is not None

    def start(self) -> None:
        """Host-device wait."""
        trace = DeviceTrace()
        trace.start()
        self._trace = trace  # only now: one that did not start cannot be stopped

    def stop(self, num_steps: int) -> None:
        """Host-device wait, if there is a trace. One of no step at all is thrown away."""
        if self._trace is not None:
            work = self._trace.stop(max(1, num_steps))
            self.work = work if num_steps else None
            self._trace = None
