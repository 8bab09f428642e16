"""The network at its first step: built, with its number format and its optimizer."""

import logging

import torch
from torch import nn

from flatout.engine.precision import Amp, default_fast_amp
from flatout.spike.config import SpikeConfig
from flatout.spike.data import ClipSet
from flatout.spike.model import DeblurNet

logger = logging.getLogger(__name__)


def amp_of(config: SpikeConfig, device: torch.device) -> Amp:
    """The number format; half precision on a CPU would only be slow."""
    return default_fast_amp(device) if config.TRAIN.AMP == "auto" else config.TRAIN.AMP


def make_network(config: SpikeConfig, clips: ClipSet) -> DeblurNet:
    """Fresh, on the CPU."""
    facts = clips.sequences[0]
    network = DeblurNet(config.MODEL, channels=config.DATA.channels, ratio=facts.rgb_hw[0] / facts.spike_hw[0])
    count = sum(parameter.numel() for parameter in network.parameters())
    kind = "RGB + spikes" if config.MODEL.USE_SPIKE else "RGB only"
    logger.info("Network: %.2f M parameters, %s.", count / 1e6, kind)
    return network


def optimizer_for(network: nn.Module, config: SpikeConfig) -> torch.optim.Optimizer:
    """AdamW, fused; only the weights of convolutions shrink."""
    optim = config.TRAIN.OPTIM
    weights = [parameter for parameter in network.parameters() if parameter.dim() == 4]
    others = [parameter for parameter in network.parameters() if parameter.dim() != 4]
    groups = [{"params": weights, "weight_decay": optim.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.LR, betas=optim.BETAS, fused=True)
