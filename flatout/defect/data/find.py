"""Lists the files of a data set, in an order that is the same on every machine.

R/train/good/*                       defect-free images, for training
R/train/hard_negative_samples/*      optional: hard negatives, real images in which nothing may be detected
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
ENDINGS = frozenset(extension for extensions in EXTENSIONS.values() for extension in extensions)
GOOD, DEFECTIVE = "good", "bright_spots"
HARD_NEGATIVES = "hard_negative_samples"
Split = Literal["test", "valid"]
SPLITS: tuple[Split, Split] = ("test", "valid")
_TRUTH = {"valid": "ground_truth_valid", "test": "ground_truth"}


@dataclass(frozen=True)
class EvaluationImage:
    """An image to evaluate on, with its label if there is one."""

    path: Path
    mask: Path | None
    """File that marks its defects; None if there is none."""
    is_good: bool
    """Whether it is known to have no defects; its mask is then empty."""
    references: tuple[Path, ...] = ()
    """Files of its one or two references, if it is the inspected image of a pair; else its own file has them."""
    boxes: Path | None = None
    """File with boxes around its defects, if there is one."""

    @property
    def is_labelled(self) -> bool:
        return self.is_good or self.mask is not None


def list_images(folder: str | Path, img_format: ImgFormat) -> list[Path]:
    """Files of a format in a folder, sorted by name; DataError if there are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder.")
    found = [path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS[img_format] and path.is_file()]
    if not found:
        suffixes = {
            path.suffix.lower() for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
        }
        others = sorted(suffixes - {""})
        kinds = [f"{', '.join(others)} files"] if others else []
        kinds += ["files without an extension"] if "" in suffixes else []
        there = f"; it holds {' and '.join(kinds)}" if kinds else ""
        advice = " Choose their format with --img_format." if ENDINGS.intersection(others) else ""
        raise DataError(f"{folder}: no {' or '.join(EXTENSIONS[img_format])} files{there}.{advice}")
    return sorted(found, key=lambda path: path.name)


def root_of(training_path: str | Path) -> Path:
    """The root of a data set: the folder itself, or the one two levels above if the folder is `R/train/good`."""
    path = Path(training_path)
    if (path / "train" / GOOD).is_dir():
        return path
    return path.parent.parent


def training_folder(training_path: str | Path) -> Path:
    """The folder of the training images, given that folder or the root of the data set."""
    path = Path(training_path)
    return path / "train" / GOOD if (path / "train" / GOOD).is_dir() else path


def truth_folder(root: Path, split: Split) -> Path:
    """The folder of the masks of a split's defective images."""
    return root / _TRUTH[split] / DEFECTIVE


def list_split(root: Path, split: Split, img_format: ImgFormat) -> list[EvaluationImage]:
    """Images of a split, good ones first; empty if the split does not exist."""
    images: list[EvaluationImage] = []
    for kind in (GOOD, DEFECTIVE):
        folder = root / split / kind
        if folder.is_dir() and any(folder.iterdir()):
            masks = _masks(truth_folder(root, split))
            images += [
                EvaluationImage(path, None if kind == GOOD else masks.get(path.stem), is_good=kind == GOOD)
                for path in list_images(folder, img_format)
            ]
    return images


def _masks(folder: Path) -> dict[str, Path]:
    """Mask files by the stem of their image."""
    if not folder.is_dir():
        return {}
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
    return {path.stem.removesuffix("_mask"): path for path in found if path.stem.endswith("_mask")}
