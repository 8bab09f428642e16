"""What a training was asked to do: one field per flag and per key of the YAML file, under the same name.

The defaults live here and nowhere else. No torch: help must answer at once.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from flatout.defect.strips.find import ImgFormat
from flatout.defect.synth.config import BoardShape, DefectMode, Range, SynthConfig
from flatout.errors import ConfigError

Network = Literal["v1", "v2"]
ImageType = Literal["strip", "square", "mvtec"]
PATCH_OF_TYPE: dict[str, int] = {"strip": 128, "square": 128, "mvtec": 256}
CPU = -1


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """A training of the defect job."""

    # Names of the trainer that people know
    training_dataset_path: str = ""
    """R/train/good, or the root R; see docs/defect.md for what else may lie below R."""
    img_format: ImgFormat = "tiff"
    image_type: ImageType | None = None
    """An old name for a patch size; the size of images is read from the first file."""
    patch_size: int | None = None
    """None: 128, or what image_type stands for."""
    bs: int = 16
    """Samples per step, over all GPUs together."""
    lr: float = 1e-3
    epochs: int = 30
    gpu_id: int | None = None
    """None: a GPU if there is one; -1: the CPU."""
    checkpoint_path: str = "runs/defect"
    """Folder that run folders are made in."""
    num_defects_range: tuple[int, int] = (3, 8)
    use_mask: bool = True
    """Whether to validate after every epoch, if there is a valid/ folder. Training needs no masks."""
    seed: int = 42
    cache_size: int | None = None
    """Decoded images to keep, once for all workers; None: all that fit into half of the free memory."""
    gamma_start: float = 2.0
    gamma_end: float = 2.0
    defect_mode: DefectMode = "gaussian"
    psf_type: str = "type1"
    psf_pool_size: int = 1000
    num_workers: int | str = "auto"
    prefetch_factor: int | None = None
    partial_leak_prob: float = 0.0
    partial_leak_scale: Range = (0.2, 0.7)

    # Ours: recipe
    network: Network = "v1"
    base_width: int = 64
    weights: str = ""
    """A file to start from: of ours, or of an older training."""
    min_patches: tuple[int, int] | None = None
    """Rows and columns of the grid at least; None: neighbours share 16 pixels."""
    amplitudes: tuple[Range, ...] = ((60.0, 60.0), (80.0, 80.0))
    board_shapes: tuple[BoardShape, ...] = ("blob",)
    """With defect_mode board: blob, open, short, spur, pinhole; equally many of those that are named."""
    min_target_only: int = 1
    defect_share: float = 0.5
    """Of patches that are neither hard negatives nor get lines."""
    alpha_background: float = 1.0
    alpha_defect: float = 1.0
    hard_negative_dir: str = ""
    """Images that must not fire; empty: R/train/hard_negative_samples if their share is not 0."""
    hard_negative_ratio: float = 0.0
    line_ratio: float = 0.0
    shift_px: float = 0.0
    noise: float = 0.0
    edge_noise: float = 0.0
    gain: float = 0.0
    offset: float = 0.0
    steepness: float = 1.0
    """Contrast after shift and noise; 4 for scans of black and white."""
    one_reference: bool = False
    """ref2 is ref1 again: for pairs of a picture and a template."""
    group_images: int = 0
    """Visit patches in groups of this many images, for sets that do not fit; 0: shuffle all."""
    patience: int = 0
    """Epochs without a better validation after which training ends; 0: never."""

    # Ours: speed
    amp: Literal["auto", "off", "bf16", "fp16"] = "auto"
    """auto: bf16 on a GPU that has it, else fp16; off on a CPU."""
    channels_last: bool = True
    compile: Literal["on", "off"] = "off"
    graphs: bool = True
    """Run a step as one CUDA graph, where there is a GPU."""
    device_strips: Literal["auto", "on", "off"] = "auto"
    """Keep images in GPU memory and paint there; auto: where there is a GPU."""

    # Ours: files
    name: str = "exp"
    exist_ok: bool = False
    fresh: bool = False
    once: bool = False
    """Exit with 0 if the run is complete, instead of beginning the next one: for what restarts always."""
    resume: str = ""
    """A run folder or checkpoint to continue."""
    allow_data_change: bool = False
    break_lock: bool = False
    deterministic: bool = False
    save_every_minutes: float = 10.0
    save_every_steps: int = 1000
    log_every: int = 20
    log_to: tuple[Literal["tensorboard", "wandb", "mlflow", "none"], ...] = ()
    """Where numbers go besides the run folder; empty: tensorboard, if it is installed."""
    price: float | None = None
    """What an hour of this machine costs, in any currency."""
    budget: str = ""
    """Stop, saved, when this much is spent: money (with a price) or time, like 5.00 or 2h30m."""
    on_done: str = ""
    """A command to run when all is over; $FLATOUT_OUTCOME and others tell it what."""
    no_preflight: bool = False
    """Do not look at disk and GPU before training."""
    stop_after: int | None = None
    """FLATOUT_STOP_AFTER: end cleanly after this many steps."""

    def __post_init__(self) -> None:
        for field in ("bs", "epochs", "log_every", "save_every_steps"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must be 1 or more.")
        if self.lr <= 0:
            raise ConfigError(f"lr={self.lr} must be above 0.")
        if self.patch % 32 or self.patch < 32:
            raise ConfigError(f"patch_size={self.patch} must be a multiple of 32: the network halves it five times.")
        for field in ("cache_size", "group_images", "patience", "alpha_background", "alpha_defect", "gamma_start"):
            if (getattr(self, field) or 0) < 0:
                raise ConfigError(f"{field}={getattr(self, field)} must not be negative.")

    @property
    def patch(self) -> int:
        return self.patch_size or PATCH_OF_TYPE[self.image_type or "strip"]

    @property
    def device(self) -> str:
        """As `flatout.engine.device_choice` reads it."""
        if self.gpu_id is None:
            return ""
        return "cpu" if self.gpu_id == CPU else str(self.gpu_id)

    def synth(self, amplitudes: tuple[Range, ...]) -> SynthConfig:
        """The recipe of samples; `amplitudes` are those of the mode."""
        return SynthConfig(
            defect_share=self.defect_share,
            num_defects=self.num_defects_range,
            amplitudes=amplitudes,
            min_target_only=self.min_target_only,
            partial_leak_prob=self.partial_leak_prob,
            partial_leak_scale=self.partial_leak_scale,
            hard_negative_ratio=self.hard_negative_ratio,
            line_ratio=self.line_ratio,
            mode=self.defect_mode,
            shift_px=self.shift_px,
            noise=self.noise,
            edge_noise=self.edge_noise,
            gain=self.gain,
            offset=self.offset,
            steepness=self.steepness,
            one_reference=self.one_reference,
        )


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """An evaluation, or a prediction where nothing is known about the images."""

    model_path: str = ""
    test_path: str = ""
    """The root of a data set, its test/ folder, or any folder with images."""
    output_dir: str = "runs/defect/test"
    img_format: ImgFormat = "tiff"
    image_type: ImageType | None = None
    patch_size: int | None = None
    """None: as in training."""
    min_patches: tuple[int, int] | None = None
    gpu_id: int | None = None
    use_ground_truth_mask: bool = True
    untiled: bool = False
    """One pass over the whole image instead of patches: faster, and slightly different at borders."""
    threshold: float | None = None
    """Probability above which a pixel counts; None: the one that training chose, else 0.5."""
    dead_pixels: str = ""
    """CSV with columns dead_x and dead_y: boxes around these pixels are set to 0."""
    save_maps: bool = True
    save_pictures: bool = True
    sweep: bool = False
    """Also report the mean probability of made-up defects by strength and group."""

    @property
    def device(self) -> str:
        if self.gpu_id is None:
            return ""
        return "cpu" if self.gpu_id == CPU else str(self.gpu_id)


_OF_THIS_CALL = (
    "resume", "break_lock", "allow_data_change", "stop_after", "price", "budget", "on_done", "no_preflight",
    "once",
)  # fmt: skip
_NO_MATTER = (
    *_OF_THIS_CALL, "fresh", "exist_ok", "checkpoint_path", "name", "gpu_id", "num_workers", "prefetch_factor",
    "save_every_minutes", "save_every_steps", "log_every", "cache_size", "device_strips", "graphs", "compile",
    "log_to",
)  # fmt: skip
"""Where, on what and how fast: nothing that is learned depends on them."""


def plain(options: TrainOptions) -> dict[str, Any]:
    """In values that YAML and JSON know."""
    return {key: _listed(value) for key, value in asdict(options).items()}


def config_of_run(options: TrainOptions) -> dict[str, Any]:
    """What a result depends on: commands with equal ones mean the same run."""
    return {key: value for key, value in plain(options).items() if key not in _NO_MATTER}


def of_this_call(options: TrainOptions) -> dict[str, Any]:
    """What every command says anew, also when it continues a run."""
    return {key: getattr(options, key) for key in _OF_THIS_CALL}


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value
