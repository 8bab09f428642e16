"""A replayed step: the images and targets that the network saw, compared with the record.

    plan --> positions, indices --draw--> parameters --read--> batch --multi-scale, quad--> inputs --hash--> Comparison

The order and all random numbers of a training are functions of (seed, epoch, position), so a step is made again alone,
by the code that made it in the training, without the steps before it.

Dimension key:  M samples of the step   B images that the network gets   T targets   N images of the data set
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from flatout.engine import hash_inputs
from flatout.errors import ConfigError, counted
from flatout.feed import DeviceBatches, Unreadable
from flatout.runs import STEPS_NAME
from flatout.yolo.augment.draw import FOUR, NINE, PLAIN
from flatout.yolo.augment.paste import ENOUGH_OBJECTS
from flatout.yolo.data.image_set import ImageSet, Labels
from flatout.yolo.data.recorded_files import MAX_NAMED
from flatout.yolo.data.tile_set import TileSet
from flatout.yolo.replays.run import InputFacts, ReplayRun

if TYPE_CHECKING:
    from flatout.yolo.replays.losses import StepLosses

MAIN, TILE, MIXED_IN, PASTED = "image", "tile", "mixed in", "paste"
"""Roles of a file in a sample: its own image, another tile of its mosaic, a tile of the mosaic that is mixed in, and an
image out of which objects are cut that may be pasted."""
NUM_HASHES = 2
WHAT_IS_HASHED = ("images", "targets")


Window = tuple[int, int, int, int]
"""Left, top, right and bottom of a tile of a run with --tiles, in pixels of its image."""


class ShownFile(NamedTuple):
    """A file in a sample."""

    path: str
    role: str
    number: int
    """Number of the image, or of the tile in a run with --tiles, in the training set."""
    visible: bool
    """Whether any of its pixels can reach the sample; always for an image that objects are cut out of."""
    window: Window | None = None
    """The part of the file that is shown; None: all of it."""

    def __str__(self) -> str:
        return self.path + where_in(self.window)


def where_in(window: Window | None) -> str:
    """ " at (320, 640)" for a tile that begins there; empty for a whole image."""
    return "" if window is None else f" at ({window[0]}, {window[1]})"


def window_of(images: ImageSet, number: int) -> Window | None:
    """The part of a file that is image `number` of a training set; None: all of it."""
    return tuple(images.window_N4[number].tolist()) if isinstance(images, TileSet) else None


@dataclass(frozen=True)
class Sample:
    """One sample of a step: where it comes from, and the parameters that were drawn for it."""

    number: int
    """Row in the step, over all ranks."""
    position: int
    """Place in the epoch's order; random numbers are keyed by it."""
    files: tuple[ShownFile, ...]
    kind: str
    parameters: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The file that the sample is named after."""
        return self.files[0].path


class Comparison(NamedTuple):
    """Whether a replay is what the network saw."""

    identical: bool | None
    """None: nothing to compare with."""
    text: str
    """The result, and the likely causes of a difference as sentences."""
    changed_files: tuple[str, ...] = ()
    """Files of this step whose size or time of change is not that of the training."""


@dataclass(frozen=True)
class Replayed:
    """A step of a run as the network saw it. All arrays are owned by the caller."""

    run: Path
    epoch: int
    step: int
    images: np.ndarray
    """[B, 3, H, W], RGB: uint8, or float32 of 0 to 1 where the run made them on the device or rescaled them. With
    several ranks, those of all ranks, one after another."""
    targets: np.ndarray
    """float32 [T, 6]: row of `images`, class, centre x, centre y, width and height relative to the image; padding that
    the device leaves has row -1."""
    samples: tuple[Sample, ...]
    names: tuple[str, ...]
    """Names of the classes."""
    comparison: Comparison
    losses: "StepLosses | None" = field(default=None, repr=False)
    """Matches and losses; None if they were not asked for, or no weights are left."""
    why_no_losses: str = ""

    @property
    def identical(self) -> bool | None:
        """Whether this is bit for bit what the network saw; None if the run did not record it."""
        return self.comparison.identical

    def images_uint8(self) -> np.ndarray:
        """The images as uint8, rounded where the network saw fractions."""
        if self.images.dtype == np.uint8:
            return self.images
        return np.rint(self.images.astype(np.float32) * 255).clip(0, 255).astype(np.uint8)

    def save(self, folder: str | Path, *, sample: int | None = None) -> list[Path]:
        """Write sheet.jpg, batch.npz, samples.json and, with losses, matches.csv and losses.json; returns the paths.

        With `sample`, the sheet shows that sample alone, with its source images. ResourceError if the disk is full.
        """
        from flatout.yolo.replays.sheet import save

        return save(self, Path(folder), sample=sample)

    def sample_of(self, number: int) -> Sample:
        """A sample by its number; ConfigError if there is none."""
        if not 0 <= number < len(self.samples):
            raise ConfigError(
                f"--sample {number}: the step has {counted(len(self.samples), 'sample')}. Use 0 to "
                f"{len(self.samples) - 1}."
            )
        return self.samples[number]

    def __str__(self) -> str:
        """A summary in a few lines."""
        _, _, height, width = self.images.shape
        num_targets = int((self.targets[:, 0] >= 0).sum())
        lines = [
            f"{self.run}, epoch {self.epoch}, step {self.step}: {counted(len(self.samples), 'sample')}, "
            f"{width} x {height} px, {counted(num_targets, 'target')}",
            f"input    {self.comparison.text}",
        ]
        lines += self.losses.lines() if self.losses is not None else []
        lines += [f"losses   not computed: {self.why_no_losses}"] if self.why_no_losses else []
        return "\n".join(lines + [f"{sample.number:<8} {_describe(sample)}" for sample in self.samples])


def _describe(sample: Sample) -> str:
    others = [Path(file.path).name + where_in(file.window) for file in sample.files[1:] if file.visible]
    return f"{sample.files[0]}  {sample.kind}{' with ' if others else ''}{', '.join(others)}"


def replay_step(run: ReplayRun, epoch: int, step: int) -> tuple[Replayed, dict[int, dict[str, Tensor]], InputFacts]:
    """Make a step again; also returns the tensors of each rank, and how they were made. ConfigError if the run has no
    such step."""
    facts = run.facts_of(epoch, step)
    check_step(run, facts, epoch, step)
    inputs: dict[int, dict[str, Tensor]] = {}
    samples: list[Sample] = []
    for rank in range(facts.ranks):
        tensors, own = _read(run, facts, rank, epoch, step, first=len(samples))
        inputs[rank] = tensors
        samples += own
    images, targets = _joined(inputs)
    comparison = _compare(run, facts, inputs, samples, epoch, step)
    return Replayed(run.folder, epoch, step, images, targets, tuple(samples), run.names, comparison), inputs, facts


def check_step(run: ReplayRun, facts: InputFacts, epoch: int, step: int) -> None:
    """ConfigError unless the run has this step."""
    check_epoch(run, facts.epochs, epoch)
    num_steps = run.plan(facts).epoch(epoch).num_steps
    if not 0 <= step < num_steps:
        raise ConfigError(
            f"--step {step}: an epoch of {run.folder} has {counted(num_steps, 'step')}. Use 0 to {num_steps - 1}."
        )


def check_epoch(run: ReplayRun, num_epochs: int, epoch: int) -> None:
    """ConfigError unless the run has this epoch."""
    if not 0 <= epoch < num_epochs:
        raise ConfigError(
            f"--epoch {epoch}: {run.folder} is a training of {counted(num_epochs, 'epoch')}. Use 0 to {num_epochs - 1}."
        )


def _read(
    run: ReplayRun, facts: InputFacts, rank: int, epoch: int, step: int, *, first: int
) -> tuple[dict[str, Tensor], list[Sample]]:
    """The tensors of one rank, and its samples, numbered from `first` on."""
    planned = run.plan(facts, rank).epoch(epoch).step(step)
    source = run.source(facts)
    draws = source.draw(facts.seed, epoch, planned.positions, planned.indices)
    needed = np.unique(np.concatenate((draws["tiles"].ravel(), draws["paste_tiles"].ravel(), planned.indices)))
    bad: Mapping[int, str] = {}
    # Unreadable files are replaced by others, which a device that keeps only the needed images does not have.
    for wanted in (needed, np.arange(len(run.images))):
        batches = run.open(facts, rank, wanted)
        try:
            tensors = _inputs_of(run, facts, batches, epoch, step)
            bad = batches.feed.bad_samples
        finally:
            batches.feed.close()
        if not bad or not facts.input_settings.on_device:
            break
    if bad:
        is_bad_N = np.isin(np.arange(len(run.images)), list(bad))
        unreadable = Unreadable(is_bad_N, seed=facts.seed, epoch=epoch, positions_M=planned.positions)
        draws = source.substitute(planned.indices, draws, unreadable).draws
    is_read_M29 = source.tiles_read(draws)
    samples = [
        _sample(run, draws, is_read_M29, m, first + m, int(position))
        for m, position in enumerate(planned.positions.tolist())
    ]
    return tensors, samples


def _inputs_of(run: ReplayRun, facts: InputFacts, batches: DeviceBatches, epoch: int, step: int) -> dict[str, Tensor]:
    batch = next(iter(batches.epoch(epoch, start=step)))
    inputs = run.step_inputs(facts)(batch["images"], batch["targets"], epoch, step)
    # A batch is a view of a slot, which is about to be closed.
    return {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in inputs.items()}


def _joined(inputs: Mapping[int, Mapping[str, Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """Images and targets of all ranks as arrays; rows of images are counted over all ranks."""
    images, targets, first = [], [], 0
    for tensors in inputs.values():
        tensor = tensors["images"].detach().cpu()
        images.append((tensor if tensor.dtype == torch.uint8 else tensor.float()).contiguous().numpy())
        target_T6 = tensors["targets"].detach().float().cpu().numpy().copy()
        target_T6[target_T6[:, 0] >= 0, 0] += first
        targets.append(target_T6)
        first += len(tensor)
    return np.concatenate(images), np.concatenate(targets)


# Samples

_KINDS = {PLAIN: "single image", FOUR: "mosaic of 4", NINE: "mosaic of 9"}
_WARP = ("perspective_x", "perspective_y", "degrees", "scale", "shear_x", "shear_y", "translate_x", "translate_y")


def files_of(draws: Mapping[str, np.ndarray], m: int, labels: Labels) -> list[tuple[int, str, tuple[int, ...]]]:
    """Images of sample `m`: number, role, and (canvas, tile) or, for pasting, (round, tile)."""
    found: list[tuple[int, str, tuple[int, ...]]] = []
    for layer, tile in itertools.product(range(2), range(9)):
        if (number := int(draws["tiles"][m, layer, tile])) >= 0:
            role = MIXED_IN if layer else TILE if tile else MAIN
            found.append((number, role, (layer, tile)))
    if draws["paste"][m]:
        tiles_R4 = draws["paste_tiles"][m][: _num_rounds(draws["paste_tiles"][m], labels)]
        places = itertools.product(*map(range, tiles_R4.shape))
        found += [(int(tiles_R4[at]), PASTED, at) for at in places if labels.has_polygon_N[tiles_R4[at]]]
    return found


def _num_rounds(tiles_R4: np.ndarray, labels: Labels) -> int:
    """Mosaics that are searched for objects to paste: until there are enough, and none if the first has none.

    Counted by polygons. Objects that are cut off at the edge do not count in the training, so that it may search one
    mosaic more.
    """
    has_points_T = np.diff(labels.first_point_T) > 0
    counts_T = np.concatenate(([0], np.cumsum(has_points_T)))
    polygons_R = (counts_T[labels.first_N[tiles_R4 + 1]] - counts_T[labels.first_N[tiles_R4]]).sum(1)
    if not polygons_R.any() or not polygons_R[0]:
        return 0
    is_enough_R = np.cumsum(np.rint(0.5 * polygons_R)) >= ENOUGH_OBJECTS
    return int(is_enough_R.argmax()) + 1 if is_enough_R.any() else len(tiles_R4)


def _sample(
    run: ReplayRun, draws: Mapping[str, np.ndarray], is_read_M29: np.ndarray, m: int, number: int, position: int
) -> Sample:
    files = tuple(
        ShownFile(
            run.images.paths[image],
            role,
            image,
            bool(role == PASTED or is_read_M29[m, *place]),
            window_of(run.images, image),
        )
        for image, role, place in files_of(draws, m, run.images.labels)
    )
    kinds = draws["kind"][m].tolist()
    kind = _KINDS[kinds[0]] + (f", mixed with a {_KINDS[kinds[1]]}" if kinds[1] else "")
    kind += ", objects pasted" if any(file.role == PASTED for file in files) else ""
    return Sample(number, position, files, kind, _parameters(draws, m, num_canvases=1 + bool(kinds[1])))


def _parameters(draws: Mapping[str, np.ndarray], m: int, *, num_canvases: int) -> dict[str, Any]:
    """The numbers that were drawn for a sample, as JSON values."""
    hue, saturation, value = draws["hsv"][m].tolist()
    up_down, left_right = draws["flip"][m].tolist()
    parameters: dict[str, Any] = {
        "hue": hue,
        "saturation": saturation,
        "value": value,
        "flip_up_down": up_down,
        "flip_left_right": left_right,
        "share_of_own_canvas": float(draws["mix"][m]),
    }
    if "gamma" in draws:
        parameters["gamma"] = float(draws["gamma"][m])
    canvases = []
    for layer in range(num_canvases):
        warp = dict(zip(_WARP, draws["warp"][m, layer].tolist(), strict=True))
        centre = draws["centre"][m, layer].tolist()
        canvases.append({**warp, "aspect": float(draws["aspect"][m, layer]), "centre_px": centre})
    return parameters | {"canvases": canvases}


# Comparison with the record

_PACKAGES = {"opencv": "OpenCV", "torch": "PyTorch"}


def _compare(
    run: ReplayRun,
    facts: InputFacts,
    inputs: Mapping[int, Mapping[str, Tensor]],
    samples: list[Sample],
    epoch: int,
    step: int,
) -> Comparison:
    """Compare the hashes of a replayed step with those that the run recorded."""
    shown = {file.path for sample in samples for file in sample.files}
    touched = tuple(sorted((run.changes.touched | run.changes.files.keys()) & shown))
    recorded = run.recorded.hashes_of(epoch, step)
    if recorded is None:
        return Comparison(None, f"cannot be compared: {_why_not_recorded(run)}", touched)
    found = [f"{value:016x}" for rank in inputs for value in hashes_of(inputs[rank])]
    if tuple(found) == recorded:
        return Comparison(True, "identical to what the network saw", touched)
    numbers = [number for number, pair in enumerate(itertools.zip_longest(found, recorded)) if pair[0] != pair[1]]
    what = " and ".join(
        name for number, name in enumerate(WHAT_IS_HASHED) if number in {n % NUM_HASHES for n in numbers}
    )
    causes = " ".join(_causes(run, facts, touched))
    return Comparison(False, f"NOT what the network saw: other {what}. {causes}", touched)


def hashes_of(tensors: Mapping[str, Tensor]) -> list[int]:
    """The hashes of images and targets, as a run records them; waits for the device."""
    hashes: list[int] = hash_inputs(tensors).cpu().numpy().view(np.uint64).tolist()
    return hashes


def _why_not_recorded(run: ReplayRun) -> str:
    if not run.is_recorded:
        damaged = (run.folder / STEPS_NAME).exists()
        why = f"its {STEPS_NAME} is damaged" if damaged else "it was trained by a version that did not record hashes"
        return f"{run.name} has no hashes: {why}"
    if not run.recorded.steps:
        return "the run has not recorded any step yet"
    first, last = min(run.recorded.steps), max(run.recorded.steps)
    recorded = f"from epoch {first[0]}, step {first[1]} to epoch {last[0]}, step {last[1]}"
    return f"the run has not recorded this step (only those {recorded})"


def _causes(run: ReplayRun, facts: InputFacts, touched: tuple[str, ...]) -> list[str]:
    """Possible causes of a difference, the likeliest first."""
    causes = []
    if touched:
        more = f" and {len(touched) - MAX_NAMED} more" if len(touched) > MAX_NAMED else ""
        causes.append(f"Changed since the training: {', '.join(touched[:MAX_NAMED])}{more}.")
    if facts.device == "cuda" and run.device.type != "cuda":
        causes.append("The run made it on a GPU and this replay on the CPU: without a GPU it is not bit-equal.")
    now = {"opencv": cv2.__version__, "torch": str(torch.__version__)}
    for name, version in facts.versions.items():
        if now.get(name, version) != version:
            causes.append(f"{_PACKAGES[name]} was {version} and is {now[name]}.")
    return causes or ["The cause is unknown: no file of this step has another size or time of change."]
