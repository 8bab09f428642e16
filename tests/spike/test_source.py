"""A sample is the same crop of frames and spikes with the same flips, and every way of loading gives the same one."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.errors import ConfigError, DataError
from flatout.feed import Feed, FeedConfig, Out, Plan
from flatout.spike.config import AugmentConfig, DataConfig
from flatout.spike.data.clip_set import ClipFrame, ClipSet, SequenceFacts, open_clips
from flatout.spike.data.decode import pack
from flatout.spike.data.frames import Frames
from flatout.spike.data.precompute import write_voxels
from flatout.spike.data.source import ClipSource, ClipTransform, flip_and_rotate
from flatout.spike.data.stream_layout import Layout
from flatout.spike.input import open_store, training_source
from flatout.spike.step import to_float_frames
from tests.golden_cases import golden_cases

TRANSFORMS = {
    "hflip": ClipTransform(hflip=True),
    "vflip": ClipTransform(vflip=True),
    "rot90": ClipTransform(rot90=True),
    "all3": ClipTransform(hflip=True, vflip=True, rot90=True),
    "reverse": ClipTransform(reverse=True),
}


def samples(path: Path):
    """One case per expected array."""
    arrays = dict(np.load(path))
    given = {"dims", "blur_u8", "sharp_u8", "dat_packed"}
    yield from ((key, (key, arrays)) for key in arrays if key not in given)


@pytest.mark.parametrize("case", golden_cases("spike/sample.npz", samples))
def test_samples_match_the_golden_arrays(case, tmp_path):
    import cv2

    key, arrays = case
    length, height, width, spike_h, spike_w, frames, bins, size, top, left = arrays["dims"].tolist()
    listed = []
    for number in range(length):
        for part in ("blur", "sharp"):
            cv2.imwrite(str(tmp_path / f"{part}{number}.png"), arrays[f"{part}_u8"][number][..., ::-1])
        (tmp_path / f"{number}.dat").write_bytes(arrays["dat_packed"][number].tobytes())
        paths = (str(tmp_path / name) for name in (f"blur{number}.png", f"sharp{number}.png", f"{number}.dat"))
        listed.append(ClipFrame(0, str(number), *paths, frames))
    facts = SequenceFacts("a", (height, width), Layout("packed", frames, spike_h, spike_w, True))
    clips = ClipSet("here", [facts], listed, np.arange(length)[None], np.ones((1, length), bool), False)
    source = ClipSource(Frames(clips, DataConfig(ROOT="", NUM_VOXEL_BINS=bins)), crop=size)
    out = {name: np.zeros((1, *field.shape), field.dtype) for name, field in source.fields.items()}
    *transform, name = key.split("/")
    source._read_clip(0, [top, left], TRANSFORMS[transform[0]] if transform else ClipTransform(), Out(out), 0)
    if name == "spike_vox":
        assert np.array_equal(out["spikes"][0], arrays[key])
    else:
        found = to_float_frames(torch.from_numpy(out[name]))[0].numpy()
        np.testing.assert_allclose(found, arrays[key], rtol=0, atol=1e-6)


def config_of(demo: Path, **changes) -> DataConfig:
    return DataConfig(ROOT=str(demo.parent), CROP_SIZE=16, CLIP_LEN=3, NUM_VOXEL_BINS=4, **changes)


def digest(source: ClipSource, workers: int) -> str:
    total = hashlib.sha256()
    plan = Plan(num_samples=len(source), batch_size=2, seed=3)
    with Feed(source, plan, FeedConfig(workers=workers, backend="thread")) as feed:
        for epoch in range(2):
            for batch in feed.epoch(epoch):
                for name in sorted(batch.fields):
                    total.update(np.ascontiguousarray(batch[name]).tobytes())
    return total.hexdigest()


@pytest.mark.parametrize(("lost", "warns"), [(1, False), (2, True), (3, True)])
def test_many_incomplete_frames_are_a_warning(demo, tmp_path, caplog, lost, warns):
    shutil.copytree(demo.parent, tmp_path / "tree")
    sequences = sorted((tmp_path / "tree/train").iterdir())
    for path in sorted((sequences[0] / "sharp").iterdir())[:lost]:
        path.unlink()
    open_clips(replace(config_of(demo), ROOT=str(tmp_path / "tree")), "train", scored=False)
    assert (f"{lost} of 12 frames are in no clip: {sequences[0].name}: frame" in caplog.text) == warns


def test_without_a_complete_clip_nothing_starts(demo, tmp_path):
    shutil.copytree(demo.parent, tmp_path / "tree")
    for folder in (tmp_path / "tree/train").glob("*/sharp"):
        shutil.rmtree(folder)
        folder.mkdir()
    with pytest.raises(DataError, match=r"No valid samples found in .*frame .* has no sharp frame.*spike prepare"):
        open_clips(replace(config_of(demo), ROOT=str(tmp_path / "tree")), "train", scored=False)


def test_workers_cache_and_precomputed_voxels_do_not_change_the_stream(demo):
    config = config_of(demo, AUGMENT=AugmentConfig(REVERSE=0.5))
    clips = open_clips(config, "train", scored=False)
    expected = digest(training_source(clips, config), 0)
    assert digest(training_source(clips, config), 2) == expected
    cached = replace(config, USE_RAM_CACHE=True)
    for budget in (10**9, 60_000):  # everything, and a part
        store = open_store(clips, cached, budget_bytes=budget, workers=0)
        assert store is not None
        with store:
            assert digest(training_source(clips, cached, store), 0) == expected
    list(write_voxels(config, "train"))
    written = replace(config, USE_PRECOMPUTED_VOXELS=True)
    again = training_source(open_clips(written, "train", scored=False), written)
    assert again.fields["spikes"].dtype == np.float32
    live, stored = (next(iter(Feed(each, Plan(num_samples=len(each), batch_size=2, seed=3), FeedConfig(workers=0))))
                    for each in (training_source(clips, config), again))  # fmt: skip
    for name in ("blur", "sharp", "spikes", "spike_frames"):
        assert np.array_equal(live[name], stored[name])


@pytest.mark.parametrize(("spike_hw", "is_rotated"), [((16, 32), True), ((16, 16), False)])
def test_crops_whose_spikes_are_not_square_are_flipped_but_not_rotated(tmp_path, spike_hw, is_rotated, caplog):
    import cv2

    frame = np.random.default_rng(0).integers(0, 256, (32, 64, 3), np.uint8)
    paths = [str(tmp_path / name) for name in ("blur.png", "sharp.png", "a.dat")]
    for path in paths[:2]:
        cv2.imwrite(path, frame)
    spikes = np.random.default_rng(1).integers(0, 2, (8, *spike_hw), np.uint8)
    Path(paths[2]).write_bytes(pack(spikes).tobytes())
    facts = SequenceFacts("a", (32, 64), Layout("packed", 8, *spike_hw, True))
    clips = ClipSet("", [facts], [ClipFrame(0, "a", *paths, 8)], np.zeros((1, 1), int), np.ones((1, 1), bool), False)
    augment = AugmentConfig(HFLIP=1, VFLIP=0, ROT90=1)
    source = ClipSource(Frames(clips, DataConfig(ROOT="", NUM_VOXEL_BINS=2)), crop=32, augment=augment)
    with Feed(source, Plan(num_samples=1, batch_size=1, seed=0), FeedConfig(workers=0)) as feed:
        (batch,) = [{name: np.array(values) for name, values in batch.fields.items()} for batch in feed]
    assert ("so ROT90 is not applied" in caplog.text) == (not is_rotated)
    # Some crop of 32 x 32, mirrored, and turned counter-clockwise only if its spikes can be.
    mirrored = [np.flip(frame[:, left : left + 32], 1)[..., ::-1] for left in range(33)]
    expected = [np.rot90(each) if is_rotated else each for each in mirrored]
    assert any(np.array_equal(batch["blur"][0, 0], each) for each in expected)


def test_rotation_is_counter_clockwise():
    square = np.arange(9).reshape(3, 3)
    found = flip_and_rotate(square, ClipTransform(rot90=True), rows=0)
    assert all(found[y, x] == square[x, 2 - y] for y in range(3) for x in range(3))


def test_voxels_of_another_number_of_bins_name_both_numbers(demo):
    config = config_of(demo)
    list(write_voxels(config, "test"))
    with pytest.raises(ConfigError, match=r"has 4 voxel bins.*NUM_VOXEL_BINS.* is 9\. Set it to 4"):
        open_clips(replace(config, USE_PRECOMPUTED_VOXELS=True, NUM_VOXEL_BINS=9), "test", scored=True)


def test_a_crop_that_does_not_fit_is_refused_with_the_sequence(demo):
    config = replace(config_of(demo), CROP_SIZE=40)
    with pytest.raises(ValueError, match=r"scene_00: CROP_SIZE=40 is larger than a side of the frames"):
        training_source(open_clips(config, "train", scored=False), config)


def test_a_missing_spike_file_is_named(demo, tmp_path):
    shutil.copytree(demo.parent, tmp_path / "tree")
    config = replace(config_of(demo), ROOT=str(tmp_path / "tree"))
    source = training_source(open_clips(config, "train", scored=False), config)
    for path in (tmp_path / "tree").glob("train/*/spike/*.dat"):
        path.unlink()
    out = {name: np.zeros((1, *field.shape), field.dtype) for name, field in source.fields.items()}
    sentence = (
        r"^/.*\.dat: the spike file of sequence scene_00, frame 000001, has been removed .* Restore it, or start again"
    )
    with pytest.raises(FileNotFoundError, match=sentence):
        source._read_clip(0, [0, 0], ClipTransform(), Out(out), 0)


def damaged_tree(demo: Path, folder: Path, *names: str) -> tuple[Path, list[Path]]:
    """A copy of the data in which the files of these names, like scene_00/blur/000003, are damaged; and these files."""
    shutil.copytree(demo.parent, folder / "tree")
    paths = [next((folder / "tree/train").glob(f"{name}.*")) for name in names]
    for path in paths:
        path.write_bytes(b"nothing")
    return folder / "tree", paths


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["scene_00/blur/000003", "scene_01/sharp/000002", "scene_00/blur/000001"])
def test_clips_with_a_damaged_file_are_replaced_by_whole_ones(demo, tmp_path, name, cached, caplog):
    tree, (path,) = damaged_tree(demo, tmp_path, name)
    config = replace(config_of(demo), ROOT=str(tree), USE_RAM_CACHE=cached)
    clips = open_clips(config, "train", scored=False)
    frame = next(n for n, each in enumerate(clips.frames) if str(path) in (each.blur, each.sharp))
    with_it = np.flatnonzero((clips.windows_NL == frame).any(1))
    contents = []
    for workers in (0, 2):
        store = open_store(clips, config, budget_bytes=10**8, workers=0) if cached else None
        source = training_source(clips, config, store)
        plan = Plan(num_samples=len(source), batch_size=2, seed=3)
        with Feed(source, plan, FeedConfig(workers=workers, backend="thread", on_error="substitute")) as feed:
            batches = [batch.copy() for epoch in range(2) for batch in feed.epoch(epoch)]
            assert list(feed.bad_samples) == [frame if "blur" in name else len(clips.frames) + frame]
            assert feed.num_replaced == 2 * len(with_it)
        indices = np.concatenate([batch.indices for batch in batches])
        assert not np.isin(indices, with_it).any()
        for batch in batches:
            assert np.array_equal(batch["score"], clips.score_NL[batch.indices])
        contents.append([batch[field].tobytes() for batch in batches for field in sorted(batch.fields)])
    assert contents[0] == contents[1]
    assert sum(f"File {path} is replaced by a substitute" in text for text in caplog.messages) == 2, "once by each feed"


def test_a_stream_that_is_truncated_during_training_is_replaced_too(demo, tmp_path):
    shutil.copytree(demo.parent, tmp_path / "tree")
    config = replace(config_of(demo), ROOT=str(tmp_path / "tree"))
    source = training_source(open_clips(config, "train", scored=False), config)
    path = tmp_path / "tree/train/scene_00/spike/000003.dat"
    path.write_bytes(path.read_bytes()[:-5])
    with Feed(
        source, Plan(num_samples=len(source), batch_size=2), FeedConfig(workers=0, on_error="substitute")
    ) as feed:
        list(feed)
        ((item, cause),) = feed.bad_samples.items()
        assert source.where_item(item) == str(path) and "were found when the data set was opened" in cause


@pytest.mark.parametrize("damage", ["empty", "truncated", "one byte more", "wrong geometry"])
def test_damaged_streams_are_found_before_training(demo, tmp_path, damage):
    shutil.copytree(demo.parent, tmp_path / "tree")
    victim = tmp_path / "tree/train/scene_01/spike/000004.dat"
    content = victim.read_bytes()
    config = replace(config_of(demo), ROOT=str(tmp_path / "tree"))
    if damage == "wrong geometry":
        config = replace(config, SPIKE_H=17, SPIKE_W=32)
    else:
        victim.write_bytes({"empty": b"", "truncated": content[:-5], "one byte more": content + b"x"}[damage])
    with pytest.raises(ValueError, match=r"^Cannot reshape spike data: .*\.dat"):
        open_clips(config, "train", scored=False)


def test_unusual_but_complete_streams_are_read_with_a_warning(demo, tmp_path, caplog):
    """Files of only zeros or only ones, and one with a single frame."""
    shutil.copytree(demo.parent, tmp_path / "tree")
    config = replace(config_of(demo), ROOT=str(tmp_path / "tree"))
    victim = tmp_path / "tree/train/scene_00/spike/000002.dat"
    for content in (bytes(victim.stat().st_size), b"\xff" * victim.stat().st_size, b"\x55" * 64):
        victim.write_bytes(content)
        source = training_source(open_clips(config, "train", scored=False), config)
        out = {name: np.zeros((1, *field.shape), field.dtype) for name, field in source.fields.items()}
        source._read_clip(0, [0, 0], ClipTransform(), Out(out), 0)
        rate = out["spikes"][0, 1].sum(axis=0) / out["spike_frames"][0, 1].sum()
        assert rate.mean() == {0: 0.0, 255: 1.0, 85: 0.5}[content[0]]
    assert "leave some of the 4 voxel bins empty" in caplog.text
    for path in (tmp_path / "tree").glob("train/*/spike/*.dat"):
        path.write_bytes(bytes(path.stat().st_size))
    open_clips(config, "train", scored=False)
    assert "nothing but zeros" in caplog.text


@pytest.mark.parametrize(("kind", "channels"), [("window", 81), ("tfp", 4)])
def test_streams_too_short_for_a_representation_are_found_before_training(demo, kind, channels):
    config = replace(config_of(demo), SPIKE_REPR=kind, NUM_VOXEL_BINS=channels, TFP_HALF_WINDOW=40)
    with pytest.raises(ValueError, match=r"\.dat: (a window|TFP)"):
        open_clips(config, "train", scored=False)


@pytest.mark.parametrize("kind", ["window", "tfp"])
def test_other_representations_make_batches(demo, kind):
    config = replace(config_of(demo), SPIKE_REPR=kind, TFP_HALF_WINDOW=10)
    source = training_source(open_clips(config, "train", scored=False), config)
    batch = next(iter(Feed(source, Plan(num_samples=len(source), batch_size=2), FeedConfig(workers=0))))
    assert batch["spikes"].shape == (2, 3, 4, 8, 8)
    assert batch["spikes"].any()
