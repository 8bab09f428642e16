"""The hyper-parameters of a training: the 30 keys of YOLOv7's hyp files, and four more.

A hyp file must contain every key that is not optional. It is validated when it is read, and all mistakes are reported
at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from flatout.config import read_config
from flatout.errors import ConfigError
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.loss.losses import LossConfig

_AUGMENT_KEYS = tuple(field.name for field in fields(AugmentConfig))
_LOSS_KEYS = ("box", "obj", "cls", "obj_pw", "cls_pw", "anchor_t", "fl_gamma")
_NOT_NEGATIVE = ("lr0", "lrf", "weight_decay", "warmup_epochs", "warmup_bias_lr")


@dataclass(frozen=True, kw_only=True)
class Hyp:
    """Hyper-parameters as in the file, before gains, weight decay and learning rate are scaled to the run."""

    lr0: float
    """Learning rate at the end of the warm-up."""
    lrf: float
    """Final learning rate as a share of `lr0`."""
    momentum: float
    """Momentum of SGD, or beta 1 of Adam."""
    weight_decay: float
    warmup_epochs: float
    warmup_momentum: float
    warmup_bias_lr: float
    """Learning rate of biases at the first iteration; that of weights starts at 0."""

    box: float
    cls: float
    cls_pw: float
    obj: float
    obj_pw: float
    iou_t: float
    """Accepted and not used: no loss depends on it."""
    anchor_t: float
    fl_gamma: float

    hsv_h: float
    hsv_s: float
    hsv_v: float
    degrees: float
    translate: float
    scale: float
    shear: float
    perspective: float
    flipud: float
    fliplr: float
    mosaic: float
    mixup: float
    copy_paste: float
    paste_in: float
    aspect: float = 0.0
    """Width / height changes by a factor of up to 1 + this value; not a key of YOLOv7."""
    gamma: float = 0.0
    """Gamma correction with an exponent from exp(-this value) to exp(this value); not a key of YOLOv7."""

    loss_ota: int = 1
    """1: targets are assigned by OTA; any other value: by anchor shape alone."""
    anchors: float | None = None
    """Number of new anchors per layer that replace those of the network."""
    warmup_iters: int | None = None
    """Length of the warm-up in iterations, instead of max(warmup_epochs, 1000 iterations)."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def ota(self) -> bool:
        return self.loss_ota == 1

    def augment(self) -> AugmentConfig:
        """The config of the augmentation."""
        return AugmentConfig(**{key: getattr(self, key) for key in _AUGMENT_KEYS})

    def loss(self, *, label_smoothing: float = 0.0) -> LossConfig:
        """The config of the loss, with gains as in the file; `LossConfig.scaled` fits them to a network."""
        return LossConfig(**{key: getattr(self, key) for key in _LOSS_KEYS}, label_smoothing=label_smoothing)

    def for_batch(self, batch_size: int) -> "Hyp":
        """The hyper-parameters for `--auto-lr`: a larger learning rate above 64 images, a longer warm-up from 128."""
        if batch_size <= 64:
            return self
        warmup_epochs = max(self.warmup_epochs, 5.0) if batch_size >= 128 else self.warmup_epochs
        return replace(self, lr0=self.lr0 * math.sqrt(batch_size / 64), warmup_epochs=warmup_epochs)


def load_hyp(path: str | Path) -> Hyp:
    """Read a hyp file; ConfigError lists every wrong, missing and unknown key."""
    return read_config(path, Hyp)


def _problems(hyp: Hyp) -> Iterator[str]:
    for key in _NOT_NEGATIVE:
        if not getattr(hyp, key) >= 0:
            yield f"{key}={getattr(hyp, key)} must not be negative"
    for key in ("momentum", "warmup_momentum"):
        if not 0 <= getattr(hyp, key) < 1:
            yield f"{key}={getattr(hyp, key)} must be at least 0 and less than 1"
    if hyp.warmup_iters is not None and hyp.warmup_iters < 0:
        yield f"warmup_iters={hyp.warmup_iters} must not be negative"
    if hyp.anchors is not None and hyp.anchors < 1:
        yield f"anchors={hyp.anchors} must be 1 or more"
    # Key by key, because a config stops at its first mistake. The other keys keep their valid defaults.
    for config, keys in ((AugmentConfig, _AUGMENT_KEYS), (LossConfig, _LOSS_KEYS)):
        for key in keys:
            try:
                config(**{key: getattr(hyp, key)})
            except ValueError as error:
                yield str(error).rstrip(".")
