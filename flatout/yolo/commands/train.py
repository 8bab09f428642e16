"""flatout yolo train, train.py and train_aux.py: train a detector."""

import os
import sys
from pathlib import PurePath

from flatout.yolo.commands.log_lines import show_log
from flatout.yolo.compat.flags import train_options, train_parser
from flatout.yolo.compat.not_built import refuse_what_is_not_built
from flatout.yolo.options import TrainOptions


def main(argv: list[str]) -> int:
    """Train; returns the exit code."""
    called = PurePath(sys.argv[0]).name
    parser = train_parser(called if called in ("train.py", "train_aux.py") else "flatout yolo train")
    options = train_options(parser.parse_args(argv), os.environ)
    refuse_what_is_not_built(options)
    show_log(only_warnings=os.environ.get("RANK", "0") not in ("", "0"))
    # Now, because help and mistakes are answered without torch.
    from flatout.yolo.train import train

    if options.profile:
        return _profiled(options)
    train(options)
    return 0


def _profiled(options: TrainOptions) -> int:
    """Train, and say what the first steps were like."""
    from flatout.profiler.engine_steps import EngineObservation
    from flatout.yolo.train import train

    observation = EngineObservation(images_per_step=options.batch_size, num_steps=options.profile)
    with observation.observing():
        result = train(options)
    if result is not None and observation.is_complete:
        print(observation.profile.text())
        print(f"The same as a page: {observation.profile.save(result.folder)}")
    return 0
