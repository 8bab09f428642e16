"""What is audited, and how. Imports no torch, so that mistakes on the command line are answered at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """What is audited, and how. A run gives its own data, weights and size where they are left out."""

    run: Path | None = None
    weights: tuple[str, ...] = ()
    data: str = ""
    split: Literal["train", "val", "test"] = "train"
    img_size: int = 0
    """Longer side of the input; 0: that of the run, else 640."""
    batch_size: int = 32
    device: str = ""
    workers: int = 8
    mirrored: bool = False
    """A second pass of each weights file over mirrored images."""
    out: Path | None = None
    """Folder for the files; None: `audit` in the run folder, else runs/audit/exp."""

    def __post_init__(self) -> None:
        if self.run is None and not self.weights:
            raise ConfigError("Give the folder of a run, or weights and a data set: --weights FILE --data DATA.yaml")
        if self.run is None and not self.data:
            raise ConfigError("--data is missing: give the data YAML whose labels are to be audited.")
        if self.batch_size < 1 or self.workers < 0 or self.img_size < 0:
            raise ConfigError("--batch-size must be 1 or more; --workers and --img-size must not be negative.")
