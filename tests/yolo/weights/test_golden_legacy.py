"""Checkpoints of YOLOv7 are read completely: every tensor to the bit, and all other values."""

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from flatout.safefiles.container import PlainReader
from flatout.safefiles.open_file import read_objects, reading
from flatout.yolo.model.network import build_network
from flatout.yolo.weights import State, Weights, read_weights, save_safetensors, save_weights, transfer
from flatout.yolo.weights.legacy import PickledModule, legacy_allowlist, network_inside, parameter_groups
from tests.golden_cases import golden_cases
from tests.yolo.golden_network import golden_images, samples
from tests.yolo.weights.legacy_files import Model, yolov7_names

PIXELS = 1e-7


class Case(NamedTuple):
    """One aspect of one checkpoint."""

    path: Path
    aspect: str
    expected: Any


def aspects(path: Path) -> Iterable[tuple[str, Case]]:
    for name, record in json.loads(path.read_text()).items():
        checkpoint = path.with_name(record.get("file", f"legacy-{name}.pt"))
        yield from ((f"{name}.{aspect}", Case(checkpoint, aspect, value)) for aspect, value in record.items())


def whole_file(path: Path) -> Iterable[tuple[str, Path]]:
    return [("round trip", path)]


@pytest.mark.parametrize("case", golden_cases("yolov7-models/legacy-expected.json", aspects))
def test_a_legacy_checkpoint_is_read_completely(case: Case):
    assert case.path.is_file(), f"{case.path.name} is listed but does not exist"
    assert case.aspect in CHECKS, f"no test checks {case.aspect}"
    CHECKS[case.aspect](case.path, case.expected)


@pytest.mark.parametrize("path", golden_cases("yolov7-models/*.pt", whole_file))
def test_a_legacy_checkpoint_survives_our_own_formats(path: Path, tmp_path: Path):
    weights = read(path)
    save_weights(tmp_path / "own.pt", weights)
    again = read_weights(tmp_path / "own.pt")
    assert digest(again.state) == digest(weights.state)
    assert digest(again.ema or {}) == digest(weights.ema or {})
    for field in ("config", "names", "nc", "hyp", "epoch", "best_fitness", "training_results", "updates", "kind"):
        assert getattr(again, field) == getattr(weights, field)
    save_safetensors(tmp_path / "own.safetensors", weights)
    exported = read_weights(tmp_path / "own.safetensors")
    assert digest(exported.state) == digest(weights.for_inference())
    assert (exported.config, exported.names) == (weights.config, weights.names)


@lru_cache(maxsize=2)
def read(path: Path) -> Weights:
    return read_weights(path)


def hash_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).numpy().tobytes()).hexdigest()[:16]


def digest(state: dict[str, Tensor]) -> list[list[object]]:
    return [[key, list(value.shape), str(value.dtype)[6:], hash_of(value)] for key, value in state.items()]


def check_file(path: Path, name: str) -> None:
    assert path.name == name


def check_size(path: Path, size_bytes: int) -> None:
    assert path.stat().st_size == size_bytes


def check_top(path: Path, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict):
            value = float(np.array(value["ndarray"], value["dtype"])[0])
        assert getattr(read(path), name) == value, name


def check_network(path: Path, entry: str, expected: dict[str, Any] | None) -> None:
    weights = read(path)
    state = states(weights)[entry]
    if expected is None:
        assert state is None
        return
    for part, value in expected.items():
        match part:
            case "state":
                assert state is not None
                assert digest(state) == value
            case "attrs":
                check_attributes(network_in(path, entry), weights, value)
            case "requires_grad":
                assert sorted({tensor.requires_grad for tensor in parameters(network_in(path, entry))}) == value
            case _:
                pytest.fail(f"no test checks {entry}.{part}")


def states(weights: Weights) -> dict[str, State | None]:
    """The entries `model` and `ema` of the file."""
    if weights.kind == "ema":
        return {"model": None, "ema": weights.state}
    return {"model": weights.state, "ema": weights.ema}


def check_attributes(network: PickledModule, weights: Weights, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name == "yaml_rows":
            assert weights.config is not None
            assert len(weights.config["backbone"]) + len(weights.config["head"]) == value
            continue
        found = PlainReader().plain(network.attributes[name], name)
        if name == "yaml":
            assert isinstance(found, dict)
            assert found == weights.config
            found = {key: found[key] for key in value}
        assert (found.tolist() if isinstance(found, Tensor) else found) == value, name
        if name in ("names", "nc", "hyp"):
            assert getattr(weights, name) == value


def check_optimizer(path: Path, expected: dict[str, Any] | None) -> None:
    weights = read(path)
    if expected is None or weights.optimizer is None:
        assert weights.optimizer is expected
        return
    groups, state = weights.optimizer["param_groups"], weights.optimizer["state"]
    for part, value in expected.items():
        match part:
            case "group_sizes":
                assert [len(group["params"]) for group in groups] == value
                assert list(map(len, parameter_groups(weights.state))) == value
            case "groups":
                found = [{key: group[key] for key in row} for group, row in zip(groups, value, strict=True)]
                assert json.loads(json.dumps(found)) == value
                assert [set(group) - {"params"} for group in groups] == [set(row) for row in value]
            case "params":
                names = [name for group in parameter_groups(weights.state) for name in group]
                numbers = [number for group in groups for number in group["params"]]
                assert [[number, names[number], hashes(state[number])] for number in numbers] == value
            case _:
                pytest.fail(f"no test checks optimizer.{part}")


def hashes(state: dict[str, Any]) -> dict[str, str]:
    return {name: hash_of(value) for name, value in state.items() if isinstance(value, Tensor)}


def check_forward(path: Path, expected: dict[str, Any]) -> None:
    weights = read(path)
    assert ("model" if states(weights)["ema"] is None else "ema") == expected["source"]
    network = build_network(weights.config).double().eval()
    report = transfer(network, weights.for_inference(), skip_anchors=False)
    assert report.kept == report.total
    with torch.no_grad():
        decoded = network(golden_images(expected["input_seed"], expected["input_shape"]).double()).decoded
    assert list(decoded.shape) == expected["dec_shape"]
    stored = expected["samples"]
    np.testing.assert_allclose(samples(decoded, len(stored)), stored, rtol=0, atol=PIXELS)
    figures = {"mean": decoded.mean(), "std": decoded.std(correction=0), "abs_sum": decoded.abs().sum()}
    for name, figure in figures.items():
        assert float(figure) == pytest.approx(expected[name], rel=1e-9)


@lru_cache(maxsize=2)
def objects_in(path: Path) -> Any:
    with reading(path) as file:
        return read_objects(file, legacy_allowlist)


def network_in(path: Path, entry: str) -> PickledModule:
    objects = objects_in(path)
    network = objects if isinstance(objects, PickledModule) else objects[entry]
    assert isinstance(network, PickledModule)
    return network_inside(network)


def parameters(module: PickledModule) -> Iterable[Tensor]:
    own: Any = module.attributes
    yield from (value for value in own["_parameters"].values() if value is not None)
    for child in own["_modules"].values():
        if child is not None:
            yield from parameters(child)


CHECKS: dict[str, Callable[[Path, Any], None]] = {
    "file": check_file,
    "size_bytes": check_size,
    "top": check_top,
    "model": lambda path, expected: check_network(path, "model", expected),
    "ema": lambda path, expected: check_network(path, "ema", expected),
    "optimizer": check_optimizer,
    "forward": check_forward,
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("entry", ["model", "ema"])
def test_the_checks_handle_files_with_one_network_and_with_a_wrapped_one(tmp_path: Path, entry: str, wrapped: bool):
    network = Model().half()
    path = tmp_path / "one.pt"
    with yolov7_names():
        torch.save({entry: torch.nn.DataParallel(network) if wrapped else network}, path)
    expected = {"attrs": {"names": network.names, "nc": 2}, "state": digest(network.state_dict())}
    for each in ("model", "ema"):
        CHECKS[each](path, expected if each == entry else None)


def test_the_checks_compare_options_of_an_optimizer_in_their_json_form(tmp_path: Path):
    network = Model()
    optimizer = torch.optim.Adam(network.parameters(), betas=(0.9, 0.99)).state_dict()
    path = tmp_path / "adam.pt"
    with yolov7_names():
        torch.save({"model": network, "optimizer": optimizer}, path)
    options = {key: value for key, value in optimizer["param_groups"][0].items() if key != "params"}
    check_optimizer(path, {"groups": [options | {"betas": [0.9, 0.99]}]})
