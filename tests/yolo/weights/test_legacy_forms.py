"""Every form of YOLOv7 weights is read with the same result as by torch itself, without running anything."""

import copy
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.yolo.weights import Weights, read_weights
from flatout.yolo.weights.legacy import parameter_groups
from tests.yolo.weights.legacy_files import CONFIG, Model, training_checkpoint, yolov7_names
from tests.yolo.weights.pickle_bytes import unzip_bytes, zip_bytes


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    with yolov7_names():
        yield


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Weights]:
    """Saves an object with torch and reads it with flatout."""

    def save(content: object, **options: Any) -> Weights:
        torch.save(content, tmp_path / "saved.pt", **options)
        return read_weights(tmp_path / "saved.pt")

    return save


def assert_same(state: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> None:
    """Check keys and their order, dtypes, shapes and bits."""
    assert state is not None
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert state[key].dtype == value.dtype
        assert torch.equal(state[key], value)
        assert not state[key].requires_grad


def test_a_full_checkpoint_is_read_completely(model: Model, saved: Callable[..., Weights]):
    ema = copy.deepcopy(model).half()
    content = training_checkpoint(model, ema)
    weights = saved(content)
    assert_same(weights.state, model.state_dict())
    assert_same(weights.ema, ema.state_dict())
    assert weights.for_inference() is weights.ema
    assert weights.for_training() is weights.state
    assert (weights.kind, weights.format, weights.epoch, weights.updates) == ("full", "legacy", 7, 12)
    assert (weights.best_fitness, weights.training_results) == (0.25, "0/1\n1/1\n")
    assert (weights.config, weights.names, weights.nc) == (CONFIG, ["ant", "bee"], 2)
    assert weights.hyp == {"lr0": 0.01, "anchor_t": 4}
    assert weights.optimizer is not None
    assert weights.optimizer["param_groups"][0]["lr"] == 0.05
    assert type(weights.optimizer["param_groups"][0]["lr"]) is float
    for number, state in content["optimizer"]["state"].items():
        assert torch.equal(weights.optimizer["state"][number]["momentum_buffer"], state["momentum_buffer"])


def test_a_stripped_checkpoint_is_its_moving_average(model: Model, saved: Callable[..., Weights]):
    content = training_checkpoint(model, model) | {"epoch": -1, "model": copy.deepcopy(model).half()}
    weights = saved(content | dict.fromkeys(("ema", "optimizer", "updates", "training_results")))
    assert (weights.kind, weights.epoch, weights.ema, weights.optimizer) == ("stripped", -1, None, None)
    assert weights.for_inference() is weights.state
    assert_same(weights.state, copy.deepcopy(model).half().state_dict())


def test_a_converted_checkpoint_is_recognised(model: Model, saved: Callable[..., Weights]):
    weights = saved({"model": model, "optimizer": None, "training_results": None, "epoch": -1})
    assert (weights.kind, weights.nc, weights.best_fitness) == ("deploy", 2, None)


def test_a_bare_network_is_read(model: Model, saved: Callable[..., Weights]):
    weights = saved(model)
    assert (weights.kind, weights.names) == ("model", ["ant", "bee"])
    assert_same(weights.state, model.state_dict())


def test_a_moving_average_alone_is_read(model: Model, saved: Callable[..., Weights]):
    weights = saved({"model": None, "ema": model, "epoch": 3})
    assert (weights.kind, weights.config) == ("ema", CONFIG)
    assert_same(weights.for_inference(), model.state_dict())
    assert_same(weights.for_training(), model.state_dict())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state},
        lambda state: {"state_dict": state, "epoch": "of another program", "optimizer": 3},
        lambda state: {"model_state_dict": state},
    ],
    ids=["bare", "model", "state_dict", "model_state_dict"],
)
@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
def test_a_state_dict_is_read_without_the_prefix_of_wrappers(
    wrap: Callable[[object], object], prefix: str, model: Model, saved: Callable[..., Weights]
):
    weights = saved(wrap({prefix + key: value for key, value in model.state_dict().items()}))
    assert (weights.config, weights.names) == (None, None)
    assert_same(weights.state, model.state_dict())


def test_what_state_dict_returns_is_read_with_its_metadata(model: Model, saved: Callable[..., Weights]):
    weights = saved(model.state_dict())
    assert weights.kind == "state_dict"
    assert_same(weights.state, model.state_dict())


def test_a_network_in_a_wrapper_for_several_gpus_is_unwrapped(model: Model, saved: Callable[..., Weights]):
    weights = saved({"model": nn.DataParallel(model), "epoch": -1})
    assert weights.names == ["ant", "bee"]
    assert_same(weights.state, model.state_dict())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(protocol: int, model: Model, saved: Callable[..., Weights]):
    weights = saved(training_checkpoint(model, model), pickle_protocol=protocol)
    assert_same(weights.state, model.state_dict())
    assert weights.best_fitness == 0.25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision_is_kept(dtype: torch.dtype, model: Model, saved: Callable[..., Weights]):
    assert_same(saved(model.to(dtype)).state, model.state_dict())


def test_views_ties_and_layouts_are_kept(saved: Callable[..., Weights]):
    base = torch.arange(24.0)
    state = {
        "tied": base,
        "tied.too": base,
        "view": base[4:16].view(3, 4),
        "transposed": base.view(4, 6).t(),
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
    }
    weights = saved(state)
    assert_same(weights.state, state)
    assert weights.state["channels_last"].stride() == state["channels_last"].stride()
    assert weights.state["tied"].data_ptr() == weights.state["tied.too"].data_ptr()


def test_the_folder_in_the_zip_need_not_be_the_name_of_the_file(model: Model, tmp_path: Path):
    torch.save(model, tmp_path / "epoch_002.pt")
    moved = (tmp_path / "epoch_002.pt").rename(tmp_path / "best.weights")
    assert_same(read_weights(moved).state, model.state_dict())


def test_tensors_of_a_gpu_that_does_not_exist_are_read(model: Model, tmp_path: Path):
    torch.save(model.state_dict(), tmp_path / "cpu.pt")
    pickled = rewritten(tmp_path / "cpu.pt", b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:7")
    assert_same(read_weights(pickled).state, model.state_dict())


def test_both_names_of_the_core_of_numpy_are_read(model: Model, tmp_path: Path):
    torch.save(training_checkpoint(model, model), tmp_path / "new.pt")
    old = rewritten(tmp_path / "new.pt", b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert read_weights(old).best_fitness == 0.25


def rewritten(path: Path, old: bytes, new: bytes) -> Path:
    """The file with bytes of its pickle replaced and an intact zip."""
    entries = unzip_bytes(path)
    pickle_name = next(name for name in entries if name.endswith("/data.pkl"))
    assert old in entries[pickle_name]
    path.write_bytes(zip_bytes(entries | {pickle_name: entries[pickle_name].replace(old, new)}))
    return path


def test_a_file_that_was_zipped_again_is_read(model: Model, tmp_path: Path):
    torch.save(model, tmp_path / "stored.pt")
    (tmp_path / "deflated.pt").write_bytes(zip_bytes(unzip_bytes(tmp_path / "stored.pt"), zipfile.ZIP_DEFLATED))
    assert_same(read_weights(tmp_path / "deflated.pt").state, model.state_dict())


def test_a_file_saved_without_checksums_is_read(model: Model, saved: Callable[..., Weights]):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        assert_same(saved(model).state, model.state_dict())
    finally:
        torch.serialization.set_crc32_options(before)


def test_names_in_a_dict_become_a_list(model: Model, saved: Callable[..., Weights]):
    model.names = {0: "ant", 1: "bee"}  # type: ignore[assignment]
    assert saved(model).names == ["ant", "bee"]


@pytest.mark.parametrize(
    ("written", "read"),
    [([0, 1], ["0", "1"]), ([False, "b"], ["False", "b"]), ((0.5, "b"), ["0.5", "b"]), ({1: "b", 0: 7}, ["7", "b"])],
)
def test_names_that_the_yaml_did_not_quote_are_text(written, read, model: Model, saved: Callable[..., Weights]):
    model.names = written
    assert saved(model).names == read


def test_the_original_program_is_not_needed(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.save(model, tmp_path / "model.pt")
    for name in ("models", "models.common", "models.yolo"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError):
        torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(read_weights(tmp_path / "model.pt").state, model.state_dict())


def test_optimizer_numbers_follow_the_three_groups_of_yolov7():
    keys = [
        *("model.0.conv.weight", "model.0.bn.weight", "model.0.bn.bias", "model.0.bn.running_mean"),
        *("model.1.m.0.weight", "model.1.m.0.bias", "model.1.ia.0.implicit", "model.1.im.0.implicit"),
    ]
    assert parameter_groups(keys) == (
        ["model.0.bn.weight", "model.1.im.0.implicit", "model.1.ia.0.implicit"],
        ["model.0.conv.weight", "model.1.m.0.weight"],
        ["model.0.bn.bias", "model.1.m.0.bias"],
    )
