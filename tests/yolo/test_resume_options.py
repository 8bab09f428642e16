"""opt.yaml and hyp.yaml bring a run's options back; which differences make another run, and what `--resume` means."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.engine.run_folder import changes
from flatout.errors import CheckpointError, ConfigError
from flatout.yolo.compat.resume_options import (
    checkpoint_to_resume,
    config_of_run,
    options_to_resume,
    read_options,
    write_options,
)
from flatout.yolo.options import TrainOptions
from tests.yolo.recipes import recipe


@settings(deadline=None, max_examples=25)
@given(
    name=st.text(st.characters(codec="utf-8", exclude_categories=["C"])) | st.sampled_from(["1e3", "~", "no"]),
    freeze=st.lists(st.integers(0, 100), min_size=1).map(tuple),
    smoothing=st.floats(0, 1),
    resume=st.one_of(st.booleans(), st.just("runs/exp/weights/last.pt")),
    lr0=st.floats(0, 10),
)
def test_options_come_back_as_they_were_written(tmp_path_factory, name, freeze, smoothing, resume, lr0):
    folder = tmp_path_factory.mktemp("run")
    options = TrainOptions(name=name, freeze=freeze, label_smoothing=smoothing, resume=resume, device="0")
    hyp = recipe(lr0=lr0, warmup_iters=7)
    write_options(folder, options, hyp)
    assert read_options(folder) == (options, hyp)
    # Tools for YOLOv7's run folders read them with PyYAML.
    assert yaml.safe_load((folder / "hyp.yaml").read_text())["lr0"] == lr0


def test_a_long_list_of_layers_comes_back_whole(tmp_path):
    options = TrainOptions(freeze=tuple(range(50)))
    write_options(tmp_path, options, recipe())
    assert read_options(tmp_path)[0] == options


def test_a_file_that_was_edited_wrongly_is_told_with_the_nearest_key(tmp_path):
    write_options(tmp_path, TrainOptions(), recipe())
    text = (tmp_path / "opt.yaml").read_text()
    (tmp_path / "opt.yaml").write_text(text.replace("batch_size:", "batch_sise:", 1))
    with pytest.raises(ConfigError, match=r"opt.yaml: batch_sise: unknown key \(16\) - did you mean 'batch_size'"):
        read_options(tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        {"workers": 3},
        {"device": "1"},
        {"name": "b"},
        {"fresh": True},
        {"log_every": 9},
        {"stop_after": 4},
        {"resume": True},
        {"no_persistent_workers": True},
    ],
)
def test_where_and_on_what_a_run_goes_on_makes_no_other_run(other):
    hyp, options = recipe(), TrainOptions()
    assert config_of_run(replace(options, **other), hyp) == config_of_run(options, hyp)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"batch_size": 32}, "batch_size 16 -> 32"),
        ({"img_size": (320, 320)}, "img_size [640, 640] -> [320, 320]"),
        ({"fast_dataloader": True}, "fast_dataloader false -> true"),
        ({"seed": 4}, "seed null -> 4"),
        ({"no_scaled_decode": True}, "no_scaled_decode unset -> true"),
    ],
)
def test_what_changes_the_result_makes_another_run(other, told):
    hyp, options = recipe(), TrainOptions()
    assert changes(config_of_run(options, hyp), config_of_run(replace(options, **other), hyp)) == [told]


def test_a_run_that_began_before_parts_of_fast_could_be_left_out_goes_on():
    """Its record does not know these keys."""
    config = config_of_run(TrainOptions(fast=True), recipe())
    assert not [key for key in config if key.startswith("no_")]
    assert config["compile"] == "off"


def test_another_hyper_parameter_makes_another_run_even_in_a_file_of_the_same_name():
    options = TrainOptions()
    assert changes(config_of_run(options, recipe()), config_of_run(options, recipe(lr0=0.02))) == [
        "hyp.lr0 0.01 -> 0.02"
    ]


def test_a_key_that_came_later_stops_no_older_run_unless_it_is_used():
    options = TrainOptions()
    before = {key: value for key, value in config_of_run(options, recipe(aspect=0.5)).items() if key != "hyp.aspect"}
    assert changes(before, config_of_run(options, recipe())) == []
    assert changes(before, config_of_run(options, recipe(aspect=0.5))) == ["hyp.aspect unset -> 0.5"]


def test_a_resumed_run_has_its_own_options_whatever_else_the_command_says(tmp_path):
    stored, hyp = TrainOptions(batch_size=48, workers=3, name="bolts", break_lock=True), recipe(lr0=0.02)
    write_options(tmp_path, stored, hyp)
    asked = TrainOptions(resume=True, batch_size=8, workers=5, epochs=7, stop_after=2)
    assert options_to_resume(asked, tmp_path) == (replace(stored, resume=True, stop_after=2, break_lock=False), hyp)


def test_resume_without_a_value_takes_the_newest_run_and_with_one_that_one(tmp_path):
    old, new = (tmp_path / f"runs/train/{name}/weights/last.pt" for name in ("exp", "exp2"))
    for file in (old, new):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
    assert checkpoint_to_resume(TrainOptions(), root=tmp_path) is None
    assert checkpoint_to_resume(TrainOptions(resume=True), root=tmp_path) == new
    assert checkpoint_to_resume(TrainOptions(resume=str(old)), root=tmp_path) == old
    with pytest.raises(CheckpointError, match=r"--resume gone.pt: no such file. Name a last.pt, or nothing"):
        checkpoint_to_resume(TrainOptions(resume="gone.pt"))


def test_every_option_is_written(tmp_path):
    write_options(tmp_path, TrainOptions(), recipe())
    written = yaml.safe_load(Path(tmp_path / "opt.yaml").read_text())
    assert list(written) == [field.name for field in fields(TrainOptions)]
