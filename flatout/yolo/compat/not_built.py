"""Flags of YOLOv7 and its fork that flatout does not obey yet: refused in a sentence each, never ignored."""

from collections.abc import Iterator

from flatout.errors import ConfigError
from flatout.yolo.options import TrainOptions

_HEADS = "networks with several heads (1B4H) are not built yet"
_WANDB = "flatout does not talk to Weights & Biases; results are in the run folder, as text, CSV and pictures"
_REASONS = {
    "evolve": "the search for hyper-parameters is not built yet; train with several --hyp files and compare",
    "bucket": "copying to a bucket is not built yet; copy the run folder afterwards",
    "compat_pt": "pickled files for old tools are not built yet; `flatout yolo convert` writes safetensors",
    "sync_bn": "batch-norm statistics over several GPUs are not built yet; each GPU uses those of its own pictures",
    "entity": _WANDB,
    "upload_dataset": _WANDB,
    "bbox_interval": _WANDB,
    "save_period": _WANDB,
    "artifact_alias": _WANDB,
    "heads": _HEADS,
    "head_config": _HEADS,
    "class_aware_aug": f"{_HEADS}, and augmentation by class belongs to them",
    "head_params": f"{_HEADS}, and augmentation by class belongs to them",
}


def refuse_what_is_not_built(options: TrainOptions) -> None:
    """ConfigError names every flag that cannot be obeyed."""
    if refusals := list(_refusals(options)):
        raise ConfigError("\n".join(refusals))


def _refusals(options: TrainOptions) -> Iterator[str]:
    defaults = TrainOptions()
    for name, reason in _REASONS.items():
        if getattr(options, name) != getattr(defaults, name):
            flag = f"--{name}" if name in _UNDERSCORED else f"--{name.replace('_', '-')}"
            yield f"{flag}: {reason}. Leave the flag out."


_UNDERSCORED = ("upload_dataset", "bbox_interval", "save_period", "artifact_alias")
