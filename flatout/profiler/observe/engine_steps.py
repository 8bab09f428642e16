"""Observing a training that flatout's own engine runs: the engine's marks tell where steps begin."""

from collections.abc import Mapping
from pathlib import Path

from flatout.clock import clock
from flatout.profiler.observe.observation import ALL_PHASES, Observation, Phases
from flatout.profiler.observe.recorder import StepRecorder
from flatout.profiler.observe.summary import FeedWorkers
from flatout.profiler.outcome import Profile
from flatout.profiler.verdict.remedy import with_job_flags

STEP_BEGINS = "train.wait"
"""The first stage of every step, and of nothing else."""

WARM_UP_ON_DEVICE = 6
"""The engine captures the fourth step as a CUDA graph; before that, kernels are chosen and compiled."""


class _EngineRecorder(StepRecorder):
    """A recorder that ends a step where the next one begins."""

    observation: "EngineObservation"

    def opened(self, name: str) -> None:
        if name == STEP_BEGINS:
            self.observation.step_begins()
        super().opened(name)


class EngineObservation(Observation):
    """Observation of `num_steps` steps (None: all) of the engine's loop in this thread while `observing()`."""

    def __init__(
        self,
        *,
        images_per_step: int = 0,
        num_steps: int | None,
        phases: Phases = ALL_PHASES,
        title: str = "",
        own_flags: Mapping[str, str] | None = None,
    ) -> None:
        """`images_per_step` counts until `batch_taken` reports another number. `own_flags`: patterns in the advice of a
        verdict -> the flags of the observed job; see `with_job_flags`."""
        self._images, self._most_images = images_per_step, 0
        self._has_begun = False
        self._own_flags = own_flags or {}
        recorder = _EngineRecorder()
        recorder.observation = self
        super().__init__(FeedWorkers(), recorder, num_steps=num_steps, phases=phases, title=title)
        self._phases_on_device = phases._replace(warm_up=max(phases.warm_up, WARM_UP_ON_DEVICE))

    @property
    def total_steps(self) -> int:
        """Steps after which the observation is over: one more than are measured, to see the end of the last one."""
        import torch

        assert self._num_steps is not None
        phases = self._phases_on_device if torch.cuda.is_available() else self._phases_on_host
        return phases.timing_begins + self._num_steps + 1

    @property
    def profile(self) -> Profile:
        profile = Profile(self)
        profile.reword = lambda remedy: with_job_flags(remedy, self._own_flags)
        return profile

    def report(self, folder: Path) -> str:
        """Ledger and verdict for a terminal, or why there are none; profile.html and the other files go to `folder`."""
        if not self.is_complete:
            return f"No profile: {self.too_short}"
        page = self.profile.save(folder)
        return f"\nWhere the time of a step goes (as a page: {page}):\n{self.profile.text()}"

    def batch_taken(self, num_images: int) -> None:
        """Set the number of images of the current step."""
        self._images = num_images
        if self._is_short:
            self.pass_ends()  # unlike the other steps, so neither traced nor counted

    @property
    def _is_short(self) -> bool:
        """Whether the current step has fewer images than earlier ones, as the last step of an epoch may."""
        return self._images < self._most_images

    def step_begins(self) -> None:
        """The loop requests a batch: the previous step, if there was one, has ended."""
        if not self._has_begun:
            self._has_begun = True
            self.attach_device()
            clock.step_ended(0)
        elif self._is_short:
            clock.step_ended(0)
            self.pass_begins()
        else:
            self._most_images = self._images
            clock.step_ended(self._images)
            self.after_step()
