"""Section TRAIN: how long, how fast, and with what optimizer."""

from dataclasses import dataclass
from typing import Literal

from flatout.errors import ConfigError
from flatout.spike.config.loader import WorkerCount


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer."""

    LR: float
    """Learning rate after warm-up."""
    TYPE: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` means adamw, with a note."""
    BETAS: tuple[float, float] = (0.9, 0.99)
    """Of AdamW."""
    WEIGHT_DECAY: float = 1e-4
    """Of AdamW."""


@dataclass(frozen=True, kw_only=True)
class SchedConfig:
    """The learning rate over time."""

    TYPE: Literal["cosine"] = "cosine"
    """Half a cosine to 0."""
    WARMUP_STEPS: int = 0
    """Optimizer steps of linear warm-up."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How it is trained."""

    OPTIM: OptimConfig
    """AdamW."""
    EPOCHS: int | None = None
    """Passes over the training clips; wins over TOTAL_STEPS."""
    TOTAL_STEPS: int | None = None
    """Optimizer steps; rounded up to whole epochs."""
    BATCH_SIZE: int = 4
    """Clips per GPU and micro-batch."""
    VAL_BATCH_SIZE: int = 1
    """Clips per step of a validation."""
    GRADIENT_ACCUMULATION_STEPS: int = 1
    """Micro-batches per optimizer step; those left over at the end of an epoch are not trained."""
    MAX_GRAD_NORM: float | None = 1.0
    """Gradients are clipped to this norm; null: never."""
    SCHED: SchedConfig = SchedConfig()
    """Cosine with warm-up."""
    AMP: Literal["auto", "bf16", "fp16", "off"] = "auto"
    """Number format; auto: bf16 where the GPU computes in it, else fp16; off on a CPU."""
    EMA_DECAY: float = 0.999
    """Of the moving average that is validated and kept."""
    COMPILE_MODEL: bool = False
    """torch.compile."""
    CUDA_GRAPHS: bool = True
    """Run a step as one CUDA graph, where there is one GPU."""
    DEVICE_RESIDENT: bool = False
    """Keep frames and packed spikes in GPU memory (what does not fit: pinned RAM), and crop, unpack and bin there."""
    RESUME_FROM_CHECKPOINT: bool = False
    """Continue CHECKPOINT_PATH."""
    CHECKPOINT_PATH: str | None = None
    """A file or run folder to continue."""
    NUM_WORKERS: WorkerCount | None = None
    """Old key: workers per GPU where there is no DATALOADER section."""
    VAL_NUM_WORKERS: WorkerCount | None = None
    """Old key, as NUM_WORKERS."""
    PREFETCH_FACTOR: int = 4
    """Old key, as NUM_WORKERS."""
    VAL_PREFETCH_FACTOR: int = 2
    """Old key, as NUM_WORKERS."""

    def __post_init__(self) -> None:
        if self.EPOCHS is None and self.TOTAL_STEPS is None:
            raise ConfigError("set EPOCHS or TOTAL_STEPS")
        for name in ("EPOCHS", "TOTAL_STEPS", "BATCH_SIZE", "VAL_BATCH_SIZE", "GRADIENT_ACCUMULATION_STEPS"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if not 0 <= self.EMA_DECAY < 1:
            raise ConfigError(f"EMA_DECAY={self.EMA_DECAY} must be from 0 to below 1")
