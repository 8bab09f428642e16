"""Observe a training by flatout's own engine: its marks say where steps begin, so nothing has to be told apart."""

from collections.abc import Mapping
from pathlib import Path

from flatout.clock import clock
from flatout.profiler.observe.observation import ALL, Observation, Phases
from flatout.profiler.observe.recorder import StepRecorder
from flatout.profiler.observe.summary import FeedWorkers
from flatout.profiler.outcome import Profile
from flatout.profiler.verdict.remedy import respelled

STEP_BEGINS = "train.wait"
"""The first stage of every step, and of nothing else."""

WARM_UP_ON_DEVICE = 6
"""The engine captures the fourth step as a graph; before, kernels are chosen and compiled."""


class _EngineRecorder(StepRecorder):
    """Ends a step where the next one begins."""

    observation: "EngineObservation"

    def opened(self, name: str) -> None:
        if name == STEP_BEGINS:
            self.observation.step_begins()
        super().opened(name)


class EngineObservation(Observation):
    """A look at `num_steps` steps (None: all) of the loop that runs in this thread while `observing()`."""

    def __init__(
        self,
        *,
        images_per_step: int,
        num_steps: int | None,
        phases: Phases = ALL,
        title: str = "",
        own_flags: Mapping[str, str] | None = None,
    ) -> None:
        """`own_flags`: patterns of what the verdict advises -> how the job that is looked at spells it; see
        `respelled`."""
        self._images, self._most_images = images_per_step, 0
        self._has_begun = False
        self._own_flags = own_flags or {}
        super().__init__(FeedWorkers(), num_steps=num_steps, phases=phases, title=title)

    def _make_recorder(self) -> StepRecorder:
        recorder = _EngineRecorder()
        recorder.observation = self
        return recorder

    @property
    def total_steps(self) -> int:
        """Steps after which the observation is over: one more than it needs, to see the last one's end."""
        import torch

        assert self._num_steps is not None
        on_device = torch.cuda.is_available()
        phases = _on_device(self._phases) if on_device else self._phases
        return phases.timing_begins(on_device=on_device) + self._num_steps + 1

    def attach_device(self) -> None:
        super().attach_device()
        if self._device is not None:
            self._phases = _on_device(self._phases)

    @property
    def profile(self) -> Profile:
        profile = Profile(self)
        profile.reword = lambda remedy: respelled(remedy, self._own_flags)
        return profile

    def report(self, folder: Path) -> str:
        """Ledger and verdict for a terminal, or why there are none; the page goes to `folder`."""
        if not self.is_complete:
            return f"Nothing was profiled: {self.too_short}"
        page = self.profile.save(folder)
        return f"\nWhere a step goes (as a page: {page}):\n{self.profile.text()}"

    def batch_taken(self, num_images: int) -> None:
        """The step that runs has so many images; without this it has `images_per_step`."""
        self._images = num_images
        if self._is_short:
            self.pass_ends()  # it is like no other step: not to be traced, nor counted

    @property
    def _is_short(self) -> bool:
        """Whether the step that runs has fewer images than others, at the end of an epoch."""
        return self._images < self._most_images

    def step_begins(self) -> None:
        """The loop asks for a batch."""
        if self._has_begun and self._is_short:
            clock.step_ended(0)
            self.pass_begins()
            return
        if self._has_begun:
            self._most_images = self._images
            clock.step_ended(self._images)
            self.after_step()
            return
        self._has_begun = True
        self.attach_device()
        clock.step_ended(0)


def _on_device(phases: Phases) -> Phases:
    return phases._replace(warm_up=max(phases.warm_up, WARM_UP_ON_DEVICE))
