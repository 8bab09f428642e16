"""flatout yolo train, train.py and train_aux.py: train a detector."""

import os
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from flatout.cli import FlagParser
from flatout.runs import Given, TrainCommand
from flatout.yolo.commands.flags import options_from, refuse_what_is_not_built, train_parser
from flatout.yolo.options import TrainOptions

if TYPE_CHECKING:
    from flatout.engine import Callback
    from flatout.runs import Spending


class YoloCommand(TrainCommand):
    """YOLOv7's flags with their abbreviations, its environment variables, and `--evolve`."""

    def parser(self, prog: str) -> FlagParser:
        called = PurePath(sys.argv[0]).name
        return train_parser(called if called in ("train.py", "train_aux.py") else prog)

    def options(self, given: Given) -> TrainOptions:
        options = options_from(given, os.environ)
        refuse_what_is_not_built(options)
        return options

    def images_per_step(self, options: TrainOptions) -> int:
        return options.batch_size

    def look(self, options: TrainOptions) -> None:
        """Refuse a data set that cannot be trained on before torch is imported, which takes longer than looking at it.

        The training opens the data set itself, by the same rules; the label cache spares it a second scan. It alone
        looks where more has to happen first or afterwards: a resumed run names its data in its folder, a mirror may
        hold a run that is over, the command of --on-done hears of every end, and ranks of a launcher tell each other.
        """
        if options.resume or options.mirror or options.on_done or options.diagnose_compile:
            return
        if "WORLD_SIZE" in os.environ:
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

    def ranks_to_start(self, options: Any) -> int:
        return 1 if options.generations else super().ranks_to_start(options)

    def answer(
        self, options: TrainOptions, typed: frozenset[str], callbacks: "list[Callback]", spending: "Spending"
    ) -> None:  # fmt: skip
        if not options.generations:
            super().answer(options, typed, callbacks, spending)
            return
        from flatout.yolo.evolve import evolve

        evolve(options, callbacks[:1], spending=spending)


COMMAND = YoloCommand(
    "yolo", TrainOptions, "flatout.yolo.train:train", profile="flatout.yolo.profile:YoloTraining"
)  # fmt: skip
main = COMMAND.main
