"""Options of `flatout defect train`, `test` and `predict`: one field per flag and per key of the YAML file, same names.

Defaults are defined here and nowhere else. This module does not import torch, so that help is shown without delay.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from flatout.cli import option
from flatout.defect.data.find import ImgFormat
from flatout.defect.synth.config import BoardShape, DefectMode, Range, SynthConfig
from flatout.runs import RunOptions, too_small

Network = Literal["v1", "v2"]
ImageType = Literal["strip", "square", "mvtec"]
Method = Literal["network", "classical"]
PATCH_OF_TYPE: dict[str, int] = {"strip": 128, "square": 128, "mvtec": 256}
CPU = -1
"""The `gpu_id` that means the CPU."""
RENAMED_OPTIONS = {"gpu_id": "device", "checkpoint_path": "project"}
"""Old option name -> current name."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of a defect training."""

    # Names that users know from earlier trainers
    training_dataset_path: str = option(
        "",
        "folder with the training images: R/train/good, the root R of a data set, or pairs, a folder with temp/ and "
        "test/ or a CSV file (docs/defect.md shows the layouts)",
        change="place",
        metavar="FOLDER",
    )
    img_format: ImgFormat = option("tiff", "file format of the images")
    image_type: ImageType | None = option(
        None, "old way to choose the patch size: strip and square mean 128, mvtec means 256"
    )
    patch_size: int | None = option(
        None, "side of a patch in pixels, a multiple of 32 (default: 128, or the size that image_type implies)"
    )
    bs: int = option(16, "batch size: samples per step, summed over all GPUs")
    lr: float = option(
        1e-3,
        "learning rate of Adam; divided by 5 after 80 %% and again after 90 %% of the epochs (not in runs of 1 or "
        "2 epochs)",
    )
    epochs: int = option(30, "passes over the training images")
    gpu_id: int | None = option(None, "old name of --device: the number of a GPU, or -1 for the CPU", change="exact")
    checkpoint_path: str = option("", "old name of --project", change="exact", metavar="FOLDER")
    num_defects_range: tuple[int, int] = option(
        (3, 8), "minimum and maximum number of defects in a sample that has any, from 2 to 64"
    )
    use_mask: bool = option(
        True, "validate after every epoch if there is a valid/ folder; training itself needs no masks", change="exact"
    )
    seed: int = option(42, "seed of the initial weights, the order of the samples and the painted defects")
    cache_size: int | None = option(
        None,
        "number of decoded images to keep in memory that all workers share; 0: keep none; with --group_images, if not "
        "all fit, each worker keeps one group instead (default: as many as fit into half of the free memory)",
        change="exact",
    )
    gamma_start: float = option(2.0, "gamma of the focal loss in the first epoch")
    gamma_end: float = option(2.0, "gamma that is approached towards the last epoch, along a half cosine")
    defect_mode: DefectMode = option(
        "gaussian",
        "what is painted: gaussian for small spots, psf for diffraction patterns, board for larger shapes that turn "
        "dark pixels bright and bright pixels dark",
    )
    psf_type: str = option("type1", "with defect_mode psf: the family of diffraction patterns")
    psf_pool_size: int = option(1000, "with defect_mode psf or board: number of shapes that are generated beforehand")
    num_workers: int | str = option(
        "auto", "worker processes that crop and paint: a number, auto, or a share of the cores like cpu*0.9",
        change="exact",
    )  # fmt: skip
    prefetch_factor: int | None = option(
        None, "batches to keep ready (default: enough to keep all workers busy)", change="exact"
    )
    partial_leak_prob: float = option(
        0.0, "probability that a target-only defect also shows weakly in one of the references"
    )
    partial_leak_scale: Range = option(
        (0.2, 0.7), "how weakly: minimum and maximum share of the amplitude that it has in target"
    )

    # Options of flatout: samples, network and loss
    network: Network = option(
        "v1", "network version; v2 adds pooling at the coarsest level and channel attention, with fewer convolutions"
    )
    base_width: int = option(64, "channels of the first level; the other levels are multiples of it")
    weights: str = option(
        "", "weights to start from: a file of flatout, or of an older trainer", change="place", metavar="FILE"
    )
    min_patches: tuple[int, int] | None = option(
        None, "minimum rows and columns of patches per image (default: as many as make neighbours share 16 pixels)"
    )
    amplitudes: tuple[Range, ...] = option(
        ((60.0, 60.0), (80.0, 80.0)),
        "amplitudes of defects in grey levels, or ranges of them, such as 60 8:12; the sign is random (default: 60 80)",
    )
    board_shapes: tuple[BoardShape, ...] = option(
        ("blob",), "with defect_mode board: the shapes to paint, each equally often"
    )
    min_target_only: int = option(
        1,
        "minimum number of defects that are in target alone, of a sample with defects: 0 or 1; with 0, about a third "
        "of these samples have an empty label",
    )
    defect_share: float = option(
        0.5, "share of samples with defects, among those that are neither hard negatives nor samples with lines"
    )
    defect_prior: float = option(
        0.01,
        "probability of a defect that a new network predicts at every pixel before it is trained; 0: the bias of the "
        "last layer is random, as in older trainers",
    )
    alpha_background: float = option(1.0, "weight of background pixels in the loss")
    alpha_defect: float = option(1.0, "weight of defect pixels in the loss")
    hard_negative_dir: str = option(
        "",
        "folder of hard negatives, real images in which nothing may be detected "
        "(default: R/train/hard_negative_samples)",
        change="place",
        metavar="FOLDER",
    )
    hard_negative_ratio: float = option(0.0, "share of samples that are cropped from hard negatives")
    line_ratio: float = option(
        0.0, "share of samples with lines of different strength in target and the references; they are not labelled"
    )
    shift_px: float = option(0.0, "maximum shift of a reference against target, in pixels")
    noise: float = option(0.0, "standard deviation of the noise in each plane, in grey levels")
    edge_noise: float = option(0.0, "noise in proportion to the local difference of pixels, which makes edges ragged")
    gain: float = option(0.0, "maximum relative change of a plane's contrast")
    offset: float = option(0.0, "maximum change of a plane's brightness, in grey levels")
    steepness: float = option(
        1.0, "contrast factor around middle grey, applied after shift and noise; 4 for black-and-white scans"
    )
    one_reference: bool = option(False, "ref2 repeats ref1: for pairs of an image and a template")
    align_px: int = option(
        12, "for pairs to validate on: largest shift that the alignment looks for, in pixels", change="exact"
    )
    false_blobs: float | None = option(
        None,
        "store the threshold with at most this many false blobs per validation image (default: the one with the best "
        "pixel F1)",
        change="exact",
    )
    group_images: int = option(
        0,
        "visit patches in groups of this many images, for data sets that do not fit into memory; 0: shuffle all "
        "patches",
    )

    # Options of flatout: speed
    amp: Literal["auto", "off", "bf16", "fp16"] = option(
        "auto",
        "mixed precision; auto: bf16 on a GPU that supports it, fp16 on other GPUs, off on a CPU",
        change="rounding",
    )
    channels_last: bool = option(
        True, "use the channels_last memory format, which is faster on GPUs", change="rounding"
    )
    graphs: bool = option(True, "run each step as one CUDA graph when training on a single GPU", change="exact")
    device_strips: Literal["auto", "on", "off"] = option(
        "auto", "keep the images in GPU memory and crop and paint there; auto: if there is a GPU", change="exact"
    )

    # Options of every run, with other defaults
    project: str = option("runs/defect", "folder that holds the run folders", change="exact", metavar="FOLDER")
    log_every: int = option(20, "steps between two lines of the log", change="exact", metavar="STEPS")

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "bs", "epochs", "base_width", underscores=True)
        yield from too_small(
            self,
            0,
            "cache_size",
            "group_images",
            "alpha_background",
            "alpha_defect",
            "gamma_start",
            "false_blobs",
            underscores=True,
        )
        if not 0 <= self.defect_prior < 1:
            yield f"--defect_prior {self.defect_prior} must be from 0 to below 1"
        if self.lr <= 0:
            yield f"--lr {self.lr} must be above 0"
        if self.patch % 32 or self.patch < 32:
            yield f"--patch_size {self.patch} must be a multiple of 32: the network halves it five times"

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return self.patch_size or PATCH_OF_TYPE[self.image_type or "strip"]

    def with_current_names(self) -> "TrainOptions":
        """With old option names replaced by current ones; if both are given, the current one is used."""
        is_default = self.project == TrainOptions.project
        return replace(
            self,
            project=self.checkpoint_path or self.project if is_default else self.project,
            device=self.device or device_from_gpu_id(self.gpu_id),
            checkpoint_path="",
            gpu_id=None,
        )

    def synth(self, amplitudes: tuple[Range, ...]) -> SynthConfig:
        """The settings of sample synthesis; `amplitudes` are those of the defect mode."""
        shared = self.shared_with(SynthConfig) | {"amplitudes": amplitudes}
        return SynthConfig(**shared, num_defects=self.num_defects_range, mode=self.defect_mode)

    def shared_with(self, config: type) -> dict[str, Any]:
        """The options that this class of configs has under the same names."""
        known = {each.name for each in fields(self)}
        return {each.name: getattr(self, each.name) for each in fields(config) if each.name in known}


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """Options of an evaluation, and of a prediction on images without labels."""

    __test__ = False  # not a test class for pytest

    model_path: str = option("", "weights: best.pt, or a file of an older trainer", metavar="FILE")
    test_path: str = option(
        "",
        "the root of a data set, its test/ or valid/ folder, any folder with images, or pairs: a folder with temp/ and "
        "test/, or a CSV file with the columns template and test",
        metavar="FOLDER",
    )
    method: Method | None = option(
        None,
        "network, or classical: the aligned difference without any weights (default: network if --model_path is "
        "given, else classical for pairs)",
    )
    settings: str = option("", "file with a threshold, as `flatout defect calibrate` writes it", metavar="FILE")
    align: Literal["auto", "on", "off"] = option(
        "auto", "align the references to target, block by block; auto: if the images are pairs"
    )
    align_px: int = option(12, "largest shift that the alignment looks for, in pixels")
    refine: Literal["auto", "on", "off"] = option(
        "auto",
        "draw what the network detects by the difference to the references, exact to the pixel; auto: if the images "
        "are pairs",
    )
    output_dir: str = option("runs/defect/test", "folder to write results to", metavar="FOLDER")
    img_format: ImgFormat = option("tiff", "file format of the images")
    image_type: ImageType | None = option(
        None, "old way to choose the patch size: strip and square mean 128, mvtec means 256"
    )
    patch_size: int | None = option(None, "side of a patch in pixels (default: as in training)")
    min_patches: tuple[int, int] | None = option(
        None, "minimum rows and columns of patches per image (default: as many as make neighbours share 16 pixels)"
    )
    device: str = option("", "cpu, or the number of a GPU (default: the first GPU if there is one, else the CPU)")
    gpu_id: int | None = option(None, "old name of --device: the number of a GPU, or -1 for the CPU")
    amp: Literal["off", "bf16"] = option(
        "off", "bf16: the network computes in bfloat16, which is faster on a GPU; off: in float32"
    )
    use_ground_truth_mask: bool = option(True, "compare the heat maps with masks where masks exist")
    untiled: bool = option(
        False, "process each image in one pass instead of patch by patch: faster, slightly different at patch borders"
    )
    threshold: float | None = option(
        None,
        "probability at or above which a pixel counts as defect (default: the threshold in --settings, else in the "
        "weights, else 0.5; never one that is chosen on these images)",
    )
    dead_pixels: str = option(
        "",
        "CSV file with the columns dead_x and dead_y: the heat map is set to 0 in a box around each of these pixels",
        metavar="FILE",
    )
    all_detections: bool = option(
        False, "list detections below the threshold too, up to 50 per image; good images then have some"
    )
    save_maps: bool = option(True, "write a heat map per image, as float32 TIFF")
    save_pictures: bool = option(True, "write a plot per image: its planes, their differences and the heat map")
    save_masks: bool = option(True, "write a binary mask per image, as PNG: 255 at or above the threshold, 0 elsewhere")
    report: bool = option(
        True, "write report.html: scores, missed defects, false blobs and the worst images, in one file to read offline"
    )
    sweep: bool = option(
        False, "also report the mean probability of painted defects, by amplitude and by the planes they are in"
    )

    @property
    def resolved_device(self) -> str:
        """`device`, or what the old `gpu_id` stands for."""
        return self.device or device_from_gpu_id(self.gpu_id)


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(TestOptions):
    """Options of a calibration: which images, and how many false blobs are allowed."""

    settings: str = option("", "file to write the threshold to", metavar="FILE")
    false_blobs: float = option(0.1, "false blobs that are allowed per image, on average")


def device_from_gpu_id(gpu_id: int | None) -> str:
    """The value of `--device` that an old `--gpu_id` stands for; "" if none was given."""
    if gpu_id is None:
        return ""
    return "cpu" if gpu_id == CPU else str(gpu_id)
