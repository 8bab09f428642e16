"""Networks from weights files: complete for inference or refused with a reason, and for training with what fits."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flatout.errors import CheckpointError, ConfigError
from flatout.yolo.load_network import load_network, start_network
from flatout.yolo.model.configs import find_config
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.network import Network
from flatout.yolo.weights import Weights, read_weights, save_safetensors, save_weights
from tests.golden_cases import SHIPPED
from tests.yolo.model.test_network import narrow, random_images

pytestmark = pytest.mark.usefixtures("one_thread")

FULL = SHIPPED / "yolov7-models/legacy-full.pt"
STRIPPED = SHIPPED / "yolov7-models/legacy-stripped.pt"


def weights_of(network: Network, **fields: Any) -> Weights:
    known = {
        "config": network.config,
        "names": network.names,
        "nc": network.nc,
        "kind": "stripped",
        "format": "flatout",
    }
    return Weights(state=network.state_dict(), **cast(Any, known | fields))


@pytest.fixture(scope="module")
def network() -> Network:
    made = narrow("yolov7-tiny", nc=3).eval()
    made.names = ["bolt", "nut", "washer"]
    return made


def saved(path: Path, weights: Weights) -> Path:
    (save_safetensors if path.suffix == ".safetensors" else save_weights)(path, weights)
    return path


def narrow_config(folder: Path, name: str) -> Path:
    """Write the config of the network that `narrow` builds."""
    path = folder / "narrow.yaml"
    path.write_text(find_config(name).read_text().replace("width_multiple: 1.0", "width_multiple: 0.125"))
    return path


# -- for inference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@torch.no_grad()
def test_a_saved_network_is_loaded_unchanged(network, ending, tmp_path):
    loaded, weights = load_network(saved(tmp_path / f"x.{ending}", weights_of(network)))
    assert not loaded.training
    assert (loaded.names, loaded.config) == (network.names, network.config)
    assert torch.equal(loaded(random_images()).decoded, network(random_images()).decoded)
    assert weights.nc == 3
    # Its tensors share no memory with the weights, and can be trained.
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert not {tensor.data_ptr() for tensor in weights.state.values()} & {p.data_ptr() for p in loaded.parameters()}


def test_legacy_weights_are_loaded_in_float32_with_the_moving_average():
    loaded, weights = load_network(FULL)
    state = loaded.state_dict()
    assert loaded.names == weights.names
    for key, tensor in weights.ema.items():
        assert torch.equal(state[key], tensor.float() if tensor.is_floating_point() else tensor)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32, torch.int64}


@torch.no_grad()
def test_tensors_alone_need_a_config_and_determine_the_number_of_classes(network, tmp_path):
    bare = weights_of(network, config=None, names=None, nc=None, kind="state_dict")
    path = saved(tmp_path / "x.pt", bare)
    with pytest.raises(CheckpointError, match=r"contains tensors but no model config\. Give .*--cfg"):
        load_network(path)
    loaded = load_network(path, cfg=narrow_config(tmp_path, "yolov7-tiny")).network
    assert loaded.names == ["0", "1", "2"]
    assert torch.equal(loaded(random_images()).decoded, network(random_images()).decoded)


@torch.no_grad()
def test_a_fused_state_gives_a_fused_network(network, tmp_path):
    plain = fused(network)
    loaded = load_network(saved(tmp_path / "x.pt", replace(weights_of(network), state=plain.state_dict()))).network
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in loaded.modules())
    assert torch.equal(loaded(random_images()).decoded, plain(random_images()).decoded)


def test_weights_of_another_network_are_refused_with_numbers_and_examples(network, tmp_path):
    state = dict(network.state_dict())
    del state["model.0.bn.bias"]
    state["model.1.conv.weight"] = torch.zeros(1, 2)
    state["model.99.extra"] = torch.zeros(1)
    path = saved(tmp_path / "x.pt", replace(weights_of(network), state=state))
    with pytest.raises(CheckpointError) as caught:
        load_network(path)
    assert str(caught.value) == (
        f"{path}: its tensors do not fit the network of its config, or of --cfg, which has 344 entries and ends in "
        "IDetect: 1 missing (model.0.bn.bias); 1 unknown (model.99.extra); 1 of another shape or type "
        "(model.1.conv.weight is [1, 2], not [8, 8, 3, 3]). Give the config that the weights were trained with by "
        "--cfg."
    )


def test_weights_of_another_type_are_refused_with_both_types(network, tmp_path):
    state = dict(network.state_dict())
    state["model.1.conv.weight"] = state["model.1.conv.weight"].long()
    path = saved(tmp_path / "x.pt", replace(weights_of(network), state=state))
    with pytest.raises(CheckpointError, match=r"\(model\.1\.conv\.weight is torch\.int64, not torch\.float32\)"):
        load_network(path)


def test_a_config_that_does_not_fit_the_weights_is_refused():
    with pytest.raises(
        CheckpointError,
        match=r"its tensors do not fit .*, which has 566 entries and ends in IDetect: \d+ miss",
    ):
        load_network(FULL, cfg="yolov7")


def test_a_wrong_config_inside_a_file_is_a_checkpoint_error(network, tmp_path):
    hostile = network.config | {"head": [[-1, 1, "os.system", ["touch ran"]]]}
    path = saved(tmp_path / "x.pt", weights_of(network, config=hostile))
    with pytest.raises(CheckpointError, match=r"x\.pt: its model config: row 29 .*must be a detection layer.*--cfg"):
        load_network(path)


# -- for training --------------------------------------------------------------------------------------------------


def test_training_from_scratch_starts_with_a_new_network():
    start = start_network("yolov7-tiny", None, nc=2)
    assert (start.network.nc, start.weights, start.transfer) == (2, None, None)
    assert start.network.training


def test_a_start_needs_a_config_or_weights():
    with pytest.raises(ConfigError, match="Give one with --cfg or --weights"):
        start_network(None, None)


def test_training_starts_from_the_network_and_not_from_its_moving_average(caplog):
    with caplog.at_level(logging.INFO):
        start = start_network(None, FULL)
    assert f"Transferred 344/344 items from {FULL}" in caplog.text
    state = start.network.state_dict()
    for key, tensor in start.weights.state.items():
        assert torch.equal(state[key], tensor.to(state[key].dtype))


def test_with_another_number_of_classes_the_layers_that_do_not_depend_on_it_are_loaded(caplog):
    with caplog.at_level(logging.INFO):
        start = start_network(None, FULL, nc=5)
    assert f"Transferred 335/344 items from {FULL}" in caplog.text
    parts = {key.split(".")[2] for key in start.transfer.mismatched}
    assert parts == {"m", "im"}
    assert start.network.nc == 5


@pytest.mark.parametrize(
    ("given", "resume", "kept"),
    [({}, False, True), ({"anchors": 3}, False, False), ({"cfg": True}, False, False), ({"cfg": True}, True, True)],
)
def test_anchors_are_loaded_unless_others_were_given(network, given, resume, kept, tmp_path):
    trained = dict(network.state_dict())
    trained |= {key: value * 2 for key, value in trained.items() if "anchor" in key}
    path = saved(tmp_path / "x.pt", replace(weights_of(network), state=trained))
    cfg = narrow_config(tmp_path, "yolov7-tiny") if given.get("cfg") else None
    start = start_network(cfg, path, nc=3, anchors=given.get("anchors"), keeps_anchors=resume)
    assert torch.equal(start.network.head.anchors, trained["model.77.anchors"]) is kept
    assert [key for key in start.transfer.skipped if "anchor" not in key] == []


def test_the_config_of_the_command_line_overrides_the_stored_one():
    start = start_network("yolov7-tiny", STRIPPED)
    assert start.network.config["width_multiple"] == 1.0
    assert start.network.nc == 80
    assert read_weights(STRIPPED).config["width_multiple"] != 1.0
