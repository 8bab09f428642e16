"""What every job has (docs/jobs.md): each test is a row of the table there, and runs for each of its columns.

All guarantees of a run are tested with the toy; here is shown that real jobs get them, with the same flags.
"""

import csv
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.bootstrap.script import Job, script_of
from flatout.cli import JOBS
from flatout.monitor.run_state import run_state
from flatout.runs.loggers.choose import DEFAULT, LOGGERS
from flatout.safefiles.container import read_container
from tests.old_runs.compare import tensors_of
from tests.runs.every_job import Done, JobFolder, Jobs

ROOT = Path(__file__).parents[2]
DIFFERENT = {"yolo": ("--img", "96"), "defect": ("--lr", "0.5"), "spike": ("--set", "TRAIN.OPTIM.LR=0.5")}
"""A flag that makes another training."""
ROUNDING = {
    "yolo": ("--channels-last",),
    "defect": ("--channels_last", "false"),
    "spike": ("--set", "MODEL.CHANNELS_LAST=false"),
}
PART_OF_DATA = {
    "yolo": "set/images/train/15.bmp",
    "defect": "strips/train/good/0003.tiff",
    "spike": "clips/train/scene_01",
}
EXACT = {"yolo": ("--fast-dataloader",), "defect": ("--cache_size", "1"), "spike": ("--set", "DATA.USE_RAM_CACHE=true")}


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    with Jobs() as server:
        yield server


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, jobs: Jobs, tmp_path: Path) -> JobFolder:
    opened = JobFolder(jobs, request.param, tmp_path)
    opened.situation.prepare(tmp_path)
    return opened


@pytest.fixture
def stopped(job: JobFolder) -> JobFolder:
    """A run that was stopped in the middle of its second epoch."""
    ok(job.train(stop_after=job.situation.stop_after))
    return job


def ok(done: Done) -> str:
    assert done.code == 0, done.out + done.err
    return done.out


# Begin, continue, begin again


def test_the_same_command_continues_and_ends_with_the_same_weights(job: JobFolder, jobs: Jobs, tmp_path: Path):
    """G2, G7."""
    ok(job.train(stop_after=job.situation.stop_after))
    told = ok(job.train())
    assert f"Continuing {job.situation.run} at epoch 1" in told
    assert job.epochs == [0, 1, 2] and job.record["finished"]
    apart = tmp_path / "apart"
    ok(job.train("--project", str(apart), "--name", "whole"))
    mine, whole = (tensors_of(next(folder.glob("*/last.pt"))) for folder in (job.run_folder, apart / "whole"))
    assert mine.keys() == whole.keys()
    assert all(mine[name].numpy().tobytes() == whole[name].numpy().tobytes() for name in mine)


def test_fresh_begins_again(stopped: JobFolder):
    told = ok(stopped.train("--fresh", stop_after=1))
    assert f"Starting {stopped.situation.run}2." in told


def test_exist_ok_uses_the_folder_of_that_name(stopped: JobFolder):
    told = ok(stopped.train("--exist-ok", "--fresh", stop_after=1))
    assert f"Starting {stopped.situation.run}." in told


def test_once_a_complete_run_is_not_followed_by_another(job: JobFolder):
    ok(job.train())
    assert "this training is finished; nothing to do (--once)." in ok(job.train("--once"))
    assert [path.name for path in job.run_folder.parent.iterdir()] == [job.run_folder.name]


def test_resume_takes_up_the_run_it_names(stopped: JobFolder):
    assert "Continuing" in ok(stopped.train("--resume", stopped.situation.run))
    assert stopped.epochs == [0, 1, 2]


# Three classes of change


def test_an_exact_change_goes_on_in_silence(stopped: JobFolder):
    told = ok(stopped.train(*EXACT[stopped.job]))
    assert f"Continuing {stopped.situation.run} at epoch 1" in told
    assert "round differently" not in told


def test_a_rounding_change_goes_on_with_a_word(stopped: JobFolder):
    told = ok(stopped.train(*ROUNDING[stopped.job]))
    assert f"Continuing {stopped.situation.run} at epoch 1" in told
    assert "Sums round differently from here on; samples and schedule stay the same." in told


@pytest.mark.parametrize("how", ["exist-ok", "resume"])
def test_a_different_training_is_refused_with_a_list_and_a_way_out(how: str, stopped: JobFolder):
    asked = ("--exist-ok",) if how == "exist-ok" else ("--resume", stopped.situation.run)
    done = stopped.train(*asked, *DIFFERENT[stopped.job])
    assert done.code == 2
    way_out = "start over with --fresh" if how == "exist-ok" else "begin a new run without --resume"
    assert " -> " in done.err and way_out in done.err
    assert stopped.epochs == [0]


def test_other_data_is_refused_and_may_be_allowed(stopped: JobFolder):
    (stopped.folder / PART_OF_DATA[stopped.job]).rename(stopped.folder / "aside")
    refused = stopped.train()
    assert refused.code == 3 and "have changed since this run was saved" in refused.err
    assert "continuing with the changed data (--allow-data-change)" in ok(stopped.train("--allow-data-change"))


# Money, signals, saving


def test_a_budget_stops_it_saved(job: JobFolder):
    told = ok(job.train("--price", "3600", "--budget", "0.01"))
    assert "The budget of 0.01 is used up" in told and "run the same command with a larger --budget to continue" in told
    assert re.search(r"so far: 0:00:0\d, cost \d+\.\d\d at 3600.00 an hour\.", told)
    assert "Continuing" in ok(job.train())


def test_on_done_hears_how_it_ended(job: JobFolder):
    command = "echo $FLATOUT_OUTCOME $FLATOUT_EXIT_CODE $FLATOUT_EPOCH > done.txt"
    ok(job.train("--on-done", command, stop_after=1))
    assert (job.folder / "done.txt").read_text() == "stopped 0 0\n"
    ok(job.train("--on-done", command))
    assert (job.folder / "done.txt").read_text() == "finished 0 3\n"


def test_sigterm_saves_and_ends_with_75(job: JobFolder):
    """G8, and F01: it has eight seconds, of which starting takes a part here."""
    done = job.train(change="SIGTERM at step 7")
    assert done.code == 75 and done.seconds < 8
    assert re.search(
        r"^flatout: SIGTERM: saved at epoch \d, step \d\. Run the same command again to continue\.$", done.err, re.M
    )
    assert "Continuing" in ok(job.train())


def test_stop_after_ends_it_cleanly_after_so_many_steps(job: JobFolder):
    assert "Stopped after 2 steps, as requested. Run the same command again to continue." in ok(job.train(stop_after=2))
    (state,) = job.run_folder.glob("*/last.pt")
    assert read_container(state)["training"]["position"]["step"] == 2  # type: ignore[index]


def test_it_is_saved_as_often_as_was_asked_for(job: JobFolder):
    often = job.train("--save-every-steps", "1", stop_after=3)
    seldom = job.train("--save-every-steps", "1000", "--fresh", stop_after=3)
    assert often.saves - seldom.saves >= 2


def test_patience_ends_it_when_nothing_gets_better(job: JobFolder):
    """Scores of such small trainings hardly move; what counts is that the flag is known and the run complete."""
    ok(job.train("--patience", "1"))
    assert job.record["finished"]


# Elsewhere


def test_a_mirror_takes_it_to_another_machine(job: JobFolder, tmp_path: Path):
    mirror = ("--mirror", f"file://{tmp_path}/mirror")
    assert "Mirrored to" in ok(job.train(*mirror, stop_after=job.situation.stop_after))
    job.run_folder.rename(tmp_path / "gone")
    told = ok(job.train(*mirror))
    assert "fetched checkpoint" in told and f"Continuing {job.situation.run} at epoch 1" in told
    assert job.epochs == [0, 1, 2]
    if job.job == "spike":
        assert (job.run_folder / "metrics/epoch_000.json").is_file(), "files of subfolders come along"
    job.run_folder.rename(tmp_path / "gone too")
    assert "this training is finished; its files are here." in ok(job.train(*mirror))


def test_a_rented_machine_is_told_what_to_do(job: JobFolder):
    command = (job.job, "train", *job.flags[:2])
    script = script_of(Job(command=command, package="x.whl", mirror="s3://bucket/run", gpus="2"))
    assert f"flatout {job.job} train" in script and "--once --mirror s3://bucket/run --device 0,1" in script
    done = job.command("bootstrap", "--package", "x.whl", "--", job.job, "train", "--no-such-flag")
    assert done.code == 2 and "unknown flag --no-such-flag." in done.err


def test_two_ranks_train_it_and_it_goes_on_with_one(job: JobFolder):
    """G6: with another number of ranks the batch of all together stays the same, and so do the steps."""
    runs = job.ranks(2, stop_after=3)
    assert [run.code for run in runs] == [0, 0], [run.err for run in runs]
    told = ok(job.train())
    assert "world_size 2 -> 1: samples and their order per step stay the same" in told
    assert job.epochs == [0, 1, 2] and job.record["finished"]


def test_begun_with_one_rank_it_goes_on_with_two(stopped: JobFolder):
    runs = stopped.ranks(2)
    assert [run.code for run in runs] == [0, 0], [run.err for run in runs]
    assert "world_size 1 -> 2" in runs[0].out
    assert stopped.epochs == [0, 1, 2]


# Who hears of it


def test_numbers_go_to_tensorboard(job: JobFolder):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    ok(job.train("--log-to", "tensorboard", stop_after=job.situation.stop_after))
    assert list(job.run_folder.rglob("events.out.tfevents.*"))


def test_numbers_go_to_a_plain_csv(job: JobFolder):
    ok(job.train("--log-to", "csv", stop_after=job.situation.stop_after))
    ok(job.train("--log-to", "csv"))
    with (job.run_folder / "scalars.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["epoch"] for row in rows} == {"0", "1", "2"} and "step/lr" in {row["name"] for row in rows}
    told = [(int(row["step"]), row["name"]) for row in rows]
    assert len(set(told)) == len(told) and [step for step, _ in told] == sorted(step for step, _ in told)


@pytest.mark.parametrize("name", [name for name, known in LOGGERS.items() if known.needs and name != DEFAULT])
def test_other_loggers_are_known_and_named_where_they_are_missing(name: str, job: JobFolder):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed: tests/engine/test_callbacks.py logs to it")
    done = job.train("--log-to", name)
    assert done.code == 2 and f"{name} is not installed: python -m pip install {name}" in done.err


def test_the_monitor_shows_it(stopped: JobFolder):
    state = run_state(stopped.run_folder)
    assert (state["state"], state["epoch"], state["epochs"]) == ("stopped", 1, 3)
    assert state["series"] and state["readiness"] is not None


def test_profile_says_where_the_time_goes(job: JobFolder):
    told = ok(job.command("profile", job.job, "--steps", "3", "--quick", *job.flags))
    assert "ms per step" in told and "Verdict" in told
    assert (job.folder / "profile/profile.html").is_file() and not job.run_folder.exists()


def test_with_profile_a_training_says_so_by_itself(job: JobFolder):
    told = ok(job.train("--profile", "3"))
    assert f"The same as a page: {job.situation.run}/profile.html" in told
    assert job.record["finished"]


# The network


def test_it_is_compiled_if_asked_for(job: JobFolder):
    assert "Model compiled successfully" in ok(job.train("--compile", "on", change="compile cheaply", stop_after=1))


def test_compile_auto_says_whether_it_pays(job: JobFolder):
    told = ok(job.train("--compile", "auto", "--log-every", "1", change="decide at once", stop_after=4))
    assert re.search(r"compile auto: \d+ steps of .* it does not pay\.", told)


# Words


def test_what_is_wrong_has_the_same_exit_code(job: JobFolder):
    assert job.train("--no-such-flag").code == 2
    assert job.train("--device", "7").code == 5
    assert job.train("--resume", "nowhere").code == 4


def test_the_last_words_are_the_same(job: JobFolder):
    *_, results, spent = ok(job.train()).splitlines()
    (weights,) = {path.parent for path in job.run_folder.glob("*/last.pt")}
    name = weights.relative_to(job.folder)
    assert results == f"Results are in {job.situation.run}, the weights in {name}."
    assert re.fullmatch(rf"{job.situation.run}: 0:00:\d\d\.", spent)


def test_the_table_of_the_docs_has_these_rows():
    """docs/jobs.md names the test of each row."""
    text = (ROOT / "docs/jobs.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    here = {name for name in globals() if name.startswith("test_")} - {"test_the_table_of_the_docs_has_these_rows"}
    assert named == here
    (head,) = re.findall(r"^\| What \| Flag or command \| (.*) \| Test \|$", text, re.M)
    assert head.split(" | ") == list(JOBS)
