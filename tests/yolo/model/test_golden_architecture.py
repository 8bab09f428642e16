"""Configs in cfg/ give the rows, names, shapes and sizes of YOLOv7's networks."""

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.yaml_strict import Yaml
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.info import describe
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.model.spec import PROBE_PX, Head, parse_model
from tests.golden_cases import golden_cases


def whole(path: Path):
    return [("all", (path.name, json.loads(path.read_text())))]


def per_config(path: Path):
    return json.loads(path.read_text()).items()


@lru_cache
def written(name: str) -> Yaml:
    """A shipped config, read once for all tests; building a network from it copies it."""
    return load_config(name)


def built(name: str, device: str) -> Network:
    """The network of a name such as `yolov7-w6.training`, with the weights of seed 0; without weights on meta."""
    stem, _, form = name.rpartition(".")
    torch.manual_seed(0)
    with torch.device(device):
        return build_network(written(f"{form}/{stem}"))


def name_of(file: str) -> str:
    return ".".join(file.split(".")[:2])


def state_rows(network: Network) -> list[list[object]]:
    parameters = dict(network.named_parameters())
    return [
        [key, list(value.shape), str(value.dtype).removeprefix("torch."), "P" if key in parameters else "B"]
        for key, value in network.state_dict().items()
    ]


def digest(rows: list[list[object]]) -> str:
    return hashlib.sha256("\n".join(f"{key} {shape} {dtype}" for key, shape, dtype, *_ in rows).encode()).hexdigest()


@pytest.mark.parametrize("case", golden_cases("yolov7-models/*.layers.json", whole))
def test_rows_of_our_configs(case):
    file, golden = case
    stem, _, form = name_of(file).rpartition(".")
    spec = parse_model(written(f"{golden.get('kind', form)}/{golden.get('name', stem)}"))
    rows = (*spec.rows, spec.head)
    found = spec.config | {
        "strides": list(spec.head.strides),
        "backbone_rows": len(spec.config["backbone"]),
        "total_rows": len(rows),
    }
    stated = {key: golden[key] for key in found if key in golden}
    assert {key: found[key] for key in stated} == stated
    for row, expected in zip(rows, golden["rows"], strict=True) if "rows" in golden else ():
        index, origin, number, module, args, c_in, c_out, stride, params = expected
        assert (row.index, *row.written[:3]) == (index, origin, number, module)
        assert [None if arg == "None" else arg for arg in row.written[3]] == args
        if isinstance(row, Head):
            assert (list(row.channels), row.num_outputs) == (c_in, c_out)
            continue
        ins = [shape.channels for shape in row.ins]
        assert (ins if isinstance(c_in, list) else sum(ins[:1])) == c_in
        assert (row.out.channels, PROBE_PX / row.out.height, row.num_weights) == (c_out, stride, params)
    read = sorted(source for row in rows for source in row.sources if source != row.index - 1 or _is_absolute(row))
    if "save" in golden:
        assert sorted(set(golden["save"])) == sorted({source for source in read if source >= 0})


def _is_absolute(row) -> bool:
    """Whether the row names its predecessor by an absolute number instead of -1."""
    origins = row.written[0] if isinstance(row.written[0], list) else [row.written[0]]
    return any(origin >= 0 and origin == row.index - 1 for origin in origins)


@pytest.mark.parametrize("case", golden_cases("yolov7-models/*.state.json", whole))
def test_names_shapes_and_types_of_the_state_dict(case):
    file, golden = case
    check_state(state_rows(built(name_of(file), "meta")), golden)


@pytest.mark.parametrize("case", golden_cases("yolov7-models/*.fused-state.json", whole))
def test_names_and_shapes_after_fusing(case):
    file, golden = case
    check_state(state_rows(fused(built(name_of(file), "meta"))), golden)


def check_state(rows, golden) -> None:
    if "rows" in golden:
        num_columns = max(map(len, golden["rows"]), default=0)
        assert [row[:num_columns] for row in rows] == golden["rows"]
    assert golden.get("count") in (None, len(rows))
    assert golden.get("digest") in (None, digest(rows))


@pytest.mark.parametrize("case", golden_cases("yolov7-models/summary.json", per_config))
def test_summary(case, request):
    name = request.node.callspec.id.partition("[")[2].rstrip("]")
    knows_weights = "init_seed0" in case and torch.__version__.startswith("2.13")
    network = built(name, "cpu" if knows_weights else "meta")
    if "strides" in case:
        assert network.stride.tolist() == case["strides"]
    if "anchors" in case:
        assert network.config["anchors"] == case["anchors"]
    if knows_weights:
        sums = float64_sums(value for value in network.state_dict().values() if value.is_floating_point())
        assert sums == pytest.approx(case["init_seed0"], rel=1e-12)
    network.to("meta")
    check_size(network, case.get("info"), case.get("state_keys"), case.get("state_digest"))
    check_size(fused(network), case.get("fused_info"), case.get("fused_keys"), case.get("fused_digest"))


def float64_sums(values: Iterable[torch.Tensor]) -> dict[str, float]:
    """Sums of all values and of their absolute values; in chunks, since networks have up to 166 million values."""
    chunks = [chunk.numpy() for value in values for chunk in value.flatten().split(CHUNK)]
    return {
        "sum": sum(float(chunk.sum(dtype=np.float64)) for chunk in chunks),
        "abs_sum": sum(float(np.abs(chunk).sum(dtype=np.float64)) for chunk in chunks),
    }


CHUNK = 1 << 16
"""Values that fit into a CPU cache."""


def check_size(network: Network, golden_info, num_keys, key_digest) -> None:
    rows = state_rows(network)
    assert num_keys in (None, len(rows))
    assert key_digest in (None, digest(rows))
    if golden_info is not None:
        info = describe(network)
        assert golden_info.get("parameters") in (None, info.num_parameters)
        assert golden_info.get("gradients") in (None, info.num_gradients)
        if "gflops_640" in golden_info:
            assert f"{info.gflops:.1f}" == f"{golden_info['gflops_640']:.1f}"
