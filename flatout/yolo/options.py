"""Options of a training and of an evaluation: one field per flag, with the name of the flag.

The defaults are defined only here; `commands/flags.py` reads them. No torch is imported, so that help is fast.
"""

from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from flatout.cli import option
from flatout.errors import ConfigError
from flatout.runs import Compile, RunOptions, flag_name, too_small
from flatout.yolo.predict.options import tile_problems
from flatout.yolo.train.choose_input import AUTO, Asked

if TYPE_CHECKING:
    from flatout.yolo.data.open_set import SplitConfig

Amp = Literal["fp16", "bf16", "off"]

GENERATIONS = 300
"""Generations of `--evolve` without a number."""


NEVER_RELEASED = "yolo7.pt"
"""YOLOv7's default for `--weights`. No such file was ever released, so it means training from scratch."""
OPTIONS_NAME = "opt.yaml"
"""The options of a run, in its folder."""


class _Compile(Action):
    """Stores the value. Unlike the default, an explicit `off` also holds with --fast."""

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
    """The options of a training as given; `resolved` replaces shortcuts such as --fast by what they stand for."""

    # Flags of YOLOv7
    weights: str = option(
        NEVER_RELEASED,
        f"weights to start from; '' trains from scratch, and so does the default, {NEVER_RELEASED}, which was never "
        "released",
        change="place",
    )
    cfg: str = option(
        "",
        "model config: a file, or a name such as yolov7-tiny; '' uses the one stored in the weights",
        change="place",
    )
    data: str = option(
        "data/coco.yaml", "data YAML: where the images are, and the names of the classes", change="place"
    )
    hyp: str = option(
        "data/hyp.scratch.p5.yaml",
        "hyper-parameters: learning rates, loss gains, augmentation",
        change="exact",
    )
    """A run stores the values, not the path of the file."""
    epochs: int = option(300, "number of passes over the training images")
    batch_size: int = option(16, "images per step, on all GPUs together")
    img_size: tuple[int, int] = option(
        (640, 640), "image size in training and in validation; one number sets both", nargs="+", metavar="PX"
    )
    """Sizes for training and validation, before rounding up to a multiple of the stride."""
    rect: bool = option(
        False, "rectangular batches: images of similar aspect ratio together, with little padding and no mosaic"
    )
    nosave: bool = option(False, "save only after the last epoch", change="exact")
    notest: bool = option(False, "validate only after the last epoch")
    noautoanchor: bool = option(False, "use the anchors as they are, without checking whether they fit the data")
    evolve: bool | int = option(
        False,
        "search for better hyper-parameters in N complete trainings (300 if N is omitted)",
        change="exact",
        type=int,
        nargs="?",
        const=True,
        metavar="N",
    )
    """True: as many generations as in YOLOv7; a number: that many."""
    bucket: str = option(
        "",
        "not supported; use --mirror gs://BUCKET/FOLDER, which copies checkpoints to Google Cloud Storage",
        change="exact",
    )
    cache_images: bool = option(False, "decode every image once and keep it in memory", change="exact")
    image_weights: bool = option(False, "sample images with rare or badly detected classes more often")
    multi_scale: bool = option(False, "vary the image size from batch to batch, 0.5 to 1.5 times --img-size")
    single_cls: bool = option(False, "treat all classes as one")
    adam: bool = option(False, "use Adam instead of SGD")
    sync_bn: bool = option(False, "compute batch-norm statistics over the images of all GPUs")
    workers: int | Literal["auto"] = option(
        8,
        "maximum number of worker processes that read and augment images; fewer are started if there are few CPUs or "
        "batches; auto: find the best number by measuring",
        change="exact",
        type=_number_or_auto,
    )
    entity: str | None = option(None, "log to Weights & Biases as this user or team", change="exact")
    quad: bool = option(
        False, "combine every four images of a batch: tile them into one of twice the size, or enlarge one of them"
    )
    linear_lr: bool = option(False, "decay the learning rate linearly instead of along a cosine")
    label_smoothing: float = option(0.0, "amount of label smoothing, 0 to 1", metavar="EPS")
    upload_dataset: bool = option(
        False,
        "accepted for compatibility with YOLOv7, no effect: the data set is not uploaded",
        flag="--upload_dataset",
        change="exact",
    )
    bbox_interval: int = option(
        -1,
        "accepted for compatibility with YOLOv7, no effect: images are sent to W&B at the end",
        flag="--bbox_interval",
        change="exact",
    )
    save_period: int = option(
        -1, "upload the weights to W&B every N epochs; -1: never", flag="--save_period", change="exact"
    )
    artifact_alias: str = option(
        "latest", "W&B alias for the uploaded weights", flag="--artifact_alias", change="exact", metavar="ALIAS"
    )
    freeze: tuple[int, ...] = option(
        (0,), "layers to freeze: one number N means layers 0 to N-1 (0: none), several mean exactly those layers"
    )
    v5_metric: bool = option(False, "compute average precision as YOLOv5 does, with the curve extended to recall 1")

    # Flags of the Yolov7fast fork
    test_batch_size: int | None = option(
        None, "images per validation step (default: twice --batch-size)", change="exact"
    )
    heads: int = option(
        0,
        "number of detection heads, each with its own block of classes, unless --head-config assigns them; 0: as in "
        "the network's config",
    )
    head_config: str = option(
        "",
        "file that assigns the classes to heads, and so sets the number of heads",
        change="place",
    )
    transfer_weights: bool = option(
        False, "load every tensor of --weights whose name and shape match, and nothing else"
    )
    auto_lr: bool = option(
        False,
        "with more than 64 images per GPU and step, multiply the learning rate by sqrt(images / 64); from 128 on, also "
        "use a longer warm-up",
        change="exact",
    )
    """A run stores the resulting values."""
    class_aware_aug: bool = option(
        False,
        "use the rotation and shear that --head-params gives for one head per mosaic; heads with more labels in it are "
        "chosen more often",
    )
    head_params: str = option(
        "data/hyp.head_params.yaml", "file with the augmentation parameters of each head", change="place"
    )
    head_attention: bool = option(False, "with several heads: give each its own attention (CBAM) over the feature maps")

    # New flags: speed
    fast: bool = option(
        False,
        "use whatever is faster on this machine, and report what was chosen and why (flags in parentheses turn a part "
        "off): decode images once "
        "(--no-fast-dataloader), keep and augment them on the GPU (--no-device-augment), train while they are decoded "
        "(--decode-first), decode large JPEG at reduced size (--no-scaled-decode), channels-last layout "
        "(--no-channels-last), bf16 (--amp fp16), torch.compile (--no-compile), CUDA graphs (--no-graphs)",
    )
    fast_dataloader: bool = option(
        False, "decode every image only once and keep it in memory; the pixels stay the same", change="exact"
    )
    persistent_workers: bool = option(
        False, "keep worker processes between epochs; no effect, because that is the default", change="exact"
    )
    worker_tensor: bool = option(
        False, "let workers write directly into the batch; no effect, because they always do", change="exact"
    )
    device_augment: bool = option(False, "keep the decoded images in GPU memory and augment them there")
    store_420: bool = option(
        False,
        "with --device-augment or --fast: store colours at half resolution (4:2:0), in half the memory and with "
        "nearly the same pixels",
    )
    gpu_decode: bool = option(
        False,
        "with --device-augment or --fast: decode JPEG files on the GPU (nvJPEG), which may help if there are few "
        "cores; the pixels differ slightly",
    )
    compile: Compile = option(
        "off",
        "use torch.compile and CUDA graphs; auto: only if it pays off within this run "
        "(default: off; with --fast: auto)",
        change="rounding",
        action=_Compile,
    )
    """On a GPU `fast` changes off to auto, unless `no_compile` is set."""
    channels_last: bool = option(
        False, "use the channels-last memory layout, which is faster for convolutions", change="rounding"
    )
    amp: Amp | None = option(
        None,
        "mixed precision (default: fp16 on a GPU, off on a CPU; with --fast: bf16, if the device has instructions for "
        "it)",
        change="rounding",
    )
    no_fast_dataloader: bool = option(False, "with --fast: decode images again in every epoch", change="exact")
    no_persistent_workers: bool = option(
        False, "stop the worker processes after each epoch, and start new ones for the next", change="exact"
    )
    no_device_augment: bool = option(False, "with --fast: augment on the CPU")
    no_channels_last: bool = option(False, "with --fast: keep the default memory layout", change="rounding")
    no_compile: bool = option(False, "same as --compile off: compile nothing, even with --fast", change="rounding")
    no_graphs: bool = option(
        False, "with --fast or --compile on: launch each step normally instead of as a CUDA graph", change="exact"
    )
    decode_first: bool = option(
        False,
        "with --device-augment or --fast: decode all images before the first step, not only those that it needs",
        change="exact",
    )
    no_scaled_decode: bool = option(False, "with --fast: decode large JPEG files at full size")
    no_gpu_decode: bool = option(
        False, "decode JPEG files on the CPU; no effect, because that is the default", change="exact"
    )

    # New flags: recipe
    sequential: bool = option(False, "use the image order of YOLOv7, which is not shuffled on one GPU")
    ota_from: int = option(0, "use the plain loss before this epoch, and OTA from then on", metavar="EPOCH")
    seed: int | None = option(None, "seed of all random numbers (default: 1 on one GPU, 2 with several)")
    """None: the seed of YOLOv7's first process, which is 2 with DDP and 1 without; all ranks use the same."""
    tiles: int | None = option(
        None,
        "for large images: train on tiles of this size, cut from images that are decoded once, and validate whole "
        "images by tiles (docs/tiles.md)",
        metavar="PX",
    )
    tile_overlap: float = option(
        0.2,
        "with --tiles: part of its side, 0 to below 1, that a tile shares at least with each neighbour",
        metavar="SHARE",
    )
    tile_min_visible: float = option(
        0.25,
        "with --tiles: label an object in a tile that shows at least this part of its area, 0 to 1",
        metavar="SHARE",
    )

    # New flags: files
    audit: int = option(
        0,
        "sum up in every step how each training label is learned, for flatout yolo audit; the weights stay the same to "
        "the bit; 0: off",
        change="exact",
        type=int,
        nargs="?",
        const=1,
        metavar="0|1",
    )
    compat_pt: bool = option(
        False,
        "not supported: write checkpoints that old YOLOv7 tools can unpickle; use flatout yolo convert, which writes "
        "safetensors",
        change="exact",
    )
    strict_labels: bool = option(False, "apply all label rules of YOLOv7: one bad line drops the image")
    allow_bad_labels: bool = option(False, "train even if more than half of the labels are unusable", change="exact")
    verify_cache: bool = option(False, "verify the checksums of decoded images in caches", change="exact")

    # Options of every run, with other defaults
    project: str = option("runs/train", "folder that contains the run folders", change="exact", metavar="FOLDER")

    # Options from the environment
    use_compile: bool = option(False, "", change="rounding")
    """USE_COMPILE=1."""
    diagnose_compile: bool = option(False, "", change="call")
    """DIAGNOSE_COMPILE=1: print the report and train nothing."""

    def _problems(self) -> Iterator[str]:
        return _problems_of_training(self)

    @property
    def generations(self) -> int:
        """Number of generations of a hyper-parameter search; 0: no search."""
        return GENERATIONS if self.evolve is True else int(self.evolve)

    @property
    def as_graphs(self) -> bool:
        """Whether steps are replayed as CUDA graphs on a GPU. That includes compiled steps: with small batches, the
        host takes longer to launch them than the GPU to run them (bench/results/model_step_h200_202611.md)."""
        return (self.fast or self.compile == "on") and not self.multi_scale and not self.no_graphs

    @property
    def asked(self) -> Asked:
        """The input options that were given, and those left to flatout; use on options that are not yet `resolved`."""
        return Asked(
            fast=self.fast,
            device_augment=self._choice(self.device_augment, left_out=self.no_device_augment),
            fast_dataloader=self._choice(self.fast_dataloader, left_out=self.no_fast_dataloader),
            cache_images=self.cache_images,
            store_420=self.store_420,
            scaled_decode=self._choice(False, left_out=self.no_scaled_decode),
            gpu_decode=self.gpu_decode,
            workers=self.workers,
        )

    def _choice(self, given: bool, *, left_out: bool) -> bool | None:
        if given or left_out or not self.fast:
            return given
        return None

    def split_config(self, *, silent: bool = False) -> "SplitConfig":
        """How the training and validation images are opened."""
        from flatout.yolo.data.label_cache import default_folder
        from flatout.yolo.data.open_set import SplitConfig
        from flatout.yolo.data.scan import ScanConfig

        return SplitConfig(
            scan=ScanConfig(strict=self.strict_labels, large=self.tiles is not None),
            cache_folder=default_folder(),
            single_class=self.single_cls,
            needs_labels=True,
            allow_bad_labels=self.allow_bad_labels,
            silent=silent,
        )

    @property
    def decodes_scaled(self) -> bool:
        """Whether large JPEG files may be decoded at a half, a quarter or an eighth of their size."""
        return self.asked.shrinks

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether JPEG files are decoded on the GPU, for images that are kept there."""
        return self.device_augment and self.asked.gpu_decode

    def resolved(self, *, cuda: bool, bf16: bool) -> "TrainOptions":
        """The options with shortcuts replaced, for a machine with or without CUDA and bf16; idempotent."""
        options = self
        if self.fast:
            options = replace(
                options,
                fast_dataloader=self.asked.decodes_once,
                device_augment=self.asked.on_device(gpu=cuda),
                channels_last=self.channels_last or not self.no_channels_last,
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
    """The options of an evaluation."""

    __test__ = False  # tells pytest that this is not a test class

    # Flags of YOLOv7
    weights: tuple[str, ...] = option(("yolov7.pt",), "weights to evaluate; several files form an ensemble")
    """Several files form an ensemble."""
    data: str = option(
        "data/coco.yaml", "data YAML; if the name ends in coco.yaml, --save-json is implied, as in YOLOv7"
    )
    batch_size: int = option(32, "images per step", metavar="BATCH_SIZE")
    img_size: int = option(640, "longer side of the input, rounded up to a multiple of the stride", metavar="PX")
    conf_thres: float = option(0.001, "drop detections with a lower confidence", metavar="CONF")
    iou_thres: float = option(0.65, "NMS: of two boxes with a larger IoU, keep the more confident one", metavar="IOU")
    task: str = option(
        "val", "train, val or test: the split to evaluate; speed: measure speed; study: try sizes 256 to 1536"
    )
    device: str = option("", "cpu, or the number of a GPU; '' uses the first GPU, or the CPU if there is none")
    single_cls: bool = option(False, "treat all classes as one")
    augment: bool = option(False, "detect at three scales, one of them mirrored, and merge the results")
    verbose: bool = option(False, "print a row for every class, even if there are many")
    save_txt: bool = option(False, "write detections as label files")
    save_hybrid: bool = option(False, "write labels and detections together as label files")
    save_conf: bool = option(False, "with --save-txt: also write the confidence of each detection")
    save_json: bool = option(
        False, "write detections as COCO JSON, and compute COCO's AP if there is an annotation file"
    )
    """Also written without this option if the data set calls for COCO's AP; see `metrics/coco.py`."""
    project: str = option("runs/test", "folder that contains the result folders", metavar="FOLDER")
    name: str = option("exp", "name of the result folder; a number is appended if it exists")
    exist_ok: bool = option(False, "write into that folder even if it exists")
    no_trace: bool = option(False, "accepted for compatibility with YOLOv7, no effect: nothing is traced")
    v5_metric: bool = option(False, "compute average precision as YOLOv5 does, with the curve extended to recall 1")

    # Flag of the Yolov7fast fork
    save_per_class_ap: str | None = option(
        None, "write the average precision of every class to this JSON file", metavar="FILE"
    )

    # New flags
    workers: int = option(8, "maximum number of worker processes that read images", metavar="WORKERS")
    strict_labels: bool = option(False, "apply all label rules of YOLOv7: one bad line drops the image")
    allow_bad_labels: bool = option(False, "evaluate even if more than half of the labels are unusable")
    verify_cache: bool = option(False, "verify the checksums of decoded images in caches")
    tiles: int | None = option(
        None, "for large images: detect in tiles of this size, merge, and score whole images", metavar="PX"
    )
    """Detect by tiles of this side, merge, and score whole images."""
    tile_overlap: float = option(
        0.2,
        "with --tiles: part of its side, 0 to below 1, that a tile shares at least with each neighbour",
        metavar="SHARE",
    )
    tile_full_view: bool = option(
        False, "with --tiles: also detect in the whole shrunk image, for objects longer than the overlap"
    )

    def __post_init__(self) -> None:
        if problems := list(_problems_of_test(self)):
            raise ConfigError("; ".join(problems))


TASKS = ("train", "val", "test", "speed", "study")


def _problems_of_training(options: TrainOptions) -> Iterator[str]:
    yield from too_small(options, 1, "epochs", "batch_size", "test_batch_size")
    yield from too_small(options, 0, "workers", "heads", "ota_from", "seed", "evolve", "audit")
    if min(options.img_size) < 1:
        yield f"--img-size {options.img_size[0]} {options.img_size[1]}: both sizes must be 1 or more"
    if not options.freeze or min(options.freeze) < 0:
        yield f"--freeze {' '.join(map(str, options.freeze))}: layers are numbered from 0"
    yield from tile_problems(options.tiles, options.tile_overlap)
    if not 0 <= options.tile_min_visible <= 1:
        yield f"--tile-min-visible {options.tile_min_visible} must be between 0 and 1"
    if not 0 <= options.label_smoothing <= 1:
        yield f"--label-smoothing {options.label_smoothing} must be between 0 and 1"
    for name in ("fast_dataloader", "persistent_workers", "device_augment", "channels_last", "gpu_decode"):
        if getattr(options, name) and getattr(options, f"no_{name}"):
            yield f"{flag_name(name)} and {flag_name(f'no_{name}')} exclude each other: use only one of them"
    if options.compile != "off" and options.no_compile:
        yield f"--compile {options.compile} and --no-compile exclude each other: use only one of them"
    for name in ("store_420", "gpu_decode"):
        if getattr(options, name) and options.no_device_augment:
            yield f"{flag_name(name)} is for images that are kept on the GPU, and --no-device-augment keeps none there"
        elif getattr(options, name) and not (options.device_augment or options.fast):
            yield f"{flag_name(name)} is for images that are kept on the GPU: use it with --device-augment or --fast"


def _problems_of_test(options: TestOptions) -> Iterator[str]:
    yield from too_small(options, 1, "batch_size", "img_size")
    yield from too_small(options, 0, "workers")
    if not options.weights:
        yield "--weights: give at least one file"
    for name in ("conf_thres", "iou_thres"):
        if not 0 <= getattr(options, name) <= 1:
            yield f"{flag_name(name)} {getattr(options, name)} must be between 0 and 1"
    if options.task not in TASKS:
        yield f"--task {options.task} must be one of {', '.join(TASKS)}"
    yield from tile_problems(options.tiles, options.tile_overlap, full_view=options.tile_full_view)
    if options.tiles is not None and options.save_hybrid:
        yield "--save-hybrid adds labels to the NMS of a network's input, which is only a tile with --tiles: use one"
    if options.tiles is not None and options.task == "study":
        yield "--task study varies the size of the input, which --tiles fixes: use one of them"
