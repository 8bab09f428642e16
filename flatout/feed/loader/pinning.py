"""Page-locked memory for batches that go to a GPU."""

import logging
import os
import weakref

import numpy as np
import torch

logger = logging.getLogger(__name__)


def pin(body: np.ndarray) -> None:
    """Register a slot's body with CUDA, until the last view of it is gone."""
    memory = body.base  # the whole extent, which all views of it keep alive
    assert isinstance(memory, np.ndarray)
    address = memory.ctypes.data
    status = torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)
    if int(status) != 0:
        logger.warning(
            "A slot could not be pinned (%s): its batches are copied to pinned memory by the main process. "
            "Raise the locked-memory limit (ulimit -l).",
            status,
        )
        return
    # Before the memory is unmapped: the array under all views dies first.
    weakref.finalize(memory, _unpin, address, os.getpid()).atexit = False


def _unpin(address: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, where CUDA does not work
        torch.cuda.cudart().cudaHostUnregister(address)
