"""Flags of YOLOv7 and its fork that flatout does not obey yet: refused in a sentence each, never ignored."""

from collections.abc import Iterator

from flatout.errors import ConfigError
from flatout.yolo.options import TrainOptions

_REASONS = {
    "bucket": "states are copied to any store, not only to Google's: --mirror gs://BUCKET/FOLDER",
    "compat_pt": "pickled files for old tools are not built yet; `flatout yolo convert` writes safetensors",
}


def refuse_what_is_not_built(options: TrainOptions) -> None:
    """ConfigError names every flag that cannot be obeyed."""
    if refusals := list(_refusals(options)):
        raise ConfigError("\n".join(refusals))


def _refusals(options: TrainOptions) -> Iterator[str]:
    defaults = TrainOptions()
    for name, reason in _REASONS.items():
        if getattr(options, name) != getattr(defaults, name):
            yield f"--{name.replace('_', '-')}: {reason}. Leave the flag out."
