"""ONNX files compute what the network computes, in every form, and describe their inputs and outputs."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from flatout.errors import ConfigError
from flatout.export.onnx_model import Session
from flatout.yolo.export import ExportOptions
from flatout.yolo.model.configs import shipped_folder
from flatout.yolo.model.network import Network
from flatout.yolo.nms import NmsConfig, non_max_suppression
from tests.yolo.export.networks import FEW_ROWS, SIDE, confident_network, exported, pixels

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

CELLS = 3 * (8 * 8 + 4 * 4 + 2 * 2)
"""Anchors of an image of 64 px, by the specification."""


@pytest.fixture(scope="module")
def network() -> Network:
    return confident_network()


def outputs_of(path: Path) -> dict[str, list[int | str]]:
    graph = onnx.load(str(path)).graph
    return {
        output.name: [dim.dim_value or dim.dim_param for dim in output.type.tensor_type.shape.dim]
        for output in graph.output
    }


def run_file(path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
    return Session(path)({"images": images})


@torch.no_grad()
def decoded_by(network: Network, images: np.ndarray) -> torch.Tensor:
    return network(torch.from_numpy(images)).decoded


# The forms of the specification


@pytest.mark.parametrize("dynamic", [False, True])
def test_without_flags_there_is_one_raw_map_per_level(dynamic, network, tmp_path):
    exported(network, tmp_path, dynamic=dynamic)
    sides = [("y", "x")] * 3 if dynamic else [(8, 8), (4, 4), (2, 2)]
    names = ("output", "output2", "output3")
    batch = "batch" if dynamic else 1
    assert outputs_of(tmp_path / "x.onnx") == {name: [batch, 3, *yx, 8] for name, yx in zip(names, sides, strict=True)}
    images = pixels()
    with torch.no_grad():
        expected = network(torch.from_numpy(images)).raw
    for found, level in zip(run_file(tmp_path / "x.onnx", images).values(), expected, strict=True):
        np.testing.assert_allclose(found, level.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("simplify", [False, True])
def test_grid_gives_boxes_in_pixels_and_scores(simplify, network, tmp_path):
    if simplify:
        pytest.importorskip("onnxslim")
    outcome = exported(network, tmp_path, grid=True, simplify=simplify)
    assert outputs_of(tmp_path / "x.onnx") == {"output": [1, CELLS, 8]}
    (found,) = run_file(tmp_path / "x.onnx", pixels()).values()
    np.testing.assert_allclose(found, decoded_by(network, pixels()).numpy(), rtol=1e-3, atol=0.02)
    (file,) = outcome.files
    assert file.difference.is_within(file.limit) and file.num_bytes == file.path.stat().st_size
    assert file.median_ms > 0 and outcome.torch_ms > 0


@pytest.mark.parametrize(("max_wh", "agnostic"), [(4096, False), (0, True)])
def test_nms_inside_finds_what_our_own_nms_finds(max_wh, agnostic, network, tmp_path):
    options = {"conf_thres": 0.3, "iou_thres": 0.5, "dynamic_batch": True}
    exported(network, tmp_path, grid=True, end2end=True, max_wh=max_wh, **options)
    path = tmp_path / "x.onnx"
    assert outputs_of(path) == {"output": ["detections", 7]}
    assert [node.op_type for node in onnx.load(str(path)).graph.node].count("NonMaxSuppression") == 1
    images = pixels(3)
    (found_D7,) = run_file(path, images).values()
    settings = NmsConfig(conf_thres=0.3, iou_thres=0.5, agnostic=agnostic, max_det=100)
    expected = non_max_suppression(decoded_by(network, images), settings)
    assert len(found_D7) == len(expected.row_D6) > 5
    np.testing.assert_array_equal(found_D7[:, 0], expected.image_D.numpy())
    np.testing.assert_allclose(found_D7[:, [1, 2, 3, 4, 6, 5]], expected.row_D6.numpy(), rtol=1e-3, atol=0.02)


def test_nms_keeps_at_most_topk_boxes_of_an_image(network, tmp_path):
    exported(network, tmp_path, end2end=True, max_wh=640, conf_thres=0.1, topk_all=4, batch_size=2)
    (found_D7,) = run_file(tmp_path / "x.onnx", pixels(2)).values()
    assert np.bincount(found_D7[:, 0].astype(int)).tolist() == [4, 4]


def test_no_detections_are_an_empty_output(network, tmp_path):
    exported(network, tmp_path, grid=True, end2end=True, max_wh=640, conf_thres=1.0)
    (found_D7,) = run_file(tmp_path / "x.onnx", pixels()).values()
    assert found_D7.shape == (0, 7)


def test_with_a_single_class_objectness_is_the_score(tmp_path):
    network = confident_network(nc=1)
    exported(network, tmp_path, grid=True, end2end=True, max_wh=640, conf_thres=0.1, iou_thres=1.0, topk_all=1000)
    (found_D7,) = run_file(tmp_path / "x.onnx", pixels()).values()
    objectness = decoded_by(network, pixels())[0, :, 4]
    expected = objectness[objectness > 0.1].sort(descending=True).values
    np.testing.assert_allclose(found_D7[:, 6], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "coding", "dynamic_batch"),
    [({"grid": True, "end2end": True}, 1, True), ({"grid": True, "include_nms": True}, 0, False)],
)
def test_the_tensorrt_form_ends_in_the_plugin_with_all_its_settings(flags, coding, dynamic_batch, network, tmp_path):
    outcome = exported(
        network, tmp_path, **flags, dynamic_batch=dynamic_batch, topk_all=7, iou_thres=0.6, conf_thres=0.2,
        simplify=dynamic_batch,
    )  # fmt: skip
    model = onnx.load(str(tmp_path / "x.onnx"))
    batch = "batch" if dynamic_batch else 1
    assert outputs_of(tmp_path / "x.onnx") == {
        "num_dets": [batch, 1],
        "det_boxes": [batch, 7, 4],
        "det_scores": [batch, 7],
        "det_classes": [batch, 7],
    }
    types = {output.name: output.type.tensor_type.elem_type for output in model.graph.output}
    assert types["num_dets"] == types["det_classes"] == onnx.TensorProto.INT32
    (plugin,) = [node for node in model.graph.node if node.op_type == "EfficientNMS_TRT"]
    settings = {each.name: onnx.helper.get_attribute_value(each) for each in plugin.attribute}
    assert settings.pop("iou_threshold") == pytest.approx(0.6)
    assert settings.pop("score_threshold") == pytest.approx(0.2)
    assert settings == {
        "background_class": -1,
        "box_coding": coding,
        "max_output_boxes": 7,
        "plugin_version": b"1",
        "score_activation": 0,
    }
    assert list(plugin.output) == list(outputs_of(tmp_path / "x.onnx"))
    assert "compared up to the EfficientNMS_TRT node" in outcome.text()


# Sizes


def test_dynamic_accepts_any_batch_and_image_size(network, tmp_path):
    outcome = exported(network, tmp_path, grid=True, dynamic=True)
    assert outputs_of(tmp_path / "x.onnx") == {"output": ["batch", "boxes", 8]}
    assert len(outcome.input_shapes) == 3
    images = pixels(2, (96, 160))
    (found,) = run_file(tmp_path / "x.onnx", images).values()
    np.testing.assert_allclose(found, decoded_by(network, images).numpy(), rtol=1e-3, atol=0.02)


def test_a_static_file_is_compared_in_batches_of_its_size(network, tmp_path):
    outcome = exported(network, tmp_path, grid=True, batch_size=3, img_size=(64, 96))
    assert outcome.input_shapes == ((3, 3, 64, 96),)
    assert outputs_of(tmp_path / "x.onnx") == {"output": [3, 3 * (8 * 12 + 4 * 6 + 2 * 3), 8]}


def test_a_size_that_is_no_multiple_of_the_stride_is_rounded_up_with_a_warning(network, tmp_path, caplog):
    outcome = exported(network, tmp_path, img_size=(50, 50))
    assert outcome.timed_shape == (1, 3, 64, 64)
    assert caplog.text.count("--img-size 50 is not a multiple") == 1, "one warning for a square"


# Every network


@pytest.mark.parametrize("name", ["yolov7-tiny", "yolov7-w6", "yolov7-tiny-1b4h", "yolov7-tiny-1b4h-attn"])
def test_training_networks_of_every_kind_are_folded_and_exported(name, tmp_path):
    if not (shipped_folder() / "training" / f"{name}.yaml").is_file():
        pytest.skip(f"{name} is not among the shipped configs")
    network = confident_network(name, nc=None)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    outcome = exported(network, tmp_path, grid=True, img_size=(128, 128), pictures=1)
    # Wrong folding changes scores by tenths.
    assert outcome.files[0].difference.score < 0.05
    ops = {node.op_type for node in onnx.load(str(tmp_path / "x.onnx")).graph.node}
    assert "BatchNormalization" not in ops
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    (found,) = run_file(tmp_path / "x.onnx", pixels(hw=(128, 128))).values()
    assert found.shape == tuple(decoded_by(network, pixels(hw=(128, 128))).shape)


# Metadata


def test_a_file_describes_its_input_and_output(network, tmp_path):
    network.names = ["bolt", "nut", 'a "washer"']
    exported(network, tmp_path, end2end=True, max_wh=640, opset=16)
    model = onnx.load(str(tmp_path / "x.onnx"))
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(facts["names"]) == network.names
    assert (facts["stride"], facts["input_range"], facts["input_colors"]) == ("32", "0..1", "RGB")
    assert (facts["input_layout"], facts["input_size_hw"], facts["input_batch"]) == ("NCHW", f"{SIDE},{SIDE}", "1")
    assert json.loads(facts["nms"]) == {"iou_thres": 0.45, "conf_thres": 0.25, "topk_all": 100, "max_wh": 640}
    assert facts["flatout"] and facts["output"].startswith("rows of image")
    assert [each.version for each in model.opset_import if each.domain == ""] == [16]


def test_the_opset_is_12_unless_int8_needs_13(network, tmp_path):
    assert exported(network, tmp_path).files[0].kind == "ONNX opset 12"
    assert [ExportOptions(int8=int8, opset=opset).onnx_opset for int8 in (False, True) for opset in (12, 17)] == [
        12, 17, 13, 17,
    ]  # fmt: skip


def test_an_operator_that_an_opset_lacks_is_a_config_error(tmp_path):
    from flatout.export.onnx_model import traced

    class Unflattened(torch.nn.Module):
        def forward(self, x):
            return x.unflatten(1, (1, 3))

    with pytest.raises(ConfigError, match=r"^Opset 12 is too old for this network: .*unflatten"):
        traced(Unflattened(), {"x": torch.zeros(1, 3, 4, 4)}, output_names=["y"], free_axes={}, opset=12)


# Other readers


@pytest.mark.parametrize(("name", "simplify"), [(FEW_ROWS, False), (FEW_ROWS, True), ("yolov7-tiny-1b4h", False)])
def test_opencv_gives_the_boxes_of_the_network(name, simplify, tmp_path):
    net = confident_network(name)
    exported(net, tmp_path, grid=True, simplify=simplify)
    images = pixels()
    reader = cv2.dnn.readNetFromONNX(str(tmp_path / "x.onnx"))
    reader.setInput(images)
    np.testing.assert_allclose(reader.forward(), decoded_by(net, images), rtol=1e-3, atol=0.05)


def test_deprecation_warnings_of_a_newer_torch_about_tracing_are_not_shown(network, tmp_path, monkeypatch):
    """torch 2.15 raises FutureWarning, which Python shows; it hides the DeprecationWarning of older versions."""

    def warning(name: str) -> Callable[..., Any]:
        function = getattr(torch.jit, name)

        def warn_and_call(*args: Any, **settings: Any) -> Any:
            warnings.warn(f"`torch.jit.{name}` is deprecated. Please switch.", FutureWarning, stacklevel=2)
            return function(*args, **settings)

        return warn_and_call

    for name in ("trace", "freeze", "save", "load"):
        monkeypatch.setattr(torch.jit, name, warning(name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exported(network, tmp_path, formats=("onnx", "torchscript"))
    assert [str(each.message) for each in caught if each.category is FutureWarning] == []
