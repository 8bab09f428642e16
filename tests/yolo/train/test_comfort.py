"""Callbacks, budgets, patience and preflight in real trainings."""

import copy
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.__main__ import main
from flatout.doctor.gpu import DriverFacts, DriverGpu, TorchFacts
from flatout.engine.callbacks import Callback, End, RunStart, Saved, Scores
from flatout.engine.compile import CompileAuto
from flatout.engine.job import IntervalStats
from flatout.errors import CheckpointError, ResourceError
from flatout.runs import preflight
from flatout.yolo.commands.flags import options_from, train_parser
from flatout.yolo.evolve import evolve
from flatout.yolo.find_file import find_weights
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import train
from flatout.yolo.train.prepare import reads_per_sample, use_sync_batch_norm
from tests.yolo.recipes import recipe
from tests.yolo.train.scripted_recipe import ScriptedEnds, ScriptedRecipe
from tests.yolo.train.test_metric_collapse import trained
from tests.yolo.train.test_ranks import torchrun

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[3]


class Recorder(Callback):
    """Records every notification, and asserts that the folder holds what it promises."""

    def __init__(self) -> None:
        self.moments: list[str] = []
        self.scalars: dict[str, float] = {}
        self.ended: End | None = None

    def start(self, run: RunStart) -> None:
        assert run.folder.is_dir() and run.config["batch_size"] and len(run.histograms["classes"])
        self.moments.append(f"start {run.epoch}")

    def log(self, tick: IntervalStats) -> None:
        assert tick.items["box"] > 0
        self.moments.append("log")

    def validation(self, scores: Scores) -> None:
        self.moments.append(f"validation {scores.epoch}")
        self.scalars = dict(scores.scalars)

    def checkpoint(self, saved: Saved) -> None:
        assert saved.path.is_file()
        self.moments.append("checkpoint")

    def end(self, end: End) -> None:
        assert (end.folder / "results.png").is_file() == (end.how == "finished")
        self.moments.append("end")
        self.ended = end


class Raising(Callback):
    """Raises in every notification."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def __getattribute__(self, name: str):
        if name in ("start", "log", "validation", "checkpoint", "end"):
            self.calls[name] += 1
            raise RuntimeError(name)
        return super().__getattribute__(name)


def test_a_training_goes_on_if_a_callback_raises_and_the_others_are_notified_of_everything(
    options: TrainOptions, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, raising = Recorder(), Raising()
    result = train(options, [raising, recorder])
    assert result is not None and result.finished
    assert sum(raising.calls.values()) == 3, "disabled after three errors"
    assert sum("Raising" in message for message in caplog.messages) == 3
    assert (recorder.moments[0], recorder.moments[-1]) == ("start 0", "end")
    counted = Counter(recorder.moments)
    assert (counted["start 0"], counted["validation 0"], counted["validation 1"], counted["end"]) == (1, 1, 1, 1)
    assert counted["log"] >= 2 and counted["checkpoint"] >= 2
    assert recorder.ended is not None and (recorder.ended.how, recorder.ended.epoch) == ("finished", 2)
    assert {"train/box_loss", "metrics/mAP_0.5", "val/cls_loss", "x/lr2"} <= recorder.scalars.keys()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator(str(result.folder)).Reload().Tags()
    assert set(tags["scalars"]) == recorder.scalars.keys() and tags["histograms"] == ["classes"]


def test_a_budget_that_is_used_up_stops_saved_and_a_larger_one_continues(
    options: TrainOptions, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    stopped = train(replace(options, budget="0s", price=1.5), [recorder])
    assert stopped is not None and not stopped.finished
    assert re.match(r"The budget of 0s is used up \(0:0\d:\d\d, cost \d\.\d\d at 1\.50 an hour\)", stopped.why)
    assert recorder.ended is not None and (recorder.ended.how, recorder.ended.why) == ("stopped", stopped.why)
    assert (stopped.folder / "weights/last.pt").is_file()
    with caplog.at_level("INFO"):
        resumed = train(replace(options, budget="1h", price=1.5, stop_after=1))
    assert resumed is not None and resumed.folder == stopped.folder
    assert re.search(r"cost \d\.\d\d of about \d\.\d\d", caplog.text) and "an hour." in caplog.text
    assert json.loads((resumed.folder / "spent.json").read_text())["seconds"] > 0
    assert "Preflight: disk " in caplog.text and "decoding allows at most about" in caplog.text


def test_patience_goes_on_counting_after_a_resume(tmp_path: Path) -> None:
    ends, stops = trained([0.5, 0.4, 0.4], tmp_path, patience=3)
    assert not any(stops)
    state = ends.state
    assert resumed_stops(state, [0.3], first_epoch=3, folder=tmp_path) == [True]
    assert resumed_stops(state, [0.6, 0.5, 0.5, 0.5], first_epoch=3, folder=tmp_path) == [False, False, False, True]
    assert resumed_stops(None, [0.3], first_epoch=3, folder=tmp_path) == [False], "without a state it starts over"
    # The keys of versions without recipes.
    older = {key: value for key, value in state.items() if key not in ("best_score", "losses")}
    older |= {"best_fitness": 0.5, "fitness": 0.4}
    assert resumed_stops(older, [0.3], first_epoch=3, folder=tmp_path) == [True]


def resumed_stops(state: Any, scores: list[float], *, first_epoch: int, folder: Path) -> list[bool]:
    """Which epochs end a training that goes on from `state`."""
    with ScriptedEnds(ScriptedRecipe(folder, scores, patience=3), folder) as ends:
        if state is not None:
            ends.epoch_end.load_state(state)
        return [ends(first_epoch + number) for number in range(len(scores))]


def test_a_real_search_of_two_generations_goes_on_within_a_generation(options: TrainOptions) -> None:
    asked = replace(options, evolve=2, epochs=1, log_to=("none",))
    stopped = evolve(replace(asked, stop_after=2))
    assert (stopped.generations, stopped.finished) == (0, False)
    result = evolve(asked)
    assert (result.generations, result.finished, result.folder) == (2, True, stopped.folder)
    assert {"evolve.txt", "evolve.csv", "evolve.png", "hyp_evolved.yaml"} <= {p.name for p in result.folder.iterdir()}


def test_without_a_network_interface_a_training_works(options: TrainOptions) -> None:
    """F31, in a namespace that has no network at all."""
    alone = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow a namespace without network")
    words = {"--cfg": options.cfg, "--data": options.data, "--hyp": options.hyp, "--project": options.project}
    flags = [word for pair in words.items() for word in pair]
    flags += ["--weights", "", "--epochs", "1", "--batch", "32", "--img", "64", "--device", "cpu", "--workers", "0"]
    flags += ["--noautoanchor", "--nosave", "--on-done", "echo outcome $FLATOUT_OUTCOME > outcome.txt"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder = Path(options.project).parent
    ended = subprocess.run(
        [*alone, sys.executable, str(ROOT / "train.py"), *flags],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (folder / "outcome.txt").read_text() == "outcome finished\n"


def test_a_gpu_that_torch_cannot_use_ends_a_command_before_anything_is_made(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F30, before anything starts: exit code 5, the reason and the command; --device cpu gets as far as the data."""
    monkeypatch.setattr(preflight, "torch_facts", lambda device: TorchFacts(version="2.13.0+cpu"))
    driver = DriverFacts(version="580.65", gpus=(DriverGpu("H100", (9, 0)),), pci_gpus=1)
    monkeypatch.setattr(preflight, "driver_facts", lambda: driver)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    words = ["yolo", "train", "--data", "none.yaml", "--weights", ""]
    assert main(["yolo", "train", "--data", str(next((files / "data").glob("*.yaml"))), "--weights", ""]) == 5
    assert "H100: unused, this torch is built for the CPU only. To fix it: python -m pip" in capsys.readouterr().err
    assert main([*words, "--device", "cpu"]) == 2, "there is no such data set"
    assert main([*words, "--no-preflight"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_ends_a_training_before_anything_is_made(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 10, 1, 1, 10, 1, 1, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(ResourceError, match="free, but the checkpoints of this training need"):
        train(replace(options, no_preflight=False))
    assert list(Path(options.project).iterdir()) == []


def test_the_error_about_missing_weights_has_a_url_to_download_them_from() -> None:
    with pytest.raises(CheckpointError) as caught:
        find_weights("weights/yolov7_training.pt")
    assert caught.value.exit_code == 4
    assert "https://github.com/WongKinYiu/yolov7/releases/download/v0.1/yolov7_training.pt" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"^--weights mine.pt: no such file. Check the path"):
        find_weights("mine.pt")


def test_sync_batch_norm_keeps_the_tensors_and_needs_several_gpus() -> None:
    # The branches of re-parameterised layers have batch norms of their own.
    torch.manual_seed(0)
    config: Any = load_config("yolov7")
    network = build_network({**config, "nc": 3, "width_multiple": 0.0625})
    images = torch.rand(2, 3, 64, 64)
    alone = [level.detach() for level in copy.deepcopy(network).train()(images)]
    before = {name: parameter.data_ptr() for name, parameter in network.named_parameters()}
    assert "no effect with one rank" in use_sync_batch_norm(network, ranks=1, on_gpu=True)
    assert "--sync-bn needs GPUs" in use_sync_batch_norm(network, ranks=2, on_gpu=False)
    kinds = Counter(type(module).__name__ for module in network.modules())
    assert kinds["SyncBatchNorm"] == 0
    use_sync_batch_norm(network, ranks=2, on_gpu=True)
    after = Counter(type(module).__name__ for module in network.modules())
    assert (after["SyncBatchNorm"], after["BatchNorm2d"]) == (kinds["BatchNorm2d"], 0)
    assert {name: parameter.data_ptr() for name, parameter in network.named_parameters()} == before
    for level, expected in zip(network.train()(images), alone, strict=True):
        torch.testing.assert_close(level.detach(), expected)  # without other ranks nothing changes


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="sync batch norm needs two GPUs")
def test_two_gpus_train_with_sync_batch_norm(options: TrainOptions) -> None:
    output = torchrun(options, "--device", "0,1", "--sync-bn")
    assert "Batch-norm statistics are computed over the images of all 2 ranks." in output


def test_flags_that_do_not_change_the_result_do_not_change_the_identity_of_a_run() -> None:
    from flatout.yolo.run_config import config_of_run

    def config_of(words: str):
        return config_of_run(options_from(train_parser().parse_typed(words.split()), {}), recipe())

    comfort = "--price 2 --budget 2h --on-done x --no-preflight --log-to none --entity me --save_period 3"
    assert config_of(f"--img 320 {comfort}") == config_of("--img 320")
    assert config_of("--sync-bn") != config_of("")


def test_preflight_counts_checkpoints_and_reads_per_sample(tmp_path: Path) -> None:
    with ScriptedEnds(ScriptedRecipe(tmp_path, [], epochs=100), tmp_path) as ends:
        model = ends.epoch_end.model
        assert ends.recipe.num_kept_states(model) == 1 + 4 + 4  # the first, every 25th, and four more of the last five
    augment = recipe(mosaic=1.0, mixup=0.5).augment()
    assert reads_per_sample(augment) == 4 * 1.5


def test_a_profile_of_a_training_that_is_too_short_says_so(
    options: TrainOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cfg", options.cfg, "--data", options.data, "--hyp", options.hyp, "--project", options.project]
    flags = ["--weights", "", "--epochs", "1", "--batch", "32", "--img", "64", "--device", "cpu", "--workers", "0"]
    assert main(["yolo", "train", *words, *flags, "--noautoanchor", "--nosave", "--profile"]) == 0
    output = capsys.readouterr().out
    assert re.search(
        r"^--profile: Only \d+ steps? w\w+ observed; a profile needs at least \d+\. Train more epochs", output, re.M
    )


@pytest.mark.parametrize(
    ("settled_ms", "compiles"), [([11.0, 230.0], False), ([230.0, 11.0], False), ([90.0, 91.0], True)]
)
def test_compile_auto_decides_by_steps_without_one_off_costs(monkeypatch, settled_ms, compiles):
    """The first interval includes the time to choose, compile and capture kernels; any other may include a pause."""
    monkeypatch.setattr("flatout.engine.compile.Compiled", lambda network: "compiled")
    decides = CompileAuto(nn.Conv2d(3, 3, 1))
    used = []
    for steps, step_ms in zip((100, 150, 200, 250), (900.0, *settled_ms, 900.0), strict=True):
        tick = IntervalStats(0, steps, {}, 0.0, step_ms, 0.0, 1.0, steps_done=steps, steps_left=20_000)
        used.append(decides(tick, steps))
    assert [each for each in used if each is not None] == (["compiled"] if compiles else [])
    assert used.index("compiled") == 2 if compiles else True


@pytest.mark.parametrize(("compiled_ms", "is_kept"), [([230.0, 80.0], True), ([95.0, 91.0], False)])
def test_compile_auto_goes_back_if_compiled_steps_are_no_faster(monkeypatch, caplog, compiled_ms, is_kept):
    monkeypatch.setattr("flatout.engine.compile.Compiled", lambda network: "compiled")
    caplog.set_level("INFO")
    network = nn.Conv2d(3, 3, 1)
    decides = CompileAuto(network)
    durations = (900.0, 90.0, 91.0, 20_000.0, *compiled_ms, 1.0)
    used = []
    for steps, step_ms in zip(range(100, 800, 100), durations, strict=True):
        tick = IntervalStats(0, steps, {}, 0.0, step_ms, 0.0, 1.0, steps_done=steps, steps_left=20_000)
        used.append(decides(tick, steps))
    # The interval in which it is compiled does not count.
    assert used == [None, None, "compiled", None, None, None if is_kept else network, None]
    assert caplog.messages[-1] == (
        "compile auto: a step takes 80.0 ms compiled, 90.0 ms before: 11 % saved."
        if is_kept
        else "compile auto: a step takes 91.0 ms compiled, 90.0 ms before: training goes on uncompiled."
    )


def test_compile_auto_does_not_decide_by_steps_that_wait_for_images_which_are_decoded_once(monkeypatch):
    monkeypatch.setattr("flatout.engine.compile.Compiled", lambda network: "compiled")
    decides = CompileAuto(nn.Conv2d(3, 3, 1))
    for steps in range(100, 1000, 50):
        stats = IntervalStats(0, steps, {}, 0.0, 400.0, 370.0, 1.0, steps_left=20_000, fill_wait_ms=360.0)
        assert decides(stats, steps) is None
    for steps in (1000, 1050):
        stats = IntervalStats(0, steps, {}, 0.0, 11.0, 0.0, 1.0, steps_left=20_000)
        assert decides(stats, steps) is None
