"""Spike-camera guided video deblurring: blurry frames and spike streams in, sharp frames out. See docs/spike.md.

    import flatout.spike

    model = flatout.spike.load("best.pt")         # or a config: "my.yaml"
    print(model.evaluate("test"))

The public names are those in `__all__`, each imported when it is first used.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.spike.deblurrer import Deblurrer

__all__ = ["Deblurrer", "load"]


def load(path_or_config: str | Path, *, device: str = "") -> "Deblurrer":
    """A deblurrer from a file of weights, or an untrained one from a YAML config.

    `device` is "cpu", the number of a GPU, or "" for a GPU if there is one. CheckpointError if there is no such file.
    """
    from flatout.spike.deblurrer import Deblurrer

    return Deblurrer(path_or_config, device=device)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("flatout.spike.deblurrer"), name)
