"""A training learns, can be stopped anywhere and continues bit by bit; its files can be used."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.__main__ import main
from flatout.errors import DataError, ResourceError
from flatout.safefiles import atomic
from flatout.safefiles.container import read_container
from flatout.spike.config import ModelConfig, SpikeConfig, load_config
from flatout.spike.data.stream_files import open_stream
from flatout.spike.model import Clip, DeblurNet
from flatout.spike.predict import load_predictor, predict_folder, score_split
from flatout.spike.train import TrainOptions, train
from tests.spike.test_source import damaged_tree

TINY = (
    "DATA.CROP_SIZE=16", "DATA.NUM_VOXEL_BINS=4", "DATA.CLIP_LEN=2", "DATA.USE_RAM_CACHE=false", "TRAIN.EPOCHS=8",
    "TRAIN.BATCH_SIZE=2", "TRAIN.GRADIENT_ACCUMULATION_STEPS=2", "TRAIN.OPTIM.LR=4e-3", "TRAIN.SCHED.WARMUP_STEPS=1",
    "TRAIN.EMA_DECAY=0.5", "DATALOADER.TRAIN_WORKERS=0", "DATALOADER.VAL_WORKERS=0", "MODEL.WIDTH=4",
    "LOG.VAL_EVERY_STEPS=null", "LOG.TENSORBOARD=false", "TEST.NUM_WORKERS=0", "TEST.TILE_SIZE=0",
)  # fmt: skip


def config_for(demo: Path, folder: Path, *more: str) -> SpikeConfig:
    return load_config(demo, [*TINY, f"LOG.SAVE_DIR={folder}", *more])


def on_cpu(**keys) -> TrainOptions:
    return TrainOptions(device="cpu", **keys)


@pytest.fixture(scope="module")
def trained(demo, tmp_path_factory) -> Path:
    """The run folder of an uninterrupted training."""
    torch.set_num_threads(1)
    result = train(config_for(demo, tmp_path_factory.mktemp("unbroken") / "run"), on_cpu())
    assert result.finished and result.evaluation is not None
    return result.folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return read_container(folder / "ckpts/last.pt")["weights"]["state"]  # type: ignore[index]


def test_it_learns(trained):
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert len(log) == 8
    assert log[-1]["psnr"] > log[-1]["blurry_psnr"] + 0.2
    assert log[-1]["num_frames"] == 6  # each frame of the test sequence, once


def test_a_run_leaves_the_documented_files(trained):
    for name in ("config.yaml", "run.json", "log.jsonl", "ckpts/best.pt", "ckpts/last.pt", "metrics/epoch_000.json",
                 "metrics/val_step_2.json", "visuals/val_0000_00.png"):  # fmt: skip
        assert (trained / name).is_file(), name
    assert json.loads((trained / "run.json").read_text())["finished"] is True


@pytest.mark.parametrize("stops", [(2,), (3, 2), (1, 1, 1)])
def test_a_training_that_was_stopped_ends_with_the_same_bits(demo, trained, tmp_path, stops):
    """Some stops fall inside accumulation windows: the loop then finishes the window."""
    config = config_for(demo, tmp_path / "run")
    for stop in stops:
        assert not train(config, on_cpu(stop_after=stop)).finished
    result = train(config, on_cpu())
    assert result.folder == tmp_path / "run"
    ours, theirs = tensors_of(result.folder), tensors_of(trained)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    rows = [[json.loads(line)["psnr"] for line in (each / "log.jsonl").read_text().splitlines()]
            for each in (result.folder, trained)]  # fmt: skip
    assert rows[0] == rows[1]


@pytest.mark.parametrize("stops", [(), (6,)])
def test_validations_are_made_every_so_many_steps_also_within_an_epoch(demo, tmp_path, stops):
    """An epoch has two optimizer steps; the third ends inside the second epoch. A stop just there loses nothing."""
    config = config_for(demo, tmp_path / "run", "LOG.VAL_EVERY_STEPS=3", "TRAIN.EPOCHS=3")
    for stop in stops:
        assert not train(config, on_cpu(stop_after=stop)).finished
        assert not list((tmp_path / "run/metrics").glob("val_step_*.json"))
    assert train(config, on_cpu()).finished
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "run/metrics").glob("val_step_*.json")}
    assert sorted(found) == ["val_step_3", "val_step_6"]
    assert found["val_step_3"]["psnr"] != found["val_step_6"]["psnr"]
    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [("psnr" in row, row["epoch"]) for row in rows] == [(False, 0), (False, 1), (True, 2)]
    assert all(0 <= row["wait_ms"] <= row["step_ms"] for row in rows)


def test_a_finished_run_is_not_overwritten(demo, trained):
    config = config_for(demo, trained)
    result = train(config, on_cpu(stop_after=1))
    assert result.folder == trained.with_name("run2")


def test_changed_data_is_refused_unless_allowed(demo, tmp_path):
    shutil.copytree(demo.parent, tmp_path / "tree")
    config = config_for(demo, tmp_path / "run", f"DATA.ROOT={tmp_path / 'tree'}")
    train(config, on_cpu(stop_after=1))
    for part in ("blur", "sharp", "spike"):
        next((tmp_path / "tree/train/scene_00" / part).glob("000006.*")).unlink()
    with pytest.raises(DataError, match="--allow-data-change"):
        train(config, on_cpu())


@pytest.mark.parametrize("resident", ["false", "true"])
def test_one_damaged_frame_does_not_end_a_training_and_is_named(demo, tmp_path, caplog, resident):
    tree, (path,) = damaged_tree(demo, tmp_path, "scene_00/blur/000001")
    more = (f"DATA.ROOT={tree}", "TRAIN.EPOCHS=1", f"TRAIN.DEVICE_RESIDENT={resident}")
    assert train(config_for(demo, tmp_path / "run", *more), on_cpu()).finished
    assert sum(f"File {path} is replaced by a substitute" in text for text in caplog.messages) == 1
    assert any(text.startswith("1 file could not be read") and str(path) in text for text in caplog.messages)


def test_weights_score_and_deblur_through_the_commands(demo, trained, tmp_path, capsys):
    weights = str(trained / "ckpts/best.pt")
    assert main(["spike", "test", "--weights", weights, "--device", "cpu", "--output", str(tmp_path / "test")]) == 0
    assert "PSNR" in capsys.readouterr().out
    summary = json.loads((tmp_path / "test/metrics/test_summary.json").read_text())
    best = max(json.loads(line)["psnr"] for line in (trained / "log.jsonl").read_text().splitlines())
    assert summary["psnr"] == pytest.approx(best, abs=1e-4)
    scene = demo.parent / "test/scene_00"
    words = [
        "--input_blur",
        str(scene / "blur"),
        "--input_spike",
        str(scene / "spike"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert (
        main(
            ["spike", "predict", "--weights", weights, "--device", "cpu", *words, "--video", "--side_by_side", "--page"]
        )
        == 0
    )
    assert "before_after.html: open it in a browser" in capsys.readouterr().out
    page = (tmp_path / "out/before_after.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 12
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == [f"{n:06d}.png" for n in range(1, 7)]
    assert len(list(frames_of_video(tmp_path / "out/restored.avi"))) == 6
    assert (tmp_path / "out/side_by_side/000001.png").is_file()


def frames_of_video(path):
    import cv2

    video = cv2.VideoCapture(str(path))
    while (found := video.read())[0]:
        yield found[1]


def test_predict_takes_the_size_of_spike_frames_from_beside_the_spikes(demo, trained, tmp_path):
    """Frames and spikes in unrelated folders: config.yaml is above the spikes, as it was in the training."""
    scene = demo.parent / "test/scene_00"
    shutil.copytree(scene / "blur", tmp_path / "frames")
    shutil.copytree(scene / "spike", tmp_path / "camera/day/spike")
    shutil.copy(demo.parent / "config.yaml", tmp_path / "camera")
    done = predict_folder(
        load_predictor(trained / "ckpts/best.pt", "cpu"),
        tmp_path / "frames", tmp_path / "camera/day/spike", tmp_path / "out", video=False, compare=False,
    )  # fmt: skip
    assert done.frames == 6


def test_predict_takes_a_geometry_and_arrays_of_spikes(demo, trained, tmp_path, capsys):
    scene = demo.parent / "test/scene_00"
    shutil.copytree(scene / "spike", tmp_path / "dat")
    (tmp_path / "npz").mkdir()
    for path in (tmp_path / "dat").iterdir():
        np.savez(tmp_path / "npz" / f"{path.stem}.npz", spk=open_stream(path, geometry="32x16")[:])
    words = ["spike", "predict", "--weights", str(trained / "ckpts/best.pt"), "--device", "cpu"]
    words += ["--input_blur", str(scene / "blur"), "--input_spike"]
    assert main([*words, str(tmp_path / "dat"), "--output", str(tmp_path / "a")]) == 3
    error = capsys.readouterr().err
    assert "Cannot reshape spike data" in error and "--geometry WxH" in error and "SPIKE_H" not in error
    assert main([*words, str(tmp_path / "dat"), "--output", str(tmp_path / "a"), "--geometry", "32x16"]) == 0
    assert main([*words, str(tmp_path / "npz"), "--output", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    # No geometry helps against a damaged file.
    (tmp_path / "npz/000001.npz").write_bytes(b"PK\x03\x04 nothing")
    assert main([*words, str(tmp_path / "npz"), "--output", str(tmp_path / "c")]) == 3
    assert capsys.readouterr().err.rstrip().endswith("Copy or create it again.")
    for path in (tmp_path / "a").glob("*.png"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def predicting(weights: Path, blur: Path, spikes: Path, output: Path) -> list[str]:
    return [
        "spike", "predict", "--weights", str(weights), "--device", "cpu",
        "--input_blur", str(blur), "--input_spike", str(spikes), "--output", str(output),
    ]  # fmt: skip


def test_predict_deblurs_one_frame_with_its_stream_as_within_the_folder(demo, trained, tmp_path):
    scene, weights = demo.parent / "test/scene_00", trained / "ckpts/best.pt"
    shutil.copy(scene / "spike/000003.dat", demo.parent / "third_stream.dat")
    folder = ["--set", "DATA.CLIP_LEN=1"]
    assert main([*predicting(weights, scene / "blur", scene / "spike", tmp_path / "all"), *folder]) == 0
    one = predicting(weights, scene / "blur/000003.png", demo.parent / "third_stream.dat", tmp_path / "one")
    assert main([*one, "--page"]) == 0
    assert [path.name for path in (tmp_path / "one").glob("*.png")] == ["000003.png"]
    assert (tmp_path / "one/000003.png").read_bytes() == (tmp_path / "all/000003.png").read_bytes()


def test_predict_says_what_is_wrong_with_its_inputs(demo, trained, tmp_path, capsys):
    scene, weights = demo.parent / "test/scene_00", trained / "ckpts/best.pt"

    def error_of(weights: Path, blur: str, spikes: str) -> str:
        assert main(predicting(weights, scene / blur, scene / spikes, tmp_path / "out")) in (3, 4)
        return capsys.readouterr().err

    assert "no such folder or file" in error_of(weights, "blur", "none")
    assert "--input_blur is a file, the other one a folder" in error_of(weights, "blur/000001.png", "spike")
    assert "not a spike file by its name" in error_of(weights, "blur/000001.png", "sharp/000001.png")
    assert "6 frames in" in (text := error_of(weights, "blur", "sharp")) and "0 spike files in" in text
    assert f"such as {weights}." in error_of(trained, "blur", "spike")
    assert not (tmp_path / "out").exists()
    before = (scene / "blur/000001.png").read_bytes()
    for blur, spikes in (("blur", "spike"), ("blur/000001.png", "spike/000001.dat")):
        assert main(predicting(weights, scene / blur, scene / spikes, scene / "blur/../blur")) == 2
        assert "would replace the blurry ones" in capsys.readouterr().err
    assert (scene / "blur/000001.png").read_bytes() == before
    (tmp_path / "file").write_text("in the way")
    assert main(predicting(weights, scene / "blur", scene / "spike", tmp_path / "file/out")) == 5
    assert "cannot be written: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "test", "predict"])
def test_a_warning_says_if_streams_do_not_look_like_their_frames(command, demo, trained, tmp_path, caplog):
    def warnings_with(flipped: str) -> list[str]:
        caplog.clear()
        keys = (f"DATA.SPIKE_FLIPUD={flipped}",)
        if command == "train":
            train(config_for(demo, tmp_path / f"run_{flipped}", "TRAIN.EPOCHS=1", *keys), on_cpu())
        elif command == "test":
            score_split(load_predictor(trained / "ckpts/best.pt", "cpu", overrides=keys), "test", None)
        else:
            scene = demo.parent / "test/scene_00"
            words = predicting(trained / "ckpts/best.pt", scene / "blur", scene / "spike", tmp_path / flipped)
            assert main([*words, "--set", *keys]) == 0
        return [text for text in caplog.messages if "do not match their frame" in text]

    assert warnings_with("true") == []
    (warning,) = warnings_with("false")
    assert "spikes are upside down" in warning and "Set DATA.SPIKE_FLIPUD: true." in warning


def test_set_without_config_changes_the_config_in_the_weights(demo, trained, tmp_path, capsys, caplog):
    scene, weights = demo.parent / "test/scene_00", str(trained / "ckpts/best.pt")
    words = ["--weights", weights, "--device", "cpu", "--set"]
    folders = ["--input_blur", str(scene / "blur"), "--input_spike", str(scene / "spike")]
    folders += ["--output", str(tmp_path / "out")]
    assert main(["spike", "predict", *words, "DATA.SPIKE_T=3", *folders]) == 3
    assert "SPIKE_T=3" in capsys.readouterr().err
    assert main(["spike", "test", *words, "DATA.ROOT=nowhere", "--split", "test"]) == 3
    assert "DATA.ROOT=nowhere" in capsys.readouterr().err
    assert main(["spike", "test", *words, "DATA.NO_SUCH=1"]) == 2
    assert "NO_SUCH" in capsys.readouterr().err
    predictor = load_predictor(Path(weights), "cpu", overrides=["TEST.TILE_SIZE=64", "TRAIN.EPOCHS=3"])
    assert predictor.config.TEST.TILE_SIZE == 64
    assert [text for text in caplog.messages if "--set" in text] == [
        "--set TRAIN.EPOCHS=3 has no effect here: only DATA, TEST and MODEL.CHANNELS_LAST are used."
    ]


def test_the_progress_line_contains_the_line_of_the_guide(demo, tmp_path, caplog):
    caplog.set_level("INFO", "flatout")
    train(config_for(demo, tmp_path / "run", "TRAIN.EPOCHS=1"), on_cpu(log_every=1))
    line = [text for text in caplog.messages if text.startswith("train  ")][-1]
    # The guide: "step 100 | loss=0.0234 | data_time=18.5ms".
    (step,) = re.findall(r"  step (\d+) \| loss=\d\.\d{4} \| data_time=\d+\.\dms  ", line)
    assert f"  {step}/" in line
    shown = re.sub(r"\d+", "N", line)
    assert "  lr=N.Ne" in shown and "  step=N.Nms  N.N samples/s  " in shown
    page = (Path(__file__).parents[2] / "docs/spike.md").read_text()
    (example,) = [line for line in page.splitlines() if line.startswith("train  ")]
    assert re.sub(r"[-\d]+", "N", example).split() == re.sub(r"[-\d]+", "N", line).split()


def test_wrong_weights_are_exit_code_4(demo, tmp_path, capsys):
    (tmp_path / "x.pt").write_bytes(b"nothing")
    assert main(["spike", "test", "--weights", str(tmp_path / "x.pt"), "--device", "cpu"]) == 4
    assert capsys.readouterr().err.startswith("flatout: ")


def test_check_passes_on_valid_data_and_fails_on_a_flipped_stream(demo, capsys):
    words = ["spike", "check", "--config", str(demo), *(word for each in TINY for word in ("--set", each))]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.count("[PASS]") == 7
    assert "(1, 2, 3, 32, 64)" in out and "(1, 2, 4, 16, 32)" in out
    assert main([*words, "--set", "DATA.SPIKE_FLIPUD=false"]) == 3
    assert "spikes are upside down" in (out := capsys.readouterr().out) and "Set DATA.SPIKE_FLIPUD: true." in out


def test_exposure_times_come_from_an_align_log(demo, tmp_path, capsys):
    log = tmp_path / "align.csv"
    log.write_text("frame_idx,t0,t1,event_count,seq\n1,0.5,0.75,9,scene_00\n")
    words = ["spike", "check", "--config", str(demo), *(word for each in TINY for word in ("--set", each))]
    assert main([*words, "--set", f"DATA.ALIGN_LOG_PATHS=[{log}]"]) == 0
    assert "exposed from 0.5 to 0.75" in capsys.readouterr().out
    log.write_text("frame_idx,t0\nx,1\n")
    assert main([*words, "--set", f"DATA.ALIGN_LOG_PATHS=[{log}]"]) == 3
    assert f"{log}:2" in capsys.readouterr().out


def test_prepare_and_cache_work_as_commands(demo, tmp_path, capsys):
    assert main(["spike", "prepare", "--spike_root", str(tmp_path / "none")]) == 3
    assert "--spike_root" in capsys.readouterr().err
    rgb, spikes = tmp_path / "rgb", tmp_path / "spikes"
    for part in ("blur", "sharp"):
        shutil.copytree(demo.parent / "train/scene_00" / part, rgb / "train/scene_00" / part)
    shutil.copytree(demo.parent / "train/scene_00/spike", spikes / "train/scene_00/spike")
    folders = {"--spike_root": spikes, "--blur_root": rgb, "--output": tmp_path / "out"}
    words = ["spike", "prepare", *(str(word) for pair in folders.items() for word in pair)]
    assert main([*words, "--splits", "train", "--check", "--spike_hw", "16", "32"]) == 0
    out = capsys.readouterr().out
    assert "train/scene_00: 6 frames, 6 usable" in out and "fits its frame" in out
    assert main(["spike", "cache", "--config", str(demo), "--set", "DATA.VOXEL_CACHE_DIRNAME=vox5"]) == 0
    assert "train: 12 voxels" in capsys.readouterr().out
    voxel = np.load(demo.parent / "train/scene_00/vox5/000001.npy")
    assert (voxel.dtype, voxel.shape) == (np.uint8, (7, 16, 32))


def test_the_network_begins_as_the_identity_and_takes_any_size():
    for use_spike, temporal in ((True, False), (True, True), (False, True)):
        config = ModelConfig(WIDTH=4, ENC_BLOCKS=(1, 1), DEC_BLOCKS=(1, 1), USE_SPIKE=use_spike, TEMPORAL=temporal)
        network = DeblurNet(config, channels=5)
        blur = torch.rand(2, 3, 3, 22, 30)
        out = network(Clip(blur, torch.rand(2, 3, 5, 11, 15)))
        assert torch.allclose(out, blur, atol=1e-6)


@pytest.mark.parametrize(("ratio", "size"), [(1.0, 16), (2.0, 8), (4.0, 4), (3.0, 5)])
def test_spikes_reach_the_output_at_any_ratio(ratio, size):
    torch.manual_seed(1)
    network = DeblurNet(ModelConfig(WIDTH=4, ENC_BLOCKS=(1, 1, 1), DEC_BLOCKS=(1, 1, 1)), channels=5, ratio=ratio)
    torch.nn.init.normal_(network.ending.weight)
    spikes = torch.rand(1, 2, 5, size, size, requires_grad=True)
    network(Clip(torch.rand(1, 2, 3, 16, 16), spikes)).sum().backward()
    assert spikes.grad is not None and float(spikes.grad.abs().sum()) > 0


def test_the_wide_default_has_the_published_size():
    """Width 32 of NAFNet has 17.1 M parameters; the spike branch adds a little."""
    count = sum(p.numel() for p in DeblurNet(ModelConfig(USE_SPIKE=False), channels=5).parameters())
    assert 16.9e6 < count < 17.3e6


def test_a_config_with_another_number_of_bins_is_refused(demo, trained, tmp_path):
    config = config_for(demo, tmp_path, "DATA.NUM_VOXEL_BINS=6")
    with pytest.raises(ValueError, match=r"4 spike channels.*says 6"):
        load_predictor(trained / "ckpts/best.pt", "cpu", config)


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(demo, tmp_path):
    """A step of two ranks has the same clips as a step of one, and its gradient is the same mean."""
    words = [word for each in (*TINY, "TRAIN.EPOCHS=2") for word in ("--set", each)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "-m",
        "flatout",
        "spike",
        "train",
    ]
    more = ["--set", "TRAIN.BATCH_SIZE=1", "--set", f"LOG.SAVE_DIR={tmp_path / 'two/run'}"]
    done = subprocess.run(
        [*command, "--config", str(demo), "--device", "cpu", *words, *more],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one = train(config_for(demo, tmp_path / "one/run", "TRAIN.EPOCHS=2"), on_cpu()).folder
    ours, theirs = tensors_of(tmp_path / "two/run"), tensors_of(one)
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-3, atol=1e-5) for key in theirs)


# The end of a run


@pytest.mark.parametrize("name", ["best.pt", "run.json"])
def test_a_disk_that_is_full_at_the_end_loses_no_training(name, demo, tmp_path, monkeypatch):
    """F15: best.pt is written before the checkpoint that relies on it, run.json after everything."""
    config = config_for(demo, tmp_path / "run", "TRAIN.EPOCHS=1")
    whole = train(config_for(demo, tmp_path / "whole", "TRAIN.EPOCHS=1"), on_cpu())
    train(config, on_cpu(stop_after=1))  # run.json of a new run needs disk space too

    def check(path: Path, needed_bytes: int) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "check_room", check)
        with pytest.raises(
            ResourceError,
            match=r"not enough disk space: .* run the same command again to (complete the run|continue)\.$",
        ):
            train(config, on_cpu())
    result = train(config, on_cpu())
    assert (result.folder.name, result.finished) == ("run", True)
    for file in ("best.pt", "last.pt"):
        mine, theirs = (state_in(folder / "ckpts" / file) for folder in (whole.folder, result.folder))
        assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []


def state_in(path: Path) -> dict[str, torch.Tensor]:
    return read_container(path)["weights"]["state"]  # type: ignore[index]


def test_with_once_a_finished_run_is_not_repeated(demo, tmp_path):
    config = config_for(demo, tmp_path / "run", "TRAIN.EPOCHS=1")
    first, second = (train(config, on_cpu(once=True)) for _ in range(2))
    assert (first.folder, first.finished) == (second.folder, second.finished)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
