"""In which steps and roles a file of the data set was shown, from draws alone: no image is read.

Dimension key:  M samples of an epoch, or of a part of it
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError, MissingFileError, counted
from flatout.progress import progress
from flatout.yolo.data.tile_set import TileSet, whole_images
from flatout.yolo.replays.run import ReplayRun
from flatout.yolo.replays.step import PASTED, Window, check_epoch, files_of, window_of

SAMPLES_AT_ONCE = 4096


class Appearance(NamedTuple):
    """A file in a sample of a training."""

    epoch: int
    step: int
    sample: int
    """Row in the step, over all ranks."""
    position: int
    """Place in the epoch's order."""
    role: str
    """"image", "tile", "mixed in" or "paste"."""
    visible: bool
    """Whether any of its pixels can reach the sample."""
    recorded: bool
    """Whether the run has trained this step, as far as it recorded it."""
    window: Window | None = None
    """The tile of the file that is shown, in a run with --tiles; None: all of it."""


def find_image(run: ReplayRun, file: str | Path) -> int:
    """The number of an image among the files of the training set, by its path or the end of it; ConfigError if it is
    not unique."""
    wanted, paths = str(file), whole_images(run.images).paths
    exact = [number for number, path in enumerate(paths) if path == wanted]
    resolved = str(Path(wanted).resolve())
    exact = exact or [number for number, path in enumerate(paths) if str(Path(path).resolve()) == resolved]
    found = exact or [number for number, path in enumerate(paths) if path.endswith(f"/{wanted.removeprefix('./')}")]
    if not found:
        raise MissingFileError(
            f"{file}: not among the {len(paths):,} training images of {run.data.file}. Give the path of one of "
            "them, or its end."
        )
    if len(found) > 1:
        listed = ", ".join(paths[number] for number in found[:3])
        raise ConfigError(f"{file}: {len(found):,} training images end so ({listed}). Give a longer path.")
    return found[0]


def appearances(
    run: ReplayRun, file: str | Path, *, epochs: range | None = None, show_progress: bool = False
) -> list[Appearance]:
    """When and how an image was shown, in the order of the training; `epochs` limits the search to some of its epochs.

    If the run replaced unreadable files by others, those substitutes are not listed. ConfigError for an epoch that the
    training does not have.
    """
    numbers = _shown_as(run, find_image(run, file))
    epochs = range(run.num_epochs) if epochs is None else epochs
    if len(epochs) > run.num_epochs:
        raise ConfigError(f"--epochs {len(epochs)}: {run.folder} is a training of {counted(run.num_epochs, 'epoch')}.")
    for epoch in (epochs[0], epochs[-1]) if epochs else ():
        check_epoch(run, run.num_epochs, epoch)
    found: list[Appearance] = []
    with progress("searching", len(epochs), unit="epochs", shown=show_progress) as advance:
        for done, epoch in enumerate(epochs, 1):
            found += _in_epoch(run, numbers, epoch)
            advance(done, 0)
    return found


def _shown_as(run: ReplayRun, image: int) -> np.ndarray:
    """The numbers in the training set of what is shown of a file: itself, or its tiles; int64."""
    return np.flatnonzero(run.images.image_N == image) if isinstance(run.images, TileSet) else np.array([image])


def _in_epoch(run: ReplayRun, numbers: np.ndarray, epoch: int) -> Iterator[Appearance]:
    # With --image-weights the order of an epoch follows from the scores before it, which its first step recorded.
    facts = run.facts_of(epoch, 0)
    plan, source = run.plan(facts), run.source(facts)
    order_M = plan.epoch(epoch).order
    num_samples = -(-len(order_M) // facts.batch_size) * facts.batch_size if plan.last == "pad" else len(order_M)
    for begin in range(0, num_samples, SAMPLES_AT_ONCE):
        position_M = np.arange(begin, min(begin + SAMPLES_AT_ONCE, num_samples))
        draws = source.draw(facts.seed, epoch, position_M, order_M[position_M % len(order_M)])
        shown_M = np.isin(draws["tiles"], numbers).any((1, 2))
        shown_M |= draws["paste"] & np.isin(draws["paste_tiles"], numbers).any((1, 2))
        chosen = np.flatnonzero(shown_M)
        some = {name: drawn_M[chosen] for name, drawn_M in draws.items()}
        is_read_M29 = source.tiles_read(some) if len(chosen) else np.zeros((0, 2, 9), bool)
        for m, position in enumerate(position_M[chosen].tolist()):
            step, sample = divmod(position, facts.batch_size)
            for number, role, place in files_of(some, m, run.images.labels):
                if number in numbers:
                    visible = bool(role == PASTED or is_read_M29[m, *place])
                    recorded = (epoch, step) in run.recorded.steps
                    window = window_of(run.images, number)
                    yield Appearance(epoch, step, sample, position, role, visible, recorded, window)
