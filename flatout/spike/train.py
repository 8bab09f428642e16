"""Training of a deblurring network: the recipe that `flatout spike train` hands to a run.

config -> clips, loader plan, network -> run and loop of flatout.engine -> checkpoints, metrics, visuals
"""

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.cli import Change, changes_of
from flatout.clock import clock
from flatout.config import read_config
from flatout.engine import (
    DTYPES,
    AdamW,
    Amp,
    Callback,
    EpochReport,
    IntervalStats,
    MovingAverage,
    Sections,
    default_amp,
)
from flatout.errors import ConfigError
from flatout.feed import DeviceBatches, FeedConfig
from flatout.ranks import World
from flatout.runs import (
    CONFIG_NAME,
    ComputeSettings,
    DataFacts,
    EpochRecord,
    Identity,
    Model,
    Recipe,
    RunContext,
    RunOptions,
    RunResult,
    Seams,
    Spending,
    ValidationResult,
    choose_loggers,
    config_of,
    flat,
    run,
    write_options,
    write_yaml,
)
from flatout.spike.check import warn_of_mismatch
from flatout.spike.config import (
    DataConfig,
    OptimConfig,
    SpikeConfig,
    TrainConfig,
    load_config,
    plain_values,
)
from flatout.spike.data.clip_set import ClipSet, open_training
from flatout.spike.evaluate import DeblurEvaluation, RestoredBatch, Restorer, evaluate
from flatout.spike.input import (
    ClipFeed,
    LoaderPlan,
    check_memory,
    hint,
    loading_summary,
    open_resident_feed,
    open_scoring_feed,
    open_store,
    open_training_feed,
    plan_for,
    training_plan,
)
from flatout.spike.model import DeblurNet
from flatout.spike.options import OPTIONS_NAME, TrainOptions
from flatout.spike.step import DeblurJob, DeblurLoss, SpikeSchedule, StepPlan, ToClip, plan_steps
from flatout.spike.visuals import as_bytes, side_by_side, write_image
from flatout.spike.weights import refuse_legacy_weights

logger = logging.getLogger(__name__)

__all__ = ["SpikeRecipe", "TrainOptions", "TrainResult", "train"]

NUM_VISUALS = 4
"""Validation clips of which an image is written."""
_NOT_COMPARED = (
    "EPOCHS", "TOTAL_STEPS", "RESUME_FROM_CHECKPOINT", "CHECKPOINT_PATH", "DEVICE_RESIDENT", "CUDA_GRAPHS",
    "COMPILE_MODEL",
)  # fmt: skip
"""Keys of TRAIN that do not identify a training: its length and --compile are compared separately, the others change
no result."""
CHANGES: dict[str, Change] = {
    "DATA.ROOT": "place",
    "DATA.SPIKE_DIR": "place",
    "DATA.VOXEL_CACHE_DIRNAME": "place",
    "TRAIN.AMP": "rounding",
    "MODEL.CHANNELS_LAST": "rounding",
    **dict.fromkeys(
        (
            "DATA.VAL_SPLIT", "DATA.VAL_CLIP_STRIDE", "DATA.USE_RAM_CACHE", "DATA.CACHE_SIZE_GB", "DATA.CACHE_SCOPE",
            "DATA.ALIGN_LOG_PATHS", "TRAIN.VAL_BATCH_SIZE", "TRAIN.NUM_WORKERS", "TRAIN.VAL_NUM_WORKERS",
            "TRAIN.PREFETCH_FACTOR", "TRAIN.VAL_PREFETCH_FACTOR",
        ),
        "exact",
    ),
}  # fmt: skip
"""What a changed value of a key means for a resumed run; a change of any other key makes it a different training."""


class TrainResult(RunResult):
    """The result of a training."""

    outcome: DeblurEvaluation | None

    @property
    def evaluation(self) -> DeblurEvaluation | None:
        """The result of the last validation; None if there was none."""
        return self.outcome


def train(
    config: SpikeConfig,
    options: TrainOptions,
    callbacks: Iterable[Callback] = (),
    *,
    spending: Spending | None = None,
    seams: Seams | None = None,
    typed: Collection[str] | None = None,
) -> TrainResult:
    """Train as the config describes. `callbacks` are notified of events; `spending` continues an existing account.

    Raises Interrupted after a signal, once everything is saved: the same call then continues.
    """
    return train_with_options(replace(options, settings=config), callbacks, spending=spending, seams=seams, typed=typed)


def train_with_options(options: TrainOptions, callbacks: Iterable[Callback] = (), **more: Any) -> TrainResult:
    """As `train`, with the config that the options name; a resumed run uses its own config by default."""
    if options.settings is None and (options.config or not options.resume):
        options = replace(options, settings=load_config(options.config, options.set))
    if options.settings is not None:
        options = options.with_checkpoint()
    if isinstance(options.resume, str):
        refuse_legacy_weights(Path(options.resume))
    return TrainResult(**vars(run.train(SpikeRecipe, options, callbacks, **more)))


class SpikeRecipe(Recipe):
    """Trains a network that predicts sharp frames from blurry ones and their spikes."""

    name = "spike"
    weights_folder = "ckpts"
    samples = "clips"
    options: TrainOptions

    def __init__(self, options: RunOptions, world: World, device: torch.device, *, resume: Path | None = None) -> None:
        assert isinstance(options, TrainOptions)
        self.unresolved = options
        """The options as given, without what the config says about the run."""
        super().__init__(options.resolved(), world, device, resume=resume)
        self.config: SpikeConfig = options.settings

    @classmethod
    def read_options(cls, folder: Path, asked: RunOptions) -> TrainOptions:
        """The stored options, with the config of the command or, if it names none, with the stored one."""
        assert isinstance(asked, TrainOptions)
        file = folder / OPTIONS_NAME
        stored = read_config(file, TrainOptions) if file.is_file() else asked  # older versions stored only the config
        settings = load_config(folder / CONFIG_NAME, asked.set) if asked.settings is None else asked.settings
        return replace(stored, settings=settings)

    # Identity of the training

    @property
    def seed(self) -> int:
        return self.config.SEED

    @property
    def amp(self) -> Amp:
        """The precision of a step; `auto` is off on a CPU, where half precision is slow."""
        return default_amp(self.device) if self.config.TRAIN.AMP == "auto" else self.config.TRAIN.AMP

    def identity(self) -> Identity:
        config = {"epochs": self._epochs()} | config_of(self.options) | _compared(self.config)
        changes = {**changes_of(TrainOptions), **CHANGES}
        if self.config.TRAIN.EPOCHS is None:
            changes["epochs"] = "exact"  # with TOTAL_STEPS it depends on the number of ranks
        return Identity(json.loads(json.dumps(config)), _in_effect, changes)

    def write_config(self, folder: Path) -> None:
        write_yaml(folder / CONFIG_NAME, plain_values(self.config))
        write_options(folder / OPTIONS_NAME, self.unresolved, leave_out=("config", "set", "settings"))

    def loggers(self) -> list[Callback]:
        return choose_loggers(self.options.log_to, tensorboard={"within": "logs"})

    # Parts of the training

    def open_data(self) -> DataFacts:
        train, val = self._clip_sets
        if self.world.is_first:
            warn_of_mismatch(train)
        self.validates = val is not None and self.options.validate
        return DataFacts(train.fingerprint(), f"{train.where}: frames or streams")

    def build(self, run: RunContext, saved: Sections | None) -> Model:
        self._run = run
        config, clips = self.config, self._clip_sets[0]
        self._total_batch, epochs = config.TRAIN.BATCH_SIZE * self.world.size, self._epochs()
        if saved is not None:
            facts = saved["run"]
            before = facts["environment"]["world_size"]
            self._total_batch = facts.get("total_batch", config.TRAIN.BATCH_SIZE * before)
            if config.TRAIN.EPOCHS is None and facts.get("total_steps") == config.TRAIN.TOTAL_STEPS:
                epochs = facts["epochs"]
        if self._total_batch % self.world.size:
            raise ConfigError(
                f"This run trains on {self._total_batch} clips per micro-batch, summed over all ranks, which cannot be "
                f"divided equally among {self.world.size} ranks. Use a number that divides {self._total_batch}."
            )
        self._steps, self._num_epochs = self._plan_steps(self._total_batch // self.world.size), epochs
        self._loader = self._plan_loader()
        first = clips.sequences[0]
        ratio_y, ratio_x = (rgb / spike for rgb, spike in zip(first.rgb_hw, first.spike_hw, strict=True))
        network = DeblurNet(config.MODEL, channels=config.DATA.channels, ratio=ratio_y, ratio_x=ratio_x)
        count = sum(parameter.numel() for parameter in network.parameters())
        logger.info(
            "Network: %.2f M parameters, %s.", count / 1e6, "RGB + spikes" if config.MODEL.USE_SPIKE else "RGB only"
        )
        network.to(self.device)
        if config.MODEL.CHANNELS_LAST:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._to_clip = ToClip(config.DATA)
        average = MovingAverage(network, decay=config.TRAIN.EMA_DECAY)
        return Model(network=network, optimizer=self._optimizer(network), average=average, epochs=epochs)

    def open_batches(self, model: Model) -> DeviceBatches:
        clips, data, plan = self._clip_sets[0], self.config.DATA, self._loader
        # The first rank decodes the frames into the store, the others attach to it.
        with self.world.first_rank_first():
            store = open_store(clips, data, budget_bytes=plan.cache_bytes, workers=plan.workers.train)
        workers = FeedConfig(
            workers=plan.workers.train,
            slots=plan.slots,
            persistent_workers=plan.config.PERSISTENT_WORKERS,
            epochs=model.epochs,
            on_error="substitute",
        )
        open_feed = open_resident_feed if self.config.TRAIN.DEVICE_RESIDENT else open_training_feed
        order = training_plan(clips, plan.batch, steps=self._steps, seed=self.seed, world=self.world)
        feed = self._run.stack.enter_context(open_feed(clips, data, workers, order, self.device, store))
        self._validation_feed = self._open_validation_feed(feed) if self.validates and self.world.is_first else None
        return feed.batches

    def steps(self, batches: DeviceBatches) -> int:
        return self._steps.trained_micro_batches

    def job(self, model: Model) -> DeblurJob:
        loss_weight = 1 / (self._steps.accumulation * self.world.size)
        return DeblurJob(self._to_clip, DeblurLoss(self.config.LOSS).to(self.device), loss_weight=loss_weight)

    def schedule(self, model: Model, steps_per_epoch: int) -> SpikeSchedule:
        train = self.config.TRAIN
        return SpikeSchedule(train.OPTIM.LR, plan=self._steps, epochs=model.epochs, warmup=train.SCHED.WARMUP_STEPS)

    def compute_settings(self) -> ComputeSettings:
        train = self.config.TRAIN
        return ComputeSettings(amp=self.amp, clip_norm=train.MAX_GRAD_NORM, graphs=train.CUDA_GRAPHS)

    # After an epoch

    def is_due(self, epoch: int, *, last: bool) -> bool:
        every = self.config.LOG.VAL_EVERY_STEPS
        return last or not every or (epoch + 1) * self._steps.steps_per_epoch % every == 0

    def due_mid_epoch(self, epoch: int, step: int) -> int | None:
        every = self.config.LOG.VAL_EVERY_STEPS
        done = epoch * self._steps.steps_per_epoch + step // self._steps.accumulation
        return done if every and self.validates and done % every == 0 else None

    def validate(self, model: Model, epoch: int, *, last: bool) -> ValidationResult | None:
        """Score the moving average on every frame of the validation split, once."""
        if self._validation_feed is None:
            return None
        restorer = Restorer(model.evaluated, self._to_clip, self.config.TEST, DTYPES[self.amp])
        with clock.stage("train.validate"):
            found = evaluate(
                restorer, self._validation_feed, [lambda restored: self._run.stop_if_asked(), self._write_visuals]
            )
        return ValidationResult(found.psnr, found.as_dict(), found, str(found))

    def rows(self, epoch: int, report: EpochReport, found: ValidationResult | None) -> EpochRecord:
        scores = dict(found.named) if found is not None else {}
        speed, steps = report.samples_per_s, self._steps.steps_per_epoch
        row: dict[str, Any] = {"epoch": epoch, **report.items, "lr": report.lrs[0] if report.lrs else 0.0}
        row["samples_per_s"] = speed
        summary = row | {"start_step": epoch * steps, "end_step": (epoch + 1) * steps, "last_val_in_epoch": scores}
        self._write(f"epoch_{epoch:03d}.json", summary)
        if scores:
            self._write(f"val_step_{(epoch + 1) * steps}.json", {"step": (epoch + 1) * steps, **scores})
        # Every row of the table must have the same columns.
        columns = dict.fromkeys(field.name for field in fields(DeblurEvaluation)) if self.validates else {}
        return EpochRecord(row | columns | scores, _scalars(report, found, speed), at=(epoch + 1) * steps)

    def mid_epoch_scalars(self, steps: int, found: ValidationResult) -> Mapping[str, float]:
        self._write(f"val_step_{steps}.json", {"step": steps, **found.named})
        return _scores(found)

    def plot(self, folder: Path) -> None:
        from flatout.charts import plot_columns

        plot_columns(folder / "results.csv", ("loss", "lr", "psnr", "ssim"), folder / "results.png")

    # What is saved

    def describe_network(self, model: Model) -> dict[str, Any]:
        return {"network": model.network.spec, "config": plain_values(self.config)}

    def describe_run(self) -> dict[str, Any]:
        return {
            "total_batch": self._total_batch,
            "epochs": self._num_epochs,
            "total_steps": self.config.TRAIN.TOTAL_STEPS,
        }

    def best_weights(self, model: Model, epoch: int, found: ValidationResult | None) -> dict[str, Any]:
        psnr = None if found is None else found.score
        return {"kind": "stripped", "state": model.copied_state(), "epoch": epoch, "psnr": psnr}

    # Progress

    def figures(self, stats: IntervalStats) -> dict[str, str]:
        """Values of the progress line; `data_time` is how long the step was blocked waiting for data."""
        # Exactly the step line of the original guide, for whoever searches logs for it, then the rest.
        guide = f"{stats.steps_done} | loss={stats.items['loss']:.4f} | data_time={stats.wait_ms:.1f}ms"
        values = {"step": guide, "epoch=": str(stats.epoch), "lr=": f"{stats.lr:.1e}"}
        values |= {"step=": f"{stats.step_ms:.1f}ms", "": f"{stats.samples_per_s:.1f} samples/s"}
        if torch.cuda.is_available():
            values |= {"GPU0_mem=": f"{torch.cuda.max_memory_allocated() / 1e9:.1f}GB"}
        return values

    _has_hinted = False

    def hint(self, stats: IntervalStats) -> None:
        # Not in the first epoch, in which files are read from disk and kernels are selected.
        if self.world.is_first and stats.epoch > 0 and not self._has_hinted:
            self._has_hinted = True
            logger.info("%s", hint(stats.wait_ms, stats.step_ms))

    # Helpers

    @cached_property
    def _clip_sets(self) -> tuple[ClipSet, ClipSet | None]:
        """The clips to train on and to validate on; opened once."""
        return open_training(self.config.DATA)

    def _plan_steps(self, batch: int) -> StepPlan:
        accumulation = self.config.TRAIN.GRADIENT_ACCUMULATION_STEPS
        return plan_steps(len(self._clip_sets[0]), world=self.world.size, batch=batch, accumulation=accumulation)

    def _epochs(self) -> int:
        train = self.config.TRAIN
        return train.EPOCHS or self._plan_steps(train.BATCH_SIZE).epochs_for(train.TOTAL_STEPS or 1)

    def _plan_loader(self) -> LoaderPlan:
        gpus = self.world.size
        plan = plan_for(self.config, self._clip_sets[0], gpus=gpus, batch=self._total_batch // gpus)
        if self.world.is_first:
            for line in loading_summary(plan, self.config.LOG.LANG):
                logger.info("%s", line)
        check_memory(plan)
        return plan

    def _optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """Fused AdamW, with weight decay for the weights of convolutions only."""
        optim = self.config.TRAIN.OPTIM
        weights = [parameter for parameter in network.parameters() if parameter.dim() == 4]
        others = [parameter for parameter in network.parameters() if parameter.dim() != 4]
        groups = [{"params": weights, "weight_decay": optim.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        return AdamW(groups, lr=optim.LR, betas=optim.BETAS, fused=True)

    def _open_validation_feed(self, training: ClipFeed) -> ClipFeed:
        clips, config, plan = self._clip_sets[1], self.config, self._loader
        assert clips is not None
        used = training.store.statistics().nbytes if training.store is not None else 0
        store = open_store(clips, config.DATA, budget_bytes=plan.cache_bytes - used, workers=plan.workers.val)
        # Workers that persist would be idle for a whole epoch.
        workers = FeedConfig(workers=plan.workers.val, slots=plan.val_slots, persistent_workers=False)
        opened = open_scoring_feed(clips, config.DATA, workers, plan.val_batch, self.device, store)
        return self._run.stack.enter_context(opened)

    def _write_visuals(self, restored: RestoredBatch) -> None:
        """Write the first frame of the first clips as blur | restored | sharp; replaces earlier ones."""
        for row, index in enumerate(restored.indices):
            if index < NUM_VISUALS and self._run.plots:
                frames = (restored.blur[row, 0], restored.predicted[row, 0], restored.sharp[row, 0])
                image = side_by_side([as_bytes(each) for each in frames])
                path = self._run.folder / "visuals" / f"val_{index:04d}_00.png"
                self._run.background.submit(partial(write_image, path, image))

    def _write(self, name: str, values: Mapping[str, object]) -> None:
        """Write a file of metrics; a full disk must not end a training."""
        with suppress(OSError):
            folder = self._run.folder / "metrics"
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(values, indent=1))


def _compared(config: SpikeConfig) -> dict[str, Any]:
    """The keys of a config that identify a training."""
    values = plain_values(config)
    train = {key: value for key, value in values["TRAIN"].items() if key not in _NOT_COMPARED}
    return {key: values[key] for key in ("DATA", "MODEL", "LOSS", "SEED")} | {"TRAIN": train}


def _in_effect(config: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a training by their dotted keys, from a config of this or an older version."""
    # Records of older versions lack some settings.
    default = SpikeConfig(DATA=DataConfig(ROOT=""), TRAIN=TrainConfig(OPTIM=OptimConfig(LR=0.0), EPOCHS=1))
    values = flat(config_of(TrainOptions()) | _compared(default)) | flat(config)
    if values.pop("TRAIN.COMPILE_MODEL", False):  # recorded by older versions, instead of --compile
        values["compile"] = "on"
    return values


def _scores(found: ValidationResult) -> dict[str, float]:
    """Scores of a validation as scalars, under the tags of the early code where it has one."""
    tags = {"psnr": "psnr", "ssim": "ssim", "psnr_rgb": "ref_psnr_rgb", "psnr_y": "ref_psnr_y", "ssim_y": "ref_ssim_y"}
    return {f"val/{tag}": value for tag, name in tags.items() if (value := found.named[name]) is not None}


def _scalars(report: EpochReport, found: ValidationResult | None, speed: float) -> dict[str, float]:
    """Scalars of an epoch, under the tags of the early code where it has one."""
    scalars = {"epoch/avg_loss": report.items["loss"], "epoch/avg_charb": report.items["charbonnier"]}
    scalars |= {"epoch/avg_vgg": report.items["perceptual"], "epoch/throughput_samples_per_sec": speed}
    scalars |= {"epoch/lr": report.lrs[0]} if report.lrs else {}
    scalars |= _scores(found) if found is not None else {}
    if torch.cuda.is_available():
        scalars["gpu/memory_allocated_gb_gpu0"] = torch.cuda.max_memory_allocated() / 1e9
    return scalars
