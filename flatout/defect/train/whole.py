"""The whole of `flatout defect train`: options in; weights, results and pictures in a run folder out."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.defect.evaluate.outcome import Outcome
from flatout.defect.model import DefectNet
from flatout.defect.options import TrainOptions, config_of_run
from flatout.defect.source import Recipe
from flatout.defect.strips.find import Judged, list_judged, root_of, truth_folder
from flatout.defect.train.assemble import amp_of, laid_out, make_loop
from flatout.defect.train.epoch_end import EpochEnd, EpochEndConfig
from flatout.defect.train.input import TrainingImages, TrainingInput, find_images, make_recipe, open_input
from flatout.defect.train.run_files import check_data, complete_run, fingerprint, open_run, options_to_resume
from flatout.defect.train.validate import Validation
from flatout.defect.train.weight_files import BEST, WeightFiles
from flatout.defect.weights import about, load_network
from flatout.engine import distributed
from flatout.engine.callbacks import Callback, Callbacks, RunStart, Scores
from flatout.engine.determinism import set_determinism
from flatout.engine.device_choice import choose_devices
from flatout.engine.distributed import World
from flatout.engine.ending import finishing, telling_end
from flatout.engine.environment import differences, environment, warn_of_waiting_threads
from flatout.engine.generations import Generation, Generations
from flatout.engine.interrupts import Interrupts
from flatout.engine.job import Tick
from flatout.engine.loggers.choose import choose_loggers
from flatout.engine.loop import Loop, StoppedAfter
from flatout.engine.precision import DTYPES
from flatout.engine.preflight import check_descriptors
from flatout.engine.preflight.disk import check_disk, disk_need
from flatout.engine.preflight.gpu import check_gpus
from flatout.engine.progress import StepProgress
from flatout.engine.random_state import seed_all
from flatout.engine.records import Records
from flatout.engine.shared_state import load_for_all
from flatout.engine.spending import Spending
from flatout.errors import CheckpointError, ConfigError, counted

logger = logging.getLogger(__name__)

WEIGHTS = "weights"


@dataclass(frozen=True)
class TrainResult:
    """What a training left behind."""

    folder: Path
    outcome: Outcome | None
    """Of the last validation; None if there was none."""
    last_loss: float
    """Mean over the last epoch."""
    finished: bool
    """False if it was asked to end early; the same command then continues."""
    why: str = ""
    """Why it ended early."""


def train(
    options: TrainOptions, callbacks: Iterable[Callback] = (), *, spending: Spending | None = None
) -> TrainResult:
    """Train as the options say. `callbacks` hear of it; `spending` is an account that was opened before.

    Raises Interrupted once a signal was obeyed and everything is saved: the same call then continues.
    """
    if options.resume:
        options = options_to_resume(options)
    spending = spending or Spending(options.price, options.budget)
    world = distributed.read_world()
    if world.is_first and not options.no_preflight:
        check_gpus(options.device)
    device = device_for(options.device, world)
    if world.is_first and not options.no_preflight:
        check_descriptors(uses_gpu=device.type == "cuda")
    hearers = Callbacks([spending, *choose_loggers(options.log_to), *callbacks] if world.is_first else ())
    if world.is_first:
        warn_of_waiting_threads(device)
    # Before the folder is made: data that cannot be used leaves nothing behind.
    images = find_images(options)
    recipe = make_recipe(options, images)
    seed_all(options.seed)
    with distributed.together(world, device), ExitStack() as stack:
        if (over := world.from_first(complete_run(options) if world.is_first else None)) is not None:
            return TrainResult(over, None, 0.0, finished=True)
        run = stack.enter_context(open_run(options)) if world.is_first else None
        folder, continues = world.from_first((str(run.folder), run.continues) if run else None)
        training = _Training(options, images, recipe, world, device, Path(folder), continues, stack)
        with telling_end(hearers, Path(folder)) as ending, distributed.telling_ranks():
            result = training.go(hearers, spending)
            if run is not None and result.finished:
                # All files are there: best.pt was written before the last state.
                with finishing():
                    run.finish()
            ending.why = result.why
        logger.info("%s%s: %s.", folder, "" if result.finished else ", so far", spending.line())
        return result


def device_for(text: str, world: World) -> torch.device:
    """The device of this rank."""
    devices = choose_devices(text)
    if devices[0].type == "cpu" or world.size == 1:
        return devices[0]
    if world.local_rank >= len(devices):
        raise ConfigError(f"rank {world.local_rank} of this machine has no GPU: there are {len(devices)}.")
    return devices[world.local_rank]


class _Training:
    """The parts of one training, put together."""

    def __init__(
        self,
        options: TrainOptions,
        images: TrainingImages,
        recipe: Recipe,
        world: World,
        device: torch.device,
        folder: Path,
        continues: bool,
        stack: ExitStack,
    ) -> None:
        self._options, self._images, self._recipe = options, images, recipe
        self._world, self._device, self._folder, self._stack = world, device, folder, stack
        self._amp = amp_of(options, device)
        self._saved = self._saved_state(continues)
        set_determinism(options.deterministic)
        self._network = laid_out(self._make_network(), options, device)

    def go(self, callbacks: Callbacks, spending: Spending) -> TrainResult:
        folder = self._folder
        self._callbacks, self._spending = callbacks, spending
        (folder / WEIGHTS).mkdir(exist_ok=True)
        interrupts = Interrupts()
        source = self._stack.enter_context(
            open_input(self._images, self._recipe, self._options, self._device, self._world)
        )
        epoch_end = self._epoch_end(interrupts)
        loop = self._loop(source, epoch_end, interrupts)
        if self._world.is_first and not self._options.no_preflight:
            check_disk(folder, disk_need(self._network, None, loop.optimizer, kept=0))
        self._begin(loop)
        steps = source.steps_per_epoch
        try:
            done = loop.epoch * steps + loop.step
            with interrupts, StepProgress(self._options.epochs * steps, start=done) as progress:
                loop.tell = lambda tick: progress.advance(
                    tick.epoch * steps + tick.step,
                    figures(tick) | spending.figures(tick.step_ms / 1e3 * loop.steps_left),
                )
                loop.run()
        except StoppedAfter as stopped:
            logger.info("%s", stopped)
            return TrainResult(folder, epoch_end.outcome, epoch_end.last_loss, finished=False, why=str(stopped))
        source.batches.feed.log_replaced()  # while warnings are kept in the run folder
        if self._world.is_first:
            _draw_results(folder)
        logger.info("Results are in %s, the best network in %s.", folder, folder / WEIGHTS / BEST)
        return TrainResult(folder, epoch_end.outcome, epoch_end.last_loss, finished=True)

    def _make_network(self) -> DefectNet:
        options = self._options
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
        grid = self._recipe.grid
        logger.info(
            "Network %s, base width %d: %.2f M parameters. %d images of %d x %d, %d patches each of %d pixels; %s, %s.",
            options.network, options.base_width, count / 1e6, self._images.num_images, *grid.shape_hw,
            grid.per_image, options.patch, self._device, self._amp,
        )  # fmt: skip
        return network

    def _epoch_end(self, interrupts: Interrupts) -> EpochEnd:
        first = self._world.is_first
        return EpochEnd(
            EpochEndConfig(folder=self._folder, patience=self._options.patience),
            network=self._network,
            validate=self._validation(interrupts) if first else None,
            records=self._stack.enter_context(Records(self._folder)) if first else None,
            after=self._after_epoch,
            files=WeightFiles(self._folder / WEIGHTS, about(self._network, patch=self._options.patch)),
            run={
                "config": config_of_run(self._options),
                "data": fingerprint(self._images),
                "environment": environment(),
            },
        )

    def _validation(self, interrupts: Interrupts) -> Validation | None:
        options = self._options
        judged = _known_images(options) if options.use_mask else []
        if not any(not image.is_good for image in judged):
            return None
        heard = interrupts if self._world.size == 1 else None
        grid, dtype = self._recipe.grid, DTYPES[self._amp]
        return self._stack.enter_context(
            Validation(judged, grid, self._device, dtype, heard, workers=options.num_workers)
        )

    def _loop(self, source: TrainingInput, epoch_end: EpochEnd, interrupts: Interrupts) -> Loop:
        return make_loop(
            self._options,
            network=self._network,
            source=source,
            epoch_end=epoch_end,
            device=self._device,
            world=self._world,
            generations=Generations(self._folder / WEIGHTS),
            interrupts=interrupts,
            callbacks=self._callbacks,
            stop_early=self._spending.over if self._spending.has_budget else None,
        )

    def _saved_state(self, continues: bool) -> Generation | None:
        """What the run folder holds, if this command continues it."""
        generations = Generations(self._folder / WEIGHTS)
        if continues:
            return load_for_all(generations, self._world)
        if self._world.is_first and (self._folder / WEIGHTS).is_dir():
            generations.forget()
        return None

    def _begin(self, loop: Loop) -> None:
        """Continue a saved training, or save the beginning of a new one."""
        if self._saved is None:
            self._callbacks.start(self._started(loop))
            loop.save()
            return
        check_data(self._saved, self._images, self._options)
        for line in differences(self._saved.sections["run"]["environment"], environment()):  # type: ignore[index]
            logger.info("%s", line)
        loop.load_sections(self._saved.sections)
        self._callbacks.start(self._started(loop))
        logger.info("Continuing %s at epoch %d, step %d.", self._folder, loop.epoch, loop.step)

    def _started(self, loop: Loop) -> RunStart:
        return RunStart(
            job="defect",
            folder=self._folder,
            config=config_of_run(self._options),
            epoch=loop.epoch,
            epochs=self._options.epochs,
            continues=self._saved is not None,
        )

    def _after_epoch(self, epoch: int, scalars: Mapping[str, float]) -> None:
        self._callbacks.validation(Scores(epoch=epoch, at=epoch, scalars=scalars))


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


def _draw_results(folder: Path) -> None:
    """Curves for people; a training is not lost because they cannot be drawn."""
    try:
        from flatout.defect.curves import results_png

        results_png(folder / "results.csv", folder / "results.png")
    except (ImportError, OSError, ValueError) as error:
        logger.warning("No picture of the results was drawn: %s.", error)


def figures(tick: Tick) -> dict[str, str]:
    """What the terminal shows of an interval, units included."""
    shown: dict[str, str] = {"epoch": str(tick.epoch), "loss": f"{tick.items['loss']:.6f}", "lr": f"{tick.lr:.1e}"}
    shown |= {"": f"{tick.step_ms:.1f} ms/step (wait {tick.wait_ms:.1f})", " ": f"{tick.samples_per_s:.0f} patches/s"}
    if torch.cuda.is_available():
        shown |= {"  ": f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"}
    return shown
