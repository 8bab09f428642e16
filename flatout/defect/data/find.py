"""Which files belong to a data set, in an order that is the same on every machine.

R/train/good/*                       defect-free images, for training
R/train/hard_negative_samples/*      optional: real images that must not fire
R/valid/{good,bright_spots}/*        optional: validation after every epoch
R/ground_truth_valid/bright_spots/<stem>_mask.*
R/test/{good,bright_spots}/*         and R/ground_truth/bright_spots/<stem>_mask.*
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.errors import DataError

ImgFormat = Literal["tiff", "png_jpg"]
EXTENSIONS: dict[str, tuple[str, ...]] = {"tiff": (".tiff", ".tif"), "png_jpg": (".png", ".jpg", ".jpeg")}
GOOD, DEFECTIVE = "good", "bright_spots"
HARD_NEGATIVES = "hard_negative_samples"
_TRUTH = {"valid": "ground_truth_valid", "test": "ground_truth"}


@dataclass(frozen=True)
class Judged:
    """An image and what is known about it."""

    path: Path
    mask: Path | None
    """Where its defects are; None: nobody drew them."""
    is_good: bool
    """It has no defects, so its mask is empty."""

    @property
    def is_known(self) -> bool:
        return self.is_good or self.mask is not None


def list_images(folder: str | Path, img_format: ImgFormat) -> list[Path]:
    """Files of a format in a folder, sorted by name; DataError if there are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder.")
    found = [path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS[img_format] and path.is_file()]
    if not found:
        others = sorted({path.suffix.lower() for path in folder.iterdir() if path.is_file()})
        there = f"; there are {', '.join(others)} files, see --img_format" if others else ""
        raise DataError(f"{folder}: no {' or '.join(EXTENSIONS[img_format])} files{there}.")
    return sorted(found, key=lambda path: path.name)


def root_of(training_path: str | Path) -> Path:
    """The data set's root: the folder itself, or the one two above `R/train/good`, with or without a slash."""
    path = Path(training_path)
    if (path / "train" / GOOD).is_dir():
        return path
    return path.parent.parent


def training_folder(training_path: str | Path) -> Path:
    """Where the training images are, whether their folder or the root was named."""
    path = Path(training_path)
    return path / "train" / GOOD if (path / "train" / GOOD).is_dir() else path


def truth_folder(root: Path, split: Literal["valid", "test"]) -> Path:
    """Where the masks of a split's defective images are."""
    return root / _TRUTH[split] / DEFECTIVE


def list_judged(root: Path, split: Literal["valid", "test"], img_format: ImgFormat) -> list[Judged]:
    """Images of a split, good ones first; empty if there is no such split."""
    judged: list[Judged] = []
    for kind in (GOOD, DEFECTIVE):
        folder = root / split / kind
        if folder.is_dir() and any(folder.iterdir()):
            masks = _masks(truth_folder(root, split))
            judged += [
                Judged(path, None if kind == GOOD else masks.get(path.stem), is_good=kind == GOOD)
                for path in list_images(folder, img_format)
            ]
    return judged


def _masks(folder: Path) -> dict[str, Path]:
    """Masks by the stem of their image."""
    if not folder.is_dir():
        return {}
    known = {extension for extensions in EXTENSIONS.values() for extension in extensions}
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in known)
    return {path.stem.removesuffix("_mask"): path for path in found if path.stem.endswith("_mask")}
