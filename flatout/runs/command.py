"""`flatout JOB train`: from the words of a command line to a training that has ended, the same for every job.

words --flags--> options --(before torch is imported)--> one process, or one per GPU
      --> signals are answered, --on-done is run, warnings are kept --> train(options)
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatout.cli import FlagParser, flags_of, show_log
from flatout.runs.options import RunOptions, from_environment, own_and_run_options

if TYPE_CHECKING:
    from flatout.engine import Callback
    from flatout.runs.budget import Spending

Given = Mapping[str, Any]
"""Options by name: what was typed, and what the environment says."""


@dataclass(frozen=True)
class TrainCommand:
    """The training command of a job. Nothing that needs torch is imported before it trains."""

    job: str
    model: type[RunOptions]
    """Its options; flags are made of their fields."""
    trainer: str
    """'module:name' of the job's Recipe, or of train(options, callbacks, *, spending, seams, typed)."""
    description: str = ""
    epilog: str = ""
    profile: str = ""
    """'module:class' of what `flatout profile` knows of this job beyond what it knows of any."""

    def main(self, argv: Sequence[str]) -> int:
        """Train; returns the exit code."""
        options, typed = self.parse(argv, f"flatout {self.job} train")
        show_log(only_warnings=os.environ.get("RANK", "0") not in ("", "0"))
        self.look(options)
        if (num_ranks := self.ranks_to_start(options)) > 1:
            from flatout.ranks import launch_ranks

            return launch_ranks([self.job, "train", *argv], num_ranks)
        from flatout.ranks import StopSignals
        from flatout.runs.budget import Spending
        from flatout.runs.ends import OnDone, RunLog

        # Imported while a signal simply ends the process: from StopSignals on it is an exception, which imports may
        # lose.
        import_module(self.trainer.partition(":")[0])
        spending = Spending(options.price, options.budget)
        with StopSignals(), OnDone(options.on_done, spending) as done:
            self.answer(options, typed, [done, RunLog()], spending)
        return 0

    def parser(self, prog: str) -> FlagParser:
        """Reads the flags of a command of this name."""
        parser, defaults = FlagParser(prog, self.description, self.epilog), self.model()
        own, of_runs = own_and_run_options(self.model)
        parser.add_flags("the training", flags_of(self.model, own, converts=False), defaults)
        parser.add_flags("its run, as in every job", flags_of(self.model, of_runs, converts=False), defaults)
        return parser

    def options(self, given: Given) -> Any:
        """From what was given to options; ConfigError names every mistake."""
        from flatout.config import build_config  # now, because help does not need pydantic

        return build_config(dict(given), self.model)

    def parse(self, argv: Sequence[str], prog: str) -> tuple[Any, frozenset[str]]:
        """The options of a command line, and the names of those that were typed."""
        typed = self.parser(prog).parse_typed(argv)
        return self.options(from_environment(os.environ) | typed), frozenset(typed)

    def look(self, options: Any) -> None:
        """Look at what can be wrong before torch is imported, which takes longer."""

    def images_per_step(self, options: Any) -> int:
        """Samples of a step, for speeds."""
        return 1

    def ranks_to_start(self, options: RunOptions) -> int:
        """GPUs that `--device 0,1` names, each of which gets a process; 1 if a launcher has done that."""
        if "," not in options.device or "WORLD_SIZE" in os.environ or options.profile:
            return 1
        from flatout.ranks import choose_devices

        return len(choose_devices(options.device))

    def answer(
        self, options: Any, typed: frozenset[str], callbacks: "list[Callback]", spending: "Spending"
    ) -> None:  # fmt: skip
        """Train as asked; with `--profile`, and say what the first steps were like."""
        if not options.profile:
            self.train(options, callbacks, spending=spending, typed=typed)
            return
        from flatout.profiler import EngineObservation

        observation = EngineObservation(images_per_step=self.images_per_step(options), num_steps=options.profile)
        with observation.observing():
            result = self.train(options, callbacks, spending=spending, typed=typed)
        if result is None:
            return  # only a report was asked for
        if observation.is_complete:
            print(observation.profile.text())
            print(f"The same as a page: {observation.profile.save(result.folder)}")
        else:
            print(f"--profile: {observation.too_short} Train more epochs or images, or use a smaller batch.")

    def train(self, options: Any, callbacks: "Sequence[Callback]" = (), **more: Any) -> Any:
        """Train, with whatever `trainer` names."""
        module, _, name = self.trainer.partition(":")
        found = getattr(import_module(module), name)
        if not isinstance(found, type):
            return found(options, callbacks, **more)
        from flatout.runs import run

        return run.train(found, options, callbacks, **more)
