"""Features of every job (docs/jobs.md): each test is a row of the table there, and runs for each of its columns.

The guarantees of runs are tested with the toy job; these tests show that real jobs have them too, with the same flags.
"""

import csv
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.bootstrap.script import BootstrapConfig, script_of
from flatout.cli import JOBS
from flatout.monitor.run_state import run_state
from flatout.runs.folder import read_record
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
BATCH = {"yolo": 4, "defect": 4, "spike": 2}
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


# Start, continue, start over


def test_the_same_command_continues_and_ends_with_the_same_weights(job: JobFolder, jobs: Jobs, tmp_path: Path):
    """G2, G7."""
    ok(job.train(stop_after=job.situation.stop_after))
    output = ok(job.train())
    assert f"Continuing {job.situation.run} at epoch 1" in output
    assert job.epochs == [0, 1, 2] and job.record["finished"]
    apart = tmp_path / "apart"
    ok(job.train("--project", str(apart), "--name", "whole"))
    mine, whole = (tensors_of(next(folder.glob("*/last.pt"))) for folder in (job.run_folder, apart / "whole"))
    assert mine.keys() == whole.keys()
    assert all(mine[name].numpy().tobytes() == whole[name].numpy().tobytes() for name in mine)


def test_fresh_starts_a_new_run(stopped: JobFolder):
    output = ok(stopped.train("--fresh", stop_after=1))
    assert f"Starting {stopped.situation.run}2." in output


def test_exist_ok_uses_the_folder_of_that_name(stopped: JobFolder):
    output = ok(stopped.train("--exist-ok", "--fresh", stop_after=1))
    assert f"Starting {stopped.situation.run}." in output


def test_once_does_nothing_if_the_run_is_finished(job: JobFolder):
    ok(job.train())
    assert "this training is finished; nothing to do (--once)." in ok(job.train("--once"))
    assert [path.name for path in job.run_folder.parent.iterdir()] == [job.run_folder.name]


def test_resume_continues_the_run_it_names(job: JobFolder, tmp_path: Path):
    """With all of its options: --resume needs no other flag."""
    ok(job.train("--name", "mine", "--log-to", "csv", stop_after=job.situation.stop_after))
    run = job.run_folder.with_name("mine")
    resumed = job.command(job.job, "train", "--resume", str(run), "--mirror", f"file://{tmp_path}/mirror")
    assert f"Continuing {run} at epoch 1" in ok(resumed)
    assert read_record(run)["finished"]  # type: ignore[index]
    last = (run / "scalars.csv").read_text().splitlines()[-1]
    assert last.split(",")[1] == "2", "its logger is used"
    assert [path.name for path in (tmp_path / "mirror").iterdir()] == ["mine"]


# Three classes of change


def test_an_exact_change_continues_silently(stopped: JobFolder):
    output = ok(stopped.train(*EXACT[stopped.job]))
    assert f"Continuing {stopped.situation.run} at epoch 1" in output
    assert "round differently" not in output


def test_a_rounding_change_continues_and_is_logged(stopped: JobFolder):
    output = ok(stopped.train(*ROUNDING[stopped.job], "--deterministic"))
    assert f"Continuing {stopped.situation.run} at epoch 1" in output
    (line,) = re.findall(r"(.*)\. Sums round differently from here on; samples and schedule stay the same\.", output)
    assert "deterministic false -> true" in line and "channels_last" in line.lower()


@pytest.mark.parametrize("how", ["exist-ok", "resume"])
def test_a_different_training_is_refused_with_a_list_and_alternatives(how: str, stopped: JobFolder):
    flags = ("--exist-ok",) if how == "exist-ok" else ("--resume", stopped.situation.run)
    done = stopped.train(*flags, *DIFFERENT[stopped.job])
    assert done.code == 2
    advice = "start over with --fresh" if how == "exist-ok" else "start a new run without --resume"
    assert " -> " in done.err and advice in done.err
    assert stopped.epochs == [0]


def test_changed_data_is_refused_unless_allowed(stopped: JobFolder):
    (stopped.folder / PART_OF_DATA[stopped.job]).rename(stopped.folder / "aside")
    refused = stopped.train()
    assert refused.code == 3 and "have changed since this run was saved" in refused.err
    assert "continuing with the changed data (--allow-data-change)" in ok(stopped.train("--allow-data-change"))


# Money, signals, saving


def test_a_budget_saves_and_stops(job: JobFolder):
    output = ok(job.train("--price", "3600", "--budget", "0.01"))
    assert (
        "The budget of 0.01 is used up" in output
        and "run the same command with a larger --budget to continue" in output
    )
    assert re.search(r"so far: 0:00:0\d, cost \d+\.\d\d at 3600.00 an hour\.", output)
    assert "Continuing" in ok(job.train())


def test_on_done_gets_the_outcome(job: JobFolder):
    command = "echo $FLATOUT_OUTCOME $FLATOUT_EXIT_CODE $FLATOUT_EPOCH > done.txt"
    ok(job.train("--on-done", command, stop_after=1))
    assert (job.folder / "done.txt").read_text() == "stopped 0 0\n"
    ok(job.train("--on-done", command))
    assert (job.folder / "done.txt").read_text() == "finished 0 3\n"


def test_sigterm_saves_and_ends_with_75(job: JobFolder):
    """G8, F01: within eight seconds, which here include part of the start."""
    done = job.train(change="SIGTERM at step 7")
    assert done.code == 75 and done.seconds < 8
    assert re.search(
        r"^flatout: SIGTERM: saved at epoch \d, step \d\. Run the same command again to continue\.$", done.err, re.M
    )
    assert "Continuing" in ok(job.train())


def test_stop_after_stops_cleanly_after_that_many_steps(job: JobFolder):
    assert "Stopped after 2 steps, as requested. Run the same command again to continue." in ok(job.train(stop_after=2))
    (state,) = job.run_folder.glob("*/last.pt")
    assert read_container(state)["training"]["position"]["step"] == 2  # type: ignore[index]


def test_checkpoints_are_saved_as_often_as_requested(job: JobFolder):
    often = job.train("--save-every-steps", "1", stop_after=3)
    seldom = job.train("--save-every-steps", "1000", "--fresh", stop_after=3)
    assert often.saves - seldom.saves >= 2


def test_patience_stops_a_training_that_does_not_improve(job: JobFolder):
    """Scores of such small trainings hardly change; this checks only that the flag is accepted and the run finishes."""
    ok(job.train("--patience", "1"))
    assert job.record["finished"]


# Other machines, several ranks


def test_a_mirror_lets_another_machine_continue(job: JobFolder, tmp_path: Path):
    mirror = ("--mirror", f"file://{tmp_path}/mirror")
    assert "Mirrored to" in ok(job.train(*mirror, stop_after=job.situation.stop_after))
    job.run_folder.rename(tmp_path / "gone")
    output = ok(job.train(*mirror))
    assert "fetched checkpoint" in output and f"Continuing {job.situation.run} at epoch 1" in output
    assert job.epochs == [0, 1, 2]
    if job.job == "spike":
        assert (job.run_folder / "metrics/epoch_000.json").is_file(), "files of subfolders are mirrored too"
    job.run_folder.rename(tmp_path / "gone too")
    assert "this training is finished; its files are here." in ok(job.train(*mirror))


def test_bootstrap_prints_a_script_for_a_rented_machine(job: JobFolder):
    command = (job.job, "train", *job.flags[:2])
    script = script_of(BootstrapConfig(command=command, package="x.whl", mirror="s3://bucket/run", gpus="2"))
    assert f"flatout {job.job} train" in script and "--once --mirror s3://bucket/run --device 0,1" in script
    done = job.command("bootstrap", "--package", "x.whl", "--", job.job, "train", "--no-such-flag")
    assert done.code == 2 and "unknown flag --no-such-flag." in done.err


def test_two_ranks_train_and_one_continues(job: JobFolder):
    """G6: the total batch, and with it the steps, do not depend on the number of ranks."""
    runs = job.ranks(2, stop_after=3)
    assert [run.code for run in runs] == [0, 0], [run.err for run in runs]
    output = ok(job.train())
    assert "world_size 2 -> 1: samples and their order per step stay the same" in output
    assert job.epochs == [0, 1, 2] and job.record["finished"]


def test_one_rank_trains_and_two_continue(stopped: JobFolder):
    runs = stopped.ranks(2)
    assert [run.code for run in runs] == [0, 0], [run.err for run in runs]
    assert "world_size 1 -> 2" in runs[0].out
    assert stopped.epochs == [0, 1, 2]


# Loggers, monitor, profiler


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
    logged = [(int(row["step"]), row["name"]) for row in rows]
    assert len(set(logged)) == len(logged) and [step for step, _ in logged] == sorted(step for step, _ in logged)


@pytest.mark.parametrize("name", [name for name, spec in LOGGERS.items() if spec.needs and name != DEFAULT])
def test_other_loggers_are_refused_with_a_command_if_they_are_not_installed(name: str, job: JobFolder):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed: tests/engine/test_callbacks.py logs to it")
    done = job.train("--log-to", name)
    package = {"mlflow": "mlflow-skinny"}.get(name, name)
    assert done.code == 2 and f"{name} is not installed: python -m pip install {package}, or" in done.err


def test_the_monitor_shows_the_run(stopped: JobFolder):
    state = run_state(stopped.run_folder)
    assert (state["state"], state["epoch"], state["epochs"]) == ("stopped", 1, 3)
    assert state["rows"] and state["readiness"] is not None


def test_profile_shows_where_the_time_goes(job: JobFolder):
    output = ok(job.command("profile", job.job, "--steps", "3", "--quick", *job.flags))
    assert "ms per step" in output and "Verdict" in output
    assert (job.folder / "profile/profile.html").is_file() and not job.run_folder.exists()
    refused = job.command("profile", job.job, "--quick", "--resume", job.situation.run)
    assert refused.code == 2 and "--resume has no use here" in refused.err


def test_with_profile_a_training_profiles_itself(job: JobFolder):
    ok(job.train(stop_after=1))
    output = ok(job.command(job.job, "train", "--resume", job.situation.run, "--profile", "3"))
    assert f"3 steps of {BATCH[job.job]} images: " in output, "the batch is that of the run"
    assert f"Saved as a page: {job.situation.run}/profile.html" in output
    assert job.record["finished"]


# The network


def test_compile_on_compiles_the_network(job: JobFolder):
    assert "Model compiled successfully" in ok(job.train("--compile", "on", change="compile cheaply", stop_after=1))


def test_compile_auto_says_whether_it_pays(job: JobFolder):
    output = ok(job.train("--compile", "auto", "--log-every", "1", change="decide immediately", stop_after=4))
    assert re.search(r"compile auto: \d+ steps of .* it does not pay\.", output)


# Exit codes and messages


def test_mistakes_have_the_same_exit_codes(job: JobFolder):
    assert job.train("--no-such-flag").code == 2
    assert job.train("--device", "7").code == 5
    assert job.train("--resume", "nowhere").code == 4


def test_the_last_lines_are_the_same(job: JobFolder):
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
