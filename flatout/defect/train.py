"""Training a defect network: the recipe that `flatout defect train` hands to a run.

options -> images, samples, network -> run + loop of flatout.engine -> weights, results, pictures
"""

import hashlib
import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.clock import clock
from flatout.config import read_config
from flatout.defect.data.find import Judged, list_judged, root_of, truth_folder
from flatout.defect.data.items import Strips
from flatout.defect.evaluate.evaluate import HeatMapper, judge
from flatout.defect.evaluate.scores import Outcome
from flatout.defect.input import ImagesConfig, InputConfig, SamplesConfig, find_images, make_recipe, open_input
from flatout.defect.model import DefectNet
from flatout.defect.options import NEW_WORDS, TrainOptions
from flatout.defect.step import DefectJob, StepConfig, StepwiseSchedule
from flatout.defect.synth.pool import amplitudes_of
from flatout.defect.weights import about, load_network
from flatout.engine import DTYPES, Amp, Callback, Sections, default_fast_amp, make_optimizer
from flatout.errors import CheckpointError, counted
from flatout.feed import DeviceBatch, DeviceBatches, Store, StoreConfig
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
"""Samples of the first batch that are drawn."""


class TrainResult(RunResult):
    """What a training left behind; `outcome` is that of the last validation."""

    outcome: Outcome | None

    @property
    def last_loss(self) -> float:
        """Mean over the last epoch."""
        return self.losses.get("loss", 0.0)


def train(
    options: TrainOptions,
    callbacks: Iterable[Callback] = (),
    *,
    spending: Spending | None = None,
    seams: Seams | None = None,
    typed: Collection[str] | None = None,
) -> TrainResult:
    """Train as the options say. `callbacks` hear of it; `spending` is an account that was opened before.

    `typed` names the options that were given, for a run that is resumed; None: those that are not at their defaults.
    Raises Interrupted once a signal was obeyed and everything is saved: the same call then continues.
    """
    result = run.train(
        DefectRecipe,
        options.in_new_words(),
        callbacks,
        spending=spending,
        seams=seams,
        typed=None if typed is None else {NEW_WORDS.get(name, name) for name in typed},
    )
    return TrainResult(**vars(result))


class DefectRecipe(Recipe):
    """A network that tells defects from everything else that differs between dies."""

    name = "defect"
    samples = "patches"
    options: TrainOptions

    @classmethod
    def read_options(cls, folder: Path, asked: RunOptions) -> TrainOptions:
        return read_config(folder / CONFIG_NAME, TrainOptions).in_new_words()

    @property
    def seed(self) -> int:
        return self.options.seed

    @property
    def amp(self) -> Amp:
        return default_fast_amp(self.device) if self.options.amp == "auto" else self.options.amp

    def open_data(self) -> DataFacts:
        self._images = find_images(images_config(self.options))
        self._samples = make_recipe(samples_config(self.options), self._images)
        judged = _known_images(self.options) if self.options.use_mask and self.world.is_first else []
        self._judged = judged if any(not image.is_good for image in judged) else []
        # Ranks that do not validate must not take their newest weights for the best: only the first keeps any.
        self.validates = bool(self._judged)
        return DataFacts(self._fingerprint(), f"{self.options.training_dataset_path}: images")

    def build(self, run: RunContext, saved: Sections | None) -> Model:
        self._run, options = run, self.options
        self._examples: tuple[Tensor, Tensor] | None = None
        self._validation_store: Store | None = None
        network = self._make_network().to(self.device)
        if options.channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parameters = list(network.parameters())
        optimizer = make_optimizer("adam", [parameters], lr=options.lr, momentum=ADAM_BETA, decays=[0.0])
        return Model(network=network, optimizer=optimizer, epochs=options.epochs)

    def open_batches(self, model: Model) -> DeviceBatches:
        config = input_config(self.options)
        return open_input(self._images, self._samples, config, self.device, self.world, self._run.stack)

    def job(self, model: Model) -> DefectJob:
        options = self.options
        config = StepConfig(
            epochs=options.epochs,
            gamma_start=options.gamma_start,
            gamma_end=options.gamma_end,
            alpha_background=options.alpha_background,
            alpha_defect=options.alpha_defect,
            channels_last=options.channels_last,
        )
        return DefectJob(config, self._keep_examples)

    def schedule(self, model: Model, steps_per_epoch: int) -> StepwiseSchedule:
        return StepwiseSchedule(self.options.lr, self.options.epochs)

    def compute_settings(self) -> ComputeSettings:
        return ComputeSettings(amp=self.amp, graphs=self.options.graphs)

    def validate(self, model: Model, epoch: int, *, last: bool) -> ValidationResult | None:
        if not self._judged:
            return None
        model.network.eval()
        mapper = HeatMapper(model.network, self._samples.grid, self.device, dtype=DTYPES[self.amp])
        with clock.stage("train.validate"):
            watchers = [lambda seen: self._run.stop_if_asked()]
            found = judge(mapper, self._judged, read=self._read, watchers=watchers)
        return ValidationResult(found.fitness, found.scores(), found, str(found))

    def describe_network(self, model: Model) -> dict[str, Any]:
        assert isinstance(model.network, DefectNet)
        return about(model.network, patch=self.options.patch)

    def best_weights(self, model: Model, epoch: int, found: ValidationResult | None) -> dict[str, Any]:
        outcome: Outcome | None = None if found is None else found.outcome
        state = {key: tensor.detach().clone() for key, tensor in model.network.state_dict().items()}
        facts = {"kind": "model", "state": state, "epoch": epoch}
        if outcome is None:
            return facts | {"fitness": None, "threshold": None}
        return facts | {"fitness": outcome.fitness, "threshold": outcome.threshold}

    def plot_batches(self) -> None:
        """examples.png: what the network learned from; look at it first. Waits for the device."""
        if self._examples is None:
            return
        (images, masks), self._examples = self._examples, None
        with suppress(ImportError, OSError):
            from flatout.defect.pictures import examples_png

            path = self._run.folder / "examples.png"
            examples_png(images.float().cpu().numpy(), masks.cpu().numpy()[:, 0], path)

    def plot(self, folder: Path) -> None:
        from flatout.charts import plot_columns

        plot_columns(
            folder / "results.csv", ("loss", "pixel_AP", "pixel_best_F1", "recall@1FP"), folder / "results.png"
        )

    def _keep_examples(self, epoch: int, step: int, batch: DeviceBatch) -> None:
        """Some samples of the very first batch, kept on the device until the epoch ends."""
        if self._run.plots and epoch == 0 and step == 0:
            self._examples = batch["images"][:EXAMPLES].clone(), batch["masks"][:EXAMPLES].clone()

    def _fingerprint(self) -> str:
        """Changes when an image comes, goes or changes its length."""
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
        else:
            network, found = load_network(options.weights)
            if (found.version, found.base) != (options.network, options.base_width):
                raise CheckpointError(
                    f"{options.weights} is a {found.version} of base width {found.base}, wanted is a {options.network} "
                    f"of {options.base_width}. Say --network {found.version} --base_width {found.base}."
                )
        count = sum(parameter.numel() for parameter in network.parameters())
        logger.info(
            "Network %s, base width %d: %.2f M parameters. %d images of %d x %d, %d patches each of %d pixels; %s, %s.",
            options.network, options.base_width, count / 1e6, self._images.num_images, *grid.shape_hw,
            grid.per_image, options.patch, self.device, self.amp,
        )  # fmt: skip
        return network

    def _read(self, path: Path) -> np.ndarray:
        """An image of valid/, decoded once and kept for the next epoch."""
        if self._validation_store is None:
            strips = Strips([image.path for image in self._judged], shape_hw=self._samples.grid.shape_hw)
            config = StoreConfig(progress=False, workers=self.options.num_workers)
            self._validation_store = self._run.stack.enter_context(Store.open(strips, config))
            self._number = {image.path: number for number, image in enumerate(self._judged)}
        return self._validation_store[self._number[path]]


def images_config(options: TrainOptions) -> ImagesConfig:
    return ImagesConfig(
        folder=options.training_dataset_path,
        img_format=options.img_format,
        hard_negatives=bool(options.hard_negative_ratio),
        hard_negative_folder=options.hard_negative_dir,
    )


def samples_config(options: TrainOptions) -> SamplesConfig:
    return SamplesConfig(
        synth=options.synth(amplitudes_of(options.defect_mode, options.psf_type, options.amplitudes)),
        seed=options.seed,
        patch_px=options.patch,
        min_patches=options.min_patches,
        psf_type=options.psf_type,
        psf_pool_size=options.psf_pool_size,
        board_shapes=options.board_shapes,
    )


def input_config(options: TrainOptions) -> InputConfig:
    return InputConfig(
        total_batch=options.bs,
        epochs=options.epochs,
        seed=options.seed,
        group_images=options.group_images,
        workers=options.num_workers,
        prefetch_factor=options.prefetch_factor,
        cache_size=options.cache_size,
        device_strips=options.device_strips,
        channels_last=options.channels_last,
    )


def _known_images(options: TrainOptions) -> list[Judged]:
    """Images of valid/ whose defects are known; says so where masks are missing, because fewer images are judged."""
    root = root_of(options.training_dataset_path)
    judged = list_judged(root, "valid", options.img_format)
    defective = [image for image in judged if not image.is_good]
    if unknown := [image for image in defective if not image.is_known]:
        outcome = "there is no validation" if unknown == defective else "they are not validated on"
        logger.warning(
            "%d of %s in %s: no mask in %s, such as %s_mask.*: %s.",
            len(unknown), counted(len(defective), "defective image"), root / "valid", truth_folder(root, "valid"),
            unknown[0].path.stem, outcome,
        )  # fmt: skip
    return [image for image in judged if image.is_known]
