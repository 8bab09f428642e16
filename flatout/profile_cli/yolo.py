"""A detection training that is looked at for some steps and leaves nothing behind."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.profile_cli.one_batch import one_batch
from flatout.profiler.engine_steps import EngineObservation
from flatout.profiler.measurement import Limits
from flatout.profiler.outcome import Profile
from flatout.profiler.verdict import Trial
from flatout.yolo.compat.flags import train_options, train_parser
from flatout.yolo.compat.not_built import refuse_what_is_not_built
from flatout.yolo.options import TrainOptions

NETWORK = "prepare+forward+loss+backward+graph+optimizer+ema"
"""Stages of a step that do not belong to its input."""

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
        options = train_options(parser.parse_args(flags), os.environ)
        refuse_what_is_not_built(options)
        return cls(options, num_steps)

    @property
    def title(self) -> str:
        options = self.options
        return f"{Path(options.cfg or options.weights).stem}, {options.img_size[0]} px, batch {options.batch_size}"

    def with_switch(self, switch: Mapping[str, Any]) -> "YoloTraining":
        """The same training with a remedy applied."""
        return replace(self, options=replace(self.options, **switch))

    def limits(self) -> Limits:
        """What the network and the input could do, each by itself."""
        with one_batch(max(4, self.num_steps // 2)) as source:
            alone = replace(self, num_steps=max(4, self.num_steps // 2)).observe()
        return Limits(compute_ms=alone.ledger.step_ms - _wait_ms(alone), input_ms=source.input_ms)

    def trials(self, compute_ms: float) -> list[Trial]:
        """Flags that change what the network costs, each tried on one batch; `compute_ms` is what it costs now."""
        import torch

        candidates: dict[str, tuple[str, dict[str, Any]]] = {}
        if not self.options.channels_last:
            candidates["channels_last"] = "--channels-last", {"channels_last": True}
        if torch.cuda.is_available() and self.options.amp is None and torch.cuda.is_bf16_supported():
            candidates["bf16"] = "--amp bf16", {"amp": "bf16"}
        found = []
        for what, (change, switch) in candidates.items():
            then_ms = self.with_switch(switch).limits().compute_ms
            assert then_ms is not None
            share = then_ms / compute_ms
            found.append(Trial(what=what, change=change, stage=NETWORK, then_ms=share, switch=switch, is_share=True))
        return found

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


def _wait_ms(profile: Profile) -> float:
    return profile.ledger.ms("host", "feed.wait")
