"""Stages as one job: each starts from the best of the one before; an interrupted job ends like an undisturbed one."""

import csv
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flatout.__main__ import main as flatout
from flatout.engine.callbacks import Callback, End
from flatout.engine.job import IntervalStats
from flatout.errors import CheckpointError, ConfigError, DataError, Interrupted
from flatout.runs.folder import RunRequest, choose_run
from flatout.runs.lock import Locked
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.model.configs import load_config
from flatout.yolo.multihead.grouping.choose import write_grouping
from flatout.yolo.multihead.grouping.statistics import make_grouping
from flatout.yolo.stages import StagePlan, StagesResult, read_plan, run_stages
from flatout.yolo.weights import read_weights

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES = [{"epochs": 1, "freeze": 50}, {"epochs": 2, "freeze": 30}, {"epochs": 1, "freeze": 0}]


@pytest.fixture(scope="module", autouse=True)
def _default_signal_handlers() -> Iterator[None]:
    """Shells start background jobs with signals ignored, and child processes inherit that."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def file(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stages of a narrow single-head network on 70 small images."""
    path = tmp_path_factory.mktemp("stages") / "stages.small.yaml"
    common = {
        "weights": "",
        "cfg": str(files / "narrow.yaml"),
        "data": str(next((files / "data").glob("*.yaml"))),
        "hyp": str(files / "hyp.yaml"),
        "batch-size": 32,
        "img-size": 64,
        "device": "cpu",
        "workers": 0,
        "log_every": 1,
    }
    path.write_text(yaml.safe_dump({"common": common, "stages": STAGES}))
    return path


def planned(file: Path, project: Path, **flags: Any) -> StagePlan:
    return read_plan(file, {"project": str(project), **flags})


@pytest.fixture(scope="module")
def whole(file: Path, tmp_path_factory: pytest.TempPathFactory) -> StagesResult:
    """A job without interruption."""
    torch.set_num_threads(1)
    return run_stages(planned(file, tmp_path_factory.mktemp("whole")))


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return read_weights(path).for_inference()


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as table:
        return list(csv.DictReader(table))


class SendsSignal(Callback):
    """Sends SIGTERM to this process at one moment of a stage."""

    def __init__(self, moment: str, stage: str) -> None:
        self._moment, self._stage = moment, stage
        self._folder = ""

    def start(self, run: Any) -> None:
        self._folder = run.folder.name

    def log(self, tick: IntervalStats) -> None:
        self._at("log")

    def end(self, end: End) -> None:
        self._at("end")

    def _at(self, moment: str) -> None:
        if (moment, self._folder) == (self._moment, self._stage):
            self._moment = ""
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_job_leaves_one_table_one_plot_and_the_best_weights(whole: StagesResult):
    assert whole.finished and len(whole.fitness) == 3
    rows = rows_of(whole.folder)
    assert [row["stage"] for row in rows] == ["1", "2", "2", "3"]
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    lines = [line.split() for line in (whole.folder / "results.txt").read_text().splitlines()]
    assert [line[0] for line in lines] == ["0/3", "1/3", "2/3", "3/3"]
    assert all(len(line) == 15 for line in lines)
    assert (whole.folder / "results.png").stat().st_size > 10_000
    best = whole.folder / f"stage{whole.best_stage}/weights/best.pt"
    assert (whole.folder / "weights/best.pt").read_bytes() == best.read_bytes()
    assert whole.folder.name == "small"


def test_every_stage_starts_from_the_best_of_the_one_before(whole: StagesResult):
    for number in (2, 3):
        before = state_of(whole.folder / f"stage{number - 1}/weights/best.pt")
        start = state_of(whole.folder / f"stage{number}/weights/init.pt")
        assert all(torch.equal(start[key].half(), value.half()) for key, value in before.items())


def test_frozen_layers_keep_their_weights_and_unfrozen_ones_learn(whole: StagesResult):
    def moved(number: int, key: str) -> bool:
        start, end = (state_of(whole.folder / f"stage{number}/weights/{name}.pt") for name in ("init", "last"))
        return not torch.equal(start[key].half(), end[key].half())

    assert not moved(1, "model.0.conv.weight") and not moved(1, "model.35.conv.weight")
    assert not moved(2, "model.0.conv.weight") and moved(2, "model.35.conv.weight")
    assert moved(3, "model.0.conv.weight")


def test_a_job_that_was_cut_twice_ends_as_one_that_was_not(file: Path, whole: StagesResult, tmp_path: Path):
    plan = planned(file, tmp_path)
    # Between two stages, where no loop handles signals, and in the middle of one.
    for sender in (SendsSignal("end", "stage1"), SendsSignal("log", "stage2")):
        with pytest.raises(Interrupted, match=r"SIGTERM: .*saved") as caught:
            run_stages(plan, [sender])
        assert caught.value.exit_code == 75
    trained = (tmp_path / "small/stage1/weights/last.pt").stat().st_mtime_ns
    assert [row["stage"] for row in rows_of(tmp_path / "small")] == ["1"]
    result = run_stages(plan)
    assert result.finished and result.folder == tmp_path / "small"
    assert (tmp_path / "small/stage1/weights/last.pt").stat().st_mtime_ns == trained
    assert rows_of(result.folder) == rows_of(whole.folder)
    expected, found = (state_of(job.folder / "weights/last.pt") for job in (whole, result))
    assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


def test_a_finished_job_is_left_alone_and_another_plan_is_refused(
    file: Path, whole: StagesResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*") if path.name != ".lock"}
    words = ["yolo", "stages", str(file), "--project", str(whole.folder.parent)]
    assert flatout(words) == 0
    assert "the weights of stage" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*") if path.name != ".lock"}
    assert after == before
    content = yaml.safe_load(file.read_text())
    content["stages"][1]["freeze"] = 20
    changed = tmp_path / file.name
    changed.write_text(yaml.safe_dump(content))
    assert flatout(["yolo", "stages", str(changed), *words[3:]]) == 2
    error = capsys.readouterr().err
    assert "small was started with other stages: stage2.freeze [30] -> [20]. Undo these changes" in error


def test_plans_are_compared_by_the_options_that_change_the_result(file: Path, tmp_path: Path):
    meant, before = planned(file, tmp_path).identity(), planned(file, tmp_path).config()
    assert meant.compare(before) == ([], [], [])
    # An older version with other rules saved more options, and lacks the newest.
    newest = (".no_graphs", ".hyp.aspect", ".hyp.gamma")
    older = {key: value for key, value in before.items() if not key.endswith(newest)}
    older |= {"stage1.hyp": "hyp.yaml", "stage2.nosave": False, "stage3.fast_dataloader": False}
    assert meant.compare(older) == ([], [], [])
    assert planned(file, tmp_path, workers=2, cache_images=True).identity().compare(before) == ([], [], [])
    rounding = planned(file, tmp_path, channels_last=True).identity().compare(before)
    assert rounding == ([f"stage{n}.channels_last false -> true" for n in (1, 2, 3)], [], [])
    longer = planned(file, tmp_path, epochs=2).identity().compare(before)
    assert longer.different == ["stage1.epochs 1 -> 2", "stage3.epochs 1 -> 2"]


def test_a_job_that_another_process_has_just_begun_is_not_touched_by_another_plan(file: Path, tmp_path: Path):
    plan = planned(file, tmp_path)
    stage = tmp_path / "small/stage1"
    with choose_run(RunRequest(project=tmp_path, name="small", identity=plan.identity(), fresh=True)):
        stage.mkdir()
        (stage / "opt.yaml").write_text("")
        with pytest.raises(Locked):
            run_stages(planned(file, tmp_path, batch_size=8))
        assert (stage / "opt.yaml").is_file()


def test_a_network_with_several_heads_goes_through_stages(files: Path, file: Path, whole: StagesResult, tmp_path: Path):
    config: Any = load_config("yolov7-tiny-1b4h")
    (tmp_path / "narrow4.yaml").write_text(yaml.safe_dump({**config, "nc": 6, "width_multiple": 0.125}))
    heads = make_grouping("contiguous", [[0, 5], [1, 2, 3, 4]], ["a", "b"], ["", ""])
    write_grouping(heads, tmp_path / "heads.yaml", generated_by="a test")
    content = yaml.safe_load(file.read_text())
    content["common"] |= {
        "weights": str(whole.folder / "weights/best.pt"),
        "transfer_weights": True,
        "cfg": str(tmp_path / "narrow4.yaml"),
        "heads": 2,
        "head_config": str(tmp_path / "heads.yaml"),
    }
    content["stages"] = [{"epochs": 1, "freeze": 50}, {"epochs": 1}]
    (tmp_path / "stages.heads.yaml").write_text(yaml.safe_dump(content))
    result = run_stages(planned(tmp_path / "stages.heads.yaml", tmp_path / "runs"))
    assert result.finished
    state = state_of(result.folder / "weights/best.pt")
    widths = [len(state[f"model.77.heads.{head}.0.bias"]) for head in (0, 1)]
    assert widths == [3 * (5 + 2), 3 * (5 + 4)]
    other = make_grouping("contiguous", [[0, 4], [1, 2, 3, 5]], ["a", "b"], ["", ""])
    write_grouping(other, tmp_path / "heads.yaml", generated_by="a test")
    with pytest.raises(ConfigError, match=r"stage1\.heads_in_it"):
        run_stages(planned(tmp_path / "stages.heads.yaml", tmp_path / "runs"))


def test_fresh_begins_in_a_folder_of_its_own(file: Path, whole: StagesResult):
    plan = read_plan(file, {"project": str(whole.folder.parent), "fresh": True}, of_this_call={"stop_after": 1})
    result = run_stages(plan)
    assert (result.folder.name, result.finished, result.fitness) == ("small2", False, ())


def test_the_shipped_file_is_the_planned_schedule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    plan = read_plan("data/stages.gradual_unfreeze.yaml", {"data": str(shipped_folder("data") / "coco320.yaml")})
    assert plan.name == "gradual_unfreeze"
    assert [stage.epochs for stage in plan.stages] == [100, 100, 100, 200]
    assert [stage.freeze for stage in plan.stages] == [(50,), (30,), (10,), (0,)]
    assert [hyp.lr0 for hyp in plan.hyps] == [0.01, 0.001, 0.0005, 0.0001]
    assert all(stage.img_size == (320, 320) and stage.heads == 4 for stage in plan.stages)
    assert [stage.cfg for stage in plan.stages] == ["cfg/training/yolov7-tiny-1b4h.yaml", "", "", ""]


def test_flags_of_the_command_hold_for_all_stages(file: Path):
    plan = read_plan(file, {"epochs": 7, "img_size": [96], "name": "other"})
    assert [(stage.epochs, stage.img_size) for stage in plan.stages] == [(7, (96, 96))] * 3
    assert (plan.name, plan.project) == ("other", Path("runs/stages"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"stages": []}, "stages: the list is empty. Name at least one stage."),
        ({}, "stages: missing key"),
        ({"stages": [{"epoch": 3}]}, "stage 1: unknown key 'epoch' - did you mean 'epochs'?"),
        ({"stages": [{"epochs": 0}]}, "stage 1: --epochs 0 must be 1 or more"),
        ({"stages": [{"epochs": "many"}]}, "stage 1: epochs: wrong value ('many') - write a whole number"),
        ({"stages": [{}, {"weights": "x.pt"}]}, "stage 2: weights: a stage starts from the best weights"),
        ({"stages": [{"name": "x"}]}, "stage 1: name applies to all stages: give it to the command, as --name."),
        ({"common": {"resume": True}, "stages": [{}]}, "common: resume cannot be used in stages. Leave it out."),
        ({"stages": [{"hyp": "hyp.scratch.tiny.noota.stage9.yaml"}]}, "--hyp hyp.scratch.tiny.noota.stage9.yaml: no"),
    ],
)
def test_mistakes_in_the_file_are_named_before_anything_is_trained(content: Any, sentence: str, tmp_path: Path):
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as caught:
        read_plan(path, {"data": str(shipped_folder("data") / "coco320.yaml")})
    assert sentence in str(caught.value)


def test_a_job_that_failed_before_its_first_step_may_be_corrected(file: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"--weights nowhere\.pt: no such file"):
        run_stages(planned(file, tmp_path, weights="nowhere.pt"))
    assert not (tmp_path / "small").exists()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("train: nowhere\nval: nowhere\nnames: [a]\n")
    with pytest.raises(DataError, match="nowhere does not exist"):
        run_stages(planned(file, tmp_path, data=str(wrong)))
    plan = read_plan(file, {"project": str(tmp_path)}, of_this_call={"stop_after": 1})
    assert run_stages(plan).folder == tmp_path / "small"


def test_what_stages_cannot_do_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--resume cannot be used with stages: the same command continues"):
        read_plan(file, {"resume": True})
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match=r"stages run on one GPU"):
        run_stages(planned(file, tmp_path))
