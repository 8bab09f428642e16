"""A recorded run: its options, data and record, opened without training.

    opt.yaml, hyp.yaml   the options          replay.jsonl      settings of the input, hashes of steps
    train_files.csv      the images           weights/          saved states of the network

Runs of older versions have neither replay.jsonl nor train_files.csv: their settings follow from the options and the
weights, and nothing shows whether the result is what the network saw.
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.config import build_config
from flatout.engine import DTYPES, Amp
from flatout.errors import ConfigError, DataError, counted
from flatout.feed import DeviceBatches, Plan
from flatout.ranks import World, choose_device, make_current
from flatout.runs import RecordedSteps, read_steps
from flatout.yolo.augment.samples import TrainingSourceBase
from flatout.yolo.data.data_yaml import require_valid
from flatout.yolo.data.image_set import ImageSet, ImageWeights
from flatout.yolo.data.letterbox import round_up_img_size
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import open_split
from flatout.yolo.data.recorded_files import Changes, changes_since, digest, read_files
from flatout.yolo.data.tile_set import whole_images
from flatout.yolo.find_file import find_data_of_run, find_run
from flatout.yolo.load_network import network_of
from flatout.yolo.model.network import Network
from flatout.yolo.multihead.training import class_aware
from flatout.yolo.run_config import read_options
from flatout.yolo.train.choose_input import InputSettings
from flatout.yolo.train.input import InputConfig, open_single_steps, plan_of
from flatout.yolo.train.prepare import class_names, grid_of
from flatout.yolo.train.recipe import FIRST_SEED, tile_rules
from flatout.yolo.train.step import StepInputs
from flatout.yolo.weights import read_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class InputFacts:
    """What a run recorded about its input (`YoloRecipe.input_facts`)."""

    size: int
    grid: int
    seed: int
    batch_size: int
    """Samples per step, over all ranks."""
    ranks: int = 1
    steps_per_epoch: int | None = None
    epochs: int
    device: str = "cpu"
    amp: Amp = "off"
    channels_last: bool = False
    settings: dict[str, Any]
    files: str = ""
    """The digest of train_files.csv; empty if it could not be written."""
    maps: list[float] | None = None
    """The mAP of each class that image weights were computed from; None without --image-weights."""
    versions: dict[str, str]

    @property
    def input_settings(self) -> InputSettings:
        # Records of older versions also name the painter, of which there were two with the same pixels.
        settings = {name: value for name, value in self.settings.items() if name != "painter"}
        return build_config({**settings, "workers": 0}, InputSettings, where="the record of the input")


class ReplayRun:
    """A run folder that is read and never changed. Nothing is decoded before a step is asked for."""

    def __init__(self, run: str | Path, *, data: str = "", device: str = "", allow_data_change: bool = False) -> None:
        """`data` is the data YAML, if it is not where the run had it. `device` as for --device; empty: a GPU if the run
        used one and there is one, else the CPU. `allow_data_change`: go on although images or labels have changed.

        ConfigError if `run` is no run folder of flatout yolo, DataError if its data has changed.
        """
        self.folder = find_run(run)
        self.options, self.hyp = read_options(self.folder)
        self.recorded: RecordedSteps = read_steps(self.folder)
        self.data = require_valid(open_data_set(find_data_of_run(data, self.options.data, self.folder)))
        self.images = self._open_images()
        self.changes = self._changes(allowed=allow_data_change)
        used_gpu = any(facts.get("device") == "cuda" for facts in self.recorded.inputs)
        self.device = choose_device(device or ("0" if used_gpu and torch.cuda.is_available() else "cpu"))
        make_current(self.device)

    @property
    def name(self) -> str:
        """The name of the folder, also if it was given as `.`"""
        return self.folder.resolve().name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes that were trained."""
        return tuple(class_names(self.data, single_cls=self.options.single_cls))

    @property
    def is_recorded(self) -> bool:
        """Whether the run has recorded what its networks saw."""
        return bool(self.recorded.inputs)

    def facts_of(self, epoch: int, step: int) -> InputFacts:
        """How the input of a step was made; for an old run as it must have been."""
        recorded = self.recorded.facts_of(epoch, step)
        if recorded is None:
            return self._facts_of_old_run
        facts = build_config(dict(recorded), InputFacts, where=f"{self.folder}/replay.jsonl")
        self._check_same_files(facts)
        return facts

    @property
    def num_epochs(self) -> int:
        """Epochs of the training, as it was last continued."""
        latest = self.recorded.inputs[-1] if self.recorded.inputs else None
        return self._facts_of_old_run.epochs if latest is None else int(latest["epochs"])

    def plan(self, facts: InputFacts, rank: int = 0) -> Plan:
        """Which image goes into which step."""
        return plan_of(self.images, self._input_config(facts, rank)).with_weights(self._weights(facts))

    def source(self, facts: InputFacts) -> TrainingSourceBase:
        """Draws the parameters of samples; reads nothing."""
        config = self._input_config(facts, 0)
        return TrainingSourceBase(
            self.images, config.applied_augment, size=facts.size, class_aware=config.class_aware
        )  # fmt: skip

    def open(self, facts: InputFacts, rank: int, needed: np.ndarray) -> DeviceBatches:
        """The batches of one rank; `needed` are the images that the wanted step is made of."""
        batches = open_single_steps(
            self.images, self._input_config(facts, rank), facts.input_settings, lambda plan: needed
        )  # fmt: skip
        if (weights := self._weights(facts)) is not None:
            batches.feed.set_weights(weights)
        return batches

    def step_inputs(self, facts: InputFacts) -> StepInputs:
        """How the network's input follows from a batch."""
        options = self.options
        return StepInputs(
            dtype=DTYPES[facts.amp],
            channels_last=facts.channels_last,
            size=facts.size,
            grid=facts.grid,
            seed=facts.seed,
            multi_scale=options.multi_scale,
            quad=options.quad,
        )

    def _input_config(self, facts: InputFacts, rank: int) -> InputConfig:
        options = self.options
        return InputConfig(
            augment=self.hyp.augment(),
            size=facts.size,
            batch_size=facts.batch_size // facts.ranks,
            seed=facts.seed,
            grid=facts.grid,
            epochs=facts.epochs,
            device=self.device,
            dtype=DTYPES[facts.amp],
            world=World(rank=rank, size=facts.ranks),
            class_aware=class_aware(options.head_params, self._any_network, self.images)
            if options.class_aware_aug
            else None,
            rect=options.rect,
            sequential=options.sequential,
            channels_last=facts.channels_last,
        )

    def _weights(self, facts: InputFacts) -> np.ndarray | None:
        if facts.maps is None:
            return None
        num_classes = 1 if self.options.single_cls else len(self.data.names)
        image_weights = ImageWeights(self.images, num_classes)
        return image_weights(np.array(facts.maps or image_weights.initial_map))

    def _open_images(self) -> ImageSet:
        config = replace(self.options.split_config(silent=True), needs_labels=False, allow_bad_labels=True)
        images, tiles = open_split(self.data, "train", config).images, tile_rules(self.options)
        return images if tiles is None else tiles.cut(images)

    def _changes(self, *, allowed: bool) -> Changes:
        """How the training images have changed since the run; DataError if their order or labels have."""
        recorded = read_files(self.folder)
        if recorded is None:
            return Changes({}, frozenset())
        self._digest = digest(recorded)
        found = changes_since(recorded, whole_images(self.images))
        if found.files:
            message = (
                f"{self.data.file}: {counted(len(found.files), 'file')} changed since {self.folder} ({found.listed})"
            )
            if not allowed:
                raise DataError(
                    f"{message}. Samples are drawn from the list of images, so that another list gives other samples. "
                    "Restore the files, or replay with the changed ones all the same: --allow-data-change"
                )
            logger.warning("%s: this replay shows the changed data.", message)
        return found

    _digest = ""

    def _check_same_files(self, facts: InputFacts) -> None:
        """Warn if the run continued with changed data after this step: train_files.csv then lists later files."""
        if facts.files and self._digest and facts.files != self._digest:
            logger.warning(
                "%s: images or labels changed while this run was going (--allow-data-change), after this step. "
                "The replay shows the later ones.",
                self.folder,
            )

    @cached_property
    def _any_network(self) -> Network:
        """A network of the run, for its structure only."""
        for path in sorted((self.folder / "weights").glob("*.pt"), key=lambda path: path.stat().st_mtime_ns):
            weights = read_weights(path)
            return network_of(weights, weights.state, where=path)
        raise ConfigError(
            f"{self.folder}/weights has no weights, and this replay needs them to know the structure of the network. "
            "Copy init.pt or any other weights of the run there."
        )

    @cached_property
    def _facts_of_old_run(self) -> InputFacts:
        """The facts of a run without a record, from its options and its network."""
        options = self.options.resolved(cuda=False, bf16=False)
        grid = grid_of(self._any_network)
        settings = InputSettings(
            keep="device" if options.device_augment else "off", workers=0, shrunk=options.decodes_scaled
        )
        return InputFacts(
            size=round_up_img_size(options.img_size[0], grid),
            grid=grid,
            seed=options.seed if options.seed is not None else FIRST_SEED - 1,
            batch_size=options.batch_size,
            epochs=options.epochs,
            settings={name: value for name, value in vars(replace(settings)).items() if name != "workers"},
            maps=[] if options.image_weights else None,
            versions={},
        )
