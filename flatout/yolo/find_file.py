"""Find the files that `--data`, `--cfg`, `--hyp` and `--weights` refer to.

    the path as given  ->  exactly one match below the working directory  ->  a file that comes with flatout

The first two steps are the rule of YOLOv7; the third makes its commands work in a folder without cfg/ and data/.
Weights are not searched for below the working directory: they are a path, or a bare name such as `yolov7-tiny`, which
means the trained weights that come with flatout, or a file that `flatout weights get` downloaded.
"""

import difflib
import glob
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePath

from flatout.errors import CheckpointError, ConfigError
from flatout.hub import downloaded, shipped
from flatout.yolo.model.configs import shipped_folder as cfg_folder
from flatout.yolo.options import NEVER_RELEASED, OPTIONS_NAME

logger = logging.getLogger(__name__)

RELEASES = "https://github.com/WongKinYiu/yolov7/releases/download/v0.1"
RELEASED = tuple(
    f"{name}{ending}"
    for name in ("yolov7", "yolov7x", "yolov7-w6", "yolov7-e6", "yolov7-d6", "yolov7-e6e", "yolov7-tiny")
    for ending in (".pt", "_training.pt")
    if (name, ending) != ("yolov7-tiny", "_training.pt")
)
"""Weights files that the authors of YOLOv7 published there."""
DEFAULT_NETWORK = "cfg/training/yolov7.yaml"
_SHIPPED = {"data": ("", "data"), "cfg": ("", "cfg/training", "cfg/deploy", "training", "deploy")}
"""Folders that come with flatout -> how users may write them in front of a file name."""

_PREFIX = {"--hyp": "hyp.", "--head-params": "hyp.", "FILE": "stages."}
"""Flag -> prefix of the shipped files in data/ that it accepts; other flags accept data sets."""


def shipped_folder(name: str) -> Path:
    """The folder `cfg`, `data` or `weights`, at the top of a checkout or inside the installed package."""
    return cfg_folder().parent / name


def find_file(given: str, *, flag: str = "--data") -> Path:
    """Find the file of `--data`, `--hyp` or `--cfg`; ConfigError if there is none, or more than one match."""
    path = Path(given)
    if path.is_file():
        return path
    found = _below_working_directory(path)
    if len(found) > 1:
        listed = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
        raise ConfigError(f"{flag} {given}: {len(found)} files match: {listed}. Give the full path of one.")
    shipped = "cfg" if flag == "--cfg" else "data"
    found = found or _shipped_file(path, shipped)
    if not found:
        advice = f"{_suggestion(path, shipped, flag)}{resize_hint(path.name)}"
        raise ConfigError(f"{flag} {given}: no such file here or in a subfolder; {advice}")
    logger.info("%s %s: using %s", flag, given, found[0])
    return found[0]


def find_data(given: str) -> Path:
    """Find a data set: a folder, which some formats are, or else a file as `find_file` does."""
    return Path(given) if os.path.isdir(given) else find_file(given)


def find_data_of_run(given: str, of_run: str, folder: Path) -> Path:
    """The data set of --data, or else the one that the run in `folder` was trained with, as `find_data` does;
    ConfigError if it is not here."""
    if given:
        return find_data(given)
    try:
        return find_data(of_run)
    except ConfigError:
        if Path(of_run).is_absolute():
            raise ConfigError(
                f"The run's data, {of_run}, does not exist any more. Give its new path with --data FILE."
            ) from None
        raise ConfigError(
            f"The run's data, {of_run}, is not here. Run this in the folder where {folder} was trained, or give "
            "--data FILE."
        ) from None


def resize_hint(path: str) -> str:
    """A sentence with the command that makes a missing copy of COCO, for a path such as ./coco320/images/train2017.

    Starts with a space; "" for other paths.
    """
    found = re.match(r"(.*/|)(coco[-_]?([2-9]\d{2}|1[0-5]\d{2}))(?=[/.]|$)", path)
    if found is None:
        return ""
    return f" Make it from COCO with: flatout yolo resize coco.yaml --size {found[3]} --out {found[1]}{found[2]}"


def find_weights(given: str) -> Path | None:
    """Find the file of `--weights`; None means training from scratch, with a warning unless '' was given.

    CheckpointError if another file does not exist.
    """
    if given == "":
        return None
    if given == NEVER_RELEASED and not Path(given).is_file():
        logger.warning("--weights was not given, and there is no %s: training from scratch.", NEVER_RELEASED)
        return None
    return weights_file(given, advice="Check the path, or use --weights '' to train from scratch.")


def weights_files(given: Iterable[str]) -> tuple[str, ...]:
    """Find the files of a `--weights` that takes several, as in `test`; CheckpointError if one is missing."""
    return tuple(str(weights_file(each)) for each in given)


def weights_file(given: str | Path, *, flag: str = "--weights ", advice: str = "Check the path.") -> Path:
    """Find a weights file: the path as given, or else the weights of that name that come with flatout.

    CheckpointError, with `flag` and `advice`, if there is neither.
    """
    # A folder named yolov7-tiny does not hide the weights. Other folders are refused, with a better reason, by the code
    # that reads them. Path.is_file() would raise for a name that is too long.
    own = None if os.path.isfile(given) else shipped_weights(given)
    if own is not None:
        logger.info("%s%s: using the trained weights that come with flatout, %s", flag, given, own)
        return own
    if os.path.exists(given):
        return Path(given)
    if (found := downloaded(given)) is not None:
        logger.info("%s%s: using the downloaded weights %s", flag, given, found)
        return found
    raise CheckpointError(f"{flag}{given}: no such file. {advice}{_where_to_get(Path(given))}")


def shipped_weights(name: str | Path) -> Path | None:
    """Trained weights that come with flatout, by name without folder and ending; None if there are none."""
    return shipped().get(str(name))


def _where_to_get(path: Path) -> str:
    """Advice for missing weights: those that come with flatout, or how to download a file of YOLOv7's authors.

    Starts with a space; "" if there is none. The command to copy is at the end.
    """
    own = shipped()
    if path.name in RELEASED:
        means = f"Without the ending, {path.stem} means" if path.stem in own else f"{', '.join(own)} means"
        return (
            f" {means} the weights that come with flatout. To download those of YOLOv7's authors into this folder: "
            f"curl -LO {RELEASES}/{path.name}"
        )
    if path.suffix or path.parent != Path():
        return ""
    return f" Weights that come with flatout: {', '.join(own)}. `flatout weights list` shows downloaded ones."


def find_cfg(given: str, *, weights: Path | None) -> Path | None:
    """Find the model config of `--cfg`; None means the one stored in the weights.

    With neither, the default network is used, with a warning.
    """
    if given:
        return find_file(given, flag="--cfg")
    if weights is not None:
        return None
    logger.warning("Neither --cfg nor --weights was given: using the network %s.", PurePath(DEFAULT_NETWORK).stem)
    return find_file(DEFAULT_NETWORK, flag="--cfg")


def _below_working_directory(path: Path) -> list[Path]:
    """Files below the working directory whose path ends in `path`, without hidden folders and shipped files."""
    if path.is_absolute() or ".." in path.parts or not path.name:
        return []
    shipped = [shipped_folder(name).resolve() for name in _SHIPPED]
    found = (Path(match) for match in glob.iglob(f"**/{glob.escape(str(path))}", recursive=True))
    return sorted(match for match in found if match.is_file() and not set(shipped) & set(match.resolve().parents))


def _shipped_file(path: Path, shipped: str) -> list[Path]:
    """The shipped file of that name, whose ending may be missing; empty if the path cannot mean a shipped file."""
    folder = path.parent.as_posix()
    if path.is_absolute() or (folder if folder != "." else "") not in _SHIPPED[shipped]:
        return []
    name = path.name if path.suffix in (".yaml", ".yml") else f"{path.name}.yaml"
    kind = path.parent.name if path.parent.name in ("training", "deploy") else "training"
    file = shipped_folder(shipped) / (kind if shipped == "cfg" else "") / name
    return [file] if file.is_file() else []


def _suggestion(path: Path, shipped: str, flag: str) -> str:
    """Suggest a similar name in the same folder, or else among the shipped files; or else list the shipped files."""
    beside = [file.name for file in path.parent.glob("*.y*ml") if file.is_file()] if path.parent.is_dir() else []
    if close := _closest_name(path, beside):
        return f"did you mean {path.parent / close}?"
    known = sorted({file.name for file in shipped_folder(shipped).rglob("*.yaml")})
    known = [name for name in known if shipped == "cfg" or name.startswith(_PREFIX.get(flag, "coco"))]
    close = _closest_name(path, known)
    return f"did you mean {close}?" if close else f"these come with flatout: {', '.join(known)}."


def _closest_name(path: Path, names: Iterable[str]) -> str | None:
    """The most similar name, compared without endings, because .yaml makes any two short names similar."""
    by_stem = {PurePath(name).stem: name for name in names}
    close = difflib.get_close_matches(path.stem, by_stem, n=1)
    return by_stem[close[0]] if close else None


# Names of weights files to write; checked before anything slow is imported or computed

ENDINGS = (".safetensors", ".pt")
"""Endings of weights files, which select the format."""
MAX_NAME_BYTES = 200
"""File systems allow 255, some of which the temporary name needs."""


def check_output_name(out: Path, *, force: bool) -> None:
    """ConfigError if a weights file cannot be written under this name, or exists and must not be overwritten."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"{out}: the name must end in {' or '.join(ENDINGS)}, which selects the format.")
    if len(os.fsencode(out.name)) > MAX_NAME_BYTES:
        raise ConfigError(f"{str(out)[:200]}...: the file name is too long. Choose a shorter one.")
    if os.path.isdir(out):
        raise ConfigError(f"{out} is a folder. Give the name of a file.")
    if os.path.exists(out) and not force:
        raise ConfigError(f"{out} already exists. Choose another name, or overwrite it with --force.")
    if not os.path.isdir(out.parent):
        raise ConfigError(f"{out}: its folder does not exist. Create it first, or choose another one.")


# Run folders


def find_run(path: str | Path) -> Path:
    """The run folder that `path` is, or is in; ConfigError if it is none. Does not import torch."""
    path = Path(path)
    for folder in (path, path.parent, path.parent.parent):
        if (folder / OPTIONS_NAME).is_file():
            return folder
    what = f"there is no {OPTIONS_NAME} in it" if path.exists() else "there is no such folder"
    raise ConfigError(
        f"{path}: not a run of flatout yolo: {what}. Give the folder that the training wrote, such as runs/train/exp."
    )
