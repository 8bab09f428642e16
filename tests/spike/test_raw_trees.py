"""Other layouts of raw data: groups of S-SDM are found, and long streams of X4K are cut around each frame."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from flatout.errors import ConfigError, DataError
from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import open_clips
from flatout.spike.data.decode import decode, map_stream, pack
from flatout.spike.data.prepare import PrepareConfig, index_of, numbers_in_time, prepare

SIZE_HW = (16, 32)
SPIKE_HW = (8, 16)


def write_frame(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((*SIZE_HW, 3), value, np.uint8))


def write_stream(path: Path, num_frames: int, seed: int = 0) -> np.ndarray:
    """Random spikes [T, h, w] as a packed file."""
    spikes = np.random.default_rng(seed).integers(0, 2, (num_frames, *SPIKE_HW), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(spikes).tobytes())
    return spikes


def ssdm(root: Path) -> dict[str, np.ndarray]:
    """A data set in S-SDM's layout: sequences a (complete), b (no spikes), c (no sharp frames), d (spikes only)."""
    streams = {}
    for number in range(3):
        name = f"{number + 7:06d}"
        for sequence, parts in {
            "a": ("blur_data", "sharp_data"),
            "b": ("blur_data", "sharp_data"),
            "c": ("blur_data",),
        }.items():
            for part in parts:
                write_frame(root / "train" / part / sequence / f"{name}.png", number)
        for sequence in "acd":
            streams[f"{sequence}/{name}"] = write_stream(
                root / "train/spike_data" / sequence / f"{name}.dat", 137, number
            )
    return streams


@pytest.mark.parametrize("link", [True, False], ids=["links", "copies"])
def test_s_sdm_s_groups_become_sequences_and_its_margins_can_be_trimmed(tmp_path: Path, link: bool):
    streams = ssdm(tmp_path / "GOPRO")
    config = PrepareConfig(
        spike_root=tmp_path / "GOPRO", blur_root=tmp_path / "GOPRO", output=tmp_path / "out", use_symlinks=link
    )
    for _ in range(2):
        done = prepare(config)
        assert {name: (each.frames, each.usable) for name, each in done.created["train"].items()} == {"a": (3, 3)}
        assert done.skipped == [
            ("train", "c", "no_blur_or_sharp"), ("train", "d", "no_gopro_sequence"), ("test", None, "no_spike_split"),
        ]  # fmt: skip
    data = DataConfig(
        ROOT=str(tmp_path / "out"), CLIP_LEN=3, CROP_SIZE=None, SPIKE_H=8, SPIKE_W=16, SPIKE_TRIM=(20, 20), SPIKE_T=137
    )
    clips = open_clips(data, "train", scored=False)
    assert len(clips) == 1
    layout = clips.layout_of(0)
    assert np.array_equal(decode(map_stream(clips.frames[0].spike, layout), layout), streams["a/000007"])


def x4k(root: Path, stems: list[str], num_frames: int) -> np.ndarray:
    for stem in stems:
        for part in ("train_blurry_33", "train_blurry_65", "train_fullRGB"):
            write_frame(root / part / "scene/sub" / f"{stem}.png")
    return write_stream(root / "train_spike_2xds/scene/sub/spike.dat", num_frames)


@pytest.mark.parametrize("link", [True, False], ids=["links", "copies"])
@pytest.mark.parametrize("exposure", [33, 65])
def test_x4k_s_streams_are_cut_around_each_frame(tmp_path: Path, exposure: int, link: bool):
    # Centres 2, 36 and 70: the first exposure begins before the stream, the last one of 65 ends after it.
    spikes = x4k(tmp_path / "x4k", ["0_1", "9", "17_1"], 90)
    config = PrepareConfig(
        spike_root=tmp_path / "x4k", blur_root=tmp_path / "x4k", output=tmp_path / "out",
        splits=("train",), exposure=exposure, use_symlinks=link,
    )  # fmt: skip
    for _ in range(2):
        done = prepare(config)
    assert {name: (each.frames, each.usable) for name, each in done.created["train"].items()} == {"scene/sub": (3, 3)}
    # The geometry is written too, and frames at a distance of 34 are neighbours.
    clips = open_clips(DataConfig(ROOT=str(tmp_path / "out"), CLIP_LEN=3, CROP_SIZE=None), "train", scored=False)
    assert len(clips) == 1 and clips.sequences[0].spike_hw == SPIKE_HW
    for frame, centre in enumerate((2, 36, 70)):
        layout = clips.layout_of(frame)
        found = decode(map_stream(clips.frames[frame].spike, layout), layout)
        assert len(found) == exposure
        for position, spike_frame in enumerate(found, centre - exposure // 2):
            expected = spikes[position] if 0 <= position < len(spikes) else np.ones(SPIKE_HW, np.uint8)
            assert np.array_equal(spike_frame, expected), (centre, position)


def test_names_of_x4k_frames_are_positions_in_time():
    # In temporal order: 0, 0_0, 0_1, 0_2, 1, 1_0, ...
    assert [index_of(name) for name in ("0", "0_0", "0_1", "0_2", "1", "1_0", "16")] == [0, 1, 2, 3, 4, 5, 64]
    assert index_of("x") is None and index_of("1_2_3") is None


def test_a_missing_frame_leaves_a_gap():
    numbers = numbers_in_time([4, 8, 16, 20])
    assert [numbers[centre] for centre in (4, 8, 16, 20)] == [1, 2, 4, 5]
    assert numbers_in_time([7]) == {7: 7} and numbers_in_time([]) == {}


def test_files_that_do_not_belong_together_are_reported(tmp_path: Path):
    x4k(tmp_path / "x4k", ["0", "30"], 90)
    config: dict[str, Any] = {"spike_root": tmp_path / "x4k", "blur_root": tmp_path / "x4k", "output": tmp_path / "out"}
    with pytest.raises(DataError, match=r"90 spike frames, but .*30.png is the 120-th"):
        prepare(PrepareConfig(**config, splits=("train",)))
    with pytest.raises(ConfigError, match="33 and 65"):
        prepare(PrepareConfig(**config, exposure=34))
    write_frame(tmp_path / "x4k/train_blurry_33/scene/sub/0.png")
    (tmp_path / "x4k/train_spike_2xds/scene/sub/spike.dat").write_bytes(bytes(17))
    with pytest.raises(ValueError, match=r"^Cannot reshape spike data"):
        prepare(PrepareConfig(**config, splits=("train",)))
