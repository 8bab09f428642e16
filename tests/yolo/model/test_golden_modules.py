"""Single modules give the golden outputs, in float64 and in float32."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flatout.yolo.model.deploy import fold_batch_norm, fuse_branches, fuse_implicit
from flatout.yolo.model.layers import (
    MP,
    SP,
    SPPCSPC,
    Concat,
    Conv,
    Detect,
    DownC,
    IAuxDetect,
    IDetect,
    ReOrg,
    RepConv,
    Shortcut,
)
from flatout.yolo.model.module_specs import Activation
from flatout.yolo.model.network import DETECTION_LAYERS
from flatout.yolo.model.spec import Head
from tests.golden_cases import golden_cases
from tests.yolo.golden_network import fill, uniform

LAYERS = {layer.__name__: layer for layer in (Conv, RepConv, SPPCSPC, DownC, MP, SP, ReOrg)}
JOINS = {"Concat": Concat, "Shortcut": Shortcut}
HEADS = ("Detect", "IDetect", "IAuxDetect")


def cases(path: Path):
    with np.load(path) as file:
        arrays = dict(file)
    meta = json.loads(str(arrays.pop("meta")))
    for name, record in meta["cases"].items():
        own = {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}
        for dtype in (torch.float64, torch.float32):
            yield f"{name} {dtype}", (name, record, own, meta["weight_seed"], dtype)


def make_module(record):
    """The module at the beginning of a case's description, such as `Conv(6,8,1,1,None,1,LeakyReLU(0.1))`."""
    name, arguments = re.match(r"(?:nn\.)?(\w+)(\((?:[^()]|\([^()]*\))*\))?", record["desc"]).groups()
    if name in HEADS:
        return make_detection(name, record)
    if name in JOINS:
        return JOINS[name]()
    values = [argument(node) for node in ast.parse(f"f{arguments or '()'}", mode="eval").body.args]
    if name == "Upsample":
        return nn.Upsample(scale_factor=values[1], mode=values[2])
    return LAYERS[name](*values)


def argument(node):
    if isinstance(node, ast.Call):
        return Activation(node.func.id, tuple(map(ast.literal_eval, node.args)))
    return ast.literal_eval(node)


def make_detection(module: str, record: dict) -> Detect:
    anchors = tuple(tuple(map(float, level)) for level in record["anchors"])
    channels = tuple(shape[1] for shape in record["inputs"])
    strides = tuple(map(float, record["strides"]))
    head = DETECTION_LAYERS[module](Head(0, (), module, record["nc"], anchors, channels, strides, ()))
    head.anchors /= head.stride.view(-1, 1, 1)
    return head


@pytest.mark.parametrize("case", golden_cases("yolov7-models/modules.npz", cases))
def test_single_modules(case):
    name, record, golden, seed, dtype = case
    module = make_module(record)
    assert [[key, list(value.shape)] for key, value in module.state_dict().items()] == record["state"]
    fill(module, seed, prefix=f"{name}.")
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps = 1e-3
    module.to(dtype)
    inputs = [
        torch.from_numpy(np.float32(2 * uniform(f"{name}.x{index}", seed, tuple(shape)) - 1)).to(dtype)
        for index, shape in enumerate(record["inputs"])
    ]
    with torch.no_grad():
        found = outputs_of_head(module, inputs) if isinstance(module, Detect) else outputs_of(module, inputs)
    assert golden.keys() <= found.keys()
    for tag, expected in golden.items():
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype] * (100 if tag == "dec" else 1)
        assert found[tag].shape == expected.shape
        assert float(np.abs(found[tag].detach().double().numpy() - expected).max()) <= tolerance, tag


def outputs_of(module, inputs):
    module.eval()
    found = {"y": module(inputs if isinstance(module, Concat | Shortcut) else inputs[0])}
    if isinstance(module, Conv):
        found["fused_weight"], found["fused_bias"] = fold_batch_norm(module.conv.weight, module.bn)
    if isinstance(module, RepConv):
        fuse_branches(module)
        found["fused_weight"], found["fused_bias"] = module.rbr_reparam.weight, module.rbr_reparam.bias
        assert torch.allclose(module(inputs[0]), found["y"], atol=1e-5)
    return found


def outputs_of_head(head, inputs):
    found = {f"raw{level}": raw for level, raw in enumerate(head.train()(inputs))}
    assert len(found) == (2 if isinstance(head, IAuxDetect) else 1) * head.nl
    found["dec"] = head.eval()(inputs).decoded
    if isinstance(head, IDetect):
        fuse_implicit(head)
        for level, conv in enumerate(head.m):
            found |= {f"fused_weight{level}": conv.weight, f"fused_bias{level}": conv.bias}
    return found
