"""Exported files know the tiles that a network was trained on, and give results of whole images by them."""

import json
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import flatout.yolo
from flatout.errors import ConfigError
from flatout.export.onnx_model import is_installed
from flatout.yolo.export import ExportOptions, export
from flatout.yolo.weights import read_weights, save_safetensors, save_weights
from tests.test_docs import DOCS
from tests.yolo.predict.small_sources import NAMES, confident_network, make_image, weights_file
from tests.yolo.test_load import weights_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

NEED_ONNX = pytest.mark.skipif(
    not (is_installed("onnx") and is_installed("onnxruntime")), reason="onnx and onnxruntime are not installed"
)
SIDE = 64
TILES = {"tile": SIDE, "overlap": 0.25}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that say that they were trained on tiles."""
    path = tmp_path_factory.mktemp("trained") / "best.pt"
    save_weights(path, weights_of(confident_network(), tiles=TILES))
    return path


def exported(weights: Path, folder: Path, **options: Any) -> dict[str, str]:
    """Export TorchScript with decoded boxes into a folder; returns the metadata."""
    export(
        weights,
        ExportOptions(
            out=str(folder), img_size=(SIDE, SIDE), grid=True, formats=("torchscript",), pictures=1, **options
        ),
    )
    content = {"config.txt": ""}
    torch.jit.load(str(folder / f"{weights.stem}.torchscript.pt"), _extra_files=content)
    return dict(json.loads(content["config.txt"]))


def runner(folder: Path, name: str = "best") -> Any:
    module = torch.jit.load(str(folder / f"{name}.torchscript.pt"))
    return lambda images: module(torch.from_numpy(images)).numpy()


def large_image() -> np.ndarray:
    """150 x 200 px."""
    return np.ascontiguousarray(make_image(3, (200, 150)))


# What the files say


def test_metadata_and_card_have_the_tiles_of_the_training(trained, tmp_path):
    metadata = exported(trained, tmp_path)
    assert json.loads(metadata["tiles"]) == TILES
    card = (tmp_path / "best.card.md").read_text()
    assert "cut into tiles of 64 px that share at least 0.25 of their side" in card


def test_without_tiles_nothing_is_said_about_them(tmp_path):
    assert "tiles" not in exported(weights_file(tmp_path / "plain.pt"), tmp_path)
    assert "tiles" not in (tmp_path / "plain.card.md").read_text()


def test_the_flag_replaces_what_the_weights_say(trained, tmp_path):
    metadata = exported(trained, tmp_path, tiles=128, tile_overlap=0.1)
    assert json.loads(metadata["tiles"]) == {"tile": 128, "overlap": 0.1}
    with pytest.raises(ConfigError, match="--tiles 8: tiles have sides of 32 px or more"):
        ExportOptions(tiles=8)


def test_tiles_that_make_no_sense_are_left_out_with_a_warning(tmp_path, caplog):
    save_weights(tmp_path / "best.pt", weights_of(confident_network(), tiles={"tile": -5, "overlap": "much"}))
    assert "tiles" not in exported(tmp_path / "best.pt", tmp_path)
    assert "what it says about tiles is not valid" in caplog.text


def test_safetensors_keep_the_tiles_and_mention_none_that_are_not_there(trained, tmp_path):
    save_safetensors(tmp_path / "a.safetensors", read_weights(trained))
    assert read_weights(tmp_path / "a.safetensors").tiles == TILES
    save_safetensors(tmp_path / "b.safetensors", weights_of(confident_network()))
    assert read_weights(tmp_path / "b.safetensors").tiles is None
    assert b"flatout.tiles" not in (tmp_path / "b.safetensors").read_bytes()


# Results of whole images


def same(found: flatout.yolo.Result, expected: flatout.yolo.Result) -> None:
    """Equal up to rounding, which may change the order of detections with equal scores."""
    assert len(found) == len(expected) > 0
    rows = [np.concatenate((each.boxes, each.scores[:, None], each.classes[:, None]), 1) for each in (found, expected)]
    apart = np.abs(rows[0][:, None] - rows[1][None]).max(2)
    assert apart.min(0).max() < 0.05 and apart.min(1).max() < 0.05


def test_an_exported_network_finds_in_a_whole_image_what_the_detector_finds_by_tiles(trained, tmp_path):
    metadata = exported(trained, tmp_path)
    cv2.imwrite(str(tmp_path / "large.png"), large_image())
    (found,) = flatout.yolo.predict_with(runner(tmp_path), metadata, tmp_path / "large.png", conf_thres=0.1)
    detector = flatout.yolo.load(trained, device="cpu")
    (expected,) = detector(tmp_path / "large.png", img_size=SIDE, conf_thres=0.1, tiles=SIDE, tile_overlap=0.25)
    same(found, expected)
    assert found.image.shape == (150, 200, 3) and found.names == tuple(NAMES)
    assert found.boxes[:, 2].max() > 2 * SIDE and found.path == str(tmp_path / "large.png")


@NEED_ONNX
def test_an_onnx_file_brings_its_metadata_with_it(trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    options = ExportOptions(
        out=str(tmp_path), img_size=(SIDE, SIDE), grid=True, formats=("onnx",), pictures=1, dynamic_batch=True
    )
    export(trained, options)
    session = onnxruntime.InferenceSession(str(tmp_path / "best.onnx"))
    metadata = session.get_modelmeta().custom_metadata_map
    sizes = []

    def network(images: np.ndarray) -> np.ndarray:
        sizes.append(len(images))
        return session.run(None, {"images": images})[0]

    (found,) = flatout.yolo.predict_with(network, metadata, large_image(), conf_thres=0.1, at_once=5)
    (expected,) = flatout.yolo.load(trained, device="cpu")(
        large_image(), img_size=SIDE, conf_thres=0.1, tiles=SIDE, tile_overlap=0.25
    )
    same(found, expected)
    assert sizes == [5, 5, 2]  # 3 x 4 tiles


@NEED_ONNX
def test_the_example_of_the_documentation_runs(trained, tmp_path, monkeypatch, capsys):
    """The block of docs/tiles.md."""
    page = (DOCS / "tiles.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "predict_with" in block]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans").mkdir()
    cv2.imwrite("scans/a.png", large_image())
    export(trained, ExportOptions(out="best", img_size=(SIDE, SIDE), grid=True, formats=("onnx",), pictures=1))
    names: dict[str, Any] = {}
    capsys.readouterr()
    exec(compile(code, "example", "exec"), names)
    assert capsys.readouterr().out.startswith("scans/a.png ") and names["result"].image.shape == (150, 200, 3)


def test_without_tiles_images_are_letterboxed_to_the_full_input(trained, tmp_path):
    metadata = exported(trained, tmp_path)
    shapes = []

    def network(images: np.ndarray) -> np.ndarray:
        shapes.append(images.shape)
        return runner(tmp_path)(images)

    (found,) = flatout.yolo.predict_with(network, metadata, large_image(), conf_thres=0.1, tiles=None)
    assert shapes == [(1, 3, SIDE, SIDE)] and found.image.shape == (150, 200, 3)


def test_a_fixed_batch_is_filled_up(trained, tmp_path):
    metadata = exported(trained, tmp_path, batch_size=4)
    sizes = []

    def network(images: np.ndarray) -> np.ndarray:
        sizes.append(len(images))
        return runner(tmp_path)(images)

    (found,) = flatout.yolo.predict_with(network, metadata, large_image(), conf_thres=0.1, at_once=6)
    (alone,) = flatout.yolo.predict_with(network, metadata, large_image(), conf=0.1, imgsz=SIDE)
    assert set(sizes) == {4}
    same(found, alone)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"output": "maps before the logistic function, one per level"}, {}, "Export it with --grid"),
        ({"input_size_hw": "64,96"}, {}, "is not square"),
        ({"names": "no list"}, {}, "not the metadata of a file that flatout exported"),
        ({}, {"img_size": 128}, "img_size=128: the input of this file is 64 px"),
        ({}, {"track": True}, "augment and track need the weights"),
        ({}, {"tile": 64}, "tile: unknown key"),
    ],
)
def test_files_and_options_that_cannot_be_used_are_refused(changed, options, message):
    metadata = {
        "names": json.dumps(NAMES), "stride": "32", "input_size_hw": "64,64", "input_batch": "1",
        "output": "cx, cy, w, h in pixels of the input, objectness, class scores (not multiplied)",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        list(flatout.yolo.predict_with(lambda images: images, metadata | changed, large_image(), **options))


def test_a_network_that_returns_something_else_is_named():
    metadata = {
        "names": json.dumps(NAMES), "stride": "32", "input_size_hw": "64,64", "input_batch": "1",
        "output": "cx, cy, w, h in pixels of the input, objectness, class scores (not multiplied)",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"returned \[1, 3, 64, 64\] for 1 images, not \[1, boxes, 7\]"):
        list(flatout.yolo.predict_with(lambda images: images, metadata, large_image()))
