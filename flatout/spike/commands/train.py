"""flatout spike train: train a deblurring network."""

from flatout.cli import TRAINING_EXIT_CODES
from flatout.errors import ConfigError
from flatout.runs import Given, TrainCommand
from flatout.spike.options import OPTIONS_NAME, TrainOptions

DESCRIPTION = """\
Train a deblurring network as a YAML file describes. When interrupted (Ctrl-C, SIGTERM), the training saves; the same
command then continues it.
"""
EPILOG = f"""\
examples:
  flatout spike train --config data/spike/spike_mini.yaml
  flatout spike train --config my.yaml --set TRAIN.EPOCHS=3 --set MODEL.USE_SPIKE=false
  flatout spike train --config my.yaml --device 0,1,2               three GPUs; torchrun works too

{TRAINING_EXIT_CODES}"""


class SpikeCommand(TrainCommand):
    """`flatout spike train`: needs --config or --resume."""

    def options(self, given: Given) -> TrainOptions:
        options: TrainOptions = super().options(given)
        if not (options.config or options.resume):
            raise ConfigError("--config is missing: give the YAML file of the training, or a run to --resume.")
        return options

    def images_per_step(self, options: TrainOptions) -> int:
        from flatout.spike.config import load_config

        return load_config(options.config, options.set).TRAIN.BATCH_SIZE


COMMAND = SpikeCommand(
    "spike",
    TrainOptions,
    "flatout.spike.train:train_with_options",
    description=DESCRIPTION,
    epilog=EPILOG,
    profile="flatout.spike.profile:SpikeTraining",
    options_file=OPTIONS_NAME,
)
main = COMMAND.main
