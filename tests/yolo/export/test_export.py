"""An export as a whole: what is compared, what is refused, and that a failed export writes no file."""

import hashlib
import json
import sys
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from flatout.__main__ import main
from flatout.errors import CheckpointError, ConfigError, DataError, ParityError
from flatout.export.onnx_model import is_installed
from flatout.yolo.export import ExportOptions, export, export_network, parity
from flatout.yolo.export.files import stem_for
from flatout.yolo.export.parity import Difference, comparison_images, largest
from flatout.yolo.export.postprocess import OnnxNmsPostprocess, select
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.network import Ensemble, Network
from tests.yolo.export.networks import SIDE, confident_network, exported, pixels, saved

NEED_ONNX = pytest.mark.skipif(
    not (is_installed("onnx") and is_installed("onnxruntime")), reason="onnx and onnxruntime are not installed"
)


@pytest.fixture(scope="module")
def network() -> Network:
    return confident_network()


def folded_wrongly(network: Network) -> Network:
    made = fused(network)
    with torch.no_grad():
        made.state_dict()["model.2.conv.bias"][0] += 0.5
    return made


# TorchScript


@pytest.mark.parametrize("grid", [False, True])
@torch.no_grad()
def test_a_torchscript_file_runs_without_flatout_and_has_metadata(grid, network, tmp_path):
    outcome = exported(network, tmp_path, grid=grid, formats=("torchscript",))
    (file,) = outcome.files
    assert file.path == tmp_path / "x.torchscript.pt"
    content = {"config.txt": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(str(file.path), _extra_files=content)
    metadata = json.loads(content["config.txt"])
    assert json.loads(metadata["names"]) == network.names and metadata["input_colors"] == "RGB"
    x = torch.from_numpy(pixels(2, (SIDE, 96)))
    expected = network(x)
    found = module(x)
    for one, other in zip([found] if grid else found, [expected.decoded] if grid else expected.raw, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


def test_what_only_training_needs_is_not_in_the_file(tmp_path):
    network = confident_network("yolov7-w6", nc=2)
    size = exported(network, tmp_path, formats=("torchscript",), img_size=(128, 128), pictures=1).files[0].num_bytes
    auxiliary = sum(value.numel() * 4 for key, value in network.state_dict().items() if ".m2." in key)
    everything = sum(value.numel() * 4 for value in fused(network).state_dict().values())
    assert auxiliary and size < everything + 400_000


# Comparison


@NEED_ONNX
@pytest.mark.parametrize("grid", [False, True])
def test_a_file_that_differs_from_the_network_is_not_written(grid, network, tmp_path, monkeypatch):
    (tmp_path / "x.onnx").write_text("an older one")
    monkeypatch.setattr(parity, "fused", folded_wrongly)
    with pytest.raises(ParityError, match=r"x\.onnx: the exported network differs from .* so nothing was written"):
        exported(network, tmp_path, grid=grid)
    with pytest.raises(ParityError, match=r"x\.torchscript\.pt: the exported network differs"):
        exported(network, tmp_path, grid=grid, formats=("torchscript", "onnx"))
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]
    assert (tmp_path / "x.onnx").read_text() == "an older one"


@NEED_ONNX
def test_wrong_postprocessing_is_noticed_whatever_the_boxes_are(network, tmp_path, monkeypatch):
    other = OnnxNmsPostprocess.portable

    def one_row_less(self: OnnxNmsPostprocess, decoded: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (rows,) = other(self, decoded)
        return (rows[:-1],)

    monkeypatch.setattr(OnnxNmsPostprocess, "portable", one_row_less)
    with pytest.raises(ParityError, match=r"the model's output: ONNX Runtime gives \[\d+, 7\]"):
        exported(network, tmp_path, end2end=True, max_wh=640, conf_thres=0.1)


def test_nan_is_never_within_a_limit():
    limit = Difference(box_px=1.0, score=1.0)
    assert not Difference(box_px=float("nan")).is_within(limit)
    assert not largest([Difference(), Difference(score=float("nan"))]).is_within(limit)
    assert not Difference(box_px=0.5).is_within(Difference(box_px=float("nan"), score=1.0))
    assert largest([Difference(box_px=0.5), Difference(score=1.0)]).is_within(limit)


def test_a_network_that_amplifies_rounding_errors_gets_wider_limits(network, monkeypatch, caplog):
    context = parity.ExportContext.of(network, ExportOptions(img_size=(SIDE, SIDE), pictures=1))
    assert context.accepted(Difference(raw=1e-4), "x") == Difference(raw=1e-3)
    assert context._rounding(raw=True).raw < 1e-4
    with pytest.raises(ParityError, match=r"^x: the exported network differs from the .* by 5\.0e-03 in raw outputs"):
        context.accepted(Difference(raw=5e-3), "x")
    monkeypatch.setattr(parity.ExportContext, "_rounding", lambda self, *, raw: Difference(raw=2e-3))
    assert context.accepted(Difference(raw=5e-3), "x").raw == pytest.approx(2e-2)
    assert "float32 differs from float64 by 2.0e-03 in raw outputs (limit 0.001)" in caplog.text


@NEED_ONNX
def test_weights_that_are_not_finite_are_not_exported(tmp_path):
    network = confident_network()
    with torch.no_grad():
        network.state_dict()["model.2.conv.weight"][0] = torch.nan
    with pytest.raises(ParityError):
        exported(network, tmp_path, grid=True)


@NEED_ONNX
def test_our_selection_is_that_of_onnx_runtime():
    """Many overlapping boxes, some with equal scores, for several thresholds."""
    from flatout.export.onnx_model import Session, traced
    from flatout.yolo.export.postprocess import OnnxNms

    class Alone(torch.nn.Module):
        def forward(self, x_BN5: torch.Tensor) -> torch.Tensor:
            return OnnxNms.apply(x_BN5[..., :4], x_BN5[..., 4:].transpose(1, 2), *setting)

    rng = np.random.default_rng(0)
    for setting in [(5, 0.45, 0.25), (100, 0.5, 0.0), (1000, 0.0, 0.5), (1000, 1.0, 0.3)]:
        centre, size = rng.uniform(0, 60, (3, 200, 2)), rng.uniform(2, 30, (3, 200, 2))
        score = np.round(rng.random((3, 200, 1)), 2)
        x_BN5 = np.concatenate((centre - size / 2, centre + size / 2, score), 2).astype(np.float32)
        model = traced(
            Alone(), {"x": torch.from_numpy(x_BN5)}, output_names=["chosen"],
            free_axes={"chosen": {0: "chosen"}}, opset=12,
        )  # fmt: skip
        expected = Session(model)({"x": x_BN5})["chosen"]
        most, iou, conf = setting
        found = select(torch.from_numpy(x_BN5[..., :4]), torch.from_numpy(x_BN5[..., 4]), most=most, iou=iou, conf=conf)
        np.testing.assert_array_equal(found.numpy(), expected)


# Images


def test_images_are_generated_or_named(tmp_path, caplog):
    generated = comparison_images(ExportOptions(pictures=3))
    assert generated.origin == "3 generated images" and len(generated.images) == 3
    folder = tmp_path / "images"
    folder.mkdir()
    cv2.imwrite(str(folder / "a.png"), np.full((40, 90, 3), 200, np.uint8))
    (folder / "b.jpg").write_text("no image")
    assert comparison_images(ExportOptions(images=(str(folder),))).origin == f"1 image of {folder}"
    assert f"{folder}/b.jpg: skipped: " in caplog.text
    with pytest.raises(DataError, match=r"nothing\.png: does not exist"):
        comparison_images(ExportOptions(images=(str(tmp_path / "nothing.png"),)))
    (folder / "a.png").unlink()
    with pytest.raises(DataError, match="no image can be read"):
        comparison_images(ExportOptions(images=(str(folder),)))


def test_the_validation_images_of_a_data_set_are_used(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number in range(3):
            cv2.imwrite(str(tmp_path / split / f"{number}.png"), np.full((40, 90, 3), 50 * number, np.uint8))
    yaml = tmp_path / "set.yaml"
    yaml.write_text(f"train: {tmp_path}/train\nval: {tmp_path}/val\nnc: 1\nnames: [thing]\n")
    images = comparison_images(ExportOptions(data=str(yaml), pictures=2))
    assert images.origin == f"2 images of {yaml}"
    # Letterboxed in grey, red first, in 0..1.
    inputs = images.as_input((64, 64))
    assert inputs.shape == (2, 3, 64, 64) and inputs.dtype == np.float32
    assert inputs[1, 0, 0, 0] == np.float32(114 / 255) and inputs[1, 0, 32, 32] == np.float32(50 / 255)


# The command


@NEED_ONNX
def test_the_command_writes_beside_the_weights_and_prints_differences_sizes_and_times(network, tmp_path, capsys):
    weights = saved(network, tmp_path / "best.pt")
    words = ["--weights", str(weights), "--img", str(SIDE), "--grid", "--pictures", "1", "--dynamic-b"]
    assert main(["yolo", "export", *words]) == 0
    output = capsys.readouterr().out
    for name in ("best.torchscript.pt", "best.onnx"):
        assert (tmp_path / name).is_file()
        line = next(line for line in output.splitlines() if line.startswith(f"{tmp_path}/{name}: "))
        assert " MB; largest difference " in line and " px, " in line
        assert any(line.split()[:1] == [name] and "ms" in line for line in output.splitlines())
    assert "torch on cpu, folded" in output


def test_out_names_the_files(network, tmp_path):
    weights = saved(network, tmp_path / "best.pt")
    options = {"img_size": (SIDE, SIDE), "formats": ("torchscript",), "pictures": 1}
    outcome = export(weights, ExportOptions(**options, out=str(tmp_path / "other.onnx")))
    assert [file.path for file in outcome.files] == [tmp_path / "other.torchscript.pt"]
    with pytest.raises(ConfigError, match="no such folder"):
        export(weights, ExportOptions(**options, out=str(tmp_path / "nowhere/x")))
    assert stem_for(weights, "") == tmp_path / "best"
    assert stem_for(weights, str(tmp_path)) == tmp_path / "best"
    assert stem_for(Path("a/v1.2.safetensors"), "b/c.d") == Path("b/c.d")
    assert stem_for(Path("a/v1.2.safetensors"), "") == Path("a/v1.2")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@NEED_ONNX
def test_torch_is_timed_on_the_named_gpu(network, tmp_path):
    outcome = exported(network, tmp_path, end2end=True, max_wh=640, conf_thres=0.1, device="0")
    assert outcome.device == "cuda:0" and outcome.torch_ms > 0


def test_a_failed_comparison_has_exit_code_8(network, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parity, "fused", folded_wrongly)
    weights = saved(network, tmp_path / "best.pt")
    words = ["--weights", str(weights), "--img", str(SIDE), "--formats", "torchscript", "--pictures", "1"]
    assert main(["yolo", "export", *words]) == 8
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_ensembles_and_missing_weights_are_refused(network, tmp_path):
    with pytest.raises(ConfigError, match="an ensemble cannot be exported"):
        export_network(Ensemble([network, network]), ExportOptions(), stem=tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"yolor-csp-c\.pt: no such file"):
        export(ExportOptions().weights)


def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"package onnxruntime: pip install onnx onnxruntime onnxslim"):
        export(tmp_path / "not even there.pt")


def test_options_without_effect_are_warned_about():
    def warnings_of(**options: object) -> str:
        return " ".join(ExportOptions(**options).without_effect())  # type: ignore[arg-type]

    text = warnings_of(end2end=True, dynamic=True, simplify=True, formats=("torchscript",))
    for words in (
        "--grid is switched on",
        "--dynamic has no effect",
        "no ONNX file is written",
        "outputs decoded boxes",
    ):
        assert words in text
    assert warnings_of(max_wh=3, formats=("onnx",)) == "--max-wh has no effect without --end2end."
    assert "opset 13" in warnings_of(int8=True) and warnings_of() == warnings_of(grid=True, dynamic=True) == ""


# Other runtimes


@NEED_ONNX
@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("simplify", [False, True])
def test_an_openvino_model_computes_the_same_numbers(grid, simplify, network, tmp_path):
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    (file,) = exported(network, tmp_path, grid=grid, simplify=simplify, formats=("openvino",)).files
    assert {path.name for path in file.path.iterdir()} == {"x.xml", "x.bin", "x.json"}
    # As the card says: by default, OpenVINO computes in bfloat16 on CPUs that can.
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    assert f'compile_model("x_openvino/x.xml", "CPU", {json.dumps(settings)})' in (tmp_path / "x.card.md").read_text()
    compiled = openvino.Core().compile_model(str(tmp_path / "x_openvino/x.xml"), "CPU", settings)
    x = pixels()
    with torch.no_grad():
        expected = network(torch.from_numpy(x))
    wanted = [expected.decoded] if grid else expected.raw
    for found, one in zip(compiled(x).values(), wanted, strict=True):
        np.testing.assert_allclose(found, one.numpy(), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("grid", [False, True])
def test_an_ncnn_model_computes_the_same_numbers(grid, network, tmp_path):
    pytest.importorskip("ncnn", reason="ncnn is not installed")
    pytest.importorskip("pnnx", reason="pnnx is not installed")
    (file,) = exported(network, tmp_path, grid=grid, formats=("ncnn",)).files
    assert {path.name for path in file.path.iterdir()} == {"x.param", "x.bin", "x.json"}
    assert file.difference is not None and file.limit is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ("tensorrt",)}, "trtexec --onnx=best.onnx"),
        ({"formats": ("engine",)}, "trtexec --onnx=best.onnx"),
        ({"formats": ("ncnn",), "batch_size": 2}, "ncnn has no batches, so --batch-size 2 cannot be used; give 1"),
    ],
)
def test_what_a_format_cannot_do_is_refused_with_what_to_do(options, message):
    with pytest.raises(ConfigError, match=message):
        ExportOptions(**options)


@pytest.mark.parametrize(("name", "package"), [("openvino", "openvino"), ("ncnn", "ncnn pnnx")])
def test_a_missing_runtime_is_reported_before_anything_is_built(name, package, network, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"Exporting needs the package {name}: pip install .*{package}"):
        exported(network, tmp_path, formats=(name,))
    assert not list(tmp_path.iterdir())


@NEED_ONNX
def test_every_export_has_a_model_card_with_hashes_classes_and_the_rule_of_shapes(network, tmp_path):
    outcome = exported(network, tmp_path, grid=True)
    card = outcome.card.read_text()
    assert outcome.card == tmp_path / "x.card.md"
    assert hashlib.sha256((tmp_path / "x.onnx").read_bytes()).hexdigest() in card
    assert all(name in card for name in network.names)
    assert f"Letterbox every image to {SIDE} x {SIDE}" in card and "largest difference" in card
    assert 'onnxruntime.InferenceSession("x.onnx")' in card and "cannot read" not in card


@NEED_ONNX
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"end2end": True, "max_wh": 640}, "OpenCV 4's dnn cannot read it, because it has no layer for NMS"),
        ({"dynamic": True}, "OpenCV 4's dnn cannot read it, because it needs fixed sizes"),
        ({"end2end": True}, "trtexec --onnx=x.onnx --saveEngine=x.engine --fp16` on the machine that will run it (not"),
    ],
)
def test_the_card_says_who_cannot_read_a_file(options, sentence, network, tmp_path):
    outcome = exported(network, tmp_path, grid=True, **options)
    assert sentence in outcome.card.read_text()
    if cv2.__version__.startswith("4."):
        with pytest.raises(cv2.error):
            cv2.dnn.readNetFromONNX(str(tmp_path / "x.onnx"))


def test_the_card_tells_nobody_the_folders_of_this_machine(network, tmp_path):
    (tmp_path / "secret").mkdir()
    cv2.imwrite(str(tmp_path / "secret/a.png"), np.zeros((SIDE, SIDE, 3), np.uint8))
    images = (str(tmp_path / "secret/a.png"),)
    outcome = exported(network, tmp_path, formats=("torchscript",), images=images, pictures=1)
    assert "on 1 image of a.png." in outcome.card.read_text() and "secret" not in outcome.card.read_text()
