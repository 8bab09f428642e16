"""Section DATA: which files, how streams are read, and what is shown to the network."""

from dataclasses import dataclass
from typing import Literal

from flatout.errors import ConfigError
from flatout.spike.streams.layout import Format, StreamWishes


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
