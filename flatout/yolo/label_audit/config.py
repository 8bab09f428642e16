"""What is audited, and how. Imports no torch, so that mistakes on the command line are answered at once."""

from argparse import BooleanOptionalAction
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.cli import option
from flatout.errors import ConfigError
from flatout.yolo.predict.options import tile_problems

DEFAULT_OVERLAP = 0.2


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """What is audited, and how. A run gives its own data, weights and size where they are left out."""

    run: Path | None = None
    weights: tuple[str, ...] = option((), "weights (default: best.pt and last.pt of the run)", metavar="FILE")
    data: str = option("", "data YAML (default: that of the run)")
    split: Literal["train", "val", "test"] = option("train", "images to audit (default: %(default)s)")
    img_size: int = option(0, "longer side of the input (default: that of the run, --tiles, or 640)", metavar="PX")
    tiles: int | None = option(
        None, "for large images: look at them in tiles of this size (default: those of the run, if any)", metavar="PX"
    )
    tile_overlap: float | None = option(
        None,
        "with tiles: part of its side that a tile shares with each neighbour (default: that of the run, or 0.2)",
        metavar="SHARE",
    )
    batch_size: int = option(32, "images per step (default: %(default)s)")
    device: str = option("", "cpu, or the number of a GPU (default: a GPU if there is one)")
    workers: int = option(8, "most worker processes that read images (default: %(default)s)")
    mirrored: bool | None = option(
        None,
        "also look at mirrored images, or do not: finds more, in twice the time (default: if the training mirrored "
        "images, which the weights say)",
        action=BooleanOptionalAction,
    )
    out: Path | None = option(
        None,
        "folder for the files (default: RUN/audit, or runs/audit/exp); with --fix-list: for the corrected copies",
        type=Path,
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        if self.run is None and not self.weights:
            raise ConfigError("Give the folder of a run, or weights and a data set: --weights FILE --data DATA.yaml")
        if self.run is None and not self.data:
            raise ConfigError("--data is missing: give the data YAML whose labels are to be audited.")
        if self.batch_size < 1 or self.workers < 0 or self.img_size < 0:
            raise ConfigError("--batch-size must be 1 or more; --workers and --img-size must not be negative.")
        if problems := list(tile_problems(self.tiles, self.tile_overlap or 0.0)):
            raise ConfigError("; ".join(problems) + ".")
