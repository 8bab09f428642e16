"""Preparation: complete sequences are arranged, incomplete ones are named, and it can safely be run again."""

import shutil
from pathlib import Path

import pytest

from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import NoSamples, open_training, shared_sequences
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
