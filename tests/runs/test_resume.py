"""Which changes of options allow a run to continue (G7): exact silently, rounding with a log line, different not."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from flatout.cli import changes_of, option
from flatout.config import read_config
from flatout.errors import CheckpointError, ConfigError
from flatout.runs.folder import RunRequest, choose_run, read_record
from flatout.runs.options import (
    Identity,
    RunOptions,
    checkpoint_to_resume,
    config_of,
    flat,
    identity_of,
    options_to_resume,
)
from flatout.runs.recipe import write_options


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """One option of every class."""

    workers: int = option(8, "how fast", change="exact")
    amp: str = option("off", "how rounded", change="rounding")
    data: str = option("here", "where", change="place")
    batch: int = option(16, "what is learned")
    epochs: int = option(3, "how long")


def identity(**given: object) -> Identity:
    options = Options(**given)  # type: ignore[arg-type]
    return identity_of(options, config_of(options))


def request(project: Path, **given: object) -> RunRequest:
    resume = given.pop("resume", None)
    return RunRequest(project=project, name="exp", identity=identity(**given), resume=resume)  # type: ignore[arg-type]


def unfinished(project: Path, **given: object) -> Path:
    with choose_run(request(project, **given)) as run:
        return run.folder


# Comparing


def test_a_config_equals_itself_after_a_round_trip_through_a_file():
    config = {"size": (320, 320), "hyp": {"lr0": 0.01}}
    other = json.loads(json.dumps(config)) | {"seed": 1}
    assert Identity(config | {"seed": 2}).compare(other).different == ["seed 1 -> 2"]
    found = Identity(config).compare(json.loads(json.dumps(config)))
    assert found.is_same_training and not found.extends and not found.rounding


@pytest.mark.parametrize(
    ("now", "rounding", "different", "extends"),
    [
        ({"workers": 2, "log_every": 9, "mirror": "file:///x", "price": 2.0}, [], [], []),
        ({"amp": "bf16"}, ['amp "off" -> "bf16"'], [], []),
        ({"compile": "on"}, ['compile "off" -> "on"'], [], []),
        ({"batch": 32, "amp": "bf16"}, ['amp "off" -> "bf16"'], ["batch 16 -> 32"], []),
        ({"data": "there"}, [], ['data "here" -> "there"'], []),
        ({"epochs": 5}, [], [], ["epochs 3 -> 5"]),
        ({"epochs": 2}, [], ["epochs 3 -> 2"], []),
    ],
)
def test_every_option_belongs_to_a_class(now: dict, rounding: list, different: list, extends: list):
    found = identity(**now).compare(identity().config)
    assert (found.rounding, found.different, found.extends) == (rounding, different, extends)


def test_moved_data_is_the_same_for_a_run_that_resume_names():
    """The content of the files is compared as well."""
    assert identity(data="there").compare(identity().config, is_named=True).is_same_training


def test_an_option_that_came_later_does_not_stop_an_old_run():
    old = {key: value for key, value in identity().config.items() if key != "batch"}
    assert identity().compare(old).is_same_training
    assert identity(batch=32).compare(old).different == ["batch 16 -> 32"]


def test_an_option_that_used_to_matter_does_not_stop_an_old_run_either():
    assert identity().compare({**identity().config, "workers": 4, "patience": 7}).is_same_training


def test_groups_of_keys_are_compared_key_by_key():
    old, new = {"DATA": {"ROOT": "x", "CROP": 1}, "SEED": 1}, {"DATA": {"ROOT": "x", "CROP": 2}, "SEED": 1}
    assert flat(old) == {"DATA.ROOT": "x", "DATA.CROP": 1, "SEED": 1}
    assert Identity(new).compare(old).different == ["DATA.CROP 1 -> 2"]
    assert Identity(new, changes={"DATA.CROP": "exact"}).compare(old).is_same_training


# Effects on a command


def test_exact_changes_continue_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = unfinished(tmp_path)
    caplog.set_level(logging.INFO)
    with choose_run(request(tmp_path, workers=2, patience=5)) as run:
        assert (run.folder, run.continues) == (folder, True)
    assert caplog.messages == []


def test_rounding_changes_continue_and_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = unfinished(tmp_path)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with choose_run(request(tmp_path, amp="bf16")) as run:
            assert (run.folder, run.continues) == (folder, True)
    assert caplog.messages == [
        f'{folder}: amp "off" -> "bf16". Sums round differently from here on; samples and schedule stay the same.'
    ]
    assert (read_record(folder) or {})["config"]["amp"] == "bf16"


def test_different_changes_start_another_run_and_are_refused_with_exist_ok_and_resume(tmp_path: Path):
    folder = unfinished(tmp_path)
    with choose_run(request(tmp_path, batch=32)) as run:
        assert run.folder != folder
    with pytest.raises(ConfigError, match=r"other settings: batch 16 -> 32\. Continue it as it was with --resume"):
        choose_run(replace(request(tmp_path, batch=32), exist_ok=True))
    with pytest.raises(ConfigError, match=r"--resume .*exp: batch 16 -> 32 would make it a different training\. Leave"):
        choose_run(request(tmp_path, batch=32, resume=folder))
    with choose_run(request(tmp_path, amp="bf16", resume=folder)) as run:
        assert run.continues


# --resume RUN --flag


def test_a_resumed_run_has_its_own_options_except_those_given():
    stored = Options(batch=32, workers=1, price=1.0, log_every=7)
    requested = Options(batch=16, workers=8, price=2.0, amp="bf16", resume="runs/exp")
    merged = options_to_resume(stored, requested, {"amp", "resume", "price"})
    assert not options_to_resume(Options(fresh=True), requested, {"resume"}).fresh, "--once would start over"
    assert (merged.batch, merged.workers, merged.log_every, merged.amp) == (32, 1, 7, "bf16")
    assert (merged.price, merged.resume) == (2.0, "runs/exp"), "never taken from the run"
    typed = options_to_resume(stored, requested, {"workers", "batch"})
    assert (typed.workers, typed.batch) == (8, 16), "given, though it is the default"


def test_the_options_of_a_run_are_read_as_they_were_written_also_names_that_look_like_numbers(tmp_path: Path):
    """YAML 1.2, in which they are read, has numbers that are text in YAML 1.1, in which PyYAML writes."""
    options = RunOptions(project="0o7", name="1e3")
    write_options(tmp_path / "config.yaml", options)
    assert read_config(tmp_path / "config.yaml", RunOptions) == options


def test_from_python_options_that_differ_from_their_defaults_count_as_given():
    merged = options_to_resume(Options(batch=32, workers=1), Options(workers=8, amp="bf16"))
    assert (merged.batch, merged.workers, merged.amp) == (32, 1, "bf16")


def test_a_given_option_undoes_its_opposite():
    @dataclass(frozen=True, kw_only=True)
    class Pair(RunOptions):
        """Options that exclude each other."""

        fast: bool = option(False, "on", change="exact")
        no_fast: bool = option(False, "off", change="exact")

    merged = options_to_resume(Pair(fast=True), Pair(no_fast=True), {"no_fast"})
    assert (merged.fast, merged.no_fast) == (False, True)
    merged = options_to_resume(Pair(no_fast=True), Pair(fast=True), {"fast"})
    assert (merged.fast, merged.no_fast) == (True, False)


def test_the_path_given_to_resume_must_exist_and_be_a_checkpoint(tmp_path: Path):
    assert checkpoint_to_resume(Options()) is None
    with pytest.raises(CheckpointError, match="no such file"):
        checkpoint_to_resume(Options(resume=str(tmp_path / "last.pt")))
    (tmp_path / "best.pt").touch()
    with pytest.raises(ConfigError, match=r"Give its last\.pt or the run folder\. To start a new run .* --weights"):
        checkpoint_to_resume(Options(resume=str(tmp_path / "best.pt")))
    (tmp_path / "last.pt").touch()
    assert checkpoint_to_resume(Options(resume=True), root=tmp_path) == tmp_path / "last.pt"


def test_every_option_of_a_run_has_a_class():
    """Options of every run never make it a different training."""
    assert set(changes_of(RunOptions).values()) == {"call", "exact", "rounding"}
