"""What a training or a test was asked to do: one field per flag and per key of the YAML file, under the same name.

The defaults live here and nowhere else. No torch: help must answer at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from flatout.cli import option
from flatout.defect.data.find import ImgFormat
from flatout.defect.synth.config import BoardShape, DefectMode, Range, SynthConfig
from flatout.runs import RunOptions, too_small

Network = Literal["v1", "v2"]
ImageType = Literal["strip", "square", "mvtec"]
PATCH_OF_TYPE: dict[str, int] = {"strip": 128, "square": 128, "mvtec": 256}
CPU = -1
NEW_WORDS = {"gpu_id": "device", "checkpoint_path": "project"}
"""What older names mean."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """A training of the defect job."""

    # Names of the trainer that people know
    training_dataset_path: str = option(
        "",
        "R/train/good, or the root R; docs/defect.md says what else may lie below R",
        change="place",
        metavar="FOLDER",
    )
    img_format: ImgFormat = option("tiff", "kind of files that are read")
    image_type: ImageType | None = option(None, "an old name for a patch size: 128, 128 or 256")
    patch_size: int | None = option(None, "side of a patch in pixels (default: 128, or what image_type stands for)")
    bs: int = option(16, "samples per step, over all GPUs together")
    lr: float = option(1e-3, "learning rate of Adam; a fifth after 80 %% and again after 90 %% of the epochs")
    epochs: int = option(30, "passes over the training images")
    gpu_id: int | None = option(None, "old name of --device: the number of a GPU, or -1 for the CPU", change="exact")
    checkpoint_path: str = option("", "old name of --project", change="exact", metavar="FOLDER")
    num_defects_range: tuple[int, int] = option((3, 8), "fewest and most defects of a sample, 2 to 64")
    use_mask: bool = option(
        True, "validate after every epoch, if there is a valid/ folder; training needs no masks", change="exact"
    )
    seed: int = option(42, "of first weights, order and painted defects")
    cache_size: int | None = option(
        None,
        "decoded images to keep, once for all workers; 0: none (default: all that fit into half of the free memory)",
        change="exact",
    )
    gamma_start: float = option(2.0, "gamma of the focal loss in the first epoch")
    gamma_end: float = option(2.0, "gamma towards the last epoch, along half a wave")
    defect_mode: DefectMode = option("gaussian", "spots, diffraction patterns, or larger shapes with full swing")
    psf_type: str = option("type1", "with defect_mode psf: kind of the diffraction patterns")
    psf_pool_size: int = option(1000, "with defect_mode psf: how many patterns are made beforehand")
    num_workers: int | str = option("auto", "processes that crop and paint: a number, auto or cpu*0.9", change="exact")
    prefetch_factor: int | None = option(
        None, "batches to hold ready (default: enough for all workers)", change="exact"
    )
    partial_leak_prob: float = option(0.0, "chance that a defect of target shows weakly in one reference")
    partial_leak_scale: Range = option((0.2, 0.7), "how weakly: smallest and largest share of its strength")

    # Ours: recipe
    network: Network = option("v1", "v2 has pooling, channel weights and fewer convolutions")
    base_width: int = option(64, "channels of the first layer; the others follow from it")
    weights: str = option("", "start from this file: of ours, or of an older training", change="place", metavar="FILE")
    min_patches: tuple[int, int] | None = option(
        None, "rows and columns of patches per image at least (default: neighbours share 16 pixels)"
    )
    amplitudes: tuple[Range, ...] = option(
        ((60.0, 60.0), (80.0, 80.0)),
        "strengths of defects or ranges of them, such as 60 8:12; the sign is random (default: 60 80)",
    )
    board_shapes: tuple[BoardShape, ...] = option(
        ("blob",), "with defect_mode board: equally many of those that are named"
    )
    min_target_only: int = option(1, "fewest defects of a sample that are in target alone, 0 or 1")
    defect_share: float = option(0.5, "share of samples with defects, of those that are no hard negatives or lines")
    alpha_background: float = option(1.0, "weight of background in the loss")
    alpha_defect: float = option(1.0, "weight of defects in the loss")
    hard_negative_dir: str = option(
        "",
        "folder of images that must not fire (default: R/train/hard_negative_samples)",
        change="place",
        metavar="FOLDER",
    )
    hard_negative_ratio: float = option(0.0, "share of samples that are cut from those images")
    line_ratio: float = option(0.0, "share of samples with lines that differ between the planes, and no label")
    shift_px: float = option(0.0, "largest shift of a reference against target, in pixels")
    noise: float = option(0.0, "standard deviation of noise in each plane, in grey levels")
    edge_noise: float = option(0.0, "noise in proportion to the local step: ragged edges")
    gain: float = option(0.0, "largest relative change of a plane's contrast")
    offset: float = option(0.0, "largest change of a plane's brightness, in grey levels")
    steepness: float = option(1.0, "contrast after shift and noise; 4 for scans of black and white")
    one_reference: bool = option(False, "ref2 is ref1 again: for pairs of an image and a template")
    group_images: int = option(
        0, "visit patches in groups of this many images, for sets that do not fit; 0: shuffle all"
    )

    # Ours: speed
    amp: Literal["auto", "off", "bf16", "fp16"] = option(
        "auto", "mixed precision; auto: bf16 on a GPU that has it, else fp16; off on a CPU", change="rounding"
    )
    channels_last: bool = option(True, "the memory layout that convolutions on GPUs prefer", change="rounding")
    graphs: bool = option(True, "run a step as one CUDA graph, where there is a GPU", change="exact")
    device_strips: Literal["auto", "on", "off"] = option(
        "auto", "keep images in GPU memory and paint there; auto: where there is a GPU", change="exact"
    )

    # Those of every run, with other defaults
    project: str = option("runs/defect", "folder of the folders of runs", change="exact", metavar="FOLDER")
    log_every: int = option(20, "steps between two lines of the log", change="exact", metavar="STEPS")

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "bs", "epochs", "base_width", underscores=True)
        yield from too_small(
            self, 0, "cache_size", "group_images", "alpha_background", "alpha_defect", "gamma_start", underscores=True
        )
        if self.lr <= 0:
            yield f"--lr {self.lr} must be above 0"
        if self.patch % 32 or self.patch < 32:
            yield f"--patch_size {self.patch} must be a multiple of 32: the network halves it five times"

    @property
    def patch(self) -> int:
        return self.patch_size or PATCH_OF_TYPE[self.image_type or "strip"]

    def in_new_words(self) -> "TrainOptions":
        """Without old names for what every run has; where both are given, the new one counts."""
        is_default = self.project == TrainOptions.project
        return replace(
            self,
            project=self.checkpoint_path or self.project if is_default else self.project,
            device=self.device or device_of_id(self.gpu_id),
            checkpoint_path="",
            gpu_id=None,
        )

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

    __test__ = False  # pytest: a class of ours, not of tests

    model_path: str = option("", "weights: best.pt, or the file of an older training")
    test_path: str = option("", "the root of a data set, its test/ folder, or any folder with images")
    output_dir: str = option("runs/defect/test", "folder to write to")
    img_format: ImgFormat = option("tiff", "kind of files that are read")
    image_type: ImageType | None = option(None, "an old name for a patch size: 128, 128 or 256")
    patch_size: int | None = option(None, "side of a patch in pixels (default: as in training)")
    min_patches: tuple[int, int] | None = option(
        None, "rows and columns of patches per image at least (default: neighbours share 16 pixels)"
    )
    device: str = option("", "cpu, or the number of a GPU; '' is the first GPU, else the CPU")
    gpu_id: int | None = option(None, "old name of --device: the number of a GPU, or -1 for the CPU")
    use_ground_truth_mask: bool = option(True, "compare with masks, where there are some")
    untiled: bool = option(
        False, "one pass over the whole image instead of patches: faster, and slightly different at borders"
    )
    threshold: float | None = option(
        None, "probability above which a pixel counts (default: the one that training chose, else 0.5)"
    )
    dead_pixels: str = option("", "CSV with columns dead_x and dead_y: boxes around these pixels are set to 0")
    save_maps: bool = option(True, "write heat maps, as float32 TIFF")
    save_pictures: bool = option(True, "write pictures of what was found")
    sweep: bool = option(False, "also report the mean probability of made-up defects by strength and group")

    @property
    def where(self) -> str:
        """The device, by its old or its new name."""
        return self.device or device_of_id(self.gpu_id)


def device_of_id(gpu_id: int | None) -> str:
    """The old `--gpu_id` as `--device` has it; "" where it was not given."""
    if gpu_id is None:
        return ""
    return "cpu" if gpu_id == CPU else str(gpu_id)
