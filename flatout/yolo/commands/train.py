"""flatout yolo train, train.py and train_aux.py: train a detector."""

import os
import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING

from flatout.yolo.commands.log_lines import show_log
from flatout.yolo.compat.flags import train_options, train_parser
from flatout.yolo.compat.not_built import refuse_what_is_not_built
from flatout.yolo.options import TrainOptions

if TYPE_CHECKING:
    from flatout.engine.on_done import OnDone
    from flatout.engine.spending import Spending


def main(argv: list[str]) -> int:
    """Train; returns the exit code."""
    called = PurePath(sys.argv[0]).name
    parser = train_parser(called if called in ("train.py", "train_aux.py") else "flatout yolo train")
    options = train_options(parser.parse_args(argv), os.environ)
    refuse_what_is_not_built(options)
    show_log(only_warnings=os.environ.get("RANK", "0") not in ("", "0"))
    _look_at_data(options)
    # Now, because help and mistakes are answered without torch.
    if (num_ranks := _ranks_to_start(options)) > 1:
        from flatout.engine.launch_ranks import launch_ranks

        return launch_ranks(["yolo", "train", *argv], num_ranks)
    from flatout.engine.interrupts import StopSignals
    from flatout.engine.on_done import OnDone
    from flatout.engine.spending import Spending

    # Imported while a signal simply ends the process: from StopSignals on it is an exception, which imports may lose.
    import_module("flatout.yolo.train")
    spending = Spending(options.price, options.budget)
    with StopSignals(), OnDone(options.on_done, spending) as done:
        return _answer(options, spending, done)


def _look_at_data(options: TrainOptions) -> None:
    """Refuse a data set that cannot be trained on before torch is imported, which takes longer than looking at it.

    The training opens the data set itself, by the same rules; the label cache spares it a second scan. It alone looks
    where more has to happen first or afterwards: a resumed run names its data in its folder, a mirror may hold a run
    that is over, the command of --on-done hears of every end, and ranks of a launcher tell each other.
    """
    if options.resume or options.mirror or options.on_done or options.diagnose_compile or "WORLD_SIZE" in os.environ:
        return
    from flatout.yolo.data.data_yaml import without_complaints
    from flatout.yolo.data.open_data import open_data_set
    from flatout.yolo.data.open_set import open_training_splits
    from flatout.yolo.find_file import find_file

    open_training_splits(
        without_complaints(open_data_set(find_file(options.data))),
        strict=options.strict_labels,
        single_class=options.single_cls,
        allow_bad_labels=options.allow_bad_labels,
        silent=True,
    )


def _ranks_to_start(options: TrainOptions) -> int:
    """GPUs that `--device 0,1` names, each of which gets a process; 1 if a launcher has done that, or cannot help."""
    if "," not in options.device or "WORLD_SIZE" in os.environ or options.generations or options.profile:
        return 1
    from flatout.engine.device_choice import choose_devices

    return len(choose_devices(options.device))


def _answer(options: TrainOptions, spending: "Spending", done: "OnDone") -> int:
    from flatout.engine.warnings_kept import KeepWarnings
    from flatout.yolo.evolve import evolve
    from flatout.yolo.train import train

    if options.generations:
        evolve(options, [done], spending=spending)
    elif options.profile:
        return _profiled(options, spending, done)
    else:
        train(options, [done, KeepWarnings()], spending=spending)
    return 0


def _profiled(options: TrainOptions, spending: "Spending", done: "OnDone") -> int:
    """Train, and say what the first steps were like."""
    from flatout.engine.warnings_kept import KeepWarnings
    from flatout.profiler.engine_steps import EngineObservation
    from flatout.yolo.train import train

    observation = EngineObservation(images_per_step=options.batch_size, num_steps=options.profile)
    with observation.observing():
        result = train(options, [done, KeepWarnings()], spending=spending)
    if result is not None and observation.is_complete:
        print(observation.profile.text())
        print(f"The same as a page: {observation.profile.save(result.folder)}")
    elif result is not None:
        print(f"--profile: {observation.too_short} Train more epochs or pictures, or use a smaller --batch-size.")
    return 0
