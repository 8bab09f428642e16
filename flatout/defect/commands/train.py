"""flatout defect train: train a network on defect-free images."""

from flatout.cli import TRAINING_EXIT_CODES, FlagParser, flags_of
from flatout.defect.commands.flags import add_config, options_from
from flatout.defect.options import TrainOptions
from flatout.runs import Given, TrainCommand, own_and_run_options

DESCRIPTION = """\
Train a segmentation network on defect-free images with the planes target, ref1 and ref2. Defects are painted during
training; decoded images are kept in memory, in GPU memory if there is a GPU. When interrupted, the training saves; the
same command then continues it.
"""
EPILOG = f"""\
examples:
  flatout defect demo-data demo && flatout defect train --training_dataset_path demo --base_width 16 --epochs 3
  flatout defect train --config strips.yaml --epochs 100 --lr 1e-4
  flatout defect train --training_dataset_path R/train/good/ --amplitudes 8:12 60:90 --partial_leak_prob 0.4
  flatout defect train --config strips.yaml --device 0,1            two GPUs; torchrun works too

Every flag can also be set in the YAML file, under the same name. docs/defect.md explains the settings.

{TRAINING_EXIT_CODES}"""


class DefectCommand(TrainCommand):
    """`flatout defect train`. Flags of the job are spelled with underscores, flags of runs with dashes."""

    def parser(self, prog: str) -> FlagParser:
        parser, defaults = FlagParser(prog, self.description, self.epilog), self.model()
        add_config(parser)
        own, of_runs = own_and_run_options(self.model)
        parser.add_flags("training options", flags_of(self.model, own, converts=False, underscores=True), defaults)
        parser.add_flags("run options, the same for every job", flags_of(self.model, of_runs, converts=False), defaults)
        return parser

    def options(self, given: Given) -> TrainOptions:
        return options_from(given, TrainOptions)

    def images_per_step(self, options: TrainOptions) -> int:
        return options.bs


COMMAND = DefectCommand(
    "defect",
    TrainOptions,
    "flatout.defect.train:train",
    description=DESCRIPTION,
    epilog=EPILOG,
    profile="flatout.defect.profile:DefectTraining",
)
main = COMMAND.main
