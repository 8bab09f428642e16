"""The same command continues a run; another one never touches it (G7)."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import CheckpointError, ConfigError, ResourceError
from flatout.runs.folder import RunRequest, choose_run, finished_run, new_run_folder, numbered, read_record
from flatout.runs.options import Identity, newest_last, run_of

CONFIG = {"batch_size": 16, "img_size": (320, 320), "epochs": 3, "hyp": {"lr0": 0.01}}


def request(project: Path, name: str = "exp", config: Any = CONFIG, **settings: Any) -> RunRequest:
    return RunRequest(project=project, name=name, identity=Identity(config), **settings)


def choose(*where: Any, **settings: Any) -> Any:
    return choose_run(request(*where, **settings))


def unfinished(project: Path, **settings: Any) -> Path:
    """A run that was started and then ended early."""
    with choose(project, **settings) as run:
        return run.folder


# Names.


def test_numbers_follow_the_largest_one(tmp_path: Path):
    assert new_run_folder(tmp_path / "runs", "exp", exist_ok=False) == tmp_path / "runs/exp"
    assert new_run_folder(tmp_path / "runs", "exp", exist_ok=False) == tmp_path / "runs/exp2"
    (tmp_path / "runs/exp7").mkdir()
    (tmp_path / "runs/experiment9").mkdir()
    (tmp_path / "runs/exp_12").mkdir()
    assert new_run_folder(tmp_path / "runs", "exp", exist_ok=False) == tmp_path / "runs/exp8"
    assert new_run_folder(tmp_path / "runs", "exp", exist_ok=True) == tmp_path / "runs/exp"
    assert list(numbered(tmp_path / "runs", "exp")) == [1, 2, 7, 8]


def test_a_name_that_ends_in_a_digit_keeps_its_digits(tmp_path: Path):
    assert new_run_folder(tmp_path, "v7", exist_ok=False) == tmp_path / "v7"
    assert new_run_folder(tmp_path, "v7", exist_ok=False) == tmp_path / "v72"


@pytest.mark.parametrize("other", ["f200", "f2001", "f201"])
def test_a_run_of_another_name_that_only_looks_numbered_is_not_continued(tmp_path: Path, other: str):
    """Numbers start with 2 and have no leading zero: f200 is not a run of f20."""
    unfinished(tmp_path, name=other)
    assert unfinished(tmp_path, name="f20") == tmp_path / "f20"


def test_a_file_in_the_way_is_named(tmp_path: Path):
    (tmp_path / "exp").write_text("")
    with pytest.raises(ConfigError, match=r"exp is a file\. Choose another name with --name"):
        new_run_folder(tmp_path, "exp", exist_ok=True)


def test_a_project_folder_that_cannot_be_created_is_a_resource_error():
    """F19."""
    with pytest.raises(ResourceError, match=r"cannot be created: .*Choose another folder with --project"):
        new_run_folder(Path("/proc/nowhere"), "exp", exist_ok=False)


# Which run.


def fail(project: Path, **files: str):
    """Start a run that writes files, then fails."""
    with choose(project) as run:
        for name, content in files.items():
            (run.folder / name).write_text(content)
        raise ConfigError("--weights nowhere.pt: no such file")


def test_a_new_run_that_fails_before_it_wrote_anything_leaves_no_folder(tmp_path: Path):
    with pytest.raises(ConfigError):
        fail(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_later_keeps_its_files(tmp_path: Path):
    with pytest.raises(ConfigError):
        fail(tmp_path, results="epoch 1")
    assert sorted(path.name for path in (tmp_path / "exp").iterdir()) == ["results", "run.json"]


def test_a_run_that_is_continued_is_never_removed(tmp_path: Path):
    unfinished(tmp_path)
    with pytest.raises(ConfigError):
        fail(tmp_path)
    assert (tmp_path / "exp/run.json").exists()


def test_the_same_command_continues_an_unfinished_run(tmp_path: Path):
    first = unfinished(tmp_path)
    with choose(tmp_path) as run:
        assert (run.folder, run.continues) == (first, True)


def test_a_finished_run_is_followed_by_the_next_number(tmp_path: Path):
    with choose(tmp_path) as run:
        run.finish()
    with choose(tmp_path) as run:
        assert (run.folder.name, run.continues) == ("exp2", False)


def test_a_run_in_use_is_followed_by_the_next_number(tmp_path: Path):
    with choose(tmp_path), choose(tmp_path) as second:
        assert (second.folder.name, second.continues) == ("exp2", False)


def test_the_newest_of_several_unfinished_ones_is_continued(tmp_path: Path):
    unfinished(tmp_path)
    second = unfinished(tmp_path, fresh=True)
    os.utime(second, (0, 0))
    with choose(tmp_path) as run:
        assert run.folder == second


def test_other_settings_start_a_new_run_and_the_difference_is_logged(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    unfinished(tmp_path)
    with choose(tmp_path, config={**CONFIG, "batch_size": 32, "cache": True}) as run:
        assert (run.folder.name, run.continues) == ("exp2", False)
    difference = "exp is unfinished, but its settings differ: batch_size 16 -> 32, cache unset -> true."
    assert f"{difference} To continue it, use --resume" in caplog.text


def test_an_older_run_is_continued_when_only_its_settings_are_equal(tmp_path: Path):
    first = unfinished(tmp_path)
    unfinished(tmp_path, config={**CONFIG, "batch_size": 32})
    with choose(tmp_path) as run:
        assert (run.folder, run.continues) == (first, True)


def test_fresh_starts_a_new_run(tmp_path: Path):
    unfinished(tmp_path)
    with choose(tmp_path, fresh=True) as run:
        assert (run.folder.name, run.continues) == ("exp2", False)


def test_more_epochs_continue_and_the_rule_is_logged(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    first = unfinished(tmp_path)
    with choose(tmp_path, config={**CONFIG, "epochs": 5}) as run:
        assert (run.folder, run.continues) == (first, True)
    assert "epochs 3 -> 5. From here on, the schedule is that of the new length." in caplog.text
    record = read_record(first)
    assert record is not None
    assert record["config"]["epochs"] == 5


def test_fewer_epochs_do_not(tmp_path: Path):
    unfinished(tmp_path)
    with choose(tmp_path, config={**CONFIG, "epochs": 2}) as run:
        assert run.folder.name == "exp2"


# Exactly this folder.


def test_exist_ok_continues_an_equal_run_and_refuses_another_one(tmp_path: Path):
    first = unfinished(tmp_path, exist_ok=True)
    with choose(tmp_path, exist_ok=True) as run:
        assert (run.folder, run.continues) == (first, True)
    with pytest.raises(ConfigError, match=r"settings: hyp\.lr0 0\.01 -> 0\.1\. .*--resume .*--fresh.*--name"):
        choose(tmp_path, exist_ok=True, config={**CONFIG, "hyp": {"lr0": 0.1}})
    # Nothing stays locked after a refusal.
    choose(tmp_path, exist_ok=True).close()


def test_exist_ok_starts_over_if_the_old_run_is_finished_or_with_fresh(tmp_path: Path):
    unfinished(tmp_path, exist_ok=True)
    with choose(tmp_path, exist_ok=True, fresh=True) as run:
        assert (run.folder.name, run.continues) == ("exp", False)
        run.finish()
    with choose(tmp_path, exist_ok=True) as run:
        assert (run.folder.name, run.continues) == ("exp", False)


def test_exist_ok_and_resume_are_refused_while_the_run_is_in_use(tmp_path: Path):
    with choose(tmp_path, exist_ok=True) as run:
        for settings in ({"exist_ok": True}, {"resume": run.folder}):
            with pytest.raises(ConfigError, match="is in use by process"):
                choose(tmp_path, **settings)


@pytest.mark.parametrize("path", ["", "weights", "weights/last.pt"])
def test_resume_takes_a_checkpoint_or_its_folder(path: str, tmp_path: Path):
    folder = unfinished(tmp_path)
    (folder / "weights").mkdir()
    (folder / "weights/last.pt").touch()
    with choose(tmp_path, name="other", resume=folder / path) as run:
        assert (run.folder, run.continues) == (folder, True)


def test_a_finished_run_that_is_resumed_with_more_epochs_keeps_its_record(tmp_path: Path, caplog):
    """It is refused once its checkpoint is read."""
    caplog.set_level(logging.INFO)
    with choose(tmp_path) as run:
        run.finish()
    before = read_record(run.folder)
    choose(tmp_path, config=CONFIG | {"epochs": 5}, resume=run.folder).close()
    assert read_record(run.folder) == before and "new length" not in caplog.text


def test_resume_of_a_file_outside_of_runs_is_refused(tmp_path: Path):
    (tmp_path / "yolov7.pt").touch()
    with pytest.raises(CheckpointError, match=r"yolov7\.pt: not part of a run that can be continued.*--weights"):
        run_of(tmp_path / "yolov7.pt")


# Bare --resume.


def test_the_newest_last_is_found_by_the_time_it_changed(tmp_path: Path):
    for name in ("exp", "exp2"):
        (tmp_path / name / "weights").mkdir(parents=True)
        (tmp_path / name / "weights/last.pt").touch()
    # File times move in steps of a few milliseconds.
    time.sleep(0.02)
    (tmp_path / "exp/weights/last.pt").chmod(0o600)
    # Renamed after the newest one appeared, as a save does.
    (tmp_path / "exp/weights/last.prev.pt").touch()
    assert newest_last(tmp_path) == tmp_path / "exp/weights/last.pt"


def test_a_run_whose_newest_file_is_gone_is_found_by_the_one_before(tmp_path: Path):
    (tmp_path / "last.prev.pt").touch()
    assert newest_last(tmp_path) == tmp_path / "last.pt"


def test_resume_without_any_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no last\*\.pt below this folder\. Name a run: --resume RUN"):
        newest_last(tmp_path)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"config": 3}'])
def test_a_folder_whose_record_cannot_be_read_is_not_a_run(damage: str, tmp_path: Path):
    folder = unfinished(tmp_path)
    (folder / "run.json").write_text(damage)
    with choose(tmp_path) as run:
        assert run.folder.name == "exp2"


def test_two_commands_at_once_get_two_folders(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from flatout.runs.folder import RunRequest, choose_run\n"
        "sys.stdin.readline()\n"
        "run = choose_run(RunRequest(project=Path(sys.argv[1]), name='exp'))\n"
        "print(run.folder.name, flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    together = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for _ in range(2)
    ]
    for process in together:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    names = {process.stdout.readline().strip() for process in together if process.stdout}
    for process in together:
        process.communicate("end\n")
    assert names == {"exp", "exp2"}


# Of several unfinished runs.


def test_of_many_unfinished_runs_with_other_settings_only_the_newest_is_listed(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    for size in (1, 2, 3):
        unfinished(tmp_path, config={**CONFIG, "batch_size": size})
    caplog.clear()
    unfinished(tmp_path)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{tmp_path}/exp3 is unfinished, but its settings differ: batch_size 3 -> 16.")
    assert caplog.messages[0].endswith("(2 older unfinished runs of this name)")


def test_nothing_is_listed_if_a_run_is_continued(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    first = unfinished(tmp_path)
    unfinished(tmp_path, config={**CONFIG, "batch_size": 32})
    caplog.clear()
    assert unfinished(tmp_path) == first
    assert "settings differ" not in caplog.text


# --once.


def finished(project: Path, **settings: Any) -> Path:
    with choose(project, **settings) as run:
        run.finish()
        return run.folder


def once(project: Path, **settings: Any) -> Path | None:
    return finished_run(request(project, **settings))


def test_once_does_nothing_if_the_run_is_finished(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    assert once(tmp_path) is None
    first = finished(tmp_path)
    assert once(tmp_path) == first
    assert caplog.messages[-1] == f"{first}: this training is finished; nothing to do (--once)."
    assert once(tmp_path, exist_ok=True) == first
    assert once(tmp_path, resume=first) == first
    assert once(tmp_path, fresh=True) is None


def test_with_once_other_settings_and_more_epochs_are_another_run(tmp_path: Path):
    finished(tmp_path)
    assert once(tmp_path, config={**CONFIG, "batch_size": 32}) is None
    assert once(tmp_path, config={**CONFIG, "epochs": 5}) is None


def test_with_once_an_unfinished_run_is_continued_and_one_in_use_is_refused(tmp_path: Path):
    finished(tmp_path)
    second = unfinished(tmp_path)
    assert once(tmp_path) is None
    with choose(tmp_path) as run:
        assert run.folder == second
        with pytest.raises(ConfigError, match="exp2 is in use by process"):
            once(tmp_path)


# Leftovers of killed processes, and folders that are removed.


def test_incomplete_files_of_dead_processes_are_removed_and_no_others(tmp_path: Path):
    folder = unfinished(tmp_path)
    weights = folder / "weights"
    weights.mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, ours = (weights / f".epoch_000.pt.{pid}.0123abcd.part" for pid in (ended.pid, os.getpid()))
    kept = [
        weights / f".epoch_000.pt.{os.getppid()}.0123abcd.part",  # its process is running
        weights / "epoch_000.part",
        weights / f".epoch_000.pt.{ended.pid}.part",
        weights / "epoch_000.pt",
    ]
    for path in (dead, ours, *kept):
        path.write_bytes(b"half")
    choose(tmp_path).close()
    assert sorted(weights.iterdir()) == sorted(kept)
    dead.write_bytes(b"half")
    choose(tmp_path, resume=folder).close()
    assert not dead.exists()


def test_a_folder_that_is_moved_during_training_is_a_resource_error(tmp_path: Path):
    def train() -> None:
        with choose(tmp_path) as run:
            (run.folder / "run.json").unlink()
            run.folder.rename(tmp_path / "elsewhere")
            (run.folder / "plot.png").write_bytes(b"")

    with pytest.raises(ResourceError, match=r"exp was removed or moved while the training was running.*Restore it"):
        train()
