"""What a training or an evaluation was asked to do: one field per flag, under the flag's own name.

The defaults of the flags live here and nowhere else; `compat/flags.py` reads them. No torch: help must answer at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from flatout.errors import ConfigError

Compile = Literal["on", "off", "auto"]
Amp = Literal["fp16", "bf16", "off"]
LogTo = Literal["tensorboard", "wandb", "mlflow", "none"]

AUTO = "auto"
"""`--workers auto`: as many as the input needs here, by measurement."""

GENERATIONS = 300
"""Of `--evolve` without a number."""

NEVER_RELEASED = "yolo7.pt"
"""YOLOv7's default for `--weights`. There is no such file, so it means: from scratch."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """A training as its command says it; `resolved` says what the shortcuts among the flags stand for."""

    # Flags of YOLOv7
    weights: str = NEVER_RELEASED
    cfg: str = ""
    data: str = "data/coco.yaml"
    hyp: str = "data/hyp.scratch.p5.yaml"
    epochs: int = 300
    batch_size: int = 16
    """Over all GPUs together."""
    img_size: tuple[int, int] = (640, 640)
    """Training and validation, before rounding up to the grid."""
    rect: bool = False
    resume: bool | str = False
    """True: the newest run; a text: that checkpoint."""
    nosave: bool = False
    notest: bool = False
    noautoanchor: bool = False
    evolve: bool | int = False
    """True: as many generations as YOLOv7 has; a number: so many."""
    bucket: str = ""
    cache_images: bool = False
    image_weights: bool = False
    device: str = ""
    multi_scale: bool = False
    single_cls: bool = False
    adam: bool = False
    sync_bn: bool = False
    local_rank: int = -1
    workers: int | Literal["auto"] = 8
    project: str = "runs/train"
    entity: str | None = None
    name: str = "exp"
    exist_ok: bool = False
    quad: bool = False
    linear_lr: bool = False
    label_smoothing: float = 0.0
    upload_dataset: bool = False
    bbox_interval: int = -1
    save_period: int = -1
    artifact_alias: str = "latest"
    freeze: tuple[int, ...] = (0,)
    """One number: that many layers from the first on; several: exactly those."""
    v5_metric: bool = False

    # Flags of the Yolov7fast fork
    test_batch_size: int | None = None
    """None: twice the batch size."""
    heads: int = 0
    """Of the network; 0: as its config says."""
    head_config: str = ""
    """File that says which head has which classes."""
    transfer_weights: bool = False
    auto_lr: bool = False
    class_aware_aug: bool = False
    head_params: str = "data/hyp.head_params.yaml"
    head_attention: bool = False

    # Ours: speed
    fast_dataloader: bool = False
    persistent_workers: bool = False
    """Says what holds anyway, unless `no_persistent_workers` is set."""
    worker_tensor: bool = False
    """Says what always holds."""
    device_augment: bool = False
    store_420: bool = False
    """Pictures on the device with colours at half size."""
    compile: Compile = "off"
    """`fast` makes auto of off on a GPU, unless `no_compile` is set."""
    channels_last: bool = False
    amp: Amp | None = None
    """None: as YOLOv7, fp16 on a GPU and off on a CPU."""
    fast: bool = False
    no_fast_dataloader: bool = False
    no_persistent_workers: bool = False
    no_device_augment: bool = False
    no_channels_last: bool = False
    no_compile: bool = False
    no_graphs: bool = False
    no_scaled_decode: bool = False
    no_gpu_decode: bool = False
    profile: int = 0
    """Steps to time before training goes on; 0: none."""

    # Ours: recipe
    sequential: bool = False
    ota_from: int = 0
    """First epoch that assigns targets by OTA; earlier ones use the plain loss."""
    patience: int = 0
    """Epochs without a better fitness after which training ends; 0: never."""
    price: float | None = None
    """Of an hour, in any currency."""
    budget: str = ""
    """Money (with a price) or time after which training stops: 5.00, 2h30m."""
    seed: int | None = None
    """None: YOLOv7's, which is 2 + the global rank, and 1 without DDP."""
    deterministic: bool = False

    # Ours: files
    fresh: bool = False
    once: bool = False
    """A run of these settings that is complete is not followed by another one."""
    save_every_minutes: float = 10.0
    save_every_steps: int = 1000
    compat_pt: bool = False
    allow_data_change: bool = False
    break_lock: bool = False
    strict_labels: bool = False
    allow_bad_labels: bool = False
    """Train although more than half of the labels are dropped."""
    verify_cache: bool = False
    log_every: int = 50
    """Steps between two lines of the log."""
    log_to: tuple[LogTo, ...] = ()
    """Empty: TensorBoard, if it is installed."""
    mirror: str = ""
    """URL to copy saved states to, and to continue from on a machine that has none."""
    on_done: str = ""
    """A command to run when all is over."""
    no_preflight: bool = False

    # From the environment
    stop_after: int | None = None
    """FLATOUT_STOP_AFTER: end cleanly after this many steps."""
    use_compile: bool = False
    """USE_COMPILE=1."""
    diagnose_compile: bool = False
    """DIAGNOSE_COMPILE=1: print the report and train nothing."""

    def __post_init__(self) -> None:
        if problems := list(_problems_of_training(self)):
            raise ConfigError("; ".join(problems))

    @property
    def generations(self) -> int:
        """Of a search for hyper-parameters; 0: none."""
        return GENERATIONS if self.evolve is True else int(self.evolve)

    @property
    def as_graphs(self) -> bool:
        """Whether steps are replayed as CUDA graphs, where there are some. Compiled steps too: where batches are small,
        launching them takes the host longer than running them the GPU (bench/results/model_step_h200_202611.md)."""
        return (self.fast or self.compile == "on") and not self.multi_scale and not self.no_graphs

    @property
    def decodes_scaled(self) -> bool:
        """Whether large JPEG files may be decoded at a half, a quarter or an eighth of their size."""
        return self.fast and not self.no_scaled_decode

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether JPEG files may be decoded by the GPU, for pictures that stay there."""
        return self.fast and self.device_augment and not self.no_gpu_decode

    def resolved(self, *, cuda: bool, bf16: bool) -> "TrainOptions":
        """What the shortcuts stand for on a machine with or without CUDA and bf16; resolving twice changes nothing."""
        options = self
        if self.fast:
            options = replace(
                options,
                fast_dataloader=not self.no_fast_dataloader,
                device_augment=self.device_augment or (cuda and not self.no_device_augment),
                channels_last=self.channels_last or (cuda and not self.no_channels_last),
                compile="auto" if self.compile == "off" and cuda and not self.no_compile else self.compile,
                amp="bf16" if self.amp is None and bf16 else self.amp,
            )
        if self.use_compile and not self.no_compile:
            options = replace(options, compile="on")
        if options.fast_dataloader:
            options = replace(options, persistent_workers=not self.no_persistent_workers, worker_tensor=True)
        return options


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """An evaluation as its command says it."""

    __test__ = False  # pytest: a class of ours, not of tests

    # Flags of YOLOv7
    weights: tuple[str, ...] = ("yolov7.pt",)
    """Several files: an ensemble."""
    data: str = "data/coco.yaml"
    batch_size: int = 32
    img_size: int = 640
    conf_thres: float = 0.001
    iou_thres: float = 0.65
    task: str = "val"
    device: str = ""
    single_cls: bool = False
    augment: bool = False
    verbose: bool = False
    save_txt: bool = False
    save_hybrid: bool = False
    save_conf: bool = False
    save_json: bool = False
    """Also without it where the data set asks for COCO's AP, see evaluate/coco_ap.py."""
    project: str = "runs/test"
    name: str = "exp"
    exist_ok: bool = False
    no_trace: bool = False
    v5_metric: bool = False

    # Flag of the Yolov7fast fork
    save_per_class_ap: str | None = None

    # Ours
    workers: int = 8
    strict_labels: bool = False
    allow_bad_labels: bool = False
    verify_cache: bool = False

    def __post_init__(self) -> None:
        if problems := list(_problems_of_test(self)):
            raise ConfigError("; ".join(problems))


TASKS = ("train", "val", "test", "speed", "study")


def _problems_of_training(options: TrainOptions) -> Iterator[str]:
    yield from _too_small(options, 1, "epochs", "batch_size", "test_batch_size", "save_every_steps", "log_every")
    yield from _too_small(options, 1, "stop_after")
    yield from _too_small(options, 0, "workers", "heads", "ota_from", "patience", "seed", "profile", "evolve", "price")
    if min(options.img_size) < 1:
        yield f"--img-size {options.img_size[0]} {options.img_size[1]}: both sizes must be 1 or more"
    if not options.freeze or min(options.freeze) < 0:
        yield f"--freeze {' '.join(map(str, options.freeze))}: layers are numbered from 0"
    if not 0 <= options.label_smoothing <= 1:
        yield f"--label-smoothing {options.label_smoothing} is outside 0 to 1"
    if not options.save_every_minutes > 0:
        yield f"--save-every-minutes {options.save_every_minutes} must be more than 0"
    for name in ("fast_dataloader", "persistent_workers", "device_augment", "channels_last"):
        if getattr(options, name) and getattr(options, f"no_{name}"):
            yield f"{_flag(name)} and {_flag(f'no_{name}')} exclude each other: use one of them"
    if options.compile != "off" and options.no_compile:
        yield f"--compile {options.compile} and --no-compile exclude each other: use one of them"
    if options.store_420 and options.no_device_augment:
        yield "--store-420 is about pictures that are kept on the GPU, and --no-device-augment keeps none there"
    if options.store_420 and not (options.device_augment or options.fast):
        yield "--store-420 is about pictures that are kept on the GPU: use it with --device-augment or --fast"


def _problems_of_test(options: TestOptions) -> Iterator[str]:
    yield from _too_small(options, 1, "batch_size", "img_size")
    yield from _too_small(options, 0, "workers")
    if not options.weights:
        yield "--weights: name at least one file"
    for name in ("conf_thres", "iou_thres"):
        if not 0 <= getattr(options, name) <= 1:
            yield f"{_flag(name)} {getattr(options, name)} is outside 0 to 1"
    if options.task not in TASKS:
        yield f"--task {options.task} is none of {', '.join(TASKS)}"


def _too_small(options: object, least: int, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(options, name)
        if value is not None and value != AUTO and value < least:
            yield f"{_flag(name)} {value} must be {least} or more"


def _flag(name: str) -> str:
    return "FLATOUT_STOP_AFTER" if name == "stop_after" else f"--{name.replace('_', '-')}"
