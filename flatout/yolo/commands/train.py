"""`flatout yolo train`, train.py and train_aux.py: train a detector."""

import os
import sys
from collections.abc import Collection
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from flatout.cli import FlagParser
from flatout.ranks import has_launcher
from flatout.runs import Given, TrainCommand
from flatout.yolo.commands.flags import options_from, refuse_unsupported, train_parser
from flatout.yolo.options import OPTIONS_NAME, TrainOptions

if TYPE_CHECKING:
    from flatout.engine import Callback
    from flatout.runs import Spending


class YoloCommand(TrainCommand):
    """Training with YOLOv7's flags, abbreviations and environment variables, and with `--evolve`."""

    def parser(self, prog: str) -> FlagParser:
        called = PurePath(sys.argv[0]).name
        return train_parser(called if called in ("train.py", "train_aux.py") else prog)

    def options(self, given: Given) -> TrainOptions:
        options = options_from(given, os.environ)
        refuse_unsupported(options)
        return options

    def images_per_step(self, options: TrainOptions) -> int:
        return options.batch_size

    def check_early(self, options: TrainOptions) -> None:
        """Refuse an unusable data set before torch is imported, which takes longer than checking the data.

        The training uses the scan that is made here. The early check is skipped where it must not come first: a resumed
        run takes its data from its folder, a mirror may hold a finished run, --on-done must run after every end, and
        the ranks of a launcher must fail together.
        """
        if options.resume or options.mirror or options.on_done or options.diagnose_compile or has_launcher():
            return
        from flatout.yolo.data.data_yaml import require_valid
        from flatout.yolo.data.open_data import open_data_set
        from flatout.yolo.data.open_set import check_training_splits
        from flatout.yolo.find_file import find_data

        data = require_valid(open_data_set(find_data(options.data)))
        check_training_splits(data, options.split_config())

    def ranks_to_start(self, options: Any, typed: Collection[str]) -> int:
        return 1 if options.generations else super().ranks_to_start(options, typed)

    def run_training(
        self, options: TrainOptions, typed: frozenset[str], callbacks: "list[Callback]", spending: "Spending"
    ) -> None:  # fmt: skip
        if not options.generations:
            super().run_training(options, typed, callbacks, spending)
            return
        from flatout.yolo.evolve import evolve

        evolve(options, callbacks[:1], spending=spending)


COMMAND = YoloCommand(
    "yolo",
    TrainOptions,
    "flatout.yolo.train:train",
    profile="flatout.yolo.profile:YoloTraining",
    options_file=OPTIONS_NAME,
)
main = COMMAND.main
