"""The pictures of a training, and how its data is told from changed data."""

import hashlib
import logging
from dataclasses import dataclass

import numpy as np

from flatout.errors import DataError
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.open_set import open_training_splits
from flatout.yolo.train.setting import Setting

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pictures:
    """The two sets of a training; validation pictures are those of the first rank only."""

    train: ImageSet
    val: ImageSet

    def fingerprint(self) -> str:
        """Changes when a picture comes, goes or changes its size, or when any label changes."""
        digest = hashlib.sha256()
        for images in (self.train, self.val):
            digest.update("\n".join((*images.names, *images.paths)).encode(errors="surrogateescape"))
            for array in (images.size_wh_N2, images.labels.class_box_T5, images.labels.first_N, images.labels.point_P2):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def open_pictures(setting: Setting) -> Pictures:
    """Both sets, scanned or from the cache of an earlier scan. Ranks wait for each other here."""
    options = setting.options
    # The first rank scans, the others find its cache.
    if not setting.world.is_first:
        setting.world.wait_for_all()
    train, val = open_training_splits(
        setting.data,
        strict=options.strict_labels,
        single_class=options.single_cls,
        allow_bad_labels=options.allow_bad_labels,
    )
    if setting.world.is_first:
        setting.world.wait_for_all()
    return Pictures(train, val)


def check_unchanged(fingerprint: str, pictures: Pictures, setting: Setting) -> None:
    """DataError if these are not the pictures of the run that is continued, unless that is wished for."""
    if fingerprint == pictures.fingerprint():
        return
    told = f"{setting.data.file}: pictures or labels have changed since this run was saved"
    if not setting.options.allow_data_change:
        raise DataError(
            f"{told}. Start a new run with --fresh, or continue with the changed data with --allow-data-change."
        )
    logger.warning("%s; continuing with the changed ones, as asked.", told)
