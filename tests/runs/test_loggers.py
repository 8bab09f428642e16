"""The registry is the only list of loggers, and scalars.csv has every number once, whatever interrupts a run."""

import csv
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from flatout.cli import flags_of
from flatout.config import build_config
from flatout.engine.callbacks import Callback, Callbacks, End, RunStart, Scores
from flatout.engine.job import IntervalStats
from flatout.errors import ConfigError
from flatout.runs.loggers import choose
from flatout.runs.loggers.choose import LOGGERS, NONE, LoggerSpec, choose_loggers
from flatout.runs.loggers.plain_csv import NAME, PlainCsv
from flatout.runs.loggers.tensorboard import TensorBoard, crc32c
from flatout.runs.options import RunOptions
from tests.runs.test_records import full_after
from tests.runs.toy_ranks import run_ranks
from tests.runs.toy_runs import Toys

DOCS = Path(__file__).parents[2] / "docs"
STEPS = 4
"""Steps per epoch."""


# The registry


def test_flags_errors_and_documentation_know_the_same_loggers():
    known = [*LOGGERS, NONE]
    (flag,) = flags_of(RunOptions, ["log_to"])
    assert list(flag.settings["choices"]) == known
    with pytest.raises(ConfigError, match=f"write {', '.join(map(repr, known[:-1]))} or {known[-1]!r}"):
        build_config({"log_to": ["paper"]}, RunOptions)
    table = (DOCS / "callbacks.md").read_text().partition("## Loggers")[2].partition("### ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == known


def test_a_new_logger_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch):
    class Paper(Callback):
        def __init__(self, size: str = "A4") -> None:
            self.size = size

    module = ModuleType("paper_logger")
    module.Paper = Paper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paper_logger", module)
    monkeypatch.setitem(choose.LOGGERS, "paper", LoggerSpec("paper_logger:Paper"))
    (made,) = choose_loggers(("paper", "none", "paper"), paper={"size": "A3"})
    assert isinstance(made, Paper) and made.size == "A3"
    monkeypatch.setitem(choose.LOGGERS, "paper", LoggerSpec("paper_logger:Paper", needs="no_such_paper"))
    with pytest.raises(ConfigError, match="paper is not installed: python -m pip install no_such_paper, or choose"):
        choose_loggers(("paper",))
    spec = LoggerSpec("paper_logger:Paper", needs="no_such_paper", package="paper-pip")
    monkeypatch.setitem(choose.LOGGERS, "paper", spec)
    with pytest.raises(ConfigError, match="paper is not installed: python -m pip install paper-pip, or choose"):
        choose_loggers(("paper",))


# TensorBoard


@pytest.mark.parametrize("num_bytes", [4, 5, 127, 128, 255, 256, 257, 4099, 70_001])
def test_checksums_are_those_of_tensorboard(num_bytes: int):
    pywrap = pytest.importorskip(
        "tensorboard.compat.tensorflow_stub.pywrap_tensorflow", reason="tensorboard is not installed"
    )
    content = np.random.default_rng(num_bytes).bytes(num_bytes)
    assert crc32c(content) == pywrap.crc32c(content)


def test_the_checksum_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283


def test_plots_are_images_of_tensorboard_as_they_are_on_disk(tmp_path: Path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    (tmp_path / "visuals").mkdir()
    plots = {"results": tmp_path / "results.png", "visuals/frame": tmp_path / "visuals/frame.png"}
    for plot in plots.values():
        Image.effect_noise((40, 30), 50).save(plot)
    (tmp_path / "half.png").write_bytes(b"no image")
    logger = TensorBoard()
    logger.start(RunStart(job="toy", folder=tmp_path, config={}, epoch=0, epochs=1, continues=False))
    logger.validation(Scores(epoch=0, at=0, scalars={"val/accuracy": 0.5}))
    logger.end(End(how="finished", folder=tmp_path, epoch=1))
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert found.Tags()["scalars"] == ["val/accuracy"] and sorted(found.Tags()["images"]) == sorted(plots)
    for name, plot in plots.items():
        (shown,) = found.Images(name)
        assert (shown.step, shown.width, shown.height) == (1, 40, 30)
        assert shown.encoded_image_string == plot.read_bytes()


# scalars.csv


def started(folder: Path, *, epoch: int = 0, step: int = 0, continues: bool = True) -> PlainCsv:
    logger = PlainCsv()
    done = epoch * STEPS + step
    logger.start(
        RunStart(
            job="toy", folder=folder, config={}, epoch=epoch, epochs=9, continues=continues, step=step, steps_done=done
        )
    )
    return logger


def train(logger: PlainCsv, epoch: int, *steps: int, ends: bool = True, loss: float = 1.0) -> None:
    """Report log intervals that end after these steps of an epoch, then its validation."""
    for step in steps:
        done = epoch * STEPS + step
        logger.log(IntervalStats(epoch, step, {"loss": loss}, 0.1, 5.0, 1.0, 80.0, steps_done=done, steps_left=1))
    if ends:
        done = (epoch + 1) * STEPS
        logger.validation(Scores(epoch=epoch, at=epoch, steps_done=done, scalars={"val/accuracy": loss / 2}))


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / NAME).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def events(folder: Path) -> list[tuple[int, int, str]]:
    """Step, epoch and name of losses and scores."""
    names = {"step/loss", "val/accuracy"}
    return [(int(row["step"]), int(row["epoch"]), row["name"]) for row in rows_of(folder) if row["name"] in names]


def test_every_number_has_a_row(tmp_path: Path):
    logger = started(tmp_path, continues=False)
    train(logger, 0, 2)
    logger.end(End(how="finished", folder=tmp_path, epoch=1))
    assert (tmp_path / NAME).read_text() == (
        "step,epoch,name,value\n2,0,step/loss,1.0\n2,0,step/lr,0.1\n2,0,step/step_ms,5.0\n2,0,step/wait_ms,1.0\n"
        "2,0,step/samples_per_s,80.0\n4,0,val/accuracy,0.5\n"
    )


def test_a_validation_within_an_epoch_belongs_to_the_current_epoch(tmp_path: Path):
    logger = started(tmp_path, epoch=1, continues=False)
    logger.validation(Scores(epoch=0, at=6, steps_done=6, scalars={"val/accuracy": 0.5}))
    assert events(tmp_path) == [(6, 1, "val/accuracy")]


EPOCH_0 = [(2, 0, "step/loss"), (4, 0, "step/loss"), (4, 0, "val/accuracy")]
EPOCH_1 = [(6, 1, "step/loss"), (8, 1, "step/loss"), (8, 1, "val/accuracy")]


@pytest.mark.parametrize(
    ("epoch", "step", "kept"),
    [
        (0, 0, []),
        (0, 3, EPOCH_0[:1]),
        (0, 4, EPOCH_0[:2]),
        (1, 0, EPOCH_0),
        (1, 2, [*EPOCH_0, *EPOCH_1[:1]]),
        (2, 0, [*EPOCH_0, *EPOCH_1]),
    ],
    ids=["its start", "within an epoch", "before its validation", "after it", "later", "the end"],
)
def test_rows_newer_than_the_checkpoint_are_removed(epoch: int, step: int, kept: list, tmp_path: Path):
    logger = started(tmp_path, continues=False)
    train(logger, 0, 2, 4)
    train(logger, 1, 2, 4)
    started(tmp_path, epoch=epoch, step=step)
    assert events(tmp_path) == kept


def test_without_truncating_rows_would_appear_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    monkeypatch.setattr(PlainCsv, "_truncate", lambda self, length: None)
    train(started(tmp_path, continues=False), 0, 2, 4)
    train(started(tmp_path, step=2), 0, 4)
    assert events(tmp_path) == [*EPOCH_0, *EPOCH_0[1:]]


def test_half_a_row_at_the_end_is_removed(tmp_path: Path):
    train(started(tmp_path, continues=False), 0, 2)
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole + b"5,1,step/lo")
    started(tmp_path, epoch=1)
    assert (tmp_path / NAME).read_bytes() == whole


def test_a_training_that_was_rolled_back_has_its_steps_once(tmp_path: Path):
    logger = started(tmp_path, continues=False)
    train(logger, 0, 2, 4)
    train(logger, 1, 2, ends=False, loss=float("nan"))
    train(logger, 0, 4, loss=3.0)
    train(logger, 1, 2, 4)
    assert events(tmp_path) == [*EPOCH_0, *EPOCH_1]
    assert "nan" not in (tmp_path / NAME).read_text()


def test_an_interval_that_is_reported_twice_counts_as_reported_the_second_time(tmp_path: Path):
    """A save reports the interval again, with the steps that the device had not finished when it ended."""
    logger = started(tmp_path, continues=False)
    train(logger, 0, 2, 4, 4, loss=2.0)
    assert events(tmp_path) == EPOCH_0
    train(logger, 0, loss=5.0)
    assert rows_of(tmp_path)[-1]["value"] == "2.5" and events(tmp_path) == EPOCH_0


def test_a_new_run_in_an_old_folder_starts_over(tmp_path: Path):
    train(started(tmp_path, continues=False), 0, 2)
    train(started(tmp_path, continues=False), 0, 4)
    assert events(tmp_path) == EPOCH_0[1:]


def test_switched_on_in_the_middle_it_starts_there(tmp_path: Path):
    train(started(tmp_path, epoch=1), 1, 2, 4)
    assert events(tmp_path) == EPOCH_1


@pytest.mark.fault
def test_a_full_disk_costs_rows_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    callbacks = Callbacks([logger := started(tmp_path, continues=False)])
    train(logger, 0, 2, 4)
    with full_after((tmp_path / NAME).stat().st_size):
        for _ in range(4):
            callbacks.validation(Scores(epoch=1, at=1, steps_done=8, scalars={"val/accuracy": 0.5}))
    train(logger, 2, 2)
    assert events(tmp_path) == [*EPOCH_0, (10, 2, "step/loss"), (12, 2, "val/accuracy")]
    (warning,) = caplog.messages
    assert "scalars.csv: cannot be written: File too large. Training goes on without it" in warning
    assert "# 4 missing" in (tmp_path / NAME).read_text()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (("--signal-at", "2:1:SIGKILL"), -9),
        (("--signal-at", "1:11:SIGKILL"), -9),
        (("--signal-at", "1:11:SIGTERM"), 75),
        (("--poison-weights", "2:5", "--transient"), 0),
    ],
    ids=["killed", "killed in a validation", "stopped in a validation", "rolled back"],
)
def test_a_disturbed_training_has_the_numbers_of_an_undisturbed_one(
    fault: tuple[str, ...], code: int, toys: Toys, tmp_path: Path
):
    plain, disturbed = tmp_path / "plain", tmp_path / "disturbed"
    run = toys.run(plain, "--log-to", "csv")
    assert run.code == 0, run.output
    assert toys.run(disturbed, "--log-to", "csv", *fault).code == code
    if code:
        run = toys.run(disturbed, "--log-to", "csv")
        assert run.code == 0, run.output
    expected, found = (numbers_of(project / "toy") for project in (plain, disturbed))
    assert len({key[:2] for key in found}) == len(found), "each number once"
    assert {key for key in expected if not key[1].startswith("step/")} <= found
    steps = [int(row["step"]) for row in rows_of(disturbed / "toy")]
    assert steps == sorted(steps)
    whole_epochs = {key for key in expected if key[1] == "step/loss" and key[0] % 10 == 0}
    assert len(whole_epochs) == 4 and whole_epochs <= found


def numbers_of(folder: Path) -> set[tuple[int, str, str]]:
    """Step, name and value of everything that does not depend on the clock."""
    rows = [row for row in rows_of(folder) if not re.search(r"_ms$|_per_s$", row["name"])]
    numbers = {(int(row["step"]), row["name"], row["value"]) for row in rows}
    assert len(numbers) == len(rows)
    return numbers


def test_only_the_first_rank_writes(toys: Toys, tmp_path: Path):
    runs = run_ranks(toys, tmp_path, "--epochs", 2, "--log-to", "csv")
    assert [run.code for run in runs] == [0, 0], runs[0].output
    assert [key[0] for key in sorted(numbers_of(tmp_path / "toy")) if key[1] == "val/val_accuracy"] == [10, 20]


@pytest.mark.fault
def test_a_mirror_includes_it(toys: Toys, tmp_path: Path):
    flags = ("--log-to", "csv", "--mirror", (tmp_path / "mirror").as_uri())
    assert toys.run(tmp_path / "here", *flags, env={"FLATOUT_STOP_AFTER": "14"}).code == 0
    run = toys.run(tmp_path / "there", *flags)
    assert run.code == 0, run.output
    assert numbers_of(tmp_path / "here/toy") < numbers_of(tmp_path / "there/toy")
