"""Training of a defect network: the recipe that `flatout defect train` hands to a run.

options -> images, samples, network -> run and loop of flatout.engine -> weights, results, plots
"""

import hashlib
import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.clock import clock
from flatout.config import read_config
from flatout.defect.compare.align import AlignConfig
from flatout.defect.compare.calibrate import ANY_HEAT, LOWEST, heat_blobs, lowest_for, response, threshold_for
from flatout.defect.data.find import EvaluationImage, list_split, root_of, truth_folder
from flatout.defect.data.items import MAX_GREY, Strips, size_text
from flatout.defect.data.pairs import PairReader, holds_pairs, list_pair_images, read_template_planes
from flatout.defect.evaluate.evaluate import EvaluatedImage, evaluate_images, mask_of_image
from flatout.defect.evaluate.maps import HeatMapper, HostMapMaker
from flatout.defect.evaluate.scores import DefectEvaluation, detect_components
from flatout.defect.input import InputConfig, TrainingImages, find_images, open_input
from flatout.defect.model import DefectNet, detection_problem
from flatout.defect.options import RENAMED_OPTIONS, TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.plots import examples_png
from flatout.defect.source import SampleRecipe
from flatout.defect.step import DefectJob, StepConfig, step_settings
from flatout.defect.synth.pool import amplitudes_of, make_kernels
from flatout.defect.weights import load_network, weights_metadata
from flatout.engine import DTYPES, Amp, Callback, Schedule, Sections, default_amp, make_optimizer
from flatout.errors import CheckpointError, DataError, counted
from flatout.feed import DecodeError, DeviceBatch, DeviceBatches, Store, StoreConfig
from flatout.runs import (
    CONFIG_NAME,
    ComputeSettings,
    DataFacts,
    Model,
    Recipe,
    RunContext,
    RunOptions,
    RunResult,
    Seams,
    Spending,
    ValidationResult,
    run,
)

logger = logging.getLogger(__name__)

ADAM_BETA = 0.9
EXAMPLES = 8
"""Samples of the first batch that are plotted, and on which the trained network is checked."""


class TrainResult(RunResult):
    """The result of a training; `outcome` is that of the last validation."""

    outcome: DefectEvaluation | None

    @property
    def last_loss(self) -> float:
        """Mean loss over the last epoch."""
        return self.losses.get("loss", 0.0)


def train(
    options: TrainOptions,
    callbacks: Iterable[Callback] = (),
    *,
    spending: Spending | None = None,
    seams: Seams | None = None,
    typed: Collection[str] | None = None,
) -> TrainResult:
    """Train as the options describe. `callbacks` are notified of events; `spending` continues an existing account.

    `typed` names the options that were given explicitly, for a resumed run; None: those that differ from their
    defaults. Raises Interrupted after a signal, once everything is saved: the same call then continues.
    """
    result = run.train(
        DefectRecipe,
        with_pair_recipe(options.with_current_names()),
        callbacks,
        spending=spending,
        seams=seams,
        typed=None if typed is None else {RENAMED_OPTIONS.get(name, name) for name in typed},
    )
    return TrainResult(**vars(result))


PAIR_RECIPE: dict[str, Any] = {
    "defect_mode": "board",
    "num_defects_range": (3, 10),
    "defect_share": 0.8,
    "shift_px": 1.0,
    "noise": 6.0,
    "edge_noise": 0.4,
}
"""Options that are changed for pairs if they have their default values: painted differences as those that are left
between an inspected image and its aligned template."""
SCAN_STEEPNESS = 4.0
"""`steepness` for pairs of black-and-white scans, whose edges are full steps wherever they lie."""
MAX_GREY_SHARE = 0.05
"""Share of pixels that are neither dark nor bright up to which a template is black and white."""


def with_pair_recipe(options: TrainOptions) -> TrainOptions:
    """The options; if the data are pairs, those that have their default values are replaced by `PAIR_RECIPE`.

    DataError if the first template cannot be read.
    """
    if not options.training_dataset_path or not holds_pairs(options.training_dataset_path):
        return options
    first = list_pair_images(options.training_dataset_path)[0]
    wanted = PAIR_RECIPE | {"one_reference": len(first.references) == 1}
    try:
        template_HW = read_template_planes(first.references[0])[0]
    except (OSError, DecodeError) as error:
        raise DataError(str(error)) from None
    if float(((template_HW > MAX_GREY / 4) & (template_HW < MAX_GREY * 3 / 4)).mean()) <= MAX_GREY_SHARE:
        wanted["steepness"] = SCAN_STEEPNESS
    usual = TrainOptions()
    changed = {name: value for name, value in wanted.items() if getattr(options, name) == getattr(usual, name)}
    logger.info(
        "Pairs: defects are painted on the templates with %s.",
        ", ".join(f"{name} {value}" for name, value in changed.items()) or "the options as they are given",
    )
    return replace(options, **changed)


class DefectRecipe(Recipe):
    """Trains a network that distinguishes defects from all other differences between dies."""

    name = "defect"
    samples = "patches"
    options: TrainOptions

    @classmethod
    def read_options(cls, folder: Path, asked: RunOptions) -> TrainOptions:
        return read_config(folder / CONFIG_NAME, TrainOptions).with_current_names()

    @property
    def seed(self) -> int:
        return self.options.seed

    @property
    def amp(self) -> Amp:
        return default_amp(self.device) if self.options.amp == "auto" else self.options.amp

    def open_data(self) -> DataFacts:
        self._images = training_images(self.options)
        self._samples = sample_recipe(self.options, self._images)
        self._validation_images = _chosen_validation_images(self.options) if self.world.is_first else []
        # False on the other ranks, whose newest weights then count as the best; only the first rank keeps any.
        self.validates = bool(self._validation_images)
        return DataFacts(self._fingerprint(), f"{self.options.training_dataset_path}: images")

    def build(self, run: RunContext, saved: Sections | None) -> Model:
        self._run, options = run, self.options
        self._examples: tuple[Tensor, Tensor] | None = None
        self._probe: tuple[Tensor, Tensor] | None = None
        network = self._network = self._make_network().to(self.device)
        if options.channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._refuse_bad_validation_images()
        parameters = list(network.parameters())
        optimizer = make_optimizer("adam", [parameters], lr=options.lr, momentum=ADAM_BETA, decays=[0.0])
        return Model(network=network, optimizer=optimizer, epochs=options.epochs)

    def open_batches(self, model: Model) -> DeviceBatches:
        config = input_config(self.options)
        return open_input(self._images, self._samples, config, self.device, self.world, self._run.stack)

    def job(self, model: Model) -> DefectJob:
        return DefectJob(StepConfig(**self.options.shared_with(StepConfig)), self._keep_examples)

    def schedule(self, model: Model, steps_per_epoch: int) -> Schedule:
        return partial(step_settings, self.options.lr, self.options.epochs)

    def compute_settings(self) -> ComputeSettings:
        return ComputeSettings(amp=self.amp, graphs=self.options.graphs)

    def validate(self, model: Model, epoch: int, *, last: bool) -> ValidationResult | None:
        if not self._validation_images:
            return None
        model.network.eval()
        are_pairs = bool(self._validation_images[0].references)
        grid_over = partial(Grid.over, patch=self.options.patch, min_patches=self.options.min_patches)
        mapper = HeatMapper(model.network, grid_over, self.device, dtype=DTYPES[self.amp])
        # Refined as in `test` and `predict`, so that the threshold is that of their maps. One image at a time, because
        # a compiled network would be compiled again for a batch.
        maker = HostMapMaker(mapper, refines=are_pairs)
        false_heat: list[np.ndarray] = []
        defect_heat: list[float] = []

        def keep(evaluated: EvaluatedImage) -> None:
            self._run.stop_if_asked()
            if self.options.false_blobs is not None:
                # Every component of a refined map has one heat, so all of them can be counted.
                least = ANY_HEAT if are_pairs else LOWEST / 2
                blobs = heat_blobs(evaluated.heat_HW, evaluated.image, least=least)
                false_heat.append(blobs.heat_N[blobs.is_false_N])
                defect_heat.extend(blobs.best_K.tolist())

        with clock.stage("train.validate"):
            found = evaluate_images(
                maker, self._validation_images, read=self._read, observers=[keep],
                find=detect_components if are_pairs else None, device=self.device, threads=0,
            )  # fmt: skip
        if self.options.false_blobs is not None:
            best = found.pixels.best_f1()
            probe = partial(response, self._validation_images, self._read, maker, threads=0)
            lowest = lowest_for(None if best is None else best[1], probe) if are_pairs else LOWEST
            threshold = threshold_for(false_heat, self.options.false_blobs, lowest=lowest)
            found = replace(found, chosen_threshold=threshold)
            if last and max(defect_heat, default=1.0) < threshold:
                logger.warning(
                    "None of the %s of the validation images reaches the stored threshold of %.4g: train longer.",
                    counted(len(defect_heat), "labelled defect"), threshold,
                )  # fmt: skip
        return ValidationResult(found.fitness, found.scores(), found, str(found))

    def describe_network(self, model: Model) -> dict[str, Any]:
        assert isinstance(model.network, DefectNet)
        return weights_metadata(model.network, patch=self.options.patch)

    def best_weights(self, model: Model, epoch: int, found: ValidationResult | None) -> dict[str, Any]:
        outcome: DefectEvaluation | None = None if found is None else found.outcome
        facts = {"kind": "model", "state": model.copied_state(), "epoch": epoch}
        if outcome is None:
            return facts | {"fitness": None, "threshold": None}
        chosen = outcome.chosen_threshold is not None or outcome.pixels.best_f1() is not None
        return facts | {"fitness": outcome.fitness, "threshold": outcome.threshold if chosen else None}

    def plot_batches(self) -> None:
        """Have examples.png plotted, samples of the first batch, and keep them for the check of the network at the end.

        Waits for the device.
        """
        if self._examples is None:
            return
        images, masks = (part.float().cpu() for part in self._examples)
        self._examples, self._probe = None, (images, masks)
        path = self._run.folder / "examples.png"
        # A run that was interrupted in its first epoch has none yet.
        if path.exists() and self._run.continues:
            return
        images_BCHW, masks_BHW = images.numpy()[:EXAMPLES], masks.numpy()[:EXAMPLES, 0]
        self._run.background.submit(partial(examples_png, images_BCHW, masks_BHW, path))

    def plot(self, folder: Path) -> None:
        from flatout.charts import plot_columns

        plot_columns(
            folder / "results.csv", ("loss", "pixel_AP", "pixel_best_F1", "recall@1FP"), folder / "results.png"
        )

    def finished(self, folder: Path) -> None:
        if (problem := self._detection_problem()) is not None:
            logger.warning(
                "This network cannot find defects: %s. Train again with more --epochs, another --seed or a lower --lr.",
                problem,
            )

    def _detection_problem(self) -> str | None:
        """Check the trained network on samples of the first batch; None if nothing is wrong, or no batch was kept."""
        if self._probe is None:
            return None
        images, masks = self._probe
        # A copy, because the network itself may be compiled.
        with torch.random.fork_rng(devices=[]):
            network = DefectNet(self._network.version, self._network.base)
        network.load_state_dict(self._network.state_dict())
        network.to(self.device).eval()
        most = masks.flatten(1).sum(1).argsort(descending=True)[:EXAMPLES]
        x, is_defect = images[most].to(self.device) / MAX_GREY, masks[most, 0].to(self.device) > 0
        return detection_problem(network, x, is_defect) or None

    def _keep_examples(self, epoch: int, step: int, batch: DeviceBatch) -> None:
        """Keep the first batch of this process on the device, until samples of it are plotted."""
        if self._run.plots and self._examples is None and self._probe is None:
            self._examples = batch["images"].clone(), batch["masks"].clone()

    def _fingerprint(self) -> str:
        """A digest that changes when an image is added or removed, or when the size of its file changes."""
        strips = self._images.strips
        digest = hashlib.sha256(f"{self._images.num_images} {strips.shape_hw}".encode())
        for path in (Path(strips.path(index)) for index in range(len(strips))):
            size = path.stat().st_size if path.exists() else -1
            digest.update(f"{path.name}\0{size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _make_network(self) -> DefectNet:
        options, grid = self.options, self._samples.grid
        if not options.weights:
            network = DefectNet(options.network, options.base_width)
            if options.defect_prior:
                network.predict_prior(options.defect_prior)
        else:
            network, found = load_network(options.weights)
            if (found.version, found.base) != (options.network, options.base_width):
                raise CheckpointError(
                    f"{options.weights} holds a {found.version} network of base width {found.base}, but the options "
                    f"ask for {options.network} of base width {options.base_width}. Use --network {found.version} "
                    f"--base_width {found.base}."
                )
        count = sum(parameter.numel() for parameter in network.parameters())
        logger.info(
            "Network %s, base width %d: %.2f M parameters. %s of %s px (width x height), %d patches of %d px each; %s, "
            "amp %s.",
            options.network, options.base_width, count / 1e6, counted(self._images.num_images, "image"),
            size_text(grid.shape_hw), grid.per_image, options.patch, self.device, self.amp,
        )  # fmt: skip
        return network

    def _refuse_bad_validation_images(self) -> None:
        """Read them with their masks before the training: a bad one would end it after the first epoch."""
        bad: list[str] = []
        for image in self._validation_images:
            try:
                mask_of_image(image, self._read(image.path).shape[1:])
            except (OSError, DecodeError, DataError) as error:
                bad.append(str(error))
        if bad:
            raise DataError(
                f"{counted(len(bad), 'validation image')} cannot be used; the first: {bad[0]} To train without "
                "validation, give --use_mask false."
            )

    def _read(self, path: Path) -> np.ndarray:
        """An image of valid/, decoded once and kept for the following epochs."""
        return self._validation_store[self._validation_numbers[path]]

    @cached_property
    def _validation_numbers(self) -> dict[Path, int]:
        return {image.path: number for number, image in enumerate(self._validation_images)}

    @cached_property
    def _validation_store(self) -> Store:
        images = self._validation_images
        reader = PairReader(images, AlignConfig(reach_px=self.options.align_px)) if images[0].references else None
        strips = Strips([image.path for image in images], shape_hw=self._samples.grid.shape_hw, read=reader)
        config = StoreConfig(progress=False, workers=self.options.num_workers)
        return self._run.stack.enter_context(Store.open(strips, config))


def training_images(options: TrainOptions) -> TrainingImages:
    return find_images(
        options.training_dataset_path,
        options.img_format,
        hard_negatives=bool(options.hard_negative_ratio),
        hard_negative_folder=options.hard_negative_dir,
    )


def sample_recipe(options: TrainOptions, images: TrainingImages) -> SampleRecipe:
    """Which patches are cropped, and what is painted into them."""
    synth = options.synth(amplitudes_of(options.defect_mode, options.psf_type, options.amplitudes))
    kernels = make_kernels(
        synth.mode,
        psf_type=options.psf_type,
        pool_size=options.psf_pool_size,
        seed=options.seed,
        board_shapes=options.board_shapes,
    )
    return SampleRecipe(
        Grid.over(images.strips.shape_hw, options.patch, options.min_patches),
        synth,
        kernels,
        num_images=images.num_images,
        num_hard_negatives=images.num_hard_negatives,
    )


def input_config(options: TrainOptions) -> InputConfig:
    return InputConfig(**options.shared_with(InputConfig), total_batch=options.bs, workers=options.num_workers)


def _chosen_validation_images(options: TrainOptions) -> list[EvaluationImage]:
    """The images to validate on. Good ones alone are enough only if a number of false blobs is to be kept."""
    images = _list_validation_images(options) if options.use_mask else []
    if options.false_blobs is None:
        return images if any(not image.is_good for image in images) else []
    if not images:
        logger.warning(
            "--false_blobs %g has no effect: there are no images to validate on, good ones or with masks. Choose a "
            "threshold after the training, with: flatout defect calibrate",
            options.false_blobs,
        )
    return images


def _list_validation_images(options: TrainOptions) -> list[EvaluationImage]:
    """The labelled images of valid/; warns of defective images without a mask, which are not used."""
    if holds_pairs(options.training_dataset_path):
        # Only their templates are trained on.
        pairs = list_pair_images(options.training_dataset_path)
        if with_boxes := [pair for pair in pairs if pair.boxes is not None and not pair.is_labelled]:
            logger.warning(
                "%d of %s have boxes but no mask, such as %s: they are not validated on. After the training, choose a "
                "threshold on them with: flatout defect calibrate --model_path WEIGHTS --test_path %s --settings FILE",
                len(with_boxes), counted(len(pairs), "pair"), with_boxes[0].path, options.training_dataset_path,
            )  # fmt: skip
        return [pair for pair in pairs if pair.is_labelled]
    root = root_of(options.training_dataset_path)
    images = list_split(root, "valid", options.img_format)
    defective = [image for image in images if not image.is_good]
    if unlabelled := [image for image in defective if not image.is_labelled]:
        consequence = "there is no validation" if unlabelled == defective else "they are not validated on"
        logger.warning(
            "%d of %s in %s without a mask in %s, such as %s_mask.*: %s.",
            len(unlabelled), counted(len(defective), "defective image"), root / "valid", truth_folder(root, "valid"),
            unlabelled[0].path.stem, consequence,
        )  # fmt: skip
    return [image for image in images if image.is_labelled]
