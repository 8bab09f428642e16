"""The command `flatout JOB train`, the same for every job.

command line --flags--> options --(before torch is imported)--> one process, or one per GPU
             --> handle signals, run --on-done at the end, keep warnings in run.log --> train(options)
"""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from flatout.cli import FlagParser, flags_of, show_log
from flatout.errors import FlatoutError
from flatout.ranks import has_launcher, is_first_rank
from flatout.runs.options import (
    CONFIG_NAME,
    RunOptions,
    checkpoint_to_resume,
    from_environment,
    own_and_run_options,
    run_of,
)

if TYPE_CHECKING:
    from flatout.engine import Callback
    from flatout.runs.budget import Spending

Given = Mapping[str, Any]
"""Option values by name, from the command line and the environment."""


@dataclass(frozen=True)
class TrainCommand:
    """The training command of a job. Imports nothing that needs torch before it trains."""

    job: str
    model: type[RunOptions]
    """The dataclass of its options; each field is a flag."""
    trainer: str
    """'module:name' of the job's Recipe, or of a function train(options, callbacks, *, spending, seams, typed)."""
    description: str = ""
    epilog: str = ""
    profile: str = ""
    """'module:class' of the job's subclass of `ProfiledTraining`; empty: that class itself."""
    options_file: str = CONFIG_NAME
    """The file of a run folder that holds its options."""

    def main(self, argv: Sequence[str]) -> int:
        """Train; returns the exit code."""
        from flatout.clock import spans

        times = spans.begin_command()
        options, typed = self.parse(argv, f"flatout {self.job} train")
        show_log(only_warnings=not is_first_rank())
        with spans.span("scan"):
            self.check_early(options)
        if (num_ranks := self.ranks_to_start(options, typed)) > 1:
            from flatout.ranks import launch_ranks

            return launch_ranks([self.job, "train", *argv], num_ranks)
        from flatout.ranks import StopSignals
        from flatout.runs.budget import Spending
        from flatout.runs.ends import OnDone, RunLog

        # Imported here, where a signal simply ends the process. Inside StopSignals it raises an exception, which an
        # import may swallow.
        resolve_name(self.trainer)
        times.name_all_so_far("imports")
        spending = Spending(options.price, options.budget)
        with StopSignals(), OnDone(options.on_done, spending) as done:
            self.run_training(options, typed, [done, RunLog()], spending)
        return 0

    def parser(self, prog: str) -> FlagParser:
        """The parser of the training flags, for a command called `prog`."""
        parser, defaults = FlagParser(prog, self.description, self.epilog), self.model()
        own, of_runs = own_and_run_options(self.model)
        parser.add_flags("training options", flags_of(self.model, own, converts=False), defaults)
        parser.add_flags("run options, the same for every job", flags_of(self.model, of_runs, converts=False), defaults)
        return parser

    def options(self, given: Given) -> Any:
        """Options from values by name; ConfigError lists every mistake."""
        from flatout.config import build_config  # imported late, because help does not need pydantic

        return build_config(dict(given), self.model)

    def parse(self, argv: Sequence[str], prog: str) -> tuple[Any, frozenset[str]]:
        """The options of a command line, and the names of those that were given on it."""
        typed = self.parser(prog).parse_typed(argv)
        return self.options(from_environment(os.environ) | typed), frozenset(typed)

    def check_early(self, options: Any) -> None:
        """Check what can be checked before torch is imported, which takes longer."""

    def images_per_step(self, options: Any) -> int:
        """Samples per step, for `flatout profile`."""
        return 1

    def ranks_to_start(self, options: RunOptions, typed: Collection[str]) -> int:
        """Number of processes to start: one per GPU in `--device 0,1`; 1 if a launcher has started them already.

        A resumed run is started on its own devices, unless the command line gives others.
        """
        if has_launcher() or options.profile:
            return 1
        device = options.device
        if options.resume and "device" not in typed:
            device = self._device_of_run(options)
        if "," not in device:
            return 1
        from flatout.ranks import choose_devices

        return len(choose_devices(device))

    def _device_of_run(self, options: RunOptions) -> str:
        """`--device` of the run to resume; what is wrong with that run, the training reports."""
        from flatout.yaml_strict import load_yaml

        with suppress(FlatoutError):
            checkpoint = checkpoint_to_resume(options)
            assert checkpoint is not None
            stored = load_yaml(run_of(checkpoint) / self.options_file)
            return str(stored["device"]) if isinstance(stored, dict) and "device" in stored else ""
        return ""

    def run_training(
        self, options: Any, typed: frozenset[str], callbacks: "list[Callback]", spending: "Spending"
    ) -> None:  # fmt: skip
        """Train; with `--profile`, also print and save a profile of the first steps, of the first rank."""
        if not options.profile or not is_first_rank():
            self.train(options, callbacks, spending=spending, typed=typed)
            return
        from flatout.profiler import EngineObservation
        from flatout.ranks import read_world
        from flatout.runs.profiled import ObservedBatches
        from flatout.runs.recipe import Seams

        observation = EngineObservation(num_steps=options.profile)
        num_ranks = read_world(options.local_rank).size

        def on_batch(num_images: int) -> None:
            # Counted, because a resumed run has its own batch size.
            if not observation.is_over:
                observation.batch_taken(num_images * num_ranks)

        seams = Seams(batches=lambda batches: ObservedBatches(batches, on_batch))
        with observation.observing():
            result = self.train(options, callbacks, spending=spending, typed=typed, seams=seams)
        if result is None:
            return  # the options requested only a report
        from flatout.runs.times import ledger_lines, read_times

        if observation.is_complete:
            print(observation.profile.text())
            print(f"Saved as a page: {observation.profile.save(result.folder)}")
        else:
            print(f"--profile: {observation.too_short} Train more epochs or images, or use a smaller batch.")
        print("\n".join(["", "The whole run:", *ledger_lines(read_times(result.folder))]))

    def train(self, options: Any, callbacks: "Sequence[Callback]" = (), **more: Any) -> Any:
        """Train with the recipe or function that `trainer` names."""
        found = resolve_name(self.trainer)
        if not isinstance(found, type):
            return found(options, callbacks, **more)
        from flatout.runs import run

        return run.train(found, options, callbacks, **more)
