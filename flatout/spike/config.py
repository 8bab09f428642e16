"""The YAML file of a spike training: every key, its type, default and meaning. docs/spike.md shows them as a table.

Sections and keys are upper-case, as in the original guide. Keys of the early VRT-based code that have no meaning for
this network are accepted with a note; any other unknown key is an error.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from flatout.config import build_config
from flatout.errors import ConfigError
from flatout.spike.data.stream_layout import Format, StreamSettings
from flatout.yaml_strict import load_yaml, parse_yaml

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Mean and standard deviation of voxel values, for `VOXEL_NORM: meanstd`."""

    MEAN: float = 0.0
    """Mean that is subtracted from every voxel value."""
    STD: float = 1.0
    """Standard deviation by which the difference is divided."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Probabilities of the augmentations of a training clip, applied in this order and equally to all its frames."""

    REVERSE: float = 0.0
    """Probability of reversing time: the order of frames and of bins."""
    HFLIP: float = 0.5
    """Probability of a horizontal flip."""
    VFLIP: float = 0.5
    """Probability of a vertical flip."""
    ROT90: float = 0.5
    """Probability of a counter-clockwise rotation by 90 degrees; only of crops that are square in spike pixels, too."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data set, and how its files are read."""

    ROOT: str
    """Root of the data set, as written by `flatout spike prepare`."""
    TRAIN_SPLIT: str = "train"
    """Folder of the training sequences."""
    VAL_SPLIT: str = "val"
    """Folder of the validation sequences; if it does not exist, `val`, then `test`; without either, no validation."""
    CROP_SIZE: int | None = 256
    """Side of a training crop in RGB pixels; null: whole frames. Validation always uses whole frames."""
    CLIP_LEN: int = 5
    """Frames per clip."""
    K: int | None = None
    """Old name of NUM_VOXEL_BINS; ignored with a warning if NUM_VOXEL_BINS has another value."""
    NUM_VOXEL_BINS: int | None = None
    """Number of spike channels: bins of voxels, or channels of the other representations. Unset: K, or 5 without K."""
    USE_PRECOMPUTED_VOXELS: bool = False
    """Read the voxels that `flatout spike cache` wrote, instead of the streams."""
    VOXEL_CACHE_DIRNAME: str = "spike_vox"
    """Folder of precomputed voxels in each sequence."""
    SPIKE_DIR: str = "spike"
    """Folder of spike streams (.dat, .npz, .npy or .h5) in each sequence."""
    USE_RAM_CACHE: bool = False
    """Decode frames once and keep them, with the packed spikes, in memory that all workers and ranks share."""
    CACHE_SIZE_GB: float = 4.0
    """Maximum size of that cache, for the whole machine."""
    CACHE_SCOPE: Literal["node", "process"] = "node"
    """`node`: one cache for the machine. `process`: each worker keeps its own recently used files; worse, see
    docs/store.md."""
    IMAGE_EXTS: tuple[str, ...] = (".png", ".jpg", ".jpeg", ".bmp")
    """File name extensions of frames."""
    ALIGN_LOG_PATHS: tuple[str, ...] = ()
    """CSV files with exposure times, columns frame_idx,t0,t1,event_count,seq; shown by `flatout spike check`."""
    NORM: NormConfig = NormConfig()
    """Mean and standard deviation for `VOXEL_NORM: meanstd`."""
    SPIKE_FORMAT: Format = "auto"
    """`packed` (8 pixels per byte), `uint8` (0 or 1), `bytes` (any value, to repeat runs of the early code), or `auto`:
    decided by content."""
    SPIKE_H: int | None = None
    """Height of spike frames; set together with SPIKE_W. Unset: from config.yaml beside the spikes, else 360 x 640."""
    SPIKE_W: int | None = None
    """Width of spike frames; set together with SPIKE_H."""
    SPIKE_T: int | None = None
    """Spike frames per file, if all files have the same number; a file with another number is then an error."""
    SPIKE_FLIPUD: bool | None = None
    """Whether rows are stored bottom-up. Unset: true for packed files, else false."""
    SPIKE_TRIM: tuple[int, int] = (0, 0)
    """Spike frames to drop at the beginning and at the end of each file."""
    SPIKE_REPR: Literal["voxel", "window", "tfp"] = "voxel"
    """What the network gets: `voxel`, spike counts per bin; `window`, the middle spike frames; `tfp`, short exposures
    (texture from playback)."""
    TFP_HALF_WINDOW: int = 20
    """With `tfp`: spike frames on each side of the middle of a short exposure."""
    VOXEL_NORM: Literal["none", "rate", "log1p", "meanstd"] = "none"
    """`none`: counts; `rate`: counts / spike frames of the bin (recommended, because streams differ in length);
    `log1p`: ln(1 + count); `meanstd`: (count - MEAN) / STD."""
    VOXEL_GAIN: bool = False
    """Multiply spikes by mean brightness / mean rate of the clip, which makes them independent of the camera's
    threshold."""
    VAL_CLIP_STRIDE: int | Literal["clip"] = "clip"
    """`clip`: every frame is scored once. 1: a clip begins at every frame, as in the early code."""
    AUGMENT: AugmentConfig = AugmentConfig()
    """Probabilities of flips, rotation and time reversal of training clips."""

    def __post_init__(self) -> None:
        for name in ("CROP_SIZE", "CLIP_LEN", "K", "NUM_VOXEL_BINS", "TFP_HALF_WINDOW"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if self.VAL_CLIP_STRIDE not in ("clip", 1):
            raise ConfigError(f"VAL_CLIP_STRIDE={self.VAL_CLIP_STRIDE} must be 'clip' or 1")
        if min(self.SPIKE_TRIM) < 0:
            raise ConfigError(f"SPIKE_TRIM={list(self.SPIKE_TRIM)} must not be negative")
        if self.CACHE_SIZE_GB < 0:
            raise ConfigError(f"CACHE_SIZE_GB={self.CACHE_SIZE_GB} must not be negative")
        self.stream_settings  # noqa: B018  raises ConfigError if only one of SPIKE_H and SPIKE_W is set

    @property
    def channels(self) -> int:
        """Number of spike channels."""
        return self.NUM_VOXEL_BINS or self.K or 5

    @property
    def stream_settings(self) -> StreamSettings:
        """The keys that describe spike files."""
        return StreamSettings(
            format=self.SPIKE_FORMAT,
            height=self.SPIKE_H,
            width=self.SPIKE_W,
            frames=self.SPIKE_T,
            flipud=self.SPIKE_FLIPUD,
        )


# Section DATALOADER

WorkerCount = int | str
"""A number, `auto`, or a share of the cores like `cpu*0.9`."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Workers and prefetching."""

    TOTAL_WORKERS: WorkerCount = "auto"
    """Workers for all GPUs together: a number, `auto` (80 % of the cores), or a share of the cores like `cpu*0.9`."""
    TRAIN_WORKERS: WorkerCount | None = None
    """Training workers per GPU; unset or `auto`: TOTAL_WORKERS / GPUs."""
    VAL_WORKERS: WorkerCount | None = None
    """Validation workers per GPU; unset: half as many as for training."""
    TRAIN_PREFETCH_FACTOR: int = 4
    """Minimum number of training batches to keep ready; for small batches more are kept, so that all workers are
    busy."""
    VAL_PREFETCH_FACTOR: int = 2
    """Minimum number of validation batches to keep ready."""
    PIN_MEMORY: bool = True
    """Accepted, but has no effect: batches for a GPU are always in pinned memory."""
    PERSISTENT_WORKERS: bool = True
    """False: workers end after each epoch, which saves memory but slows the start of the next."""
    CPU_CORES: int | None = None
    """Number of cores to plan for, instead of those that this process may use."""


# Section LOSS


@dataclass(frozen=True, kw_only=True)
class CharbonnierConfig:
    """The Charbonnier loss: mean of sqrt(difference^2 + DELTA^2)."""

    DELTA: float = 1e-3
    """Differences well below it contribute little to the loss."""
    WEIGHT: float = 1.0
    """Weight of this term."""


@dataclass(frozen=True, kw_only=True)
class PerceptualConfig:
    """The perceptual loss: difference of VGG-16 features, whose weights must be provided."""

    WEIGHTS: str | None = None
    """File with VGG-16 weights under torchvision's names (features.N.weight), .safetensors or .pth; unset: no
    perceptual loss."""
    LAYERS: tuple[str, ...] = ("relu3_3",)
    """Layers whose features are compared."""
    WEIGHT: float = 0.1
    """Weight of this term."""
    MEAN: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of RGB values that the VGG-16 weights expect."""
    STD: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviation of RGB values that the VGG-16 weights expect."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The terms of the loss."""

    CHARBONNIER: CharbonnierConfig = CharbonnierConfig()
    """The main loss."""
    VGG_PERCEPTUAL: PerceptualConfig = PerceptualConfig()
    """The perceptual loss; off unless weights are given."""


# Section TRAIN


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer."""

    LR: float
    """Learning rate after warm-up."""
    TYPE: Literal["adamw", "adamw8bit"] = "adamw"
    """Kind of optimizer; `adamw8bit` is accepted with a note and means adamw."""
    BETAS: tuple[float, float] = (0.9, 0.99)
    """Betas of AdamW."""
    WEIGHT_DECAY: float = 1e-4
    """Weight decay of AdamW; applied to the weights of convolutions only."""


@dataclass(frozen=True, kw_only=True)
class SchedConfig:
    """The learning-rate schedule."""

    TYPE: Literal["cosine"] = "cosine"
    """Kind of schedule: half a cosine down to 0."""
    WARMUP_STEPS: int = 0
    """Optimizer steps of linear warm-up."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch size, optimizer and speed of a training."""

    OPTIM: OptimConfig
    """The optimizer, AdamW."""
    EPOCHS: int | None = None
    """Passes over the training clips; takes precedence over TOTAL_STEPS."""
    TOTAL_STEPS: int | None = None
    """Number of optimizer steps, rounded up to whole epochs."""
    BATCH_SIZE: int = 4
    """Clips per GPU and micro-batch."""
    VAL_BATCH_SIZE: int = 1
    """Clips per validation step."""
    GRADIENT_ACCUMULATION_STEPS: int = 1
    """Micro-batches per optimizer step; micro-batches that are left over at the end of an epoch are not trained."""
    MAX_GRAD_NORM: float | None = 1.0
    """Norm to which gradients are clipped; null: no clipping."""
    SCHED: SchedConfig = SchedConfig()
    """The learning-rate schedule, cosine with warm-up."""
    AMP: Literal["auto", "bf16", "fp16", "off"] = "auto"
    """Mixed precision; `auto`: bf16 on a GPU that supports it, fp16 on other GPUs, off on a CPU."""
    EMA_DECAY: float = 0.999
    """Decay of the moving average of the weights, which is what is validated and saved."""
    COMPILE_MODEL: bool = False
    """Use torch.compile."""
    CUDA_GRAPHS: bool = True
    """Run each step as one CUDA graph when training on a single GPU."""
    DEVICE_RESIDENT: bool = False
    """Keep frames and packed spikes in GPU memory (pinned RAM for what does not fit), and crop, unpack and bin on the
    GPU."""
    RESUME_FROM_CHECKPOINT: bool = False
    """Resume the run in CHECKPOINT_PATH."""
    CHECKPOINT_PATH: str | None = None
    """Checkpoint file or run folder to resume from."""
    NUM_WORKERS: WorkerCount | None = None
    """Old key: training workers per GPU; used only without a DATALOADER section."""
    VAL_NUM_WORKERS: WorkerCount | None = None
    """Old key: validation workers per GPU; used only without a DATALOADER section."""
    PREFETCH_FACTOR: int = 4
    """Old key: training batches to keep ready; used only without a DATALOADER section."""
    VAL_PREFETCH_FACTOR: int = 2
    """Old key: validation batches to keep ready; used only without a DATALOADER section."""

    def __post_init__(self) -> None:
        if self.EPOCHS is None and self.TOTAL_STEPS is None:
            raise ConfigError("set EPOCHS or TOTAL_STEPS")
        for name in ("EPOCHS", "TOTAL_STEPS", "BATCH_SIZE", "VAL_BATCH_SIZE", "GRADIENT_ACCUMULATION_STEPS"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if not 0 <= self.EMA_DECAY < 1:
            raise ConfigError(f"EMA_DECAY={self.EMA_DECAY} must be from 0 to below 1")


# Keys of the early VRT-based code that have no meaning here: accepted with a note, so that old files keep working

UnusedValue = dict[str, Any] | list[Any] | str | int | float | bool | None
"""Any value, for keys that are accepted and not used."""


# Section MODEL


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a U-Net of gated blocks, which spikes join by a branch or at its first layer."""

    KIND: Literal["branch", "stacked"] = "branch"
    """`branch`: the U-Net has the resolution of the frames, and a branch of spikes joins at half of it. `stacked`:
    frames are rearranged to the resolution of spikes (2 x 2 pixels become channels) and processed together with the
    spikes from the first layer on; use many bins with it, such as 56 for 56 spike frames."""
    USE_SPIKE: bool = True
    """False: use frames only, to measure how much the spikes contribute."""
    WIDTH: int = 32
    """Channels at the first level; they double at every level."""
    ENC_BLOCKS: tuple[int, ...] = (1, 1, 1, 28)
    """Blocks per level of the encoder."""
    MIDDLE_BLOCKS: int = 1
    """Blocks at the coarsest level."""
    DEC_BLOCKS: tuple[int, ...] = (1, 1, 1, 1)
    """Blocks per level of the decoder."""
    SPIKE_BLOCKS: int = 2
    """Blocks of the spike branch; `stacked` has none."""
    TEMPORAL: bool = False
    """Mix neighbouring frames of a clip, at half resolution and at the coarsest level."""
    CHANNELS_LAST: bool = True
    """Use the channels_last memory format."""
    VRT_CFG: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""
    CHANNELS_PER_SCALE: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""
    LAYERS: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""
    VRT: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""
    SPIKE_ENCODER: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""
    SPIKE_TSA: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""
    FUSE: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""
    WINDOW_SIZE: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""
    IMG_SIZE_H: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""
    IMG_SIZE_W: UnusedValue = None
    """Key of the early VRT backbone; accepted and not used."""

    def __post_init__(self) -> None:
        least = 2 if self.KIND == "branch" else 1
        if len(self.ENC_BLOCKS) != len(self.DEC_BLOCKS) or len(self.ENC_BLOCKS) < least:
            reason = ", because the spike branch joins at the second" if least == 2 else ""
            raise ConfigError(
                f"ENC_BLOCKS={list(self.ENC_BLOCKS)} and DEC_BLOCKS={list(self.DEC_BLOCKS)} must be equally long, with "
                f"at least {least} level{'s' if least > 1 else ''}{reason}"
            )
        if self.WIDTH < 2 or self.WIDTH % 2:
            raise ConfigError(f"WIDTH={self.WIDTH} must be an even number of 2 or more")


# Sections LOG and TEST


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The run folder, and how often to validate and report."""

    SAVE_DIR: str = "runs/spike/exp"
    """Run folder; if it holds a finished run, a number is added: exp, exp2, ..."""
    TENSORBOARD: bool = True
    """Write TensorBoard event files, if TensorBoard is installed."""
    VAL_EVERY_STEPS: int | None = None
    """Optimizer steps between two validations, also within an epoch; unset: after every epoch. The end of a training is
    always validated."""
    PROGRESS_EVERY_STEPS: int = 20
    """Micro-batches between two lines of the log."""
    LANG: Literal["en", "zh"] = "en"
    """Language of the summary of data loading that is logged at the start."""
    ENABLE_TIMING_LOG: UnusedValue = None
    """Accepted and not used: times are always measured, see log.jsonl and `flatout profile`."""
    TIMING_CONSOLE: UnusedValue = None
    """Accepted and not used, like ENABLE_TIMING_LOG."""
    TIMING_FILE: UnusedValue = None
    """Accepted and not used, like ENABLE_TIMING_LOG."""
    TIMING_CONSOLE_INTERVAL: UnusedValue = None
    """Accepted and not used, like ENABLE_TIMING_LOG."""
    TIMING_FILE_INTERVAL: UnusedValue = None
    """Accepted and not used, like ENABLE_TIMING_LOG."""


@dataclass(frozen=True, kw_only=True)
class TestConfig:
    """Evaluation and inference."""

    __test__ = False  # not a test class for pytest

    BATCH_SIZE: int = 1
    """Clips per step."""
    NUM_WORKERS: int = 2
    """Worker processes that load clips."""
    TILE_SIZE: int = 256
    """Side of a tile in pixels: larger frames are processed in tiles; 0: never."""
    TILE_OVERLAP: int = 32
    """Pixels that neighbouring tiles share."""


# The whole file


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """The configuration of a spike training: all sections of the YAML file."""

    DATA: DataConfig
    """The data set, and how its files are read."""
    TRAIN: TrainConfig
    """Length, batch size, optimizer and speed of the training."""
    DATALOADER: LoaderConfig | None = None
    """Workers and prefetching."""
    MODEL: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    LOSS: LossConfig = field(default_factory=LossConfig)
    """The terms of the loss."""
    LOG: LogConfig = field(default_factory=LogConfig)
    """The run folder, and how often to validate and report."""
    TEST: TestConfig = field(default_factory=TestConfig)
    """Evaluation and inference."""
    SEED: int = 123
    """Seed of the initial weights, the order of clips, crops and augmentations."""

    @property
    def loader(self) -> LoaderConfig:
        """The section DATALOADER; without it, the old keys under TRAIN."""
        if self.DATALOADER is not None:
            return self.DATALOADER
        train = self.TRAIN
        return LoaderConfig(
            TRAIN_WORKERS=train.NUM_WORKERS,
            VAL_WORKERS=train.VAL_NUM_WORKERS,
            TRAIN_PREFETCH_FACTOR=train.PREFETCH_FACTOR,
            VAL_PREFETCH_FACTOR=train.VAL_PREFETCH_FACTOR,
        )


# From a YAML file and `--set` to a config, and back to plain values


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> SpikeConfig:
    """Read a YAML file; a ConfigError lists all wrong, missing and unknown keys at once.

    Overrides have the form that `--set` takes: "TRAIN.EPOCHS=3".
    """
    values = load_yaml(path)
    values = {} if values is None else values
    config = config_from(values, overrides, where=str(path))
    for note in notes(values if isinstance(values, dict) else {}, config):
        logger.warning("%s: %s", path, note)
    return config


def config_from(values: Any, overrides: Sequence[str] = (), *, where: str) -> SpikeConfig:
    """As `load_config`, from the content of a file, which is changed by the overrides."""
    for override in overrides:
        _override(values, override)
    return build_config(values, SpikeConfig, where=where)


def _override(values: Any, text: str) -> None:
    name, equals, value = text.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: write SECTION.KEY=VALUE, as in TRAIN.EPOCHS=3.")
    for key in keys[:-1]:
        values = values.setdefault(key, {}) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"--set {text}: {'.'.join(keys[:-1])} is not a section of the file.")
    values[keys[-1]] = parse_yaml(value, where=f"--set {text}")


UNUSED_KEYS = {
    section: [each.name for each in fields(config) if each.type == UnusedValue]
    for section, config in (("MODEL", ModelConfig), ("LOG", LogConfig))
}
"""Section -> keys that are accepted and not used."""


def notes(values: Mapping[Any, Any], config: SpikeConfig) -> Iterator[str]:
    """Notes on keys of a valid file that are ignored or have an unexpected effect."""
    for section, keys in UNUSED_KEYS.items():
        given = values.get(section) or {}
        # Not those that are null, as in the complete config of a run folder.
        if present := [key for key in keys if given.get(key) is not None]:
            yield f"{section}.{', '.join(present)}: keys of the early VRT-based code, accepted and not used."
    data = config.DATA
    if data.K is not None and data.NUM_VOXEL_BINS is not None and data.NUM_VOXEL_BINS != data.K:
        yield f"DATA.K={data.K} is ignored: NUM_VOXEL_BINS={data.NUM_VOXEL_BINS} sets the number of spike channels."
    if config.TRAIN.OPTIM.TYPE == "adamw8bit":
        yield "TRAIN.OPTIM.TYPE: adamw8bit is not supported; adamw is used, which takes 6 bytes more per parameter."


def plain_values(config: object) -> Any:
    """A config as dicts, lists and plain values, as YAML and JSON need it."""
    if is_dataclass(config):
        return {each.name: plain_values(getattr(config, each.name)) for each in fields(config)}
    return list(config) if isinstance(config, tuple) else config
