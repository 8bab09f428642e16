"""Sections LOG and TEST: what is written and how often, and how networks are judged."""

from dataclasses import dataclass
from typing import Literal

from flatout.spike.config.unused import Extra


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written, and how often."""

    SAVE_DIR: str = "runs/spike/exp"
    """Run folder; a finished one gets a number: exp, exp2, ..."""
    TENSORBOARD: bool = True
    """Event files, where TensorBoard is installed."""
    VAL_EVERY_STEPS: int | None = None
    """Optimizer steps between two validations, also within an epoch; unset: after every epoch. The end is always
    validated."""
    PROGRESS_EVERY_STEPS: int = 20
    """Micro-batches between two looks at the numbers."""
    LANG: Literal["en", "zh"] = "en"
    """Of the block that says how data is loaded."""
    ENABLE_TIMING_LOG: Extra = None
    """Accepted; times are always measured: log.jsonl and `flatout profile`."""
    TIMING_CONSOLE: Extra = None
    """As ENABLE_TIMING_LOG."""
    TIMING_FILE: Extra = None
    """As ENABLE_TIMING_LOG."""
    TIMING_CONSOLE_INTERVAL: Extra = None
    """As ENABLE_TIMING_LOG."""
    TIMING_FILE_INTERVAL: Extra = None
    """As ENABLE_TIMING_LOG."""


@dataclass(frozen=True, kw_only=True)
class TestConfig:
    """Evaluation and inference."""

    __test__ = False  # pytest: a class of ours, not of tests

    BATCH_SIZE: int = 1
    """Clips per step."""
    NUM_WORKERS: int = 2
    """Who load them."""
    TILE_SIZE: int = 256
    """Frames larger than this are worked on in tiles; 0: never."""
    TILE_OVERLAP: int = 32
    """Pixels that neighbouring tiles share."""
