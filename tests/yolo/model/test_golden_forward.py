"""Networks with golden weights give the golden outputs, in float64 and in float32."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flatout.yaml_strict import parse_yaml
from flatout.yolo.model.configs import load_config, shipped_folder
from flatout.yolo.model.deploy import deploy_config, fused, to_deploy
from flatout.yolo.model.layers import Predictions
from flatout.yolo.model.network import Network, build_network, predict_augmented
from flatout.yolo.model.spec import parse_model
from tests.golden_cases import golden_cases
from tests.yolo.golden_network import Recipe, fill, golden_images, running_statistics, samples

PIXELS = {torch.float64: 1e-7, torch.float32: 0.1}
LOGITS = {torch.float64: 1e-9, torch.float32: 1e-3}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


class Case(NamedTuple):
    path: Path
    dtype: torch.dtype
    tag: str


class Golden(NamedTuple):
    """The contents of a forward file."""

    path: Path
    meta: dict
    arrays: dict[str, np.ndarray]

    @property
    def norm_scales(self) -> dict[str, float]:
        return dict(self.table("bn_keys", "bn_scale"))

    def table(self, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Rows of several arrays; no rows if one of the arrays is absent."""
        present = all(column in self.arrays for column in columns)
        return zip(*(self.arrays[column].tolist() for column in columns if present), strict=True)

    def images(self) -> Tensor:
        return golden_images(self.meta["input_seed"], self.meta["input_shape"])

    @property
    def tags(self) -> list[str]:
        """Tags of all outputs for which it has statistics or values."""
        values = [name.removeprefix("val.") for name in self.arrays if name.startswith("val.")]
        return sorted({*self.meta.get("outputs", {}), *values})

    def levels(self, part: str) -> list[tuple[str, int]]:
        """The tags of a part with their level numbers."""
        tags = [tag for tag in self.tags if tag.rstrip("0123456789") == part]
        return [(tag, int(tag.removeprefix(part))) for tag in tags]

    def check(self, tag: str, output: Tensor, tolerance: dict[torch.dtype, float]) -> None:
        if tag in self.meta.get("outputs", {}):
            check_statistics(output, self.meta["outputs"][tag])
        if f"val.{tag}" in self.arrays:
            check_values(output, self.arrays[f"val.{tag}"], tolerance)


@lru_cache(maxsize=1)
def opened(path: Path) -> Golden:
    with np.load(path) as file:
        arrays = dict(file)
    return Golden(path, json.loads(str(arrays.pop("meta"))), arrays)


class NoRandomInit(TorchFunctionMode):
    """Skips the random initialisation of up to 166 million weights, all of which `fill` overwrites."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


KNOWN_WEIGHTS: dict[Recipe, Tensor] = {}
"""The weights of the last network. Files come in the order of their names, so that the training form of a network can
reuse all weights of its deploy form except those of the head."""


@lru_cache(maxsize=1)
def filled(path: Path) -> Network:
    """The network of a forward file, float32; callers must not change its weights."""
    golden = opened(path)
    with NoRandomInit():
        network = build_network(load_config(f"{golden.meta['kind']}/{golden.meta['name']}"))
    weights = fill(network, golden.meta["weight_seed"], norm_scales=golden.norm_scales, known=KNOWN_WEIGHTS)
    KNOWN_WEIGHTS.clear()
    KNOWN_WEIGHTS.update(weights)
    return network


@lru_cache(maxsize=1)
def converted(path: Path, dtype: torch.dtype) -> Network:
    """The network of a forward file in another dtype, without the extra copy that deepcopy().to() would make."""
    network = filled(path)
    if dtype == torch.float32:
        return network
    memo = {id(parameter): nn.Parameter(parameter.detach().to(dtype)) for parameter in network.parameters()}
    return copy.deepcopy(network, memo).to(dtype)


@pytest.fixture(autouse=True)
def _in_one_thread():
    """Overrides the fixture of the folder: whole networks in float64 use all cores."""


@pytest.fixture(scope="module", autouse=True)
def _forget_networks():
    yield
    for cached in (opened, filled, converted, predicted):
        cached.cache_clear()
    KNOWN_WEIGHTS.clear()


def check_statistics(output: Tensor, golden: dict) -> None:
    values = output.detach().double()
    rel = 1e-9 if output.dtype == torch.float64 else 1e-4
    assert golden.get("shape") in (None, list(values.shape))
    assert values.isfinite().all()
    std = float(values.std(correction=0))
    figures = {"abs_sum": float(values.abs().sum()), "std": std}
    for name in figures.keys() & golden.keys():
        assert figures[name] == pytest.approx(golden[name], rel=rel), name
    if "mean" in golden:
        scale = max(golden.get("std", std), abs(golden["mean"]))
        assert float(values.mean()) == pytest.approx(golden["mean"], abs=rel * scale)


def check_values(output: Tensor, golden_N: np.ndarray, tolerance: dict[torch.dtype, float]) -> None:
    difference_N = np.abs(samples(output, len(golden_N)) - golden_N)
    assert difference_N.max() <= tolerance[output.dtype]
    if tolerance is PIXELS and output.dtype == torch.float32:
        assert (difference_N / np.maximum(1, np.abs(golden_N))).max() <= 1e-3


# -- the parts of a forward file -----------------------------------------------------------------------------------


@torch.no_grad()
def check_raw(golden, network, x):
    """Raw outputs with running statistics, and the mean of every row's output."""
    seen = []
    hooks = [layer.register_forward_hook(lambda *call: seen.append(call[-1])) for layer in network.model[:-1]]
    outputs = running_statistics(network)(x)
    for hook in hooks:
        hook.remove()
    tolerance = 1e-9 if x.dtype == torch.float64 else 1e-3
    for name, reduce in {"layer_abs_mean": lambda y: y.abs().mean(), "layer_mean": torch.mean}.items():
        if name in golden.arrays:
            means = np.array([float(reduce(y.double())) for y in seen])
            wrong = np.flatnonzero(~np.isclose(means, golden.arrays[name], rtol=tolerance, atol=tolerance))
            assert not len(wrong), f"{name}: the first wrong row is {wrong[0]}"
    assert len(outputs) == len(network.spec.head.sources)
    for tag, level in golden.levels("raw"):
        golden.check(tag, outputs[level], LOGITS)


@lru_cache(maxsize=1)
@torch.no_grad()
def predicted(path: Path, dtype: torch.dtype) -> Predictions:
    """Output of the network in evaluation mode, cached because two of the parts use it."""
    prediction = converted(path, dtype).eval()(opened(path).images().to(dtype))
    assert isinstance(prediction, Predictions)
    return prediction


def check_decoded(golden, network, x):
    prediction = predicted(golden.path, x.dtype)
    assert len(prediction.raw) == golden.meta.get("eval_raw_len", network.head.nl)
    golden.check("dec", prediction.decoded, PIXELS)


@torch.no_grad()
def check_fused(golden, network, x):
    plain = fused(network)
    golden.check("fused_dec", plain(x).decoded, PIXELS)
    state = plain.state_dict()
    for name, sums in golden.meta.get("fused_tensors", {}).items():
        rel = 1e-9 if x.dtype == torch.float64 else 1e-4
        assert float(state[name].double().abs().sum()) == pytest.approx(sums["abs_sum"], rel=rel)
        assert float(state[name].double().sum()) == pytest.approx(sums["sum"], abs=rel * sums["abs_sum"])


@torch.no_grad()
def check_augmented(golden, network, x):
    golden.check("tta", predict_augmented(network.eval(), x, int(network.stride.max())), PIXELS)


def check_training(golden, network, x):
    """One pass in training mode: outputs, gradients and running statistics."""
    network = copy.deepcopy(network).train()
    outputs = network(x)
    exact = x.dtype == torch.float64
    for tag, level in golden.levels("bntrain_raw"):
        golden.check(tag, outputs[level], LOGITS | {torch.float32: 5e-3})
    loss = sum((output**2).mean() for output in outputs)
    if "bntrain_loss" in golden.meta:
        assert loss.item() == pytest.approx(golden.meta["bntrain_loss"], rel=1e-9 if exact else 1e-4)
    loss.backward()
    grads = {key: parameter.grad for key, parameter in network.named_parameters()}
    assert all(grads[key].isfinite().all() for key, *_ in golden.table("grad_keys"))
    for key, norm in golden.table("grad_keys", "grad_l2"):
        assert float(grads[key].double().norm()) == pytest.approx(norm, rel=1e-7 if exact else 1e-2, abs=1e-12), key
    # Not in float32, where the sums cancel.
    for key, total in golden.table("grad_keys", "grad_sum") if exact else ():
        assert float(grads[key].sum()) == pytest.approx(total, abs=1e-7 * float(grads[key].norm()) + 1e-12), key
    state = network.state_dict()
    for key, var in golden.table("bn_keys", "bn_after_var_sum"):
        assert float(state[key].double().sum()) == pytest.approx(var, rel=1e-9 if exact else 1e-5), key
    for key, mean in golden.table("bn_keys", "bn_after_mean_sum"):
        means = state[key.removesuffix("running_var") + "running_mean"].double()
        assert float(means.sum()) == pytest.approx(mean, rel=1e-9, abs=1e-9 if exact else 1e-4), key
    counters = {int(value) for key, value in state.items() if key.endswith("num_batches_tracked")}
    assert counters <= set(golden.meta.get("num_batches_tracked_after", counters))


@torch.no_grad()
def check_deploy(golden, network, x):
    """The converted network gives the same boxes, and its config is the deploy config we ship."""
    deployed = to_deploy(network)
    difference = (deployed(x).decoded - predicted(golden.path, x.dtype).decoded).abs()
    assert float(difference.max()) <= PIXELS[x.dtype]
    shipped = shipped_folder() / f"deploy/{golden.meta['name']}.yaml"
    if shipped.is_file():
        assert deploy_config(network.spec) == parse_model(load_config(shipped)).config


CHECKS: dict[str, Callable[[Golden, Network, Tensor], None]] = {
    "raw": check_raw,
    "dec": check_decoded,
    "fused_dec": check_fused,
    "tta": check_augmented,
    "bntrain_raw": check_training,
    "deploy": check_deploy,
}


BESIDE_OUTPUTS = {
    "raw": {"layer_mean", "layer_abs_mean"},
    "fused_dec": {"fused_tensors"},
    "bntrain_raw": {"grad_keys", "bn_after_mean_sum", "bn_after_var_sum", "bntrain_loss"},
}
"""Other entries that the parts check, besides the outputs of their name."""


def parts(path: Path):
    golden = opened(path)
    outside = [part for part, names in BESIDE_OUTPUTS.items() if {*golden.arrays, *golden.meta} & names]
    tags = sorted({*(tag.rstrip("0123456789") for tag in golden.tags), *outside})
    cases = [Case(path, dtype, tag) for dtype in DTYPES.values() for tag in tags]
    if "deploy_reparam_max_abs_diff_dec" in golden.meta:
        cases.insert(0, Case(path, torch.float64, "deploy"))
    return [(f"{case.dtype} {case.tag}".removeprefix("torch."), case) for case in cases]


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("case", golden_cases("yolov7-models/*.fwd.npz", parts))
def test_outputs_of_our_configs(case):
    assert case.tag in CHECKS, f"no test computes {case.tag}"
    golden, network = opened(case.path), converted(case.path, case.dtype)
    # oneDNN takes 30 ms to prepare each of up to 250 convolutions, for a single use. Only small networks use it here.
    small = sum(parameter.numel() for parameter in network.parameters()) < 10e6
    with torch.backends.mkldnn.flags(enabled=small):
        CHECKS[case.tag](golden, network, golden.images().to(case.dtype))


# -- made-up configs -----------------------------------------------------------------------------------------------


def entries(path: Path):
    return [
        (f"{name} {dtype}", (record, DTYPES[dtype]))
        for name, record in json.loads(path.read_text()).items()
        for dtype in DTYPES
    ]


OVERRIDDEN = ("nc", "anchors", "depth_multiple", "width_multiple", "ch", "backbone", "head")


def config_of(record):
    """The config of an entry: YAML text, or a shipped base config (`yolov7.deploy`, `deploy/yolov7`, or `yolov7` and a
    kind) with some keys replaced, given as a table or one by one (`override_nc`)."""
    if record.get("yaml"):
        config = parse_yaml(record["yaml"])
    else:
        base = record["base"].removesuffix(".yaml")
        stem, dot, form = base.rpartition(".")
        if not dot or form not in ("training", "deploy"):
            stem, form = base, record.get("kind")
        config = load_config(f"{form}/{stem}" if form else stem)
    # `anchors` is the expected result, and `override_anchors` a number; both are used elsewhere.
    single = {key: record.get(f"override_{key}", record.get(key)) for key in OVERRIDDEN if key != "anchors"}
    replaced = single | (record.get("override") or {}) | (record.get("overrides") or {})
    return config | {key: value for key, value in replaced.items() if key in OVERRIDDEN and value is not None}


OVERRIDES = [
    {"overrides": {"width_multiple": 0.25, "nc": 3}},
    {"override": {"width_multiple": 0.25}, "override_nc": 3},
    {"override_width_multiple": 0.25, "nc": 3, "anchors": [[[1, 2]]]},
]


@pytest.mark.parametrize("record", OVERRIDES)
@pytest.mark.parametrize("base", ["yolov7-tiny.training", "cfg/training/yolov7-tiny.yaml", "yolov7-tiny"])
def test_overrides_of_a_base_config_are_read_in_every_form(base, record):
    config = config_of({"base": base} | record)
    assert config == load_config("training/yolov7-tiny") | {"width_multiple": 0.25, "nc": 3}


@pytest.mark.parametrize("case", golden_cases("yolov7-models/synthetic.json", entries))
def test_made_up_configs(case):
    record, dtype = case
    network = build_network(config_of(record), nc=record.get("override_nc"), anchors=record.get("override_anchors"))
    if "strides" in record:
        assert network.stride.tolist() == record["strides"]
    if "parameters" in record:
        assert sum(parameter.numel() for parameter in network.parameters()) == record["parameters"]
    if "anchors" in record:
        assert network.head.anchors.tolist() == record["anchors"]
    if "anchor_grid" in record:
        assert network.head.anchor_grid.flatten().tolist() == record["anchor_grid"]
    if "state" in record:
        found = [[key, list(value.shape)] for key, value in network.state_dict().items()]
        assert found == [row[:2] for row in record["state"]]
    if not record.get("outputs"):
        return
    fill(network, record["weight_seed"], norm_scales=record.get("bn_scale"))
    network.to(dtype)
    x = golden_images(record["input_seed"], record["input_shape"]).to(dtype)
    with torch.no_grad():
        decoded = network.eval()(x).decoded
        found = {"dec": decoded, "fused_dec": fused(network)(x).decoded}
        found |= {f"raw{level}": raw for level, raw in enumerate(running_statistics(network)(x))}
        if "tta" in record["outputs"]:
            found["tta"] = predict_augmented(network.eval(), x, int(network.stride.max()))
    for tag, golden in record["outputs"].items():
        assert tag in found, f"no test computes {tag}"
        check_statistics(found[tag], golden)
        if "samples" in golden:
            check_values(found[tag], np.array(golden["samples"]), LOGITS if tag.startswith("raw") else PIXELS)
