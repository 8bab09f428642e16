"""Streams of any format and geometry are opened as what they are, or refused with what would fit."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.spike
from flatout.__main__ import main
from flatout.errors import ConfigError, DataError, MissingFileError, ResourceError
from flatout.feed import FeedConfig
from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import open_training
from flatout.spike.data.decode import pack
from flatout.spike.data.geometry import find_geometry, geometry_beside, geometry_name, parse_geometry, write_geometry
from flatout.spike.data.stream_layout import KNOWN_HW, StreamError
from flatout.spike.input import open_scoring_feed


def spikes_of(num: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Random spikes of which the first rows and columns differ, so that no flip goes unnoticed."""
    return (np.random.default_rng(seed).random((num, height, width)) < 0.3).astype(np.uint8)


# Geometry


@given(st.integers(1, 9999), st.integers(1, 9999))
def test_a_geometry_survives_its_name(height, width):
    assert parse_geometry(geometry_name((height, width))) == (height, width)


def test_names_of_geometries_have_the_width_first(caplog):
    assert parse_geometry("400x250") == (250, 400)
    assert parse_geometry(" 640 X 360 ") == (360, 640)
    assert not caplog.messages
    # Turned around it has the same size in bytes, so only a warning can help.
    assert parse_geometry("250x400") == (400, 250)
    assert "250 wide and 400 high. Known cameras have 400x250" in caplog.text


@pytest.mark.parametrize("name", ["400", "400x", "0x250", "axb", "400x250x3", "-4x8"])
def test_anything_else_is_refused_with_the_known_names(name):
    with pytest.raises(
        ConfigError, match=r"give width x height in pixels, as in 400x250\. Known ones: 640x360, 400x25"
    ):
        parse_geometry(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"height": 16, "width": 24}'),
        ("a.json", '{"height": "16", "width": "24"}'),
        ("a.yaml", "geometry: 24x16\n"),
        ("a.yml", "spike_h: 16\nspike_w: 24\n"),
        ("config.yaml", "filename: x\nspike_w: 24\nspike_h: 16\n"),
        ("config.json", '{"spike_h": 16, "spike_w": 24}'),
        ("../config.yaml", "spike_h: 16\nspike_w: 24\n"),
    ],
)
def test_every_kind_of_sidecar_is_read(tmp_path, name, text):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(text)
    assert geometry_beside(tmp_path / "in/a.dat") == (16, 24)
    spikes = spikes_of(5, 16, 24)
    (tmp_path / "in/a.dat").write_bytes(pack(spikes).tobytes())
    assert np.array_equal(flatout.spike.open_stream(tmp_path / "in/a.dat")[:], spikes)


def test_the_nearest_sidecar_counts_and_a_broken_one_is_ignored(tmp_path, caplog):
    write_geometry(tmp_path, (16, 24))
    assert find_geometry(tmp_path) == (16, 24)
    (tmp_path / "a.json").write_text('{"height": 8, "width": 8}')
    assert geometry_beside(tmp_path / "a.dat") == (8, 8)
    assert geometry_beside(tmp_path / "b.dat") == (16, 24)
    (tmp_path / "a.json").write_text("{")
    assert geometry_beside(tmp_path / "a.dat") == (16, 24)
    assert "This file is ignored" in caplog.text


@pytest.mark.parametrize("text", ["geometry: 24 by 16", "spike_h: 16\nspike_w: 0", "height: 16\nwidth: 24.5"])
def test_a_sidecar_whose_size_cannot_be_read_is_named(tmp_path, text, caplog):
    (tmp_path / "a.yaml").write_text(text)
    write_geometry(tmp_path, (8, 8))
    assert geometry_beside(tmp_path / "a.dat") == (8, 8)
    assert f"{tmp_path / 'a.yaml'}: geometry" in caplog.text and "This file is ignored" in caplog.text


@pytest.mark.parametrize("shape_hw", KNOWN_HW, ids=geometry_name)
def test_a_file_without_a_geometry_is_refused_with_those_that_fit(tmp_path, shape_hw):
    height, width = shape_hw
    path = tmp_path / "a.dat"
    spikes = spikes_of(1, height, width)
    path.write_bytes(pack(spikes).tobytes())
    if shape_hw != (360, 640):
        with pytest.raises(StreamError, match=rf"^Cannot reshape spike data.* --geometry {width}x{height}\b"):
            flatout.spike.open_stream(path)
    stream = flatout.spike.open_stream(path, geometry=f"{width}x{height}")
    assert np.array_equal(stream[:], spikes) and stream.shape == (1, height, width)


def test_a_geometry_that_is_assumed_although_others_fit_is_reported(tmp_path, caplog):
    (tmp_path / "a.dat").write_bytes(b"\x55" * 720_000)  # 25 frames of 640 x 360, or 57.6 of 400 x 250
    flatout.spike.open_stream(tmp_path / "a.dat")
    assert "100x" not in caplog.text
    (tmp_path / "a.dat").write_bytes(b"\x55" * 3_600_000)  # 125 frames of 640 x 360, or 288 of 400 x 250
    flatout.spike.open_stream(tmp_path / "a.dat")
    assert "read as 640x360, because no geometry is given; 400x250 (288 frames)" in caplog.text
    # Not again for each of many streams.
    shutil.copy(tmp_path / "a.dat", tmp_path / "b.dat")
    flatout.spike.open_stream(tmp_path / "b.dat")
    assert caplog.text.count("400x250 (288 frames)") == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.sampled_from([None, True, False]), st.data())
def test_any_stream_survives_its_file(tmp_path_factory, num, height, columns, flipud, data):
    """Any shape whose pixels fill whole bytes, either flip, any range of frames."""
    width = 8 * columns // (2 if height % 2 == 0 else 1)
    spikes = spikes_of(num, height, width, seed=height * 100 + width)
    spikes[0, 0, 0] = 1
    spikes[0, 0, 1:8] = 1  # a byte above 1, so that it cannot be one byte per pixel
    folder = tmp_path_factory.mktemp("streams", numbered=True)
    (folder / "a.dat").write_bytes(pack(spikes, flipud=flipud is not False).tobytes())
    name = geometry_name((height, width))
    stream = flatout.spike.open_stream(folder / "a.dat", geometry=name, stored_as="packed", flipud=flipud)
    begin = data.draw(st.integers(0, num - 1))
    assert len(stream) == num
    assert np.array_equal(stream[begin:], spikes[begin:])


# Arrays of spikes


def write_array(path: Path, spikes: np.ndarray, name: str = "spk", **others: np.ndarray) -> Path:
    if path.suffix == ".npz":
        np.savez_compressed(path, **{name: spikes}, **others)  # type: ignore[arg-type]
    elif path.suffix == ".npy":
        np.save(path, spikes)
    else:
        h5py = pytest.importorskip("h5py", reason="the extra h5 is not installed")
        with h5py.File(path, "w") as file:
            for key, value in {name: spikes, **others}.items():
                file[key] = value
    return path


@pytest.mark.parametrize("ending", [".npz", ".npy", ".h5"])
@pytest.mark.parametrize("kind", [np.uint8, bool, np.float32])
@pytest.mark.parametrize("width", [24, 5])
def test_arrays_of_spikes_are_streams_with_their_own_geometry(tmp_path, ending, kind, width):
    spikes = spikes_of(7, 5, width)
    stream = flatout.spike.open_stream(write_array(tmp_path / f"a{ending}", spikes.astype(kind)))
    assert stream.shape == (7, 5, width)
    assert np.array_equal(stream[2:], spikes[2:]) and stream[:].dtype == np.uint8
    assert np.array_equal(stream[-1], spikes[-1]) and np.array_equal(stream[np.int64(3)], spikes[3])
    # An array whose rows are bottom-up, as some programs store them.
    turned = flatout.spike.open_stream(tmp_path / f"a{ending}", flipud=True)
    assert np.array_equal(turned[:], spikes[:, ::-1])


def test_the_array_of_spikes_is_found_among_others_or_asked_for(tmp_path):
    spikes = spikes_of(3, 8, 8)
    others = {"label": np.int64(3), "image": np.zeros((2, 8, 8))}
    assert np.array_equal(flatout.spike.open_stream(write_array(tmp_path / "a.npz", spikes, **others))[:], spikes)
    with pytest.raises(StreamError, match=r"under the name spk\. Its arrays: mine \(3, 8, 8\), label \(\), image"):
        flatout.spike.open_stream(write_array(tmp_path / "b.npz", spikes, "mine", **others))


def test_arrays_that_are_no_spikes_are_refused(tmp_path):
    with pytest.raises(StreamError, match="values other than 0 and 1, so it is not a stream of spikes"):
        flatout.spike.open_stream(write_array(tmp_path / "a.npz", np.full((2, 8, 8), 0.5)))
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(StreamError, match="is not a file of arrays"):
        flatout.spike.open_stream(tmp_path / "b.npz")
    np.save(tmp_path / "c.npy", np.array([[[{}]]], object), allow_pickle=True)
    with pytest.raises(StreamError, match="is not a file of arrays"):
        flatout.spike.open_stream(tmp_path / "c.npy")
    for name, other in (("one.npy", "two.npz"), ("three.npz", "four.npy")):
        write_array(tmp_path / name, np.zeros((2, 8, 8))).rename(tmp_path / other)
        with pytest.raises(StreamError, match="is not a file of arrays"):
            flatout.spike.open_stream(tmp_path / other)
    with pytest.raises(StreamError, match=r"of 8x8, but the configuration says 2 of 4x16.*SPIKE_H"):
        flatout.spike.open_stream(write_array(tmp_path / "d.npy", np.zeros((2, 8, 8))), geometry="4x16")
    with pytest.raises(StreamError, match="holds no spike frames"):
        flatout.spike.open_stream(write_array(tmp_path / "e.npy", np.zeros((0, 8, 8))))


def test_what_is_no_stream_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match=r"a\.dat does not exist"):
        flatout.spike.open_stream(tmp_path / "a.dat")
    with pytest.raises(MissingFileError, match="is a folder; give one stream"):
        flatout.spike.open_stream(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"not a spike stream by its name\. Endings of streams: \.dat, \.npz"):
        flatout.spike.open_stream(tmp_path / "a.txt")


def test_without_h5py_the_message_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.h5").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ResourceError, match="pip install h5py"):
        flatout.spike.open_stream(tmp_path / "a.h5")


@pytest.mark.parametrize("cache", [False, True])
def test_a_data_set_of_arrays_gives_the_clips_of_its_dat_files(demo, tmp_path, cache, caplog):
    """Training, testing and prediction read streams in one place, so one data set stands for all."""
    shutil.copytree(demo.parent, tmp_path / "arrays")
    for path in (tmp_path / "arrays").glob("*/*/spike/*.dat"):
        np.savez(path.with_suffix(".npz"), spk=flatout.spike.open_stream(path)[:])
        path.unlink()

    def batches(root: Path) -> list[np.ndarray]:
        config = DataConfig(ROOT=str(root), CLIP_LEN=3, USE_RAM_CACHE=cache)
        _, clips = open_training(config)
        assert clips is not None
        with open_scoring_feed(clips, config, FeedConfig(workers=0), 1, torch.device("cpu")) as feed:
            return [np.array(batch["spikes"]) for batch in feed.batches.feed]

    arrays = batches(tmp_path / "arrays")
    assert len(arrays) == 2
    assert all(map(np.array_equal, arrays, batches(demo.parent)))
    assert ("USE_RAM_CACHE: true does so only once" in caplog.text) == (not cache)


# Sharp frames and streams without blurry frames: the layout of Spike-Zoo


@pytest.mark.parametrize("sequences", [(".",), ("one", "two")], ids=["flat", "sequences"])
def test_the_layout_of_spike_zoo_becomes_clips_that_start_from_the_mean_of_the_stream(
    demo, tmp_path, sequences, capsys
):
    root, scene = tmp_path / "zoo", demo.parent / "train/scene_00"
    for split in ("train", "test"):
        for name in sequences:
            # Spike frames of the size of sharp frames, as in that data set.
            (root / split / name / "gt").mkdir(parents=True)
            (root / split / name / "spike").mkdir()
            for path in sorted((scene / "sharp").iterdir()):
                import cv2

                frame = cv2.resize(cv2.imread(str(path)), (32, 16), interpolation=cv2.INTER_AREA)
                cv2.imwrite(str(root / split / name / "gt" / path.name), frame)
                shutil.copy(scene / f"spike/{path.stem}.dat", root / split / name / "spike")
    words = ["--spike_root", str(root), "--blur_root", str(root), "--output", str(tmp_path / "out")]
    assert main(["spike", "prepare", *words, "--use_symlinks", "--check"]) == 0
    out = capsys.readouterr().out
    assert out.count("6 frames, 6 usable") == 2 * len(sequences) and "fits its frame" in out
    train, val = open_training(DataConfig(ROOT=str(tmp_path / "out"), CLIP_LEN=1, CROP_SIZE=16))
    names = ["all"] if sequences == (".",) else list(sequences)
    assert [each.name for each in train.sequences] == names
    assert {(each.rgb_hw, each.spike_hw) for each in train.sequences} == {((16, 32), (16, 32))}
    assert val is not None and len(train) == 6 * len(names)
    # The blurry frame is the mean of the stream, as bright as the sharp frames.
    blur, sharp = (
        np.mean([cv2.imread(getattr(each, part)).mean() for each in train.frames]) for part in ("blur", "sharp")
    )
    assert blur == pytest.approx(sharp, rel=0.05)


def test_a_stream_that_does_not_match_its_sharp_frame_is_reported(demo, tmp_path, caplog, capsys):
    import cv2

    scene = demo.parent / "train/scene_00"
    for split in ("train", "test"):
        (tmp_path / split / "gt").mkdir(parents=True)
        shutil.copytree(scene / "spike", tmp_path / split / "spike")
        for path in (scene / "sharp").iterdir():
            frame = cv2.resize(cv2.imread(str(path)), (32, 16), interpolation=cv2.INTER_AREA)
            cv2.imwrite(str(tmp_path / split / "gt" / path.name), frame[::-1])
    words = ["spike", "prepare", "--spike_root", str(tmp_path), "--blur_root", str(tmp_path)]
    words += ["--output", str(tmp_path / "out")]
    assert main([*words, "--check"]) == 3
    assert "spikes are upside down" in caplog.text
    advice = "Prepare again with --flip no, and train with SPIKE_FLIPUD: false."
    assert capsys.readouterr().out.count(advice) == 4  # two warnings, two failed checks
    caplog.clear()
    # The same folder: blurry frames are made again.
    assert main([*words, "--check", "--flip", "no"]) == 0
    assert "upside down" not in caplog.text
    blur, sharp = (
        cv2.imread(str(tmp_path / "out/train/all" / part / "000001.png"))[..., 1].ravel() for part in ("blur", "sharp")
    )
    assert np.corrcoef(blur, sharp)[0, 1] > 0.5


def test_a_geometry_given_to_prepare_is_written_beside_the_sequences(demo, tmp_path, capsys):
    root = tmp_path / "raw"
    for part in ("blur", "sharp", "spike"):
        shutil.copytree(demo.parent / "train/scene_00" / part, root / "train/a" / part)
    words = [
        "--spike_root",
        str(root),
        "--blur_root",
        str(root),
        "--output",
        str(tmp_path / "out"),
        "--splits",
        "train",
    ]
    assert main(["spike", "prepare", *words, "--geometry", "32x16", "--check"]) == 0
    assert "fits its frame" in capsys.readouterr().out
    assert find_geometry(tmp_path / "out/train/a/spike") == (16, 32)
    assert main(["spike", "prepare", *words, "--geometry", "32x16", "--spike_hw", "16", "32"]) == 2
    assert "--geometry and --spike_hw mean the same" in capsys.readouterr().err


# Viewing and reconstructing


@pytest.fixture
def disc(tmp_path) -> Path:
    """A stream in which a bright square of 8 x 8 moves to the right, one pixel every 8 frames, 64 x 32 pixels."""
    spikes = np.zeros((128, 32, 64), np.uint8)
    for t in range(128):
        spikes[t, 4:12, t // 8 + 8 : t // 8 + 16] = t % 2 == 0
    spikes[::16] = 1
    (tmp_path / "disc.dat").write_bytes(pack(spikes).tobytes())
    write_geometry(tmp_path, (32, 64))
    return tmp_path / "disc.dat"


def read_images(path: Path) -> list[np.ndarray]:
    import cv2

    capture, frames = cv2.VideoCapture(str(path)), []
    while (read := capture.read())[0]:
        frames.append(read[1])
    return frames


@pytest.mark.parametrize("ending", [".mp4", ".avi", ".gif"])
def test_view_writes_a_video_of_any_range(disc, tmp_path, ending, capsys):
    out = tmp_path / f"out/a{ending}"
    words = ["spike", "view", str(disc), "--out", str(out), "--from", "32", "--to", "96", "--every", "16"]
    assert main([*words, "--window", "16"]) == 0
    assert "128 spike frames of 64x32, packed, rows bottom-up" in capsys.readouterr().out
    frames = read_images(out)
    assert [frame.shape for frame in frames] == [(32, 64, 3)] * 4
    # The square is white where it is at frame 32, and dark elsewhere; the right way up.
    assert frames[0][5:11, 13:19].mean() > 200 and frames[0][20:].mean() < 60


@pytest.mark.parametrize(("show", "images"), [("tfp", 12), ("tfi", 12), ("raw", 12), ("voxel", 5)])
def test_view_writes_a_sheet(disc, tmp_path, show, images, capsys):
    import cv2

    out = tmp_path / "sheet.png"
    assert main(["spike", "view", str(disc), "--as", show, "--bins", "5", "--out", str(out)]) == 0
    assert f"{out}: {images} images" in capsys.readouterr().out
    page = cv2.imread(str(out))
    assert page.shape[1] == 4 * 64 + 3 * 4 and page.shape[0] >= -(-images // 4) * 32
    first = page[18:50, :64]
    assert show == "raw" or first[4:12, 9:15].mean() > first[16:].mean() + 100


def test_a_voxel_that_is_viewed_is_the_voxel_of_the_network(disc, tmp_path):
    from flatout.spike.view import ViewConfig, as_grey, images_at, moments_of

    stream = flatout.spike.open_stream(disc)
    config = ViewConfig(show="voxel", bins=3, begin=10, end=120)
    moments = list(images_at(stream, moments_of(128, config, most=9), 1.5, config))
    assert [each.frame for each in moments] == [10, 47, 84]  # ceil(b * 110 / 3) frames after the first
    for each, rate in zip(moments, flatout.spike.voxel(stream[10:120], 3), strict=True):
        assert np.array_equal(each.image_HW, as_grey(rate, 1.5))


def test_reconstruct_writes_one_image_per_stream_or_many_or_videos(disc, tmp_path, capsys):
    import cv2

    folder = tmp_path / "streams"
    folder.mkdir()
    shutil.copy(disc, folder / "a.dat")
    np.savez(folder / "b.npz", spk=flatout.spike.open_stream(disc)[:])
    out = tmp_path / "out"
    assert main(["spike", "reconstruct", str(folder), str(out), "--method", "tfi", "--gain", "1"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["a.png", "b.png"]
    a, b = (cv2.imread(str(out / name))[..., 0] for name in ("a.png", "b.png"))
    assert np.array_equal(a, b)
    stream = flatout.spike.open_stream(disc)
    expected = np.rint(255 * flatout.spike.tfi(stream[:], 64, 32))
    assert np.abs(a.astype(int) - expected).max() <= 1
    assert main(["spike", "reconstruct", str(disc), str(tmp_path / "many"), "--every", "50"]) == 0
    assert [path.name for path in sorted((tmp_path / "many/disc").iterdir())] == [
        "000000.png",
        "000050.png",
        "000100.png",
    ]
    assert main(["spike", "reconstruct", str(disc), str(tmp_path / "video"), "--video", "avi", "--every", "32"]) == 0
    assert len(read_images(tmp_path / "video/disc.avi")) == 4
    assert "4 images in" in capsys.readouterr().out


def test_voxels_that_cannot_be_written_are_the_users_to_fix(demo, tmp_path, capsys):
    shutil.copytree(demo.parent, tmp_path / "tree")
    (in_the_way := tmp_path / "tree/train/scene_00/voxels").write_text("a file")
    keys = ("--set", f"DATA.ROOT={tmp_path / 'tree'}", "--set", "DATA.VOXEL_CACHE_DIRNAME=voxels")
    assert main(["spike", "cache", "--config", str(demo), *keys, "--splits", "train"]) == 5
    assert f"flatout: {in_the_way}: cannot be written: File exists. Choose" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_the_users_to_fix(disc, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    for part in ("blur", "sharp", "spike"):
        (tmp_path / "raw/train/a" / part).mkdir(parents=True)
    raw, out = str(tmp_path / "raw"), str(tmp_path / "file/out")
    for words in (
        ["view", str(disc), "--out", f"{out}.png"],
        ["reconstruct", str(disc), out],
        ["prepare", "--spike_root", raw, "--blur_root", raw, "--output", out],
    ):
        assert main(["spike", *words]) == 5
        text = capsys.readouterr().err
        assert f"flatout: {tmp_path / 'file'}" in text and "cannot be written: " in text


def test_an_input_that_disappears_is_not_called_an_output():
    from flatout.spike.commands.arguments import writing_to

    with pytest.raises(FileNotFoundError), writing_to(Path("out")):
        Path("elsewhere/a.dat").read_bytes()
    with pytest.raises(MissingFileError), writing_to(Path("out")):
        raise MissingFileError("out/a.dat does not exist.")
    with pytest.raises(ResourceError, match="out: cannot be written: No space left"), writing_to(Path("out")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--from", "100", "--to", "50"], 2, "Use 0 <= from < to <= 128"),
        (["--from", "128"], 2, "of which the stream has 128"),
        (["--window", "0"], 2, "--window 0: it must be above 0"),
        (["--out", "a.tiff"], 2, "its ending decides what is written"),
        (["--geometry", "64x31"], 3, "Cannot reshape spike data"),
        (["--geometry", "64"], 2, "give width x height"),
    ],
)
def test_mistakes_of_view_are_explained(disc, words, code, text, capsys):
    assert main(["spike", "view", str(disc), *words]) == code
    assert text in capsys.readouterr().err


def test_view_needs_no_torch():
    import subprocess

    program = "import sys, flatout.spike.view, flatout.spike.simulate; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"import json; {program}"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
