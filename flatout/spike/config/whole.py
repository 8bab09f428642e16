"""A whole file: all sections together."""

from dataclasses import dataclass, field

from flatout.spike.config.data import DataConfig
from flatout.spike.config.loader import LoaderConfig
from flatout.spike.config.loss import LossConfig
from flatout.spike.config.network import ModelConfig
from flatout.spike.config.outputs import LogConfig, TestConfig
from flatout.spike.config.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """A whole file."""

    DATA: DataConfig
    """What is trained on."""
    TRAIN: TrainConfig
    """How it is trained."""
    DATALOADER: LoaderConfig | None = None
    """Who loads, and how far ahead."""
    MODEL: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    LOSS: LossConfig = field(default_factory=LossConfig)
    """What a wrong pixel costs."""
    LOG: LogConfig = field(default_factory=LogConfig)
    """What is written, and how often."""
    TEST: TestConfig = field(default_factory=TestConfig)
    """Evaluation and inference."""
    SEED: int = 123
    """Of first weights, order, crops and flips."""

    @property
    def loader(self) -> LoaderConfig:
        """The section, or what the old keys under TRAIN say."""
        if self.DATALOADER is not None:
            return self.DATALOADER
        train = self.TRAIN
        return LoaderConfig(
            TRAIN_WORKERS=train.NUM_WORKERS,
            VAL_WORKERS=train.VAL_NUM_WORKERS,
            TRAIN_PREFETCH_FACTOR=train.PREFETCH_FACTOR,
            VAL_PREFETCH_FACTOR=train.VAL_PREFETCH_FACTOR,
        )
