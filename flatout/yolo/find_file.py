"""Which file a flag means: `--data`, `--cfg`, `--hyp` and `--weights`.

    as given  ->  below the working directory, exactly one  ->  those that come with flatout

The first two are YOLOv7's rule; the third lets its commands work in a folder that has neither cfg/ nor data/. Weights
are not searched for below the working directory: they are a file as given, or a bare name such as `yolov7-tiny`, which
means the trained weights that come with flatout.
"""

import difflib
import glob
import logging
import os
from collections.abc import Iterable
from pathlib import Path, PurePath

from flatout.errors import CheckpointError, ConfigError
from flatout.yolo.data.find import how_to_resize
from flatout.yolo.model.configs import shipped_folder as cfg_folder
from flatout.yolo.options import NEVER_RELEASED

logger = logging.getLogger(__name__)

RELEASES = "https://github.com/WongKinYiu/yolov7/releases/download/v0.1"
RELEASED = tuple(
    f"{name}{ending}"
    for name in ("yolov7", "yolov7x", "yolov7-w6", "yolov7-e6", "yolov7-d6", "yolov7-e6e", "yolov7-tiny")
    for ending in (".pt", "_training.pt")
    if (name, ending) != ("yolov7-tiny", "_training.pt")
)
"""Files of weights that YOLOv7's authors offer there."""
DEFAULT_NETWORK = "cfg/training/yolov7.yaml"
_SHIPPED = {"data": ("", "data"), "cfg": ("", "cfg/training", "cfg/deploy", "training", "deploy")}
"""Folders of ours, and how people write them in front of a file name."""

_PREFIX = {"--hyp": "hyp.", "--head-params": "hyp.", "FILE": "stages."}
"""How names of ours in data/ begin that a flag can mean; else they are data sets."""


def shipped_folder(name: str) -> Path:
    """`cfg`, `data` or `weights`: at the top of a checkout, or inside the installed package."""
    return cfg_folder().parent / name


def find_file(given: str, *, flag: str = "--data") -> Path:
    """The file that `--data`, `--hyp` or `--cfg` means; ConfigError if there is none, or if several could be meant."""
    path = Path(given)
    if path.is_file():
        return path
    found = _below_here(path)
    if len(found) > 1:
        listed = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
        raise ConfigError(f"{flag} {given}: {len(found)} files could be meant: {listed}. Give the whole path of one.")
    shipped = "cfg" if flag == "--cfg" else "data"
    found = found or _that_ship(path, shipped)
    if not found:
        advice = f"{_nearest(path, shipped, flag)}{how_to_resize(path.name)}"
        raise ConfigError(f"{flag} {given}: no such file, nor one below this folder; {advice}")
    logger.info("%s %s: taking %s", flag, given, found[0])
    return found[0]


def find_weights(given: str) -> Path | None:
    """The file that `--weights` means; None is a start from scratch, which is said where nobody asked for it."""
    if given == "":
        return None
    if given == NEVER_RELEASED and not Path(given).is_file():
        logger.warning("--weights was not given, and there is no %s: training starts from scratch.", NEVER_RELEASED)
        return None
    return weights_file(given, advice="Check the path, or give --weights '' to start from scratch.")


def weights_files(given: Iterable[str]) -> tuple[str, ...]:
    """The files that `--weights` means where it takes several, as `test` and `detect` do."""
    return tuple(str(weights_file(each)) for each in given)


def weights_file(given: str | Path, *, flag: str = "--weights ", advice: str = "Check the path.") -> Path:
    """The file to read weights from: as given, else those that come with flatout under that name."""
    # A folder called yolov7-tiny is no weights; any other folder is refused by whoever reads it, with a better reason.
    # Not Path.is_file(): it raises where a name is longer than names can be.
    shipped = None if os.path.isfile(given) else shipped_weights(given)
    if shipped is not None:
        logger.info("%s%s: taking the trained weights that come with flatout, %s", flag, given, shipped)
        return shipped
    if os.path.exists(given):
        return Path(given)
    raise CheckpointError(f"{flag}{given}: no such file. {_where_to_get(Path(given))}{advice}")


def shipped_weights(name: str | Path) -> Path | None:
    """Trained weights that come with flatout, by their bare name: no folder, no ending. None if there are none."""
    return _all_shipped_weights().get(str(name))


def _all_shipped_weights() -> dict[str, Path]:
    return {file.stem: file for file in sorted(shipped_folder("weights").glob("*.safetensors"))}


def _where_to_get(path: Path) -> str:
    """What could be meant: a file of YOLOv7's authors, which is fetched by hand, or weights that come with flatout."""
    ours = _all_shipped_weights()
    if path.name in RELEASED:
        instead = f"(without its ending, {path.stem} means flatout's own weights). " if path.stem in ours else ""
        return f"Fetch it by hand, into this folder: curl -LO {RELEASES}/{path.name} {instead}"
    if path.suffix or path.parent != Path():
        return ""
    return f"Weights that come with flatout: {', '.join(ours)}. "


def find_cfg(given: str, *, weights: Path | None) -> Path | None:
    """The model config that `--cfg` means; None: the one inside the weights."""
    if given:
        return find_file(given, flag="--cfg")
    if weights is not None:
        return None
    logger.warning("neither --cfg nor weights were given: the network is %s.", PurePath(DEFAULT_NETWORK).stem)
    return find_file(DEFAULT_NETWORK, flag="--cfg")


def _below_here(path: Path) -> list[Path]:
    """Files below the working directory whose path ends in `path`, hidden folders and our own files left out."""
    if path.is_absolute() or ".." in path.parts or not path.name:
        return []
    ours = [shipped_folder(name).resolve() for name in _SHIPPED]
    found = (Path(match) for match in glob.iglob(f"**/{glob.escape(str(path))}", recursive=True))
    return sorted(match for match in found if match.is_file() and not set(ours) & set(match.resolve().parents))


def _that_ship(path: Path, shipped: str) -> list[Path]:
    """Ours of that name; the ending may be missing. Empty for a path that cannot mean one of ours."""
    folder = path.parent.as_posix()
    if path.is_absolute() or (folder if folder != "." else "") not in _SHIPPED[shipped]:
        return []
    name = path.name if path.suffix in (".yaml", ".yml") else f"{path.name}.yaml"
    kind = path.parent.name if path.parent.name in ("training", "deploy") else "training"
    file = shipped_folder(shipped) / (kind if shipped == "cfg" else "") / name
    return [file] if file.is_file() else []


def _nearest(path: Path, shipped: str, flag: str) -> str:
    """A file of a like name: the user's own in that folder, else one of ours; else all of ours that could be meant."""
    beside = [file.name for file in path.parent.glob("*.y*ml") if file.is_file()] if path.parent.is_dir() else []
    if close := _like(path, beside):
        return f"did you mean {path.parent / close}?"
    known = sorted({file.name for file in shipped_folder(shipped).rglob("*.yaml")})
    known = [name for name in known if shipped == "cfg" or name.startswith(_PREFIX.get(flag, "coco"))]
    close = _like(path, known)
    return f"did you mean {close}?" if close else f"flatout has {', '.join(known)}."


def _like(path: Path, names: Iterable[str]) -> str | None:
    """The name nearest to a path's, both without their endings: .yaml alone makes any two short names alike."""
    by_stem = {PurePath(name).stem: name for name in names}
    close = difflib.get_close_matches(path.stem, by_stem, n=1)
    return by_stem[close[0]] if close else None


# May a file of weights be written under this name? Asked before anything heavy is loaded or computed.

ENDINGS = (".safetensors", ".pt")
"""Of a file's name; they say its format."""
MAX_NAME_BYTES = 200
"""Of any file system we know 255, of which the hidden name it is written under needs some."""


def check_out(out: Path, *, force: bool) -> None:
    """ConfigError if the name says no format, or if the file exists and must not be overwritten."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"{out}: the name must end in {' or '.join(ENDINGS)}, which says the format.")
    if len(os.fsencode(out.name)) > MAX_NAME_BYTES:
        raise ConfigError(f"{str(out)[:200]}...: the name is too long for a file. Choose a shorter one.")
    if os.path.isdir(out):
        raise ConfigError(f"{out}: is a folder. Choose the name of a file.")
    if os.path.exists(out) and not force:
        raise ConfigError(f"{out}: exists already. Choose another name, or overwrite it with --force.")
    if not os.path.isdir(out.parent):
        raise ConfigError(f"{out}: its folder does not exist. Make it first, or choose another one.")
