"""A detection training that is looked at for some steps and leaves nothing behind."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.profiler.engine_steps import EngineObservation
from flatout.profiler.outcome import Profile
from flatout.yolo.compat.flags import train_options, train_parser
from flatout.yolo.options import TrainOptions

MANY_EPOCHS = 10_000
"""So that a small data set does not end before enough steps were seen; speed does not depend on it."""


@dataclass(frozen=True)
class YoloTraining:
    """What `flatout yolo train` would run, for `num_steps` timed steps."""

    options: TrainOptions
    num_steps: int

    @classmethod
    def from_flags(cls, flags: list[str], *, num_steps: int) -> "YoloTraining":
        """Flags as `flatout yolo train` takes them."""
        parser = train_parser("flatout profile yolo")
        return cls(train_options(parser.parse_args(flags), os.environ), num_steps)

    @property
    def title(self) -> str:
        options = self.options
        return f"{Path(options.cfg or options.weights).stem}, {options.img_size[0]} px, batch {options.batch_size}"

    def with_switch(self, switch: Mapping[str, Any]) -> "YoloTraining":
        """The same training with a remedy applied."""
        return replace(self, options=replace(self.options, **switch))

    def observe(self) -> Profile:
        """Train for a while and look."""
        from flatout.yolo.train import train

        observation = EngineObservation(
            images_per_step=self.options.batch_size, num_steps=self.num_steps, title=self.title
        )
        with tempfile.TemporaryDirectory(prefix="flatout-profile-") as folder, observation.observing():
            train(
                replace(
                    self.options,
                    project=folder,
                    name="run",
                    epochs=MANY_EPOCHS,
                    stop_after=observation.total_steps,
                    nosave=True,
                    notest=True,
                    fresh=True,
                    resume=False,
                    log_every=observation.total_steps,
                )
            )
        return observation.profile
