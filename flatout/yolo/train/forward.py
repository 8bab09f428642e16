"""The network as it is called: compiled if asked for, with gradients (and batch norms) shared by ranks if there are
several."""

import logging

from torch import nn

from flatout.engine.compiling import Compiled
from flatout.yolo.model.network import Network
from flatout.yolo.train.setting import Setting

logger = logging.getLogger(__name__)


def forward_of(network: Network, setting: Setting) -> nn.Module:
    """What a step calls; the weights stay those of `network`."""
    options, ranks = setting.options, setting.world.size
    if options.sync_bn:
        told = share_batch_norms(network, ranks=ranks, on_gpu=setting.device.type == "cuda")
        if setting.world.is_first:
            logger.info("%s", told)
    if ranks == 1:
        return Compiled(network) if options.compile == "on" else network
    if options.compile == "on":
        logger.warning("With several ranks the network is not compiled.")
    ids = [setting.device.index] if setting.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(network, device_ids=ids)


def share_batch_norms(network: nn.Module, *, ranks: int, on_gpu: bool) -> str:
    """`--sync-bn`: statistics over the pictures of all ranks, in place; tensors stay the same. Says what was done."""
    if ranks == 1:
        return "--sync-bn: one rank trains alone, so its batch-norm statistics are those of all pictures."
    if not on_gpu:
        # torch has the kernel for GPUs only.
        return "--sync-bn needs GPUs: on CPUs each rank keeps the batch-norm statistics of its own pictures."
    nn.SyncBatchNorm.convert_sync_batchnorm(network)
    return f"Batch-norm statistics are those of the pictures of all {ranks} ranks."
