"""The YAML of a spike training: every key, its type, default and meaning. docs/spike.md shows these classes as a table.

Upper-case sections as in the guide that researchers know. Keys of the early VRT-based code that mean nothing to our
network are accepted and named in a note; anything else unknown is an error.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from flatout.config import build_config
from flatout.errors import ConfigError
from flatout.spike.data.stream_layout import Format, StreamWishes
from flatout.yaml_strict import load_yaml, parse_yaml

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Mean and deviation of voxels, for `VOXEL_NORM: meanstd`."""

    MEAN: float = 0.0
    """Subtracted from every voxel value."""
    STD: float = 1.0
    """Divides it."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Chances of what is done to a training clip, the same for all its frames and tensors, in this order."""

    REVERSE: float = 0.0
    """Time runs backwards: frames and bins."""
    HFLIP: float = 0.5
    """Left and right change places."""
    VFLIP: float = 0.5
    """Up and down change places."""
    ROT90: float = 0.5
    """A quarter turn, counter-clockwise; square crops only."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    ROOT: str
    """The tree that `flatout spike prepare` makes."""
    TRAIN_SPLIT: str = "train"
    """Folder of the training sequences."""
    VAL_SPLIT: str = "val"
    """Folder of the validation; if it does not exist: `val`, then `test`, then none."""
    CROP_SIZE: int | None = 256
    """Side of a training crop in RGB pixels; null: whole frames. Validation never crops."""
    CLIP_LEN: int = 5
    """Frames per clip."""
    K: int | None = None
    """Old name for the number of spike channels; ignored with a warning where NUM_VOXEL_BINS says otherwise."""
    NUM_VOXEL_BINS: int | None = None
    """Bins, or channels of other representations: what the loader makes and the network takes. 5 if K is unset too."""
    USE_PRECOMPUTED_VOXELS: bool = False
    """Read what `flatout spike cache` wrote instead of the streams."""
    VOXEL_CACHE_DIRNAME: str = "spike_vox"
    """Folder of precomputed voxels in each sequence."""
    SPIKE_DIR: str = "spike"
    """Folder of `.dat` files in each sequence."""
    USE_RAM_CACHE: bool = False
    """Decode frames once and keep them, and the packed spikes, in memory that all workers and ranks share."""
    CACHE_SIZE_GB: float = 4.0
    """What that cache may take, for the whole machine."""
    CACHE_SCOPE: Literal["node", "process"] = "node"
    """`process`: each worker keeps what it used last, with a share of the budget each; worse, see docs/store.md."""
    IMAGE_EXTS: tuple[str, ...] = (".png", ".jpg", ".jpeg", ".bmp")
    """Endings of frames."""
    ALIGN_LOG_PATHS: tuple[str, ...] = ()
    """CSV files frame_idx,t0,t1,event_count,seq with the times of exposures; for `check` and whoever reads samples."""
    NORM: NormConfig = NormConfig()
    """Mean and deviation for `VOXEL_NORM: meanstd`."""
    SPIKE_FORMAT: Format = "auto"
    """`packed`, `uint8`, `bytes` (values kept, to repeat runs of the early code), or `auto`: by content."""
    SPIKE_H: int | None = None
    """Height of the spike picture; set with SPIKE_W. Else config.yaml beside the spikes, else 360 x 640."""
    SPIKE_W: int | None = None
    """Width of the spike picture."""
    SPIKE_T: int | None = None
    """Spike frames per file, if all have the same; a file with another number is then an error."""
    SPIKE_FLIPUD: bool | None = None
    """Are stored rows upside down? Unset: yes if packed."""
    SPIKE_TRIM: tuple[int, int] = (0, 0)
    """Spike frames to drop at the beginning and end of each file."""
    SPIKE_REPR: Literal["voxel", "window", "tfp"] = "voxel"
    """Counts per bin, the middle raw frames, or short exposures."""
    TFP_HALF_WINDOW: int = 20
    """Spike frames on each side of the middle of a short exposure."""
    VOXEL_NORM: Literal["none", "rate", "log1p", "meanstd"] = "none"
    """Counts; counts / frames of the bin (best: streams differ in length); ln(1 + count); (v - MEAN) / STD."""
    VOXEL_GAIN: bool = False
    """Multiply by mean brightness / mean rate of the clip: independent of the camera's threshold."""
    VAL_CLIP_STRIDE: int | Literal["clip"] = "clip"
    """`clip`: each frame is scored once. 1: windows at every frame, as the early code did."""
    AUGMENT: AugmentConfig = AugmentConfig()
    """Flips, turns and time reversal."""

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
        self.wishes  # noqa: B018  refuses half a geometry

    @property
    def channels(self) -> int:
        """Spike channels of loader and network."""
        return self.NUM_VOXEL_BINS or self.K or 5

    @property
    def wishes(self) -> StreamWishes:
        return StreamWishes(
            format=self.SPIKE_FORMAT,
            height=self.SPIKE_H,
            width=self.SPIKE_W,
            frames=self.SPIKE_T,
            flipud=self.SPIKE_FLIPUD,
        )


# Section DATALOADER: who loads, and how far ahead.

WorkerCount = int | str
"""A number, `auto`, or a share of the cores like `cpu*0.9`."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Who loads, and how far ahead."""

    TOTAL_WORKERS: WorkerCount = "auto"
    """For all GPUs together: a number, `auto` (80 % of the cores) or `cpu*0.9`."""
    TRAIN_WORKERS: WorkerCount | None = None
    """Per GPU; unset or `auto`: TOTAL_WORKERS / GPUs."""
    VAL_WORKERS: WorkerCount | None = None
    """Per GPU; unset: half of the training's."""
    TRAIN_PREFETCH_FACTOR: int = 4
    """Batches to hold ready (at least; small batches need more to keep all workers busy)."""
    VAL_PREFETCH_FACTOR: int = 2
    """The same for validation."""
    PIN_MEMORY: bool = True
    """Accepted; batches for a GPU always come from pinned memory."""
    PERSISTENT_WORKERS: bool = True
    """False ends workers after each epoch: less memory in between, slower starts."""
    CPU_CORES: int | None = None
    """Plan for this many cores instead of those this process may use."""


# Section LOSS: what a wrong pixel costs.


@dataclass(frozen=True, kw_only=True)
class CharbonnierConfig:
    """The main loss: mean of sqrt(difference^2 + DELTA^2)."""

    DELTA: float = 1e-3
    """Differences below it cost little."""
    WEIGHT: float = 1.0
    """Factor of this term."""


@dataclass(frozen=True, kw_only=True)
class PerceptualConfig:
    """Difference of VGG-16 features; only with weights of your own."""

    WEIGHTS: str | None = None
    """File of VGG-16 weights in torchvision's names (features.N.weight), .safetensors or .pth; unset: no such term."""
    LAYERS: tuple[str, ...] = ("relu3_3",)
    """Which features."""
    WEIGHT: float = 0.1
    """Factor of this term."""
    MEAN: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """What these weights expect."""
    STD: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """What these weights expect."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What a wrong pixel costs."""

    CHARBONNIER: CharbonnierConfig = CharbonnierConfig()
    """The main loss."""
    VGG_PERCEPTUAL: PerceptualConfig = PerceptualConfig()
    """Off unless weights are given."""


# Section TRAIN: how long, how fast, and with what optimizer.


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


# Keys of the early VRT-based code that mean nothing here: accepted, so that old files keep working, and told about.

Extra = dict[str, Any] | list[Any] | str | int | float | bool | None
"""Whatever such a key holds."""

DEAD = {
    "MODEL": ("VRT_CFG", "CHANNELS_PER_SCALE", "LAYERS", "VRT", "SPIKE_ENCODER", "SPIKE_TSA", "FUSE", "WINDOW_SIZE",
              "IMG_SIZE_H", "IMG_SIZE_W"),
    "LOG": ("ENABLE_TIMING_LOG", "TIMING_CONSOLE", "TIMING_FILE", "TIMING_CONSOLE_INTERVAL", "TIMING_FILE_INTERVAL"),
}  # fmt: skip
"""Keys that are accepted and not used."""


# Section MODEL: the network. Keys of the early VRT backbone are accepted and not used.


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a U of gated blocks, with a spike branch that joins at half resolution."""

    USE_SPIKE: bool = True
    """False: frames only, to see what the spikes are worth."""
    WIDTH: int = 32
    """Channels at full resolution; they double at every level."""
    ENC_BLOCKS: tuple[int, ...] = (1, 1, 1, 28)
    """Blocks per level on the way down."""
    MIDDLE_BLOCKS: int = 1
    """Blocks at the bottom."""
    DEC_BLOCKS: tuple[int, ...] = (1, 1, 1, 1)
    """Blocks per level on the way up."""
    SPIKE_BLOCKS: int = 2
    """Blocks of the spike branch, before it joins."""
    TEMPORAL: bool = False
    """Mix the frames of a clip at half resolution and at the bottom."""
    CHANNELS_LAST: bool = True
    """Memory format on a GPU."""
    VRT_CFG: Extra = None
    """Of the early VRT backbone; not used."""
    CHANNELS_PER_SCALE: Extra = None
    """Of the early VRT backbone; not used."""
    LAYERS: Extra = None
    """Of the early VRT backbone; not used."""
    VRT: Extra = None
    """Of the early VRT backbone; not used."""
    SPIKE_ENCODER: Extra = None
    """Of the early VRT backbone; not used."""
    SPIKE_TSA: Extra = None
    """Of the early VRT backbone; not used."""
    FUSE: Extra = None
    """Of the early VRT backbone; not used."""
    WINDOW_SIZE: Extra = None
    """Of the early VRT backbone; not used."""
    IMG_SIZE_H: Extra = None
    """Of the early VRT backbone; not used."""
    IMG_SIZE_W: Extra = None
    """Of the early VRT backbone; not used."""

    def __post_init__(self) -> None:
        if len(self.ENC_BLOCKS) != len(self.DEC_BLOCKS) or len(self.ENC_BLOCKS) < 2:
            raise ConfigError(
                f"ENC_BLOCKS={list(self.ENC_BLOCKS)} and DEC_BLOCKS={list(self.DEC_BLOCKS)} must be equally long, with "
                "at least 2 levels: spikes join at the second"
            )
        if self.WIDTH < 2 or self.WIDTH % 2:
            raise ConfigError(f"WIDTH={self.WIDTH} must be even")


# Sections LOG and TEST: what is written and how often, and how networks are judged.


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


# A whole file: all sections together.


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


# From a YAML file and `--set` to a config, and back to plain values.


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> SpikeConfig:
    """Read a YAML file; ConfigError names every wrong, missing and unknown key at once.

    An override is what `--set` takes: "TRAIN.EPOCHS=3".
    """
    values = load_yaml(path)
    values = {} if values is None else values
    for override in overrides:
        _override(values, override)
    config = build_config(values, SpikeConfig, where=str(path))
    for note in notes(values if isinstance(values, dict) else {}, config):
        logger.warning("%s: %s", path, note)
    return config


def _override(values: Any, text: str) -> None:
    name, equals, value = text.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: write SECTION.KEY=VALUE, as in TRAIN.EPOCHS=3.")
    for key in keys[:-1]:
        values = values.setdefault(key, {}) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"--set {text}: the file has no group of keys there.")
    values[keys[-1]] = parse_yaml(value, where=f"--set {text}")


def notes(values: Mapping[Any, Any], config: SpikeConfig) -> Iterator[str]:
    """What a reader should know about a file that is correct."""
    for section, keys in DEAD.items():
        given = values.get(section) or {}
        if used := [key for key in keys if key in given]:
            yield f"{section}.{', '.join(used)}: of the early VRT-based code; accepted and not used here."
    data = config.DATA
    if data.K is not None and data.NUM_VOXEL_BINS is not None and data.NUM_VOXEL_BINS != data.K:
        yield f"DATA.K={data.K} is ignored: the loader makes NUM_VOXEL_BINS={data.NUM_VOXEL_BINS} channels, so the "\
            "network takes as many."  # fmt: skip
    if config.TRAIN.OPTIM.TYPE == "adamw8bit":
        yield "TRAIN.OPTIM.TYPE: adamw8bit is not built in: adamw is used, which takes 6 bytes more per parameter."


def plain(config: object) -> Any:
    """A config as dicts, lists and plain values, for YAML and JSON."""
    if is_dataclass(config):
        return {each.name: plain(getattr(config, each.name)) for each in fields(config)}
    return list(config) if isinstance(config, tuple) else config
