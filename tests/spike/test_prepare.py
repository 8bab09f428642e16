"""Preparation: complete sequences are arranged, incomplete ones are named, and it can safely be run again."""

import shutil
from pathlib import Path

import pytest

from flatout.__main__ import main
from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import NoSamples, open_clips, open_training, shared_sequences
from flatout.spike.data.prepare import PrepareConfig, TreeError, make_validation, prepare, validation_names
from tests.golden_cases import golden_cases


def write_raw(root: Path, tree: dict, ending: str) -> None:
    """Create empty files by name: split -> sequence -> part -> stems."""
    for split, sequences in tree.items():
        (root / split).mkdir(parents=True, exist_ok=True)
        for sequence, parts in sequences.items():
            (root / split / sequence).mkdir()
            for part, stems in parts.items():
                (root / split / sequence / part).mkdir()
                for stem in stems:
                    (root / split / sequence / part / f"{stem}{ending}").touch()


@pytest.mark.parametrize("link", [True, False], ids=["links", "copies"])
@pytest.mark.parametrize("case", golden_cases("spike/prepare_cases.json"))
def test_trees_match_the_golden_ones(case, link, tmp_path):
    write_raw(tmp_path / "rgb", case["raw"]["gopro"], ".png")
    write_raw(tmp_path / "spikes", case["raw"]["spike"], ".dat")
    config = PrepareConfig(
        spike_root=tmp_path / "spikes",
        blur_root=tmp_path / "rgb",
        output=tmp_path / "out",
        use_symlinks=link,
        blur_dir=case["blur_dir"],
    )
    for _ in range(2):
        done = prepare(config)
        created = {
            split: {name: {"frames": each.frames, "usable": each.usable} for name, each in sequences.items()}
            for split, sequences in done.created.items()
        }
        assert created == case["expect"]["created"]
        assert [list(each) for each in done.skipped] == case["expect"]["skipped"]
    for split, sequences in created.items():
        for name in sequences:
            assert all(
                (tmp_path / "out" / split / name / part).is_symlink() == link for part in ("blur", "sharp", "spike")
            )


def test_the_regrouped_layout_gives_the_same_tree(tmp_path):
    stems = ["000001", "000002"]
    write_raw(tmp_path / "rgb", {"train_GT": {"a": {}}, "train_GT_blurred": {"a": {}}}, ".png")
    for folder in ("train_GT", "train_GT_blurred"):
        for stem in stems:
            (tmp_path / "rgb" / folder / "a" / f"{stem}.png").touch()
    write_raw(tmp_path / "spikes", {"train": {"a": {"spike": stems}, "b": {"spike": stems}}}, ".dat")
    done = prepare(PrepareConfig(spike_root=tmp_path / "spikes", blur_root=tmp_path / "rgb", output=tmp_path / "out"))
    assert {name: each.usable for name, each in done.created["train"].items()} == {"a": 2}
    assert done.skipped == [("train", "b", "no_gopro_sequence"), ("test", None, "no_spike_split")]


def test_a_missing_root_and_a_folder_in_the_way_are_reported(tmp_path):
    config = PrepareConfig(spike_root=tmp_path / "none", blur_root=tmp_path, output=tmp_path / "out", use_symlinks=True)
    with pytest.raises(TreeError, match="--spike_root"):
        prepare(config)
    write_raw(tmp_path / "rgb", {"train": {"a": {"blur": [], "sharp": []}}}, ".png")
    write_raw(tmp_path / "spikes", {"train": {"a": {"spike": []}}}, ".dat")
    (tmp_path / "out/train/a/blur").mkdir(parents=True)
    config = PrepareConfig(
        spike_root=tmp_path / "spikes", blur_root=tmp_path / "rgb", output=tmp_path / "out", use_symlinks=True
    )
    with pytest.raises(TreeError, match="real folder where a link"):
        prepare(config)


def raw_of(demo: Path, root: Path) -> list[str]:
    """The demo data set as raw data, the spike folders as links to another disk; returns arguments of `prepare`."""
    for split in ("train", "test"):
        for scene in (demo.parent / split).iterdir():
            shutil.copytree(scene / "spike", root / "disk" / split / scene.name)
            (root / "spikes" / split / scene.name).mkdir(parents=True)
            (root / "spikes" / split / scene.name / "spike").symlink_to(root / "disk" / split / scene.name)
            for part in ("blur", "sharp"):
                shutil.copytree(scene / part, root / "rgb" / split / scene.name / part)
    return ["--spike_root", str(root / "spikes"), "--blur_root", str(root / "rgb"), "--output", str(root / "out")]


@pytest.mark.parametrize("links", [["--use_symlinks"], []], ids=["links", "copies"])
def test_the_size_of_spike_frames_is_not_lost(demo, tmp_path, links, capsys):
    """config.yaml is above the spikes of the raw data set, not in the folders that are linked or copied."""
    words = raw_of(demo, tmp_path)
    shutil.copy(demo.parent / "config.yaml", tmp_path / "spikes")
    assert main(["spike", "prepare", *words, *links, "--check"]) == 0
    assert capsys.readouterr().out.count("fits its frame") == 3
    shutil.rmtree(tmp_path / "spikes")
    train, _ = open_training(DataConfig(ROOT=str(tmp_path / "out"), CLIP_LEN=3, CROP_SIZE=16))
    assert {each.spike_hw for each in train.sequences} == {(16, 32)}


def test_a_config_beside_the_links_counts(demo, tmp_path):
    words = raw_of(demo, tmp_path)
    assert main(["spike", "prepare", *words, "--use_symlinks"]) == 0
    shutil.copy(demo.parent / "config.yaml", tmp_path / "out/train")
    train = open_clips(DataConfig(ROOT=str(tmp_path / "out"), CLIP_LEN=3), "train", scored=False)
    assert {each.spike_hw for each in train.sequences} == {(16, 32)}


def test_check_names_the_flags_of_prepare(demo, tmp_path, capsys):
    words = [*raw_of(demo, tmp_path), "--use_symlinks", "--check"]
    assert main(["spike", "prepare", *words]) == 3
    error = capsys.readouterr().err
    assert "--spike_hw H W" in error and "SPIKE_H" not in error
    assert main(["spike", "prepare", *words, "--spike_hw", "32", "16"]) == 3
    assert (
        "--geometry or --spike_hw (in a training: SPIKE_H, SPIKE_W) or SPIKE_FORMAT is wrong" in capsys.readouterr().out
    )
    assert main(["spike", "prepare", *words, "--spike_hw", "0", "16"]) == 2
    assert "--spike_hw 0 16: both must be 1 or more" in capsys.readouterr().err
    assert main(["spike", "prepare", *words, "--spike_hw", "16", "32"]) == 0


@pytest.mark.parametrize("case", golden_cases("spike/val_split.json"))
def test_validation_sequences_are_the_golden_ones(case):
    names = [*case["train"], *case["val"]]
    chosen = validation_names(names, ratio=case["val_ratio"], seed=case["seed"])
    assert chosen == case["val"]
    assert sorted(set(names) - set(chosen)) == case["train"]


def test_what_is_validated_on_is_not_trained_on(demo, tmp_path):
    root = tmp_path / "tree"
    shutil.copytree(demo.parent, root)
    (chosen,) = make_validation(root, ratio=0.2, seed=42)
    config = DataConfig(ROOT=str(root), CLIP_LEN=3, CROP_SIZE=16)
    assert shared_sequences(config, "val") == [chosen]
    train, val = open_training(config)
    assert val is not None
    assert {each.name for each in train.sequences} == {"scene_00", "scene_01"} - {chosen}
    assert {each.name for each in val.sequences} == {chosen}


def test_without_any_clip_the_error_names_the_folder_and_what_is_missing(demo, tmp_path):
    root = tmp_path / "tree"
    shutil.copytree(demo.parent, root)
    for path in root.glob("train/*/spike/000002.dat"):
        path.unlink()
    for path in root.glob("train/*/spike/000005.dat"):
        path.unlink()
    with pytest.raises(
        RuntimeError, match=r"^No valid samples found in .*train: 2 sequences.*000002 has no spike file"
    ):
        open_training(DataConfig(ROOT=str(root), CLIP_LEN=3))
    with pytest.raises(NoSamples, match="flatout spike prepare"):
        open_training(DataConfig(ROOT=str(root / "nowhere")))
