"""flatout.defect.load: defect detection in Python."""

import numpy as np
import pytest

import flatout.defect
from flatout.defect.data.items import read_canonical
from flatout.defect.weights import load_network
from flatout.errors import CheckpointError, ConfigError, DataError
from tests.defect.boards import DEFECTS_XY, write_boards
from tests.defect.small_runs import small_data

SMALL = {"base_width": 8, "patch_size": 32, "min_patches": (2, 2), "bs": 8, "epochs": 1, "num_workers": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An inspector after a short training, and its data."""
    root = tmp_path_factory.mktemp("inspector")
    data = small_data(root / "data")
    model = flatout.defect.load("v1", device="cpu")
    result = model.train(data, checkpoint_path=str(root / "runs"), **SMALL)
    assert result.finished and model.weights == result.folder / "weights/best.pt"
    return model, data


def test_files_folders_and_arrays_give_the_same(trained):
    model, data = trained
    folder = data / "test/bright_spots"
    paths = sorted(folder.iterdir())
    from_folder = model.predict(folder)
    for given in (paths, list(map(str, paths)), [read_canonical(path) for path in paths]):
        for one, other in zip(model.predict(given), from_folder, strict=True):
            np.testing.assert_array_equal(one.heat, other.heat)
            assert one.detections == other.detections
    result = from_folder[0]
    least = load_network(model.weights)[1].threshold
    everything = model.predict(folder, threshold=0)[0].detections
    assert result.detections == tuple(each for each in everything if each.score >= least)
    assert model.predict(folder, threshold=1.1)[0].detections == ()
    assert result.path == str(paths[0]) and result.heat.dtype == np.float32
    assert result.heat.shape == result.planes.shape[1:] and 0 <= result.heat.min() <= result.heat.max() <= 1
    assert result.draw().shape == (*result.heat.shape, 3)


def test_the_heat_map_is_the_one_that_the_command_writes(trained, tmp_path):
    tifffile = pytest.importorskip("tifffile")
    model, data = trained
    result = model.evaluate(data, output_dir=str(tmp_path / "found"), save_pictures=False)
    assert len(result.rows) == 2
    (map_file,) = (tmp_path / "found").glob("**/bright_spots/*_heat.tiff")
    (result,) = model.predict(data / "test/bright_spots")
    np.testing.assert_allclose(tifffile.imread(map_file), result.heat, atol=1e-6)


def test_images_in_which_nothing_can_be_found_are_named(trained, tmp_path, caplog):
    model, data = trained
    planes = read_canonical(next((data / "test/good").iterdir()))
    model.predict(planes / 255)
    assert "predict() got an array: all its values are in 0..1" in caplog.text
    boards = write_boards(tmp_path / "boards", 1)
    (inspected,) = model.predict(boards / "test/00.png")
    assert not np.array_equal(inspected.planes[0], inspected.planes[1]), "a test image is a pair with its template"
    caplog.clear()
    model.predict(boards / "test")
    assert "00.png: its three planes are equal" in caplog.text


def test_pairs_are_predicted_as_the_command_does(trained, tmp_path):
    tifffile = pytest.importorskip("tifffile")
    model, _ = trained
    boards = write_boards(tmp_path / "boards", 1)
    rows = model.evaluate(boards, output_dir=str(tmp_path / "found"), save_pictures=False, threshold=0.01).rows
    (result,) = model.predict(boards, threshold=0.01)
    np.testing.assert_allclose(tifffile.imread(tmp_path / "found/00_heat.tiff"), result.heat, atol=1e-6)
    assert len(result.detections) == rows[0].num_detections > 0
    assert result.path == str(boards / "test/00.png")


def test_the_classical_method_needs_no_weights_and_does_what_the_command_does(tmp_path):
    model = flatout.defect.load("classical", device="cpu")
    boards = write_boards(tmp_path / "boards", 1)
    result = model.evaluate(boards, output_dir=str(tmp_path / "found"), save_pictures=False)
    (inspected,) = model.predict(boards)
    assert len(inspected.detections) == result.rows[0].num_detections == result.rows[0].num_found == len(DEFECTS_XY)
    (of_planes,) = model.predict(inspected.planes)
    assert of_planes.detections == inspected.detections
    assert model.predict(boards, threshold=0.99)[0].detections == ()
    assert repr(model) == "Inspector('classical')" and model.weights is None
    for method in (model.export, lambda: model.train(boards)):
        with pytest.raises(ConfigError, match=r"classical method has no weights: .*load\(\"v1\"\)"):
            method()


def test_an_exported_file_gives_the_predicted_heat_map(trained, tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model, data = trained
    (result,) = model.predict(data / "test/bright_spots")
    done = model.export(result.heat.shape, output=tmp_path / "strip.onnx")
    assert done.path == tmp_path / "strip.onnx" and done.smaller is None
    session = runtime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": result.planes[None]})
    np.testing.assert_allclose(found[0, 0], result.heat, atol=1e-4)


def test_a_trained_inspector_can_be_trained_further(trained, tmp_path):
    model, data = trained
    again = flatout.defect.load(model.weights, device="cpu")
    result = again.train(data, checkpoint_path=str(tmp_path), **{**SMALL, "epochs": 1})
    assert result.finished and again.weights != model.weights


def test_mistakes_have_clear_messages(trained, tmp_path):
    model, _ = trained
    with pytest.raises(
        CheckpointError, match=r"gone.pt: no such weights file, and not the name of a network, v1 or v2, nor classical"
    ):
        flatout.defect.load("gone.pt")
    with pytest.raises(ConfigError, match="v2 has no weights yet"):
        flatout.defect.load("v2").predict(tmp_path)
    with pytest.raises(ConfigError, match=r"predict\(\) got an array of shape \[4, 4\]"):
        model.predict(np.zeros((4, 4)))
    with pytest.raises(DataError, match="no images in this folder"):
        model.predict(tmp_path)
    for gone in (tmp_path / "gone", tmp_path / "gone.png"):
        with pytest.raises(DataError, match=f"{gone}: no such file or folder"):
            model.predict(gone)
    with pytest.raises(ConfigError, match=r"train\(\): epoch: unknown key .* did you mean 'epochs'"):
        flatout.defect.load("v1").train(tmp_path, epoch=1)
