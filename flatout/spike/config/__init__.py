"""The YAML of a spike training: every key, its type, default and meaning. docs/spike.md shows these classes as a table.

Upper-case sections as in the guide that researchers know, one file each. Keys of the early VRT-based code that mean
nothing to our network are accepted and named in a note; anything else unknown is an error.
"""

from flatout.spike.config.data import AugmentConfig, DataConfig, NormConfig
from flatout.spike.config.load import load_config, notes, plain
from flatout.spike.config.loader import LoaderConfig
from flatout.spike.config.loss import CharbonnierConfig, LossConfig, PerceptualConfig
from flatout.spike.config.network import ModelConfig
from flatout.spike.config.outputs import LogConfig, TestConfig
from flatout.spike.config.training import OptimConfig, SchedConfig, TrainConfig
from flatout.spike.config.whole import SpikeConfig

__all__ = [
    "AugmentConfig",
    "CharbonnierConfig",
    "DataConfig",
    "LoaderConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "NormConfig",
    "OptimConfig",
    "PerceptualConfig",
    "SchedConfig",
    "SpikeConfig",
    "TestConfig",
    "TrainConfig",
    "load_config",
    "notes",
    "plain",
]
