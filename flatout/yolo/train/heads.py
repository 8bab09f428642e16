"""What a training's options say about several heads: which classes each has, and how its mosaics are turned."""

import logging

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.augment.class_aware import ClassAware
from flatout.yolo.augment.head_params import read_head_params
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.find_file import find_file
from flatout.yolo.model.head_config import HeadConfig, contiguous_heads, read_head_config
from flatout.yolo.model.multihead import MultiHeadDetect
from flatout.yolo.model.network import Network
from flatout.yolo.model.with_heads import HeadChoice
from flatout.yolo.options import TrainOptions

logger = logging.getLogger(__name__)


def chosen_heads(options: TrainOptions, *, num_classes: int) -> HeadChoice | None:
    """What `--head-config`, `--heads` and `--head-attention` ask for; None if none of them was given."""
    if not (options.head_config or options.heads or options.head_attention):
        return None
    return HeadChoice(_groups(options, num_classes), options.head_attention)


def _groups(options: TrainOptions, num_classes: int) -> HeadConfig | None:
    if options.head_config:
        groups = read_head_config(find_file(options.head_config, flag="--head-config"))
        if groups.nc != num_classes:
            raise ConfigError(
                f"--head-config {options.head_config}: shares out {groups.nc} classes, but the data set has "
                f"{num_classes}. Make one for it with `flatout yolo group`."
            )
        if options.heads not in (0, groups.num_heads):
            logger.warning(
                "--heads %d: %s has %d heads, and that is how many there are.",
                options.heads, options.head_config, groups.num_heads,
            )  # fmt: skip
        return groups
    if not options.heads:
        return None
    if options.heads > num_classes:
        raise ConfigError(f"--heads {options.heads}: there are only {num_classes} classes to share out.")
    return contiguous_heads(num_classes, options.heads)


def class_aware(options: TrainOptions, network: Network, images: ImageSet) -> ClassAware | None:
    """Turn and shear by head for `--class-aware-aug`; None without it, or where the network has no heads."""
    if not options.class_aware_aug:
        return None
    if not isinstance(network.head, MultiHeadDetect):
        logger.warning("--class-aware-aug: the network has one head, so pictures are augmented as the hyp file says.")
        return None
    groups = network.head.groups
    params = read_head_params(find_file(options.head_params, flag="--head-params"), num_heads=groups.num_heads)
    degrees_H, shear_H = np.array([(one.degrees, one.shear) for one in params]).T
    return ClassAware.of(images.labels, np.array(groups.head_C), degrees_H, shear_H)
