"""In which steps and roles a file of the data set was shown, from draws alone: no image is read.

Dimension key:  M samples of an epoch, or of a part of it
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError, MissingFileError
from flatout.progress import progress
from flatout.yolo.replays.run import ReplayRun
from flatout.yolo.replays.step import PASTED, files_of

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


def find_image(run: ReplayRun, file: str | Path) -> int:
    """The number of an image in the training set, by its path or the end of it; ConfigError if it is not unique."""
    wanted = str(file)
    exact = [number for number, path in enumerate(run.images.paths) if path == wanted]
    resolved = str(Path(wanted).resolve())
    exact = exact or [number for number, path in enumerate(run.images.paths) if str(Path(path).resolve()) == resolved]
    found = exact or [
        number for number, path in enumerate(run.images.paths) if path.endswith(f"/{wanted.removeprefix('./')}")
    ]
    if not found:
        raise MissingFileError(
            f"{file}: not among the {len(run.images):,} training images of {run.data.file}. Give the path of one of "
            "them, or its end."
        )
    if len(found) > 1:
        listed = ", ".join(run.images.paths[number] for number in found[:3])
        raise ConfigError(f"{file}: {len(found):,} training images end so ({listed}). Give a longer path.")
    return found[0]


def appearances(
    run: ReplayRun, file: str | Path, *, epochs: range | None = None, show_progress: bool = False
) -> list[Appearance]:
    """When and how an image was shown, in the order of the training; `epochs` limits the search.

    If the run replaced unreadable files by others, those substitutes are not listed.
    """
    image = find_image(run, file)
    facts = run.facts_of(0, 0)
    epochs = range(facts.epochs) if epochs is None else epochs
    found: list[Appearance] = []
    with progress("epochs", len(epochs), shown=show_progress) as advance:
        for done, epoch in enumerate(epochs, 1):
            found += _in_epoch(run, image, epoch)
            advance(done, 0)
    return found


def _in_epoch(run: ReplayRun, image: int, epoch: int) -> Iterator[Appearance]:
    # With --image-weights the order of an epoch follows from the scores before it, which its first step recorded.
    facts = run.facts_of(epoch, 0)
    plan, source = run.plan(facts), run.source(facts)
    order_M = plan.epoch(epoch).order
    num_samples = -(-len(order_M) // facts.batch_size) * facts.batch_size if plan.last == "pad" else len(order_M)
    for begin in range(0, num_samples, SAMPLES_AT_ONCE):
        position_M = np.arange(begin, min(begin + SAMPLES_AT_ONCE, num_samples))
        draws = source.draw(facts.seed, epoch, position_M, order_M[position_M % len(order_M)])
        shown_M = (draws["tiles"] == image).any((1, 2))
        shown_M |= draws["paste"] & (draws["paste_tiles"] == image).any((1, 2))
        chosen = np.flatnonzero(shown_M)
        some = {name: drawn_M[chosen] for name, drawn_M in draws.items()}
        is_read_M29 = source.tiles_read(some) if len(chosen) else np.zeros((0, 2, 9), bool)
        for m, position in enumerate(position_M[chosen].tolist()):
            step, sample = divmod(position, facts.batch_size)
            for number, role, place in files_of(some, m, run.images.labels):
                if number == image:
                    visible = bool(role == PASTED or is_read_M29[m, *place])
                    recorded = (epoch, step) in run.recorded.steps
                    yield Appearance(epoch, step, sample, position, role, visible, recorded)
