"""flatout.spike.load: deblurring in Python."""

import pytest
import torch

import flatout.spike
from flatout.errors import CheckpointError, ConfigError
from flatout.safefiles.container import write_container
from flatout.spike.config import ModelConfig
from flatout.spike.model import DeblurNet
from flatout.spike.weights import load_network
from tests.spike.test_train import TINY

OVERRIDES = {**dict(each.split("=") for each in TINY), "TRAIN.EPOCHS": 1}


@pytest.fixture(scope="module")
def trained(demo, tmp_path_factory):
    """A deblurrer after a short training."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = flatout.spike.load(demo, device="cpu")
    with pytest.raises(ConfigError, match="has no weights yet"):
        model.evaluate()
    result = model.train({**OVERRIDES, "LOG.SAVE_DIR": tmp_path_factory.mktemp("deblurrer") / "run"})
    torch.set_num_threads(before)
    assert result.finished and model.weights is not None and model.weights.parent == result.folder / "ckpts"
    return model


def test_it_is_evaluated_like_the_last_validation(trained):
    found = trained.evaluate()
    again = flatout.spike.load(trained.weights, device="cpu").evaluate("test")
    assert found.num_frames == again.num_frames > 0 and found.psnr == pytest.approx(again.psnr)


def test_a_folder_is_deblurred(trained, demo, tmp_path):
    (sequence,) = (demo.parent / "test").iterdir()
    done = trained.predict(sequence / "blur", sequence / "spike", tmp_path / "out", side_by_side=True)
    assert done.frames == len(list((sequence / "blur").iterdir())) == len(list((tmp_path / "out").glob("*.png")))


def test_mistakes_have_clear_messages(trained):
    with pytest.raises(CheckpointError, match=r"gone.pt: no such weights file"):
        flatout.spike.load("gone.pt")
    with pytest.raises(ConfigError, match=r"gone.yaml: no such config"):
        flatout.spike.load("gone.yaml")
    with pytest.raises(ConfigError, match="To train, load the YAML config"):
        flatout.spike.load(trained.weights).train()
    with pytest.raises(ConfigError, match=r"train\(\): fresch: unknown key .* did you mean 'fresh'"):
        trained.train(fresch=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"KIND": "pyramid"}, "its network is of the kind 'pyramid', .* it knows branch and stacked"),
        ({"DEPTH": 3}, "describes a network that this version of flatout does not know.*DEPTH"),
    ],
)
def test_a_network_of_a_later_version_is_refused_by_name(model, message, tmp_path):
    spec = DeblurNet(ModelConfig(WIDTH=4, ENC_BLOCKS=(1, 1), DEC_BLOCKS=(1, 1)), channels=5).spec
    path = tmp_path / "best.pt"
    write_container(path, {"weights": {"network": {**spec, "model": spec["model"] | model}, "state": {}}})
    with pytest.raises(CheckpointError, match=rf"best\.pt: {message}"):
        load_network(path)


def test_weights_of_the_early_code_are_refused_by_name(demo, tmp_path):
    path = tmp_path / "best.pth"
    torch.save({"step": 3, "best_psnr": 30.0, "state_dict": {"vrt.conv.weight": torch.zeros(2)}}, path)
    with pytest.raises(CheckpointError, match=r"best\.pth: .*VRT.*best\.pt"):
        load_network(path)
    with pytest.raises(CheckpointError, match=r"best\.pth: .*VRT.*best\.pt"):
        flatout.spike.load(demo).train(resume=str(path))
    overrides = {"TRAIN.RESUME_FROM_CHECKPOINT": True, "TRAIN.CHECKPOINT_PATH": str(path)}
    with pytest.raises(CheckpointError, match=r"best\.pth: .*VRT.*best\.pt"):
        flatout.spike.load(demo).train(overrides)


def test_overrides_may_be_any_values_of_python(demo, tmp_path):
    (tmp_path / "best.pth").write_bytes(b"refused, once the config has been read")
    overrides = {"TRAIN.RESUME_FROM_CHECKPOINT": True, "TRAIN.CHECKPOINT_PATH": tmp_path / "best.pth"}
    overrides |= {
        "DATA.CROP_SIZE": None,
        "DATA.SPIKE_TRIM": (1, 2),
        "TRAIN.OPTIM.LR": 1e-5,
        "MODEL.ENC_BLOCKS": "[1, 1]",
    }
    with pytest.raises(CheckpointError, match=r"best\.pth: .*VRT"):
        flatout.spike.load(demo).train(overrides)
