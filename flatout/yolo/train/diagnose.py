"""DIAGNOSE_COMPILE=1: where the network of a command cannot be compiled as a whole."""

import torch

from flatout.engine.compiling import explain
from flatout.yolo.input_size import rounded_up
from flatout.yolo.train import prepare
from flatout.yolo.train.setting import Setting


def explained(setting: Setting) -> str:
    """The report, from one batch of zeros; nothing is trained."""
    names = prepare.class_names(setting.data, single_cls=setting.options.single_cls)
    network = prepare.make_network(setting.options, setting.hyp, names).network.to(setting.device).train()
    size = rounded_up(setting.options.img_size[0], prepare.grid_of(network))
    return explain(network, torch.zeros(setting.options.batch_size, 3, size, size, device=setting.device))
