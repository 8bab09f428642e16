"""Conversions keep what they should, give the same boxes, and write complete files or none."""

from dataclasses import replace

import pytest
import torch

from flatout.errors import CheckpointError, ConfigError
from flatout.yolo.convert import convert_weights
from flatout.yolo.load_network import load_network
from flatout.yolo.model.deploy import to_deploy
from flatout.yolo.model.network import build_network
from flatout.yolo.weights import read_weights, save_weights
from tests.golden_cases import SHIPPED
from tests.yolo.model.test_converted import filled
from tests.yolo.model.test_info import DEEP
from tests.yolo.model.test_network import random_images
from tests.yolo.test_load import narrow_config, weights_of
from tests.yolo.weights.pickle_bytes import checkpoint, dict_of, network, torch_file

pytestmark = pytest.mark.usefixtures("one_thread")

FULL = SHIPPED / "yolov7-models/legacy-full.pt"


def equal(one: dict, other: dict) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture
def trained(tmp_path):
    """A file with a trained P6 network, its moving average, names and changed anchors."""
    network = filled("yolov7-w6", nc=2).float()
    network.names = ["bolt", "nut"]
    with torch.no_grad():
        network.head.anchor_grid *= 1.25
        network.head.anchors *= 1.25
    average = {key: value * 0.99 if "conv" in key else value for key, value in network.state_dict().items()}
    path = tmp_path / "trained.pt"
    save_weights(
        path, weights_of(network, ema=average, kind="full", epoch=4, optimizer={"state": {}, "param_groups": []})
    )
    return path


def test_the_format_of_flatout_keeps_everything(tmp_path):
    done = convert_weights(FULL, tmp_path / "x.pt")
    before, after = read_weights(FULL), read_weights(done.out)
    assert done.taken == "everything"
    assert equal(before.state, after.state)
    assert equal(before.ema, after.ema)
    for field in ("config", "names", "nc", "hyp", "epoch", "best_fitness", "training_results", "updates", "kind"):
        assert getattr(after, field) == getattr(before, field), field
    assert after.optimizer.keys() == before.optimizer.keys()
    assert (after.format, done.num_bytes) == ("flatout", done.out.stat().st_size)
    # Any program may read it.
    torch.load(done.out, weights_only=True)


@pytest.mark.parametrize(("ema", "taken"), [(None, "moving average"), (True, "moving average"), (False, "network")])
def test_safetensors_hold_one_state(ema, taken, tmp_path):
    done = convert_weights(FULL, tmp_path / "x.safetensors", ema=ema)
    before, after = read_weights(FULL), read_weights(done.out)
    assert (done.taken, done.num_tensors, done.dtype) == (taken, 344, "float16")
    assert equal(after.state, before.state if ema is False else before.ema)
    assert (after.config, after.names) == (before.config, before.names)


def test_the_format_of_flatout_can_store_the_moving_average_alone(tmp_path):
    convert_weights(FULL, tmp_path / "x.pt", ema=True)
    before, after = read_weights(FULL), read_weights(tmp_path / "x.pt")
    assert equal(after.state, before.ema)
    assert (after.ema, after.optimizer, after.training_results, after.epoch, after.kind) == (
        None,
        None,
        None,
        -1,
        "stripped",
    )


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@torch.no_grad()
def test_the_deploy_form_gives_the_boxes_of_the_moving_average(ending, trained, tmp_path):
    done = convert_weights(trained, tmp_path / f"x.{ending}", deploy=True)
    training, deployed = load_network(trained).network, load_network(done.out).network
    assert deployed.config == to_deploy(training).config
    assert deployed.names == ["bolt", "nut"]
    x = random_images(side_px=128)
    torch.testing.assert_close(deployed(x).decoded, training(x).decoded, rtol=1e-4, atol=1e-3)
    assert torch.equal(deployed.head.anchor_grid, training.head.anchor_grid)
    assert done.agreement.exact < 1e-9
    assert done.agreement.stored < 1e-3


def test_half_precision_halves_the_file_and_the_rounding_is_reported(trained, tmp_path):
    single = convert_weights(trained, tmp_path / "x.safetensors", deploy=True)
    half = convert_weights(trained, tmp_path / "y.safetensors", deploy=True, half=True)
    assert (single.dtype, half.dtype) == ("float32", "float16")
    assert half.num_bytes < 0.6 * single.num_bytes
    assert single.agreement.stored < half.agreement.stored < 10


def test_half_precision_of_both_states(trained, tmp_path):
    convert_weights(trained, tmp_path / "x.pt", half=True)
    after = read_weights(tmp_path / "x.pt")
    for state in (after.state, after.ema):
        assert {tensor.dtype for tensor in state.values()} == {torch.float16, torch.int64}


def test_numbers_too_large_for_half_precision_are_named(trained, tmp_path):
    weights = read_weights(trained)
    weights.ema["model.1.bn.running_var"][3] = 1e6
    save_weights(trained, weights)
    with pytest.raises(
        CheckpointError, match=r"model\.1\.bn\.running_var contains 1e\+06, which is too large for float16"
    ):
        convert_weights(trained, tmp_path / "x.pt", half=True)
    assert not (tmp_path / "x.pt").exists()


def test_weights_with_nan_are_not_converted(trained, tmp_path):
    weights = read_weights(trained)
    weights.ema["model.1.conv.weight"][0] = torch.nan
    save_weights(trained, weights)
    with pytest.raises(
        CheckpointError, match=r"different boxes \(by nan\), so nothing was written. Are all of its weights fin"
    ):
        convert_weights(trained, tmp_path / "x.pt", deploy=True)
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_values_that_a_format_cannot_store_are_an_error_and_nothing_is_written(ending, tmp_path):
    source = tmp_path / "odd.pt"
    source.write_bytes(torch_file(checkpoint(network(yaml=dict_of({"nc": b"C\x03abc"})))))
    with pytest.raises(
        CheckpointError, match=rf"^{source}: contains something that a \.{ending} file cannot store, .*bytes.*\.$"
    ):
        convert_weights(source, tmp_path / f"x.{ending}")
    assert [path.name for path in tmp_path.iterdir()] == ["odd.pt"]


def test_the_boxes_of_a_network_are_compared_on_an_image_size_that_it_accepts(tmp_path):
    path = tmp_path / "deep.pt"
    save_weights(path, weights_of(build_network(DEEP)))
    assert convert_weights(path, tmp_path / "x.pt", deploy=True).agreement.exact == 0


def test_a_file_is_overwritten_only_on_request(tmp_path):
    out = tmp_path / "x.safetensors"
    out.write_text("mine")
    with pytest.raises(ConfigError, match=r"x\.safetensors already exists.*--force"):
        convert_weights(FULL, out)
    assert out.read_text() == "mine"
    convert_weights(FULL, out, force=True)
    assert read_weights(out).format == "safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("x.onnx", "must end in .safetensors or .pt"),
        ("x", "must end in"),
        ("none/x.pt", "its folder does not exist"),
        ("folder.pt", "is a folder"),
        (f"{'x' * 250}.pt", "the file name is too long"),
    ],
)
def test_a_name_that_cannot_be_written_is_refused_first(name, sentence, tmp_path):
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(ConfigError, match=sentence):
        convert_weights("no such file", tmp_path / name)


def test_a_missing_moving_average_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="contains no moving average, only a network"):
        convert_weights(SHIPPED / "yolov7-models/legacy-stripped.pt", tmp_path / "x.pt", ema=True)


def test_a_config_given_for_bare_tensors_is_stored_with_them(trained, tmp_path):
    save_weights(trained, replace(read_weights(trained), config=None, names=None, nc=None))
    with pytest.raises(CheckpointError, match="contains tensors but no model config"):
        convert_weights(trained, tmp_path / "x.pt", deploy=True)
    done = convert_weights(trained, tmp_path / "x.safetensors", cfg=narrow_config(tmp_path, "yolov7-w6"))
    assert load_network(done.out).network.nc == 2
