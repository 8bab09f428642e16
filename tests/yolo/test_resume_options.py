"""opt.yaml and hyp.yaml restore the options of a run; which differences make another run, and what `--resume` means."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.errors import CheckpointError, ConfigError
from flatout.runs.options import Comparison, checkpoint_to_resume, options_to_resume
from flatout.yolo.hyp import Hyp
from flatout.yolo.options import TrainOptions
from flatout.yolo.run_config import config_of_run, identity, read_options, write_options
from tests.yolo.recipes import recipe


def compared(
    before: TrainOptions | Mapping[str, Any],
    now: TrainOptions,
    *,
    hyp: Hyp | None = None,
    is_named: bool = False,
    cuda: bool = False,
) -> Comparison:
    """Compare a run, given by its options or its record, with a command that may continue it."""
    old = config_of_run(before, recipe()) if isinstance(before, TrainOptions) else before
    meant = identity(now, hyp or recipe(), cuda=cuda, bf16=cuda)
    return meant.compare(json.loads(json.dumps(old)), is_named=is_named)


@settings(deadline=None, max_examples=25)
@given(
    name=st.text(st.characters(codec="utf-8", exclude_categories=["C"])) | st.sampled_from(["1e3", "~", "no"]),
    freeze=st.lists(st.integers(0, 100), min_size=1).map(tuple),
    smoothing=st.floats(0, 1),
    resume=st.one_of(st.booleans(), st.just("runs/exp/weights/last.pt")),
    lr0=st.floats(0, 10),
)
def test_options_are_read_as_they_were_written(tmp_path_factory, name, freeze, smoothing, resume, lr0):
    folder = tmp_path_factory.mktemp("run")
    options = TrainOptions(name=name, freeze=freeze, label_smoothing=smoothing, resume=resume, device="0")
    hyp = recipe(lr0=lr0, warmup_iters=7)
    write_options(folder, options, hyp)
    assert read_options(folder) == (options, hyp)
    # Tools for run folders of YOLOv7 read them with PyYAML.
    assert yaml.safe_load((folder / "hyp.yaml").read_text())["lr0"] == lr0


def test_a_long_list_of_layers_is_read_completely(tmp_path):
    options = TrainOptions(freeze=tuple(range(50)))
    write_options(tmp_path, options, recipe())
    assert read_options(tmp_path)[0] == options


def test_the_error_for_a_wrong_key_suggests_the_nearest_one(tmp_path):
    write_options(tmp_path, TrainOptions(), recipe())
    text = (tmp_path / "opt.yaml").read_text()
    (tmp_path / "opt.yaml").write_text(text.replace("batch_size:", "batch_sise:", 1))
    with pytest.raises(ConfigError, match=r"opt.yaml: batch_sise: unknown key \(16\) - did you mean 'batch_size'"):
        read_options(tmp_path)


EXACT = [
    {"workers": 3},
    {"workers": "auto"},
    {"device": "1"},
    {"name": "b"},
    {"fresh": True},
    {"log_every": 9},
    {"stop_after": 4},
    {"resume": True},
    {"no_persistent_workers": True},
    {"fast_dataloader": True},
    {"cache_images": True},
    {"nosave": True},
    {"patience": 5},
    {"test_batch_size": 7},
    {"hyp": "elsewhere/hyp.yaml"},
    {"no_graphs": True},
]
"""Options that do not change a single bit of the weights."""


@pytest.mark.parametrize("other", EXACT, ids=str)
def test_options_that_do_not_change_the_result_make_no_other_run(other):
    hyp, options = recipe(), TrainOptions()
    assert config_of_run(replace(options, **other), hyp) == config_of_run(options, hyp)
    assert compared(options, replace(options, **other)) == Comparison([], [], [])


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"batch_size": 32}, "batch_size 16 -> 32"),
        ({"img_size": (320, 320)}, "img_size [640, 640] -> [320, 320]"),
        ({"seed": 4}, "seed null -> 4"),
        ({"device_augment": True}, "device_augment false -> true"),
        ({"fast": True, "no_channels_last": True}, "scaled_decode false -> true"),
        ({"epochs": 200}, "epochs 300 -> 200"),
        ({"cfg": "yolov7"}, 'cfg "" -> "yolov7"'),
    ],
)
def test_options_that_change_the_result_make_another_run(other, difference):
    assert compared(TrainOptions(), TrainOptions(**other)) == Comparison([], [difference], [])


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        ({"channels_last": True}, ["channels_last false -> true"]),
        ({"amp": "bf16"}, ['amp "off" -> "bf16"']),
        ({"compile": "on"}, ['compile "off" -> "on"']),
        ({"use_compile": True}, ['compile "off" -> "on"']),
        ({"deterministic": True}, ["deterministic false -> true"]),
        ({"no_compile": True}, []),
        ({"amp": "off"}, []),
    ],
)
def test_options_that_only_change_rounding_make_no_other_run_and_are_reported(other, differences):
    """They are compared by their meaning: on a CPU, mixed precision is off whether or not that is given."""
    assert compared(TrainOptions(), TrainOptions(**other)) == Comparison(differences, [], [])


def test_more_epochs_extend_a_run():
    assert compared(TrainOptions(), TrainOptions(epochs=301)) == Comparison([], [], ["epochs 300 -> 301"])


def test_files_that_moved_make_another_run_unless_the_run_is_named():
    """For a named run the contents are compared instead: data by fingerprint, weights by the saved state."""
    moved = {"data": "elsewhere/coco.yaml", "weights": "elsewhere/yolov7.pt", "head_config": "heads.yaml"}
    assert len(compared(TrainOptions(), TrainOptions(**moved)).different) == 3
    assert compared(TrainOptions(), TrainOptions(**moved), is_named=True) == Comparison([], [], [])


def test_a_shortcut_and_what_it_stands_for_on_this_machine_are_the_same_training():
    fast, spelled_out = TrainOptions(fast=True), TrainOptions(fast_dataloader=True, channels_last=True)
    assert compared(TrainOptions(fast=True, no_scaled_decode=True), spelled_out) == Comparison([], [], [])
    assert compared(fast, TrainOptions(fast=True, no_scaled_decode=True)).different == ["scaled_decode true -> false"]
    on_gpu = compared(fast, spelled_out, cuda=True)
    assert on_gpu.different == ["device_augment true -> false", "scaled_decode true -> false"]
    assert on_gpu.rounding == [
        'amp "bf16" -> "fp16"', 'compile "auto" -> "off"',
    ]  # fmt: skip
    assert compared(fast, TrainOptions(fast_dataloader=True)).rounding == ["channels_last true -> false"]


def test_decoding_on_the_gpu_is_another_training_only_if_images_are_kept_there():
    by_gpu = TrainOptions(fast=True, gpu_decode=True)
    assert compared(TrainOptions(fast=True), by_gpu, cuda=True).different == ["gpu_decode false -> true"]
    assert compared(TrainOptions(fast=True), by_gpu) == Comparison([], [], [])
    assert compared(TrainOptions(fast=True), TrainOptions(fast=True, no_gpu_decode=True), cuda=True) == Comparison(
        [], [], []
    )


def test_turning_off_a_part_of_fast_has_no_effect_without_fast():
    assert compared(TrainOptions(), TrainOptions(no_scaled_decode=True)) == Comparison([], [], [])


def test_a_run_from_before_parts_of_fast_could_be_turned_off_continues():
    """Its record does not have these keys."""
    options = TrainOptions(fast=True)
    config = {key: value for key, value in config_of_run(options, recipe()).items() if not key.startswith("no_")}
    assert compared(config, options) == Comparison([], [], [])
    assert config["compile"] == "off"


@pytest.mark.parametrize("name", [field.name for field in fields(TrainOptions)])
def test_an_option_that_was_added_later_stops_no_older_run_while_it_has_its_default(name):
    config = config_of_run(TrainOptions(), recipe())
    before = {key: value for key, value in config.items() if key != name}
    assert compared(before, TrainOptions()) == Comparison([], [], [])


def test_a_run_from_before_options_were_classified_by_what_they_change_continues():
    """Its record has nearly all options, under their present names."""
    options = TrainOptions(batch_size=32, workers=3)
    record = config_of_run(options, recipe()) | {
        "hyp": "data/hyp.scratch.tiny.yaml", "rect": False, "nosave": False, "notest": False, "cache_images": False,
        "fast_dataloader": True, "persistent_workers": False, "worker_tensor": False, "v5_metric": False,
        "test_batch_size": None, "auto_lr": False, "bucket": "", "patience": 0,
    }  # fmt: skip
    assert compared(record, options) == Comparison([], [], [])
    assert compared(record, replace(options, batch_size=64)).different == ["batch_size 32 -> 64"]


def test_another_hyper_parameter_makes_another_run_even_in_a_file_of_the_same_name():
    found = compared(TrainOptions(), TrainOptions(), hyp=recipe(lr0=0.02))
    assert found == Comparison([], ["hyp.lr0 0.01 -> 0.02"], [])


@pytest.mark.parametrize("name", ["aspect", "gamma"])
def test_a_key_that_was_added_later_stops_no_older_run_unless_it_is_used(name):
    options, used = TrainOptions(), recipe(**{name: 0.5})
    before = {key: value for key, value in config_of_run(options, used).items() if key != f"hyp.{name}"}
    assert compared(before, options).different == []
    assert compared(before, options, hyp=used).different == [f"hyp.{name} 0.0 -> 0.5"]


def test_a_resumed_run_keeps_its_options_except_those_typed_and_those_that_belong_to_each_call():
    stored = TrainOptions(batch_size=48, workers=3, name="bolts", break_lock=True, price=2.0)
    given = TrainOptions(resume=True, workers=5, epochs=7, stop_after=2)
    expected = replace(stored, resume=True, stop_after=2, break_lock=False, price=None)
    assert options_to_resume(stored, given, {"resume"}) == expected
    assert options_to_resume(stored, given, {"resume", "workers"}) == replace(expected, workers=5)
    # In Python nothing is typed: every value that differs from its default counts as given.
    assert options_to_resume(stored, given) == replace(expected, workers=5, epochs=7)


def test_resume_without_a_value_continues_the_newest_run_and_with_a_value_that_run(tmp_path):
    old, new = (tmp_path / f"runs/train/{name}/weights/last.pt" for name in ("exp", "exp2"))
    for file in (old, new):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
    assert checkpoint_to_resume(TrainOptions(), root=tmp_path) is None
    assert checkpoint_to_resume(TrainOptions(resume=True), root=tmp_path) == new
    assert checkpoint_to_resume(TrainOptions(resume=str(old)), root=tmp_path) == old
    assert checkpoint_to_resume(TrainOptions(resume=str(old.parents[1])), root=tmp_path) == old.parents[1]
    with pytest.raises(CheckpointError, match=r"--resume gone.pt: no such file. Give a run folder or its last.pt"):
        checkpoint_to_resume(TrainOptions(resume="gone.pt"))


def test_every_option_is_written(tmp_path):
    write_options(tmp_path, TrainOptions(), recipe())
    written = yaml.safe_load(Path(tmp_path / "opt.yaml").read_text())
    assert list(written) == [field.name for field in fields(TrainOptions)]
