"""Half precision and 8 bits: smaller files whose loss is told, with boxes still decoded in float32."""

import numpy as np
import pytest
import torch

from flatout.export.onnx_model import Session
from flatout.yolo.export import ExportOptions
from flatout.yolo.export.onnx_forms import Loss, probe_of, smaller
from flatout.yolo.export.postprocess import Tail
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.network import Network
from tests.yolo.export.networks import exported, pixels, sure

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def network() -> Network:
    return sure()


@pytest.mark.parametrize("form", [{"grid": True}, {"end2end": True}])
def test_smaller_files_stand_beside_the_whole_one(form, network, tmp_path):
    outcome = exported(network, tmp_path, **form, fp16=True, int8=True, conf_thres=0.3)
    whole, half, eighth = outcome.files
    assert [file.path.name for file in outcome.files] == ["x.onnx", "x.fp16.onnx", "x.int8.onnx"]
    assert max(half.num_bytes, eighth.num_bytes) < whole.num_bytes
    assert half.difference is None and eighth.difference is None
    assert half.loss.num_boxes == eighth.loss.num_boxes > 20
    assert half.loss.median_px < 0.5 and half.loss.largest_score < 0.05
    assert half.loss.median_px < eighth.loss.median_px < 5
    assert f"{half.loss.num_boxes} raw boxes above 0.3" in outcome.text()


def test_raw_maps_in_half_precision_are_not_judged(network, tmp_path):
    whole, half = exported(network, tmp_path, fp16=True).files
    assert half.loss is None and half.num_bytes < whole.num_bytes
    assert "raw maps in lower precision: not compared" in half.line()


def test_nothing_to_compare_is_said():
    assert "no raw box above 0.25 in these pictures" in Loss(0, 0.25, 0.0, 0.0, 0.0).text()


def test_decoding_stays_in_float32(network):
    """At 2048 px and beyond, half precision tells only every second pixel apart."""
    options = ExportOptions(grid=True)
    images = pixels(hw=(64, 2560))
    probe = probe_of(fused(network), options, torch.from_numpy(images))
    half = smaller(probe, "float16", [images], Tail())
    onnx.checker.check_model(half)
    whole_NO, half_NO = (Session(model)({"images": images})["output"][0] for model in (probe, half))
    far_M = whole_NO[:, 0] > 2048
    assert np.median(np.abs(whole_NO - half_NO)[far_M, 0]) < 0.3
    assert (half_NO[far_M, 0] % 1 != 0).mean() > 0.9
