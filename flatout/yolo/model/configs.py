"""Model configs found by path or by name.

`yolov7-tiny` and `yolov7-tiny.yaml` mean the training config that ships with flatout, `deploy/yolov7-tiny` its
deploy form. A path that exists takes precedence.
"""

import logging
import os
from pathlib import Path

from flatout.errors import ConfigError, did_you_mean
from flatout.yaml_strict import Yaml, load_yaml

logger = logging.getLogger(__name__)

FORMS = ("training", "deploy")
USUAL_FOLDERS = (".", *FORMS, *(f"cfg/{form}" for form in FORMS))
"""Folders that people write in front of the name of a shipped config."""


def shipped_folder() -> Path:
    """The folder of the configs that ship with flatout: `cfg/` of a checkout, or inside the installed package."""
    package = Path(__file__).parents[2]
    inside = package / "cfg"
    return inside if inside.is_dir() else package.parent / "cfg"


def find_config(name: str | Path) -> Path:
    """The config file for a path, or else the shipped config of that name; ConfigError if there is none.

    The folder of a path that does not exist selects the form of a shipped config (training or deploy). It is logged
    which file is used, unless that is how such a config is usually named. The error suggests the closest known name.
    """
    given = Path(name)
    # Path.is_file() raises for a name that is longer than the file system allows.
    if os.path.isfile(given):
        return given
    stem = given.name.removesuffix(".yaml")
    forms = [given.parent.name] if given.parent.name in FORMS else list(FORMS)
    for form in forms:
        shipped = shipped_folder() / form / f"{stem}.yaml"
        if os.path.isfile(shipped):
            if given.parent.as_posix() not in USUAL_FOLDERS:
                logger.info("%s: using %s", name, shipped)
            return shipped
    known = sorted({path.stem for path in shipped_folder().glob("*/*.yaml")})
    advice = did_you_mean(stem, known, f"flatout ships {', '.join(known)}.")
    raise ConfigError(f"{str(name)[:200]}: no such model config; {advice}")


def is_config_name(source: str | Path) -> bool:
    """Whether `source` is a model config, by path or by name, and not a weights file; ConfigError if it is neither."""
    path = Path(source)
    is_other_file = path.suffix not in (".yaml", ".yml") and os.path.exists(path)
    if path.suffix in (".pt", ".pth", ".safetensors") or is_other_file:
        return False
    find_config(source)
    return True


def load_config(name: str | Path) -> Yaml:
    """The content of a config, by path or by name; ConfigError if there is none or it is no valid YAML."""
    return load_yaml(find_config(name))
