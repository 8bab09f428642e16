"""A simulated camera obeys its arithmetic, and a simulated set is repeatable, resumable and fit for training."""

import json
import math
import shlex
import shutil
import weakref
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.spike
from flatout.__main__ import main
from flatout.errors import ConfigError, DataError, MissingFileError
from flatout.spike.config import load_config
from flatout.spike.data.clip_set import open_training
from flatout.spike.sensor import Between, LinearLight, SensorConfig, SpikeSensor, sensor_light
from flatout.spike.simulate import (
    SimulateConfig,
    exposures,
    find_sources,
    fitted,
    frame_size,
    num_exposures,
    plan_sequences,
    simulate_set,
)


def sensor_for(*shape_hw: int, seed: int = 0, **keys) -> SpikeSensor:
    return SpikeSensor((shape_hw[0], shape_hw[1]), SensorConfig(**keys), np.random.default_rng(seed))


# The sensor


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.floats(1, 8), st.integers(1, 200))
def test_a_pixel_fires_as_often_as_its_light_fills_it(light, threshold, num_frames):
    """Nothing is lost: the number of spikes is the light / threshold, to within one spike."""
    spikes = sensor_for(3, 4, threshold=threshold).expose(np.full((3, 4), light, np.float32), num_frames)
    assert spikes.shape == (num_frames, 3, 4) and spikes.dtype == bool
    assert np.abs(spikes.sum(0) - num_frames * light / threshold).max() <= 1.01


def test_the_charge_lasts_from_one_exposure_to_the_next():
    light = np.random.default_rng(1).random((6, 7), np.float32)
    whole, parts = sensor_for(6, 7), sensor_for(6, 7)
    assert np.array_equal(whole.expose(light, 60), np.concatenate([parts.expose(light, n) for n in (1, 20, 39)]))


def test_reset_to_zero_loses_what_exceeds_the_threshold():
    light = np.full((8, 8), 0.6, np.float32)
    # 0.6 per frame: full after two frames, where 0.2 are lost: every second frame instead of six of ten.
    assert sensor_for(8, 8, threshold=1, reset="zero").expose(light, 1000).mean() == pytest.approx(0.5, abs=0.01)
    assert sensor_for(8, 8, threshold=1, reset="subtract").expose(light, 1000).mean() == pytest.approx(0.6, abs=0.01)


def test_a_saturated_pixel_fires_always_and_stops_at_once():
    sensor = sensor_for(2, 2, threshold=0.25)
    assert sensor.expose(np.ones((2, 2), np.float32), 50)[1:].all()
    assert sensor.expose(np.zeros((2, 2), np.float32), 50).sum() <= 4


def test_noise_changes_when_pixels_fire_and_hardly_how_often():
    light = np.full((40, 40), 0.5, np.float32)
    quiet, noisy = sensor_for(40, 40).expose(light, 400), sensor_for(40, 40, noise=0.3).expose(light, 400)
    assert noisy.mean() == pytest.approx(quiet.mean(), rel=0.03)
    # 100 spikes expected per pixel; each is uncertain by 0.3, so the count by 0.3 * 10.
    assert quiet.sum(0).std() < 0.6 and noisy.sum(0).std() == pytest.approx(3, rel=0.2)
    mismatched = sensor_for(40, 40, mismatch=0.1).expose(light, 400).sum(0)
    assert mismatched.std() == pytest.approx(10, rel=0.2)
    dark = sensor_for(40, 40, dark=0.02).expose(0 * light, 1000)
    assert dark.mean() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("keys", [{"threshold": 0}, {"noise": -0.1}, {"mismatch": 1}, {"dark": 1.5}])
def test_impossible_sensors_are_refused(keys):
    with pytest.raises(ConfigError, match=f"--{next(iter(keys))} "):
        SensorConfig(**keys)


def test_light_is_what_a_pixel_collects_from_its_area():
    frame = np.random.default_rng(2).integers(0, 256, (6, 8, 3), np.uint8)
    light = LinearLight(2.2).light(frame)
    assert np.allclose(light, (frame / 255) ** 2.2, atol=1e-6)
    assert np.array_equal(LinearLight(2.2).stored(light), frame)
    grey = light @ np.array([0.299, 0.587, 0.114])
    assert np.allclose(sensor_light(light, (3, 4)), grey.reshape(3, 2, 4, 2).mean(axis=(1, 3)), atol=1e-6)


# Between frames


def textured(shift: int) -> np.ndarray:
    """A smooth texture, moved to the left."""
    noise = np.random.default_rng(3).integers(0, 256, (12, 20, 3), np.uint8)
    return np.ascontiguousarray(cv2.resize(noise, (160, 96), interpolation=cv2.INTER_CUBIC)[:, shift : shift + 128])


def test_optical_flow_finds_the_frame_between_and_blending_does_not():
    before, middle, after = textured(0), textured(3), textured(6)
    error = {
        method: np.abs(Between(before, after, method).at(0.5)[:, 16:-16].astype(int) - middle[:, 16:-16]).mean()
        for method in ("flow", "blend")
    }
    assert error["flow"] < 1 < 8 < error["blend"]
    between = Between(before, after, "flow")
    assert between.at(0) is before and between.at(1) is after


# Exposures


def video_of(num: int) -> np.ndarray:
    """Frames whose brightness is their number times 8."""
    return np.stack([np.full((16, 32, 3), 8 * number, np.uint8) for number in range(num)])


@pytest.mark.parametrize(("exposure", "interpolate"), [(1, 8), (2, 4), (3, 1), (3, 2), (5, 3)])
def test_an_exposure_is_centred_on_its_sharp_frame(exposure, interpolate):
    """A steady ramp of brightness: its mean over an exposure is its middle, which is a frame of the video."""
    config = SimulateConfig(exposure=exposure, interpolate=interpolate, hold=2, interpolation="blend")
    found = list(exposures(iter(video_of(20)), sensor_for(8, 16), config))
    assert len(found) == num_exposures(20, config)
    for number, each in enumerate(found):
        centre = config.reach + number * exposure
        assert np.all(each.sharp_HW3 == 8 * centre)
        assert np.abs(each.blur_HW3.astype(int) - 8 * centre).max() <= 1
        assert each.spikes_Thw.shape == (config.spike_frames, 8, 16)
        assert config.spike_frames == exposure * interpolate * 2
    # All spikes together are all the light, without gaps or overlaps between exposures.
    light = sum(8 * (config.reach + number * exposure) / 255 for number in range(len(found))) * config.spike_frames
    assert sum(each.spikes_Thw.mean() for each in found) * config.spike_frames == pytest.approx(light / 2, abs=1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(2, 9), st.integers(0, 80), st.integers(1, 12) | st.none())
def test_no_exposure_needs_a_frame_that_does_not_exist(exposure, interpolate, num_frames, stride):
    config = SimulateConfig(exposure=exposure, interpolate=interpolate, stride=stride)
    offsets = config.offsets_K
    assert offsets.sum() == pytest.approx(0, abs=1e-9) and len(offsets) == exposure * interpolate
    count = num_exposures(num_frames, config)
    last = config.reach + (count - 1) * (stride or exposure)
    if count:
        assert config.reach + offsets[0] >= 0 and math.ceil(last + offsets[-1]) <= num_frames - 1
    assert math.ceil(last + (stride or exposure) + offsets[-1]) > num_frames - 1  # one more would not fit


def test_frames_between_two_exposures_are_not_kept():
    config = SimulateConfig(exposure=3, stride=40, interpolate=2, hold=1, interpolation="blend")
    made: list[weakref.ref[np.ndarray]] = []

    def frames():
        for frame in video_of(31).repeat(6, axis=0):
            made.append(weakref.ref(own := frame.copy()))
            yield own
            del own
            assert sum(each() is not None for each in made) <= 2 * config.reach + 3

    found = sum(1 for _ in exposures(frames(), sensor_for(8, 16), config))
    assert found == num_exposures(186, config) == 5


# The plan


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 50), st.floats(0, 0.9))
def test_every_exposure_is_in_exactly_one_sequence(lengths, longest, share):
    config = SimulateConfig(sequence_length=longest, test_share=share, exposure=3)
    sources = [(f"v{number}", length) for number, length in enumerate(lengths)]
    plan = plan_sequences(sources, config)
    assert len({(each.split, each.name) for each in plan}) == len(plan)
    assert all(1 <= each.num_frames <= longest for each in plan)
    for number, (_, length) in enumerate(sources):
        starts = [each.first + 3 * n for each in plan if each.source == number for n in range(each.num_frames)]
        assert starts == [config.reach + 3 * n for n in range(num_exposures(length, config))]


def test_whole_videos_are_tested_on_if_there_are_enough_else_the_end_of_each():
    many = plan_sequences([(f"v{number}", 40) for number in range(10)], SimulateConfig(test_share=0.2))
    tested = {each.source for each in many if each.split == "test"}
    assert len(tested) == 2 and not tested & {each.source for each in many if each.split == "train"}
    (first, last) = plan_sequences([("v", 52)], SimulateConfig(test_share=0.2))
    assert (first.split, first.num_frames, last.split, last.num_frames) == ("train", 40, "test", 10)
    assert {each.split for each in plan_sequences([("v", 52)], SimulateConfig(test_share=0))} == {"train"}
    most = plan_sequences([("v", 52), ("w", 52)], SimulateConfig(test_share=0.9))
    assert {each.split for each in most} == {"train", "test"}  # something is left to train on


# Sets


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> Path:
    """A video of 14 frames of 70 x 34 in which a square moves over a texture."""
    path = tmp_path_factory.mktemp("film") / "film.avi"
    back = cv2.resize(textured(0), (70, 34))
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 30, (70, 34))
    for number in range(14):
        frame = back.copy()
        frame[8:20, 4 * number : 4 * number + 10] = (30, 200, 120)
        writer.write(frame)
    writer.release()
    return path


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.*")) if path.is_file()
    }


def words_for(film: Path, out: Path, *more: str) -> list[str]:
    return ["spike", "simulate", str(film), str(out), "--sequence-length", "5", "--hold", "4", "--noise", "0.1", *more]


def test_a_video_becomes_a_set_that_training_accepts(film, tmp_path, capsys):
    out = tmp_path / "set"
    assert main(words_for(film, out, "--workers", "1")) == 0
    assert "12 frames of 32 spike frames, sequences: 2 train, 1 test" in (text := capsys.readouterr().out)
    assert f"flatout spike train --config {out / 'train.yaml'}" in text
    config = load_config(out / "train.yaml")
    train, val = open_training(config.DATA)
    assert val is not None and len(train) > 0
    assert {(each.rgb_hw, each.spike_hw) for each in train.sequences} == {((34, 64), (17, 32))}
    assert {each.num_spike_frames for each in train.frames} == {32}
    # Streams match their frames, and the threshold is found again.
    words = ["spike", "check", "--config", str(out / "train.yaml"), "--set", "DATALOADER.TRAIN_WORKERS=0"]
    assert main(words) == 0
    assert "gain 2.0" in capsys.readouterr().out
    small = ("TRAIN.TOTAL_STEPS=1", "MODEL.WIDTH=4", "DATALOADER.TRAIN_WORKERS=0", "DATALOADER.VAL_WORKERS=0",
             "DATA.CROP_SIZE=16", "DATA.USE_RAM_CACHE=false", "LOG.TENSORBOARD=false")  # fmt: skip
    words = ["spike", "train", "--config", str(out / "train.yaml"), "--device", "cpu"]
    assert main([*words, *(word for each in small for word in ("--set", each))]) == 0
    assert (out / "runs/train/ckpts/best.pt").is_file()
    # The sharp frames are those of the video: the middle columns, the first exposure around frame 1.
    capture = cv2.VideoCapture(str(film))
    frames = [capture.read()[1] for _ in range(3)]
    assert np.array_equal(cv2.imread(str(out / "train/film_000/sharp/000001.png")), frames[1][:, 3:67])
    assert np.array_equal(cv2.imread(str(out / "train/film_000/sharp/000002.png")), frames[2][:, 3:67])


@pytest.mark.parametrize("name", ["set #1", "a: b", "- 'é'", '"'])
def test_a_folder_may_have_any_name(film, tmp_path, name, capsys):
    out = tmp_path / name
    assert main(words_for(film, out, "--max-frames", "4", "--workers", "1")) == 0
    config = load_config(out / "train.yaml")
    assert (str(out), str(out / "runs/train")) == (config.DATA.ROOT, config.LOG.SAVE_DIR)
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Train on it: ")]
    assert shlex.split(command)[-1] == str(out / "train.yaml")
    assert main(["spike", "demo-data", str(tmp_path / "demo" / name), "--width", "32", "--height", "16"]) == 0
    assert str(tmp_path / "demo" / name) == load_config(tmp_path / "demo" / name / "demo.yaml").DATA.ROOT


def test_the_same_seed_gives_the_same_files_with_any_number_of_workers(film, tmp_path):
    folders = [tmp_path / "a" / "set", tmp_path / "b" / "set", tmp_path / "c" / "set"]
    for folder, more in zip(folders, (["--workers", "1"], ["--workers", "2"], ["--seed", "1"]), strict=True):
        assert main(words_for(film, folder, *more)) == 0
    one, two, other = ({k: v for k, v in files_in(f).items() if k != "train.yaml"} for f in folders)
    assert one == two
    assert {key for key in one if one[key] != other[key]} == {
        "simulated.json", *(key for key in one if key.endswith(".dat"))
    }  # fmt: skip


def test_an_interrupted_simulation_continues_and_a_different_one_is_refused(film, tmp_path, monkeypatch, capsys):
    whole, out = tmp_path / "whole/set", tmp_path / "set"
    assert main(words_for(film, whole, "--workers", "1")) == 0
    real, count = flatout.spike.simulate.write_image, 0

    def fails_later(path: Path, image: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count == 16:  # in the middle of the second sequence
            raise KeyboardInterrupt
        real(path, image)

    with monkeypatch.context() as patched:
        patched.setattr("flatout.spike.simulate.write_image", fails_later)
        assert main(words_for(film, out, "--workers", "1")) == 130
    assert sorted(path.name for path in out.glob("t*/*")) == ["film_000"]
    first = (out / "train/film_000/spike/000001.dat").stat().st_mtime_ns
    capsys.readouterr()
    assert main(words_for(film, out, "--workers", "1")) == 0
    assert (out / "train/film_000/spike/000001.dat").stat().st_mtime_ns == first
    ignored = ("train.yaml",)
    assert {k: v for k, v in files_in(out).items() if k not in ignored} == {
        k: v for k, v in files_in(whole).items() if k not in ignored
    }
    assert not list(out.glob(".part*"))
    assert main(words_for(film, out)) == 0
    assert "(already complete)" in capsys.readouterr().out
    assert main(words_for(film, out, "--threshold", "1")) == 2
    assert "simulated with another sensor. Choose another folder" in capsys.readouterr().err


def test_a_folder_with_other_files_is_never_touched(film, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("important")
    assert main(words_for(film, tmp_path / "mine")) == 2
    assert "exists and is not a simulated set" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "set").mkdir()
    (tmp_path / "set/simulated.json").write_text("[")
    assert main(words_for(film, tmp_path / "set")) == 2
    assert "is damaged" in capsys.readouterr().err


def test_sources_are_videos_folders_of_frames_and_folders_of_either(film, tmp_path):
    assert [(each.name, each.num_frames) for each in find_sources(film)] == [("film", 14)]
    frames = tmp_path / "many/clip"
    frames.mkdir(parents=True)
    for number in (10, 9, 11):
        cv2.imwrite(str(frames / f"{number}.png"), np.full((16, 32, 3), number, np.uint8))
    (source,) = find_sources(frames)
    assert [Path(path).stem for path in source.files] == ["9", "10", "11"]
    shutil.copy(film, tmp_path / "many")
    (tmp_path / "many/notes.txt").write_text("x")
    assert [each.name for each in find_sources(tmp_path / "many")] == ["clip", "film"]
    shutil.copy(film, tmp_path / "many/clip.avi")
    with pytest.raises(DataError, match="clip exists twice"):
        find_sources(tmp_path / "many")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no frames"):
        find_sources(tmp_path / "empty")
    with pytest.raises(MissingFileError, match="no such file or folder"):
        find_sources(tmp_path / "none.mp4")
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    with pytest.raises(DataError, match="cannot be read as a video"):
        find_sources(tmp_path / "bad.mp4")


def test_a_video_that_ends_before_its_header_says_becomes_a_set_of_what_can_be_read(film, tmp_path, capsys):
    content = film.read_bytes()
    (tmp_path / "cut.avi").write_bytes(content[: len(content) * 2 // 3])
    capture, readable = cv2.VideoCapture(str(tmp_path / "cut.avi")), 0
    assert capture.get(cv2.CAP_PROP_FRAME_COUNT) == 14
    while capture.read()[0]:
        readable += 1
    assert 6 < readable < 14
    out = tmp_path / "set"
    assert main(words_for(tmp_path / "cut.avi", out, "--workers", "1")) == 0
    text = capsys.readouterr().out
    assert f"only {readable} of 14 frames can be read" in text
    assert f"{readable - 2} frames of 32 spike frames" in text
    train, val = open_training(load_config(out / "train.yaml").DATA)
    assert val is not None and len(train.frames) + len(val.frames) == readable - 2
    # Frames that are not needed need not be readable.
    assert main(words_for(tmp_path / "cut.avi", tmp_path / "few", "--max-frames", "6", "--workers", "1")) == 0
    assert "can be read" not in capsys.readouterr().out


def test_frames_are_cropped_to_whole_bytes_or_scaled_to_a_size():
    config = SimulateConfig()
    assert frame_size((721, 1285), config, "v") == (720, 1280)
    with pytest.raises(DataError, match="frames of 15x20 are too small"):
        frame_size((20, 15), config, "v")
    with pytest.raises(ConfigError, match=r"--size 100x50: the width must be a multiple of 16 and the height of 2"):
        frame_size((20, 20), SimulateConfig(size="100x50"), "v")
    frame = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    assert np.array_equal(fitted(frame, (38, 48), is_scaled=False, where="v"), frame[1:39, 6:54])
    with pytest.raises(DataError, match="v: a frame of 60x40 is smaller than the first one"):
        fitted(frame, (42, 48), is_scaled=False, where="v")
    for shape_hw in ((10, 16), (80, 64), (40, 16)):
        assert fitted(frame, shape_hw, is_scaled=True, where="v").shape == (*shape_hw, 3)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--exposure", "2", "--interpolate", "1"], 2, "must be an odd number of frames"),
        (["--exposure", "0"], 2, "--exposure 0: it must be 1 or more"),
        (["--exposure", "15"], 3, "needs 17 frames of a video, but the longest one, film, has 14"),
        (["--workers", "0"], 2, "--workers 0"),
        (["--test-share", "1"], 2, "--test-share 1.0: it must be from 0 to below 1"),
        (["--size", "big"], 2, "give width x height"),
        (["--gamma", "0"], 2, "--gamma 0.0"),
    ],
)
def test_mistakes_are_explained(film, tmp_path, words, code, text, capsys):
    assert main(["spike", "simulate", str(film), str(tmp_path / "set"), *words]) == code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_a_set_that_cannot_be_written_is_the_users_to_fix(film, capsys):
    assert main(words_for(film, film / "set")) == 5
    assert f"flatout: {film / 'set'}: cannot be written: Not a directory" in capsys.readouterr().err


def test_a_set_can_be_simulated_in_python(film, tmp_path):
    config = flatout.spike.SimulateConfig(
        exposure=3, interpolate=2, hold=2, size="32x16", sensor=flatout.spike.SensorConfig(threshold=1.5)
    )
    done = flatout.spike.simulate_set(str(film), str(tmp_path / "set"), config)
    assert (done.frames, done.written, done.sequences) == (4, 4, {"train": 1, "test": 1})
    assert simulate_set(film, tmp_path / "set", config).written == 0
    stream = flatout.spike.open_stream(tmp_path / "set/train/film_000/spike/000001.dat")
    assert stream.shape == (12, 8, 16)
    assert json.loads((tmp_path / "set/simulated.json").read_text())["sensor"]["threshold"] == 1.5
