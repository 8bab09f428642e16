"""What a training or an evaluation was asked to do: one field per flag, under the flag's own name.

The defaults of the flags live here and nowhere else; `compat/flags.py` reads them. No torch: help must answer at once.
"""

from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from flatout.cli import option
from flatout.errors import ConfigError
from flatout.runs import Compile, RunOptions, flag_name, too_small
from flatout.yolo.train.choose_input import AUTO, Asked

Amp = Literal["fp16", "bf16", "off"]

GENERATIONS = 300
"""Of `--evolve` without a number."""

NEVER_RELEASED = "yolo7.pt"
"""YOLOv7's default for `--weights`. There is no such file, so it means: from scratch."""


class _Compile(Action):
    """Stores the value. A typed `off` is more than the default: --fast obeys it."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        namespace.compile = values
        namespace.no_compile = values == "off"


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a whole number nor {AUTO}") from None


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """A training as its command says it; `resolved` says what the shortcuts among the flags stand for."""

    # Flags of YOLOv7
    weights: str = option(
        NEVER_RELEASED,
        "start from these weights; '' starts from scratch, and so does the default, a file nobody has",
        change="place",
    )
    cfg: str = option(
        "",
        "config of the network: a file, or a name like yolov7-tiny; '' takes the one inside the weights",
        change="place",
    )
    data: str = option("data/coco.yaml", "data YAML: where images are, what classes are called", change="place")
    hyp: str = option(
        "data/hyp.scratch.p5.yaml",
        "hyper-parameters: learning rates, gains of the losses, augmentation",
        change="exact",
    )
    """A run knows the values, not the file."""
    epochs: int = option(300, "passes over the training images")
    batch_size: int = option(16, "images per step, over all GPUs together")
    img_size: tuple[int, int] = option(
        (640, 640), "size in training, then in validation; one number is both", nargs="+", metavar="PX"
    )
    """Training and validation, before rounding up to the grid."""
    rect: bool = option(False, "batches of images with like proportions, little padding, no mosaic")
    nosave: bool = option(False, "save only after the last epoch", change="exact")
    notest: bool = option(False, "validate only after the last epoch")
    noautoanchor: bool = option(False, "keep the anchors without asking whether they fit the data")
    evolve: bool | int = option(
        False,
        "search for better hyper-parameters in N whole trainings (300)",
        change="exact",
        type=int,
        nargs="?",
        const=True,
        metavar="N",
    )
    """True: as many generations as YOLOv7 has; a number: so many."""
    bucket: str = option(
        "", "Google bucket to copy results to; refused: --mirror gs://bucket/folder does it", change="exact"
    )
    cache_images: bool = option(False, "decode every image once and keep it in memory", change="exact")
    image_weights: bool = option(False, "show images of badly recognised classes more often")
    multi_scale: bool = option(False, "another image size for every batch, 0.5 to 1.5 times --img-size")
    single_cls: bool = option(False, "treat all classes as one")
    adam: bool = option(False, "Adam instead of SGD")
    sync_bn: bool = option(False, "batch-norm statistics over the images of all GPUs, where several train together")
    workers: int | Literal["auto"] = option(
        8,
        "processes that read and augment, at most; fewer where CPUs or batches are few; auto: measured",
        change="exact",
        type=_number_or_auto,
    )
    entity: str | None = option(None, "log to Weights & Biases, as this user or team", change="exact")
    quad: bool = option(False, "a quarter of the batch: every four images become one, joined or enlarged")
    linear_lr: bool = option(False, "let the learning rate fall along a line instead of a cosine")
    label_smoothing: float = option(0.0, "how uncertain true classes are made, 0 to 1", metavar="EPS")
    upload_dataset: bool = option(
        False,
        "accepted for YOLOv7's sake: the data set is not sent anywhere",
        flag="--upload_dataset",
        change="exact",
    )
    bbox_interval: int = option(
        -1, "accepted for YOLOv7's sake: images go to W&B at the end", flag="--bbox_interval", change="exact"
    )
    save_period: int = option(
        -1, "send the weights to W&B every N epochs; -1: never", flag="--save_period", change="exact"
    )
    artifact_alias: str = option(
        "latest", "a further name for weights sent to W&B", flag="--artifact_alias", change="exact", metavar="ALIAS"
    )
    freeze: tuple[int, ...] = option((0,), "N: leave layers 0 to N-1 as they are; several: exactly those")
    v5_metric: bool = option(False, "average precision as YOLOv5 computes it, with recall going on to 1")

    # Flags of the Yolov7fast fork
    test_batch_size: int | None = option(
        None, "images per step of the validation (default: twice --batch-size)", change="exact"
    )
    heads: int = option(0, "several heads, each for a block of classes, or as --head-config says")
    head_config: str = option(
        "",
        "file that says which head answers for which classes, and so how many heads there are",
        change="place",
    )
    transfer_weights: bool = option(
        False, "take every tensor of --weights that fits by name and shape, and nothing else"
    )
    auto_lr: bool = option(
        False,
        "above 64 images per batch, learning rate times sqrt(batch / 64); from 128, longer warm-up",
        change="exact",
    )
    """A run knows the values that come of it."""
    class_aware_aug: bool = option(
        False, "turn and shear a mosaic as suits the head that most of its labels belong to, by lot"
    )
    head_params: str = option(
        "data/hyp.head_params.yaml", "file with the augmentation of each head's classes", change="place"
    )
    head_attention: bool = option(
        False, "with several heads: let each look at the maps through an attention of its own (CBAM)"
    )

    # Ours: speed
    fast: bool = option(
        False,
        "what pays on this machine of: images decoded once (left out by --no-fast-dataloader), kept and augmented on "
        "the GPU (--no-device-augment), JPEG decoded by the GPU (--no-gpu-decode) or, if large, at a part of its size "
        "(--no-scaled-decode), channels-last (--no-channels-last), bf16 (--amp fp16), compiling (--no-compile), CUDA "
        "graphs (--no-graphs); says what it chose and why",
    )
    fast_dataloader: bool = option(
        False, "decode every image only once, and augment it in fewer passes: the same pixels", change="exact"
    )
    persistent_workers: bool = option(
        False, "keep the workers from epoch to epoch; accepted, since that is the default", change="exact"
    )
    worker_tensor: bool = option(
        False, "workers write straight into the batch; accepted, since they always do", change="exact"
    )
    device_augment: bool = option(False, "keep the decoded images on the GPU and augment them there")
    store_420: bool = option(False, "there with colours at half size: half of the memory, nearly the same pixels")
    compile: Compile = option(
        "off",
        "torch.compile, steps as CUDA graphs; auto: if it pays within this run (default: off, with --fast auto)",
        change="rounding",
        action=_Compile,
    )
    """`fast` makes auto of off on a GPU, unless `no_compile` is set."""
    channels_last: bool = option(False, "the memory layout that convolutions on GPUs prefer", change="rounding")
    amp: Amp | None = option(None, "mixed precision (default: fp16 on a GPU, off on a CPU)", change="rounding")
    no_fast_dataloader: bool = option(
        False, "with --fast: decode in every epoch, and augment step by step", change="exact"
    )
    no_persistent_workers: bool = option(
        False, "end the workers after each epoch, and start new ones for the next", change="exact"
    )
    no_device_augment: bool = option(False, "with --fast: augment on the CPU")
    no_channels_last: bool = option(False, "with --fast: the usual memory layout", change="rounding")
    no_compile: bool = option(
        False, "the same as --compile off: also with --fast nothing is compiled", change="rounding"
    )
    no_graphs: bool = option(
        False, "with --fast or --compile on: launch steps one by one instead of as CUDA graphs", change="exact"
    )
    no_scaled_decode: bool = option(False, "with --fast: decode large JPEG files at their full size")
    no_gpu_decode: bool = option(False, "with --fast: decode JPEG files on the CPU, also those that stay on the GPU")

    # Ours: recipe
    sequential: bool = option(False, "visit the images in YOLOv7's order, which is not shuffled on one GPU")
    ota_from: int = option(0, "use the plain loss before this epoch, OTA from it on", metavar="EPOCH")
    seed: int | None = option(None, "of every random number (default: YOLOv7's, 1 on one GPU)")
    """None: YOLOv7's, which is 2 + the global rank, and 1 without DDP."""

    # Ours: files
    compat_pt: bool = option(
        False, "also write checkpoints that old YOLOv7 tools can unpickle; not built yet, refused", change="exact"
    )
    strict_labels: bool = option(False, "obey all label rules of YOLOv7: one bad line drops the image")
    allow_bad_labels: bool = option(False, "go on although more than half of the labels cannot be used", change="exact")
    verify_cache: bool = option(False, "compare decoded images in caches with their checksums", change="exact")

    # Those of every run, with other defaults
    project: str = option("runs/train", "folder of the folders of runs", change="exact", metavar="FOLDER")

    # From the environment
    use_compile: bool = option(False, "", change="rounding")
    """USE_COMPILE=1."""
    diagnose_compile: bool = option(False, "", change="call")
    """DIAGNOSE_COMPILE=1: print the report and train nothing."""

    def _problems(self) -> Iterator[str]:
        return _problems_of_training(self)

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
    def asked(self) -> Asked:
        """What is said about the input, and what is left to flatout; of options as typed, not `resolved`."""
        return Asked(
            fast=self.fast,
            device_augment=self._wish(self.device_augment, left_out=self.no_device_augment),
            fast_dataloader=self._wish(self.fast_dataloader, left_out=self.no_fast_dataloader),
            cache_images=self.cache_images,
            store_420=self.store_420,
            scaled_decode=self._wish(False, left_out=self.no_scaled_decode),
            gpu_decode=self._wish(False, left_out=self.no_gpu_decode),
            workers=self.workers,
        )

    def _wish(self, given: bool, *, left_out: bool) -> bool | None:
        if given or left_out or not self.fast:
            return given
        return None

    @property
    def decodes_scaled(self) -> bool:
        """Whether large JPEG files may be decoded at a half, a quarter or an eighth of their size."""
        return self.asked.shrinks

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether JPEG files may be decoded by the GPU, for pictures that stay there."""
        return self.device_augment and self.asked.gpu_decode is not False

    def resolved(self, *, cuda: bool, bf16: bool) -> "TrainOptions":
        """What the shortcuts stand for on a machine with or without CUDA and bf16; resolving twice changes nothing."""
        options = self
        if self.fast:
            options = replace(
                options,
                fast_dataloader=self.asked.decodes_once,
                device_augment=self.asked.on_device(gpu=cuda),
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
    yield from too_small(options, 1, "epochs", "batch_size", "test_batch_size")
    yield from too_small(options, 0, "workers", "heads", "ota_from", "seed", "evolve")
    if min(options.img_size) < 1:
        yield f"--img-size {options.img_size[0]} {options.img_size[1]}: both sizes must be 1 or more"
    if not options.freeze or min(options.freeze) < 0:
        yield f"--freeze {' '.join(map(str, options.freeze))}: layers are numbered from 0"
    if not 0 <= options.label_smoothing <= 1:
        yield f"--label-smoothing {options.label_smoothing} is outside 0 to 1"
    for name in ("fast_dataloader", "persistent_workers", "device_augment", "channels_last"):
        if getattr(options, name) and getattr(options, f"no_{name}"):
            yield f"{flag_name(name)} and {flag_name(f'no_{name}')} exclude each other: use one of them"
    if options.compile != "off" and options.no_compile:
        yield f"--compile {options.compile} and --no-compile exclude each other: use one of them"
    if options.store_420 and options.no_device_augment:
        yield "--store-420 is about pictures that are kept on the GPU, and --no-device-augment keeps none there"
    if options.store_420 and not (options.device_augment or options.fast):
        yield "--store-420 is about pictures that are kept on the GPU: use it with --device-augment or --fast"


def _problems_of_test(options: TestOptions) -> Iterator[str]:
    yield from too_small(options, 1, "batch_size", "img_size")
    yield from too_small(options, 0, "workers")
    if not options.weights:
        yield "--weights: name at least one file"
    for name in ("conf_thres", "iou_thres"):
        if not 0 <= getattr(options, name) <= 1:
            yield f"{flag_name(name)} {getattr(options, name)} is outside 0 to 1"
    if options.task not in TASKS:
        yield f"--task {options.task} is none of {', '.join(TASKS)}"
