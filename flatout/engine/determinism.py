"""The same bits every time on a GPU, at a price; or the fastest kernels."""

import logging
import os

import torch

logger = logging.getLogger(__name__)

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_determinism(wanted: bool, *, long_run: bool = True) -> None:
    """For this process: deterministic kernels, or in a long run for every shape the fastest that cuDNN finds by trying.

    Trying takes half a minute for a network of 60 convolutions, which a short run would not earn back.
    """
    torch.backends.cudnn.benchmark = long_run and not wanted
    torch.backends.cudnn.deterministic = wanted
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    if wanted and torch.cuda.is_available() and os.environ.setdefault(_WORKSPACE, ":4096:8") == "":
        logger.warning("%s is empty: matrix products may differ from run to run.", _WORKSPACE)
