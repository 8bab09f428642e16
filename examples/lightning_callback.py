"""Profile a Lightning training: Trainer(callbacks=[ProfileCallback()]) prints the verdict and writes profile.html."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback

from flatout.profiler import Profile, watch_any


class ProfileCallback(Callback):
    """Watches trainer.fit(); with `steps`, it reports after that many timed steps, and the training goes on."""

    def __init__(self, folder: str = "profile", steps: int | None = None) -> None:
        self.folder, self.steps, self.watching = folder, steps, ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            self.watching.enter_context(watch_any(num_steps=self.steps, on_complete=self.report))

    def report(self, profile: Profile) -> None:
        print(profile.text(), profile.save(self.folder), sep="\n")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.watching.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.watching.close()
