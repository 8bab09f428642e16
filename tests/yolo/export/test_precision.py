"""Files in float16 and int8: smaller, with a measured loss, and with boxes still decoded in float32."""

import numpy as np
import pytest
import torch

from flatout.export.onnx_model import Session
from flatout.yolo.export import ExportOptions
from flatout.yolo.export.onnx_forms import PrecisionLoss, in_precision, probe_of
from flatout.yolo.export.postprocess import Postprocess
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.network import Network
from tests.yolo.export.networks import confident_network, exported, pixels

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def network() -> Network:
    return confident_network()


@pytest.mark.parametrize("form", [{"grid": True}, {"end2end": True}])
def test_files_in_reduced_precision_are_written_beside_the_full_one(form, network, tmp_path):
    outcome = exported(network, tmp_path, **form, fp16=True, int8=True, conf_thres=0.3)
    full, half, int8 = outcome.files
    assert [file.path.name for file in outcome.files] == ["x.onnx", "x.fp16.onnx", "x.int8.onnx"]
    assert max(half.num_bytes, int8.num_bytes) < full.num_bytes
    assert half.difference is None and int8.difference is None
    assert half.loss.num_boxes == int8.loss.num_boxes > 20
    assert half.loss.median_px < 0.5 and half.loss.largest_score < 0.05
    assert half.loss.median_px < int8.loss.median_px < 5
    assert f"{half.loss.num_boxes} raw boxes above 0.3" in outcome.text()


def test_raw_maps_in_half_precision_are_not_compared(network, tmp_path):
    full, half = exported(network, tmp_path, fp16=True).files
    assert half.loss is None and half.num_bytes < full.num_bytes
    assert "raw maps in reduced precision are not compared" in half.line()


def test_a_loss_without_boxes_is_unknown():
    assert "no raw box above 0.25 in these images" in PrecisionLoss(0, 0.25, 0.0, 0.0, 0.0).text()


def test_decoding_stays_in_float32(network):
    """From 2048 px on, half precision distinguishes only every second pixel."""
    options = ExportOptions(grid=True)
    images = pixels(hw=(64, 2560))
    probe = probe_of(fused(network), options, torch.from_numpy(images))
    half = in_precision(probe, "float16", [images], Postprocess())
    onnx.checker.check_model(half)
    full_NO, half_NO = (Session(model)({"images": images})["output"][0] for model in (probe, half))
    far_M = full_NO[:, 0] > 2048
    assert np.median(np.abs(full_NO - half_NO)[far_M, 0]) < 0.3
    assert (half_NO[far_M, 0] % 1 != 0).mean() > 0.9
