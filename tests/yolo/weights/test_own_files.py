"""Weights are unchanged after saving and reading, and other programs can read our files too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from flatout.errors import CheckpointError
from flatout.safefiles.container import write_container
from flatout.yolo.weights import Weights, read_weights, save_safetensors, save_weights


def weights(**changes: Any) -> Weights:
    torch.manual_seed(3)
    state = {
        "model.0.conv.weight": torch.rand(4, 3, 3, 3).to(memory_format=torch.channels_last),
        "model.0.bn.num_batches_tracked": torch.tensor(7),
        "model.1.half": torch.rand(5).half(),
        "model.1.brain": torch.rand(5).bfloat16(),
        "model.1.tied": torch.arange(3.0),
    }
    state["model.1.tied.too"] = state["model.1.tied"]
    fields: dict[str, Any] = {
        "state": state,
        "ema": {key: value + 1 for key, value in state.items()},
        "config": {"nc": 2, "backbone": [[-1, 1, "Conv", [4, 3, None, True]]], "head": []},
        "names": ["Käfer", "虫🐞"],
        "nc": 2,
        "hyp": {"lr0": 0.01},
        "epoch": 4,
        "best_fitness": 0.5,
        "training_results": "0/4\n",
        "updates": 9,
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "wandb_id": "abc",
        "kind": "full",
        "format": "legacy",
    }
    return Weights(**fields | changes)


def assert_same_state(state: Any, expected: Any) -> None:
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert state[key].dtype == value.dtype
        assert torch.equal(state[key], value)


def test_our_own_file_restores_everything(tmp_path: Path):
    before = weights()
    save_weights(tmp_path / "last.pt", before)
    after = read_weights(tmp_path / "last.pt")
    assert_same_state(after.state, before.state)
    assert_same_state(after.ema, before.ema)
    for field in ("config", "names", "nc", "hyp", "epoch", "best_fitness", "training_results", "updates", "wandb_id"):
        assert getattr(after, field) == getattr(before, field)
    assert after.optimizer is not None
    assert torch.equal(after.optimizer["state"][0]["momentum_buffer"], torch.ones(3))
    assert after.optimizer["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert (after.kind, after.format) == ("full", "flatout")
    assert after.state["model.0.conv.weight"].is_contiguous(memory_format=torch.channels_last)


def test_torch_reads_our_own_file_with_weights_only(tmp_path: Path):
    save_weights(tmp_path / "last.pt", weights())
    content = torch.load(tmp_path / "last.pt", weights_only=True)
    assert content["flatout"]["schema"] == 1
    assert content["flatout"]["versions"]["torch"] == torch.__version__
    assert content["weights"]["names"] == ["Käfer", "虫🐞"]
    assert_same_state(content["weights"]["state"], weights().state)


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path: Path):
    large = torch.rand(1_000_000)
    save_weights(tmp_path / "small.pt", weights(state={"w": large[:10]}, ema=None))
    assert (tmp_path / "small.pt").stat().st_size < 20_000
    assert torch.equal(read_weights(tmp_path / "small.pt").state["w"], large[:10])


def test_safetensors_keep_the_state_for_inference_with_its_order_config_and_names(tmp_path: Path):
    before = weights()
    save_safetensors(tmp_path / "best.safetensors", before)
    after = read_weights(tmp_path / "best.safetensors")
    assert_same_state(after.state, before.for_inference())
    assert (after.config, after.names, after.nc) == (before.config, before.names, 2)
    assert (after.kind, after.format, after.ema, after.optimizer) == ("exported", "safetensors", None, None)


def test_the_safetensors_library_reads_ours_and_we_read_the_librarys(tmp_path: Path):
    save_safetensors(tmp_path / "ours.safetensors", weights(ema=None))
    theirs = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert {key: value.tolist() for key, value in theirs.items()} == {
        key: value.tolist() for key, value in weights().state.items()
    }
    state = {"module.w": torch.rand(2, 3), "module.flag": torch.tensor([True, False]), "module.none": torch.empty(0, 4)}
    safetensors.torch.save_file(state, tmp_path / "theirs.pt")
    read = read_weights(tmp_path / "theirs.pt")
    assert {key: value.tolist() for key, value in read.state.items()} == {
        key.removeprefix("module."): value.tolist() for key, value in state.items()
    }
    assert (read.config, read.names, read.nc) == (None, None, None)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_changed_byte_is_noticed_or_harmless(suffix: str, tmp_path: Path):
    """For a .pt its whole content is checked; safetensors files have no checksum, so only their structure is."""
    path = tmp_path / f"file.{suffix}"
    before = weights(ema=None, optimizer=None)
    (save_weights if suffix == "pt" else save_safetensors)(path, before)
    whole = path.read_bytes()
    noticed = 0
    for at in range(0, len(whole), 61):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            after = read_weights(path)
        except CheckpointError:
            noticed += 1
            continue
        if suffix == "pt":
            assert_same_state(after.state, before.state)
            assert (after.config, after.names) == (before.config, before.names)
    assert noticed > 0


def test_a_container_without_weights_is_refused(tmp_path: Path):
    write_container(tmp_path / "other.pt", {"training": {"step": 3}})
    with pytest.raises(
        CheckpointError, match=r"other.pt: is a file of flatout without weights\. Use a file with weights"
    ):
        read_weights(tmp_path / "other.pt")


def test_a_safetensors_header_may_be_indented(tmp_path: Path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, indent=2).encode()
    file = tmp_path / "theirs.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + np.float32(7).tobytes())
    assert read_weights(file).state["w"].tolist() == [7]
