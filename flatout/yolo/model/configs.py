"""Find a model config by path or by name, and read it.

`yolov7-tiny` and `yolov7-tiny.yaml` mean the training config that ships with flatout, `deploy/yolov7-tiny` its
deploy form; a path that exists always wins.
"""

import difflib
import os
from pathlib import Path

from flatout.errors import ConfigError
from flatout.yaml_strict import Yaml, load_yaml

FORMS = ("training", "deploy")


def shipped_folder() -> Path:
    """Where our own configs are: `cfg/` of a checkout, or inside the installed package."""
    package = Path(__file__).parents[2]
    inside = package / "cfg"
    return inside if inside.is_dir() else package.parent / "cfg"


def find_config(name: str | Path) -> Path:
    """The file that `name` means; ConfigError lists what comes close."""
    given = Path(name)
    # Path.is_file() raises where a name is longer than names can be.
    if os.path.isfile(given):
        return given
    stem = given.name.removesuffix(".yaml")
    kinds = [given.parent.name] if given.parent.name in FORMS else list(FORMS)
    for kind in kinds:
        shipped = shipped_folder() / kind / f"{stem}.yaml"
        if os.path.isfile(shipped):
            return shipped
    known = sorted({path.stem for path in shipped_folder().glob("*/*.yaml")})
    close = difflib.get_close_matches(stem, known, n=1)
    advice = f"did you mean {close[0]!r}?" if close else f"flatout knows {', '.join(known)}."
    raise ConfigError(f"{str(name)[:200]}: no such model config; {advice}")


def names_config(source: str | Path) -> bool:
    """Does it mean a model config, by path or by name, and no file of weights? ConfigError if it means neither."""
    path = Path(source)
    is_other = path.suffix not in (".yaml", ".yml") and os.path.exists(path)
    if path.suffix in (".pt", ".pth", ".safetensors") or is_other:
        return False
    find_config(source)
    return True


def load_config(name: str | Path) -> Yaml:
    """Content of the config that `name` means."""
    return load_yaml(find_config(name))
