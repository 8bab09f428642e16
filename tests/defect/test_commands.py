"""The command line: arguments are followed or refused with a message, and the promised files are written."""

import csv
import hashlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile
import torch

from flatout.__main__ import main
from flatout.defect import export
from flatout.defect.check import check_data_set, displacement
from flatout.defect.compare.align import AlignConfig
from flatout.defect.data.pairs import PairReader, list_pair_images
from flatout.defect.demo_data import (
    DemoDataConfig,
    generate_defective_strip,
    generate_strip,
    write_demo_data,
    write_strip,
)
from flatout.defect.export import WholeImage, model_for
from flatout.defect.model import DefectNet
from flatout.defect.options import CalibrateOptions
from flatout.defect.patches import Grid
from flatout.defect.predict import list_test_images
from flatout.defect.weights import weights_metadata
from flatout.errors import ConfigError
from flatout.safefiles.container import write_container
from tests.defect.boards import write_boards
from tests.defect.small_runs import small_data


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return small_data(tmp_path_factory.mktemp("strips"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "best.pt"
    torch.manual_seed(0)
    network = DefectNet("v1", 8)
    write_container(
        path, {"weights": weights_metadata(network, patch=32) | {"state": network.state_dict(), "threshold": 0.5}}
    )
    return path


def test_help_and_mistakes_are_answered_without_torch():
    program = """
import sys
from flatout.__main__ import main
for words in (["defect"], ["defect", "train", "--help"], ["defect", "test", "--help"], ["defect", "check", "--help"]):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == 0
assert main(["defect", "train", "--epochs", "many"]) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "--partial_leak_prob" in done.stdout
    assert "epochs" in done.stderr


def test_yaml_and_flags_have_the_same_names_and_flags_override(data, tmp_path, capsys):
    settings = tmp_path / "run.yaml"
    settings.write_text(
        f"training_dataset_path: {data}/train/good/\ncheckpoint_path: {tmp_path}/runs\nbase_width: 8\npatch_size: 32\n"
        "min_patches: [2, 2]\nbs: 8\nepochs: 9\ngpu_id: -1\nnum_workers: 0\nuse_mask: false\namplitudes: [[60, 80]]\n"
    )
    words = ["defect", "train", "--config", str(settings), "--epochs", "1", "--num_defects_range", "2", "4"]
    assert main([*words, "--amplitudes", "10", "20:30", "--line_ratio", "0.2"]) == 0
    written = (tmp_path / "runs/exp/config.yaml").read_text()
    assert "epochs: 1\n" in written
    assert "Results are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("epoch: 3\n", "unknown key"),
        ("bs: many\n", "a whole number"),
        ("network: v9\n", "'v1' or 'v2'"),
        ("- 1\n", "name: value"),
        ("lr: .nan\n", "finite"),
    ],
)
def test_a_yaml_with_mistakes_is_refused_by_name(text, complaint, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text(text)
    assert main(["defect", "train", "--config", str(tmp_path / "bad.yaml")]) == 2
    error = capsys.readouterr().err
    assert "bad.yaml" in error and complaint in error


def test_test_writes_maps_plots_and_tables_and_prints_scores(data, weights, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--model_path", str(weights), "--test_path", str(data), "--output_dir", str(out), "--gpu_id", "-1"]
    assert main(["defect", "test", *words, "--sweep"]) == 0
    output = capsys.readouterr().out
    assert "pixel_AP" in output and "mean probability" in output
    heat = tifffile.imread(out / "bright_spots/0001_heat.tiff")
    assert heat.shape == (80, 64) and heat.dtype == np.float32
    assert cv2.imread(str(out / "bright_spots/0001_result.png")).shape[0] == 80
    rows = list(csv.DictReader((out / "images.csv").open()))
    assert {(row["name"], row["is_defective"]) for row in rows} == {
        ("good/0001.tiff", "False"),
        ("bright_spots/0001.tiff", "True"),
    }
    assert json.loads((out / "results.json").read_text())["threshold"] == 0.5
    ranked = [float(row["score"]) for row in csv.DictReader((out / "detections.csv").open())]
    assert ranked == sorted(ranked, reverse=True)


def test_without_a_stored_threshold_a_half_is_used_and_never_one_of_the_test_images(data, tmp_path, capsys):
    torch.manual_seed(0)
    network, path = DefectNet("v1", 8), tmp_path / "old.pth"
    torch.save({"model_state_dict": network.state_dict(), "img_height": 32}, path)
    words = ["--model_path", str(path), "--test_path", str(data), "--output_dir", str(tmp_path), "--gpu_id", "-1"]
    assert main(["defect", "test", *words, "--save_pictures", "false"]) == 0
    shown = capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["threshold"] == 0.5
    assert "old.pth holds no threshold, so 0.5 is used" in shown and "defect calibrate" in shown
    assert "pixel_best_F1 is an upper bound" in shown


def test_a_calibration_looks_at_validation_images_or_at_good_ones(data, weights, tmp_path, capsys):
    def calibrated(folder):
        words = ["--model_path", str(weights), "--test_path", str(folder), "--gpu_id", "-1"]
        return main(["defect", "calibrate", *words, "--settings", str(tmp_path / "s.yaml")])

    for folder, images in (
        (data, "2 images"),
        (data / "valid", "2 images"),
        (data / "train/good", "4 images, all good"),
    ):
        assert calibrated(folder) == 0
        assert images in capsys.readouterr().out
    assert {image.path.parent.parent.name for image in list_test_images(CalibrateOptions(test_path=str(data)))} == {
        "valid"
    }
    assert calibrated(data / "valid/bright_spots") == 3
    assert "a folder named good" in capsys.readouterr().err


def test_a_sweep_without_weights_is_refused_before_anything_is_read(tmp_path, capsys):
    write_boards(tmp_path, 1)
    assert main(["defect", "test", "--test_path", str(tmp_path), "--sweep"]) == 2
    assert "--sweep" in capsys.readouterr().err


def test_predict_takes_any_folder_and_zeroes_dead_pixels(data, weights, tmp_path):
    dead = tmp_path / "dead_pixels.csv"
    dead.write_text("dead_x,dead_y\n20,30\n")
    folder = data / "test/bright_spots"
    words = ["--model_path", str(weights), "--test_path", str(folder), "--output_dir", str(tmp_path / "out")]
    assert main(["defect", "predict", *words, "--gpu_id", "-1", "--dead_pixels", str(dead), "--untiled"]) == 0
    heat = tifffile.imread(tmp_path / "out/0001_heat.tiff")
    assert (heat[25:35, 15:25] == 0).all() and heat[40, 40] > 0


def test_amp_changes_the_heat_by_little_and_only_if_asked(data, weights, tmp_path):
    words = ["defect", "predict", "--model_path", str(weights), "--test_path", str(data / "test/bright_spots")]
    heat = {}
    for amp in ("none", "off", "bf16"):
        out = tmp_path / amp
        given = [] if amp == "none" else ["--amp", amp]
        assert main([*words, "--device", "cpu", "--output_dir", str(out), "--save_pictures", "false", *given]) == 0
        heat[amp] = tifffile.imread(out / "0001_heat.tiff")
    np.testing.assert_array_equal(heat["off"], heat["none"])
    assert 0 < np.abs(heat["bf16"] - heat["off"]).max() < 0.01


def test_predict_names_the_missing_argument_or_folder(weights, tmp_path, capsys):
    assert main(["defect", "predict", "--model_path", str(weights)]) == 2
    for with_weights in (["--model_path", str(weights)], []):
        assert main(["defect", "predict", *with_weights, "--test_path", str(tmp_path / "none")]) == 3
        assert "none: no such file or folder" in capsys.readouterr().err


def test_check_finds_nothing_in_a_generated_set_and_everything_in_a_spoiled_one(tmp_path, capsys):
    root = tmp_path / "set"
    write_demo_data(root, DemoDataConfig(images=3, valid=1, test=1, shape_hw=(128, 160)))
    assert main(["defect", "check", str(root)]) == 0
    assert "nothing found" in capsys.readouterr().out
    good = root / "train/good"
    write_strip(good / "small.tiff", generate_strip(1, (130, 160)))
    write_strip(good / "black.tiff", np.zeros((3, 128, 160), np.float32))
    spoiled = generate_strip(1, (128, 160))
    spoiled[1, 5, 5] = np.nan
    write_strip(good / "nan.tiff", spoiled)
    rng = np.random.default_rng(0)
    plane = rng.uniform(0, 255, (128, 160)).astype(np.float32)
    write_strip(good / "moved.tiff", np.stack((plane, np.roll(plane, (3, -4), (0, 1)), plane)))
    write_strip(good / "raw.tiff", generate_strip(2, (128, 160)) * 16)
    (good / "broken.tiff").write_bytes(b"II*\0nothing")
    write_strip(root / "train/hard_negative_samples/dark.tiff", np.zeros((3, 128, 160), np.float32))
    next((root / "ground_truth/bright_spots").iterdir()).unlink()
    report = check_data_set(str(good), "tiff")
    found = {(finding.topic, Path(finding.where).stem) for finding in report.findings}
    assert found == {
        ("size", "small"),
        ("no content", "black"),
        ("no content", "dark"),
        ("cannot be used", "nan"),
        ("cannot be used", "broken"),
        ("misregistered", "moved"),
        ("copied plane", "moved"),
        ("range", "raw"),
        ("mask missing", "0001"),
    }
    assert main(["defect", "check", str(good)]) == 3


def test_check_explains_grey_images_and_gives_sizes_as_width_x_height(tmp_path, capsys):
    png, tiff = tmp_path / "png/train/good", tmp_path / "tiff/train/good"
    for folder in (png, tiff):
        folder.mkdir(parents=True)
    for number, shape_hw in enumerate([(128, 160), (150, 140)]):
        cv2.imwrite(str(png / f"{number}.png"), generate_strip(number, shape_hw)[0].astype(np.uint8))
    assert main(["defect", "check", str(png), "--img_format", "png_jpg"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 images, the first of 160 x 128 px (width x height)"
    (size,) = (line for line in lines if "the first image 160 x 128" in line)
    assert "it has 140 x 150 pixels (width x height)" in size and "test, predict and calibrate do not" in size
    assert "warning  equal planes: 2" in lines and "ref1 is identical" not in "".join(lines)
    assert all("or pairs of a template and a test image" in line for line in lines if "three planes are equal" in line)

    tifffile.imwrite(tiff / "0.tiff", generate_strip(0, (128, 160))[0])
    assert main(["defect", "check", str(tiff)]) == 3
    found = capsys.readouterr().out
    assert "0.tiff: it is one plane of 160 x 128 px." in found and "give pairs: a template and a test image" in found


def test_displacement_is_the_shift_of_the_reference():
    plane = np.random.default_rng(0).uniform(0, 255, (90, 70)).astype(np.float32)
    assert displacement(plane, np.roll(plane, (3, -4), (0, 1))) == (-4, 3)
    assert displacement(*generate_strip(3, (128, 160))[:2]) == (0, 0)


@pytest.mark.parametrize("shift_px", [1, 2, 5])
def test_displacement_of_a_coarse_pattern_is_exact_and_noise_is_no_displacement(shift_px):
    rng = np.random.default_rng(0)
    blocks = np.kron(rng.uniform(0, 255, (16, 12)), np.ones((40, 40)))
    target, ref = (blocks + rng.normal(0, 3, blocks.shape) for _ in range(2))
    assert displacement(target, ref) == (0, 0)
    assert displacement(target, np.roll(ref, shift_px, 1)) == (shift_px, 0)


def test_check_ignores_the_range_of_a_plane_that_is_dropped(tmp_path):
    planes = np.concatenate((generate_strip(1, (128, 160)), np.full((1, 128, 160), 6e4, np.float32)))
    write_strip(tmp_path / "train/good/four.tiff", planes)
    assert check_data_set(str(tmp_path), "tiff").findings == []


def test_the_demo_trains_and_shows_what_it_found(tmp_path, monkeypatch, capsys):
    from flatout.defect import demo_data
    from flatout.defect.commands import demo

    monkeypatch.setattr(demo, "ON_CPU", demo.DemoSize(images=2, patch=32, base_width=8, epochs=1))
    small = partial(DemoDataConfig, valid=1, test=1, shape_hw=(96, 80))
    monkeypatch.setattr(demo_data, "DemoDataConfig", small)
    assert main(["defect", "demo", "--out", str(tmp_path), "--gpu_id", "-1"]) == 0
    output = capsys.readouterr().out
    assert "on strips it has not seen: pixel_AUROC" in output and "mean probability" in output
    assert (tmp_path / "test/bright_spots/0001_result.png").exists()


def test_the_demo_on_the_cpu_is_small_although_there_is_a_gpu(tmp_path, monkeypatch):
    """`--gpu_id -1` on a machine with a GPU must not start the training that was sized for the GPU."""
    from flatout import ranks
    from flatout.defect import train as training
    from flatout.defect.commands import demo

    monkeypatch.setattr(ranks, "choose_device", lambda device: torch.device(device or "cuda"))
    monkeypatch.setattr(training, "train", lambda options: pytest.fail(str(options.base_width)))
    for words, size in ((["--gpu_id", "-1"], demo.ON_CPU), ([], demo.ON_GPU)):
        with pytest.raises(pytest.fail.Exception, match=rf"^{size.base_width}$"):
            main(["defect", "demo", "--out", str(tmp_path / str(size.base_width)), *words])


def test_only_detections_that_reach_the_threshold_are_listed(data, weights, tmp_path, capsys):
    def listed(*more):
        words = [
            "--model_path",
            str(weights),
            "--test_path",
            str(data),
            "--output_dir",
            str(tmp_path),
            "--gpu_id",
            "-1",
        ]
        assert main(["defect", "predict", *words, *more]) == 0
        rows = {row["name"]: int(row["num_detections"]) for row in csv.DictReader((tmp_path / "images.csv").open())}
        return [float(row["score"]) for row in csv.DictReader((tmp_path / "detections.csv").open())], rows

    scores, _ = listed("--all_detections")
    middle = sorted(scores)[len(scores) // 2]
    capsys.readouterr()
    above, rows = listed("--threshold", str(middle))
    assert above == [score for score in scores if score >= middle] and 0 < len(above) < len(scores)
    assert sum(rows.values()) == len(above), "images.csv counts what detections.csv lists"
    assert f"2 images, {len(above)} detection" in capsys.readouterr().out
    assert listed("--threshold", "1.001") == ([], dict.fromkeys(rows, 0))
    assert listed("--threshold", "1.001", "--all_detections")[0] == scores


def test_images_without_references_are_explained_once(weights, tmp_path, caplog):
    for number in range(2):
        cv2.imwrite(str(tmp_path / f"{number}.png"), generate_strip(number, (80, 64))[0].astype(np.uint8))
    words = ["--model_path", str(weights), "--test_path", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    assert main(["defect", "predict", *words, "--gpu_id", "-1", "--img_format", "png_jpg"]) == 0
    (message,) = [text for text in caplog.messages if "planes are equal" in text]
    assert message.startswith(f"{tmp_path / '0.png'}: ") and "no defect can be found" in message


def test_demo_data_is_kept_and_other_files_are_left_alone(data, tmp_path):
    before = (data / "train/good/0000.tiff").stat().st_mtime_ns
    small_data(data)
    assert (data / "train/good/0000.tiff").stat().st_mtime_ns == before
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["defect", "demo-data", str(tmp_path)]) == 2
    planes, mask = generate_defective_strip(0)
    assert planes.shape == (3, 976, 176) and 9 * 3 <= mask.sum() <= 15 * 4


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_network_for_whole_images_equals_patch_by_patch_stitching(version):
    torch.manual_seed(0)
    network = DefectNet(version, 8).eval()
    grid = Grid.over((75, 61), 32)
    images = torch.from_numpy(np.random.default_rng(0).uniform(0, 255, (2, 3, 75, 61)).astype(np.float32))
    from flatout.defect.evaluate.maps import HeatMapper

    with torch.inference_mode():
        found = WholeImage(network, grid)(images).numpy()
    assert found.shape == (2, 3, 75, 61) and not found[:, 1:].any()
    mapper = HeatMapper(network, lambda shape_hw: grid, torch.device("cpu"))
    for image, heat in zip(images.numpy(), found[:, 0], strict=True):
        np.testing.assert_allclose(mapper(image), heat, atol=1e-6)


def test_an_exported_file_equals_the_network_for_any_batch_and_states_its_input_range(weights, tmp_path, capsys):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    out = tmp_path / "strip.onnx"
    assert main(["defect", "export", "--model_path", str(weights), "--size", "80", "64", "--output", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "of the network" in shown and f"model card: {tmp_path}/strip.card.md" in shown
    assert "It takes images of 64 x 80 px (width x height)" in shown
    card = (tmp_path / "strip.card.md").read_text()
    assert hashlib.sha256(out.read_bytes()).hexdigest() in card
    assert "| height, width | 80,64 |" in card and "| planes | target, ref1, ref2 |" in card
    facts = {entry.key: entry.value for entry in onnx.load(str(out)).metadata_props}
    assert facts["input_range"] == "0..255"
    assert facts["threshold"] == "0.5" and "at or above 0.5 counts as defect" in card and "must be aligned" in card


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_smaller_files_give_nearly_the_same_heat_map(precision, data, weights, tmp_path, capsys):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    out = tmp_path / "strip.onnx"
    words = ["defect", "export", "--model_path", str(weights), "--size", "80", "64", "--output", str(out)]
    assert main([*words, "--precision", precision, "--calibrate", str(data / "train/good")]) == 0
    smaller = tmp_path / f"strip.{precision}.onnx"
    assert smaller.stat().st_size < out.stat().st_size
    image = generate_strip(3, (80, 64))[None]
    whole, reduced = (
        runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"input": image})[0]
        for path in (out, smaller)
    )
    assert np.abs(whole - reduced).max() < 0.05
    if precision == "int8":
        assert main([*words, "--precision", "int8"]) == 2
        assert "--calibrate" in capsys.readouterr().err
        other = ["--size", "64", "80", "--precision", "int8", "--calibrate", str(data / "train/good")]
        assert main([*words, *other]) == 3
        assert "64 x 80 pixels (width x height), but the network is exported for 80 x 64" in capsys.readouterr().err
        (tmp_path / "broken.tiff").write_bytes(b"II*\0nothing")
        assert main([*words, "--precision", "int8", "--calibrate", str(tmp_path)]) == 3
        assert "broken.tiff" in capsys.readouterr().err


def test_int8_is_calibrated_on_pairs_as_the_network_sees_them(weights, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    boards = write_boards(tmp_path / "boards", 2)
    given = []

    def reduce_precision(path, out, precision, images):
        given.extend(images)
        out.write_bytes(path.read_bytes())

    monkeypatch.setattr(export, "reduce_precision", reduce_precision)
    size = map(str, cv2.imread(str(boards / "test/00.png"), cv2.IMREAD_GRAYSCALE).shape)
    words = ["defect", "export", "--model_path", str(weights), "--size", *size]
    assert main([*words, "--output", str(tmp_path / "b.onnx"), "--precision", "int8", "--calibrate", str(boards)]) == 0
    pairs = list_pair_images(boards)
    assert len(given) == len(pairs) == 2
    for image_CHW, pair in zip(given, pairs, strict=True):
        np.testing.assert_array_equal(image_CHW, PairReader(pairs, AlignConfig())(pair.path))


def test_an_openvino_model_computes_the_same_heat_map_for_any_batch(weights, tmp_path, capsys):
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    out = tmp_path / "strip.onnx"
    words = ["defect", "export", "--model_path", str(weights), "--size", "80", "64", "--output", str(out)]
    assert main([*words, "--openvino"]) == 0
    assert "strip_openvino: OpenVINO, within" in capsys.readouterr().out
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(tmp_path / "strip_openvino/strip.xml"), "CPU", settings)
    session = runtime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    for size in (1, 3):
        images = np.stack([generate_strip(number, (80, 64)) for number in range(size)])
        np.testing.assert_allclose(compiled(images)[0], session.run(None, {"input": images})[0], atol=1e-4)
    assert json.loads((tmp_path / "strip_openvino/strip.json").read_text())["input_range"] == "0..255"


def test_without_openvino_the_error_says_what_to_install(weights, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openvino", None)
    out = tmp_path / "strip.onnx"
    assert main(["defect", "export", "--model_path", str(weights), "--output", str(out), "--openvino"]) == 2
    assert "pip install onnx onnxruntime openvino" in capsys.readouterr().err and not out.exists()


def test_without_onnx_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"pip install onnx onnxruntime onnxslim"):
        model_for(DefectNet("v1", 8), Grid.over((80, 64), 32)).write_onnx(tmp_path / "x.onnx")
