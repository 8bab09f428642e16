"""An exported network computes what the network computes, and says what it takes."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import flatout.spike
from flatout.__main__ import main
from flatout.errors import ConfigError, ParityError
from flatout.export import compared
from flatout.safefiles.container import write_container
from flatout.spike.config import ModelConfig, load_config, plain_values
from flatout.spike.export import export_file
from flatout.spike.model import Clip, DeblurNet
from flatout.spike.step import Normalise, apply_gain

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture
def weights_of(demo, tmp_path):
    """Writes the weights of a random network with these keys of MODEL and DATA; returns the path and the network."""

    def write(*, model=None, data=None, ratio_x=None):
        torch.manual_seed(0)
        config = load_config(demo)
        values = {"WIDTH": 4, "ENC_BLOCKS": (1, 1), "DEC_BLOCKS": (1, 1), **(model or {})}
        config = replace(config, MODEL=ModelConfig(**values), DATA=replace(config.DATA, CLIP_LEN=3, **(data or {})))
        network = DeblurNet(config.MODEL, channels=config.DATA.channels, ratio=2.0, ratio_x=ratio_x).eval()
        for parameter in network.parameters():  # zeros, of which new networks have many, would hide mistakes
            torch.nn.init.normal_(parameter, std=0.2)
        path = tmp_path / "random.pt"
        state = {"network": network.spec, "state": network.state_dict(), "config": plain_values(config)}
        write_container(path, {"weights": state})
        return path, network

    return write


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == list(inputs)
    return session.run(["sharp"], inputs)[0]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ({}, {"VOXEL_NORM": "rate"}),
        ({"TEMPORAL": True}, {"VOXEL_NORM": "log1p", "VOXEL_GAIN": True}),
        ({"TEMPORAL": True, "KIND": "stacked", "ENC_BLOCKS": (1,), "DEC_BLOCKS": (1,)}, {"VOXEL_NORM": "rate"}),
    ],
)
def test_an_exported_file_equals_the_network_for_any_number_of_clips(weights_of, model, data):
    path, network = weights_of(model=model, data=data)
    done = export_file(path, (24, 36))
    assert done.path == path.with_suffix(".onnx") and done.largest_difference is not None
    length = 3 if model else 1
    random = np.random.default_rng(5)
    for num_clips in (1, 3):
        blur = random.uniform(0, 1, (num_clips, length, 3, 24, 36)).astype(np.float32)
        spikes = random.uniform(0, 1, (num_clips, length, network.spec["channels"], 12, 18)).astype(np.float32)
        tensors = torch.from_numpy(blur), torch.from_numpy(spikes)
        given = tensors[1]
        if data["VOXEL_NORM"] == "log1p":
            given = apply_gain(Normalise("log1p")(given, given), tensors[0])
        with torch.inference_mode():
            expected = network(Clip(tensors[0], given)).clamp(0, 1).numpy()
        found = run(done.path, blur=blur, spikes=spikes)
        assert np.ptp(found) > 0.5 and np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("kind", ["branch", "stacked"])
def test_frames_that_do_not_fill_the_coarsest_level_are_padded_in_the_file_as_in_the_network(weights_of, kind):
    path, network = weights_of(model={"KIND": kind}, data={"VOXEL_NORM": "rate"})
    random = np.random.default_rng(2)
    for height, width in ((26, 36), (24, 38), (30, 42)):
        blur = random.uniform(0, 1, (1, 1, 3, height, width)).astype(np.float32)
        spikes = random.uniform(0, 1, (1, 1, network.spec["channels"], height // 2, width // 2)).astype(np.float32)
        found = run(export_file(path, (height, width)).path, blur=blur, spikes=spikes)
        with torch.inference_mode():
            expected = network(Clip(torch.from_numpy(blur), torch.from_numpy(spikes))).clamp(0, 1).numpy()
        assert found.shape == blur.shape and np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("kind", ["branch", "stacked"])
def test_spikes_of_another_aspect_ratio_than_the_frames_keep_it_in_the_file(weights_of, kind):
    path, network = weights_of(model={"KIND": kind}, data={"VOXEL_NORM": "rate"}, ratio_x=3.0)
    random = np.random.default_rng(4)
    blur = random.uniform(0, 1, (1, 1, 3, 24, 36)).astype(np.float32)
    spikes = random.uniform(0, 1, (1, 1, network.spec["channels"], 12, 12)).astype(np.float32)
    found = run(export_file(path, (24, 36)).path, blur=blur, spikes=spikes)
    with torch.inference_mode():
        expected = network(Clip(torch.from_numpy(blur), torch.from_numpy(spikes))).clamp(0, 1).numpy()
    assert np.abs(found - expected).max() < 1e-4
    with pytest.raises(ConfigError, match="--size 24 35: height and width must be multiples of 2 and 3"):
        export_file(path, (24, 35))


def test_a_network_without_spikes_has_no_such_input(weights_of):
    path, network = weights_of(model={"USE_SPIKE": False})
    done = export_file(path, (16, 24), length=2)
    blur = np.random.default_rng(1).uniform(0, 1, (1, 2, 3, 16, 24)).astype(np.float32)
    found = run(done.path, blur=blur)
    with torch.inference_mode():
        expected = network(Clip(torch.from_numpy(blur), torch.zeros(1, 2, 5, 8, 12))).clamp(0, 1)
    assert np.abs(found - expected.numpy()).max() < 1e-4


def test_the_command_writes_a_file_that_restores_a_sequence_like_predict(weights_of, demo, tmp_path, capsys):
    path, network = weights_of(data={"VOXEL_NORM": "rate"})
    out = tmp_path / "made" / "deblur.onnx"
    assert main(["spike", "export", "--weights", str(path), "--size", "32", "64", "--output", str(out)]) == 0
    assert "of the network" in capsys.readouterr().out
    facts = {each.key: each.value for each in onnx.load(str(out)).metadata_props}
    assert "as flatout.spike.voxel gives" in facts["spikes"] and json.loads(facts["network"])["WIDTH"] == 4

    (sequence,) = (demo.parent / "test").iterdir()
    (frame, *_) = sorted((sequence / "blur").iterdir())
    predicted = tmp_path / "predicted"
    flatout.spike.load(path, device="cpu").predict(sequence / "blur", sequence / "spike", predicted)
    import cv2

    blur = np.moveaxis(cv2.imread(str(frame))[..., ::-1], 2, 0)[None, None].astype(np.float32) / 255
    stream = flatout.spike.open_stream(sequence / "spike" / f"{frame.stem}.dat")
    spikes = flatout.spike.voxel(stream[:], network.spec["channels"])[None, None]
    found = np.moveaxis(run(out, blur=blur, spikes=spikes)[0, 0], 0, 2) * 255
    expected = cv2.imread(str(predicted / f"{frame.stem}.png"))[..., ::-1]
    assert np.abs(found - expected).max() <= 0.51


def test_a_model_card_describes_the_files_and_no_folders_of_this_machine(weights_of):
    path, _ = weights_of(data={"VOXEL_NORM": "rate"})
    done = export_file(path, (24, 36))
    assert done.card == path.with_name("random.card.md")
    text = done.card.read_text()
    assert hashlib.sha256(done.path.read_bytes()).hexdigest() in text
    assert "| spikes | [1, " in text and "`sharp`, of the size of `blur`" in text
    assert f"largest difference {done.largest_difference:.1e}" in text
    assert str(path.parent) not in text


def test_a_file_that_differs_is_not_written(weights_of, monkeypatch):
    path, _ = weights_of()
    monkeypatch.setattr(compared, "TOLERANCE", -1.0)
    with pytest.raises(ParityError, match=r"random\.onnx: the exported model differs from the network by"):
        export_file(path, (16, 16))
    assert not path.with_suffix(".onnx").exists()


def test_sizes_without_whole_pixels_of_spikes_are_refused(weights_of, capsys):
    path, _ = weights_of()
    with pytest.raises(ConfigError, match="--size 15 16: height and width must be multiples of 2"):
        export_file(path, (15, 16))
    with pytest.raises(SystemExit):
        main(["spike", "export", "--weights", str(path), "--size", "0", "16"])
    assert "must be 1 or more" in capsys.readouterr().err


def test_openvino_that_is_not_installed_is_named_before_anything_is_written(weights_of, monkeypatch):
    path, _ = weights_of()
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    with pytest.raises(ConfigError, match="pip install onnx onnxruntime openvino"):
        export_file(path, (16, 16), openvino=True)
    assert not path.with_suffix(".onnx").exists()


def test_an_openvino_model_computes_the_same_frames(weights_of):
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    path, network = weights_of(model={"KIND": "stacked"}, data={"VOXEL_NORM": "rate"})
    done = export_file(path, (16, 24), openvino=True)
    assert done.openvino == path.with_name("random_openvino") and done.openvino_difference <= 1e-4
    model = openvino.Core().compile_model(
        str(done.openvino / "random.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )  # fmt: skip
    random = np.random.default_rng(2)
    blur = random.uniform(0, 1, (1, 1, 3, 16, 24)).astype(np.float32)
    spikes = random.uniform(0, 1, (1, 1, network.spec["channels"], 8, 12)).astype(np.float32)
    with torch.inference_mode():
        expected = network(Clip(torch.from_numpy(blur), torch.from_numpy(spikes))).clamp(0, 1).numpy()
    (found,) = model({"blur": blur, "spikes": spikes}).values()
    assert np.abs(found - expected).max() < 1e-4
    assert "channels, height, width" in json.loads((done.openvino / "random.json").read_text())["spikes"]
