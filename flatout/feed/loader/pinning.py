"""Page-locked memory for batches that go to a GPU."""

import logging
import weakref

import numpy as np
import torch

logger = logging.getLogger(__name__)


def pin(body: np.ndarray) -> None:
    """Register a slot's body with CUDA, until the last view of it is gone."""
    cudart = torch.cuda.cudart()
    memory = body if body.base is None or not isinstance(body.base, np.ndarray) else body.base
    address = memory.ctypes.data
    status = cudart.cudaHostRegister(address, memory.nbytes, 0)
    if int(status) != 0:
        logger.warning(
            "A slot could not be pinned (%s): its batches are copied to pinned memory by the main process. "
            "Raise the locked-memory limit (ulimit -l).",
            status,
        )
        return
    # Before the memory is unmapped: the array under all views dies first.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
