"""`train()` as a whole, on a CPU: a small network on a small generated data set, every option once."""

import errno
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml

from flatout.__main__ import main
from flatout.engine.callbacks import Callback, RunStart
from flatout.engine.checkpoints import CheckpointStore
from flatout.errors import CheckpointError, ConfigError, DataError, ResourceError
from flatout.runs.folder import RunFolder
from flatout.safefiles import atomic
from flatout.yolo.load_network import load_network
from flatout.yolo.model.network import Network
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import TrainResult, YoloRecipe, train
from flatout.yolo.weights import read_weights
from tests.yolo.data.drawn_set import SmallDataSet
from tests.yolo.train.conftest import BATCH, TRAIN, options_for

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = -(-TRAIN // BATCH)


def trained(options: TrainOptions) -> TrainResult:
    result = train(options)
    assert result is not None
    return result


def weights_in(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return read_weights(folder / "weights" / name).for_inference()


def assert_same_end(one: Path, other: Path) -> None:
    """Equal results and weights, to the bit."""
    assert results_of(one) == results_of(other)
    expected, found = weights_in(one, "last.pt"), weights_in(other, "last.pt")
    assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


def results_of(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "results.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_run(files: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A training of two epochs without interruption."""
    torch.set_num_threads(1)
    return trained(options_for(files, tmp_path_factory.mktemp("one_run")))


def test_a_run_leaves_what_yolov7_leaves(options: TrainOptions) -> None:
    result = trained(options)
    assert result.finished
    names = {path.name for path in result.folder.iterdir()}
    assert {"opt.yaml", "hyp.yaml", "results.txt", "results.csv", "results.png", "labels.jpg", "weights"} <= names
    assert {f"train_batch{step}.jpg" for step in range(STEPS)} <= names
    assert {"test_batch0_labels.jpg", "test_batch0_pred.jpg", "confusion_matrix.png"} <= names
    weights = {path.name for path in (result.folder / "weights").iterdir()}
    assert weights == {"init.pt", "last.pt", "best.pt", "epoch_000.pt", "epoch_001.pt"}
    rows = results_of(result.folder)
    assert [row[0] for row in rows] == ["0/1", "1/1"]
    assert all(len(row) == 15 for row in rows)
    assert read_weights(result.folder / "weights/last.pt").kind == "stripped"
    loaded = load_network(result.folder / "weights/best.pt").network
    assert loaded.names[:2] == ["ring", "cross"]


def test_seeded_runs_are_the_same_to_the_bit(options: TrainOptions) -> None:
    first = trained(replace(options, name="a"))
    second = trained(replace(options, name="b", workers=2))
    other = trained(replace(options, name="c", seed=7))
    assert_same_end(first.folder, second.folder)
    assert results_of(first.folder) != results_of(other.folder)


def with_gamma(hyp: Path, gamma: float, folder: Path) -> str:
    """A hyp file in `folder` with this gamma, else like `hyp`."""
    file = folder / "gamma.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(hyp.read_text()) | {"gamma": gamma}))
    return str(file)


def test_a_seeded_run_with_gamma_repeats_and_is_another_training(
    options: TrainOptions, files: Path, tmp_path: Path, one_run: TrainResult
) -> None:
    changed = replace(options, hyp=with_gamma(files / "hyp.yaml", 0.5, tmp_path))
    first, second = trained(replace(changed, name="a")), trained(replace(changed, name="b", workers=2))
    assert_same_end(first.folder, second.folder)
    assert results_of(first.folder) != results_of(one_run.folder)


def test_a_run_that_does_not_know_gamma_goes_on_without_it_and_refuses_it(
    options: TrainOptions, files: Path, tmp_path: Path, one_run: TrainResult
) -> None:
    folder = trained(replace(options, stop_after=3)).folder
    record = json.loads((folder / "run.json").read_text())
    del record["config"]["hyp.gamma"]
    (folder / "run.json").write_text(json.dumps(record))
    hyp = yaml.safe_load((folder / "hyp.yaml").read_text())
    del hyp["gamma"]
    (folder / "hyp.yaml").write_text(yaml.safe_dump(hyp))
    with pytest.raises(ConfigError, match=r"hyp\.gamma 0\.0 -> 0\.3 would make it a different training"):
        train(TrainOptions(resume=str(folder), hyp=with_gamma(files / "hyp.yaml", 0.3, tmp_path)))
    continued = trained(TrainOptions(resume=str(folder)))
    assert continued.folder == folder
    assert_same_end(continued.folder, one_run.folder)


def test_a_run_that_is_resumed_in_another_folder_asks_for_its_data(
    options: TrainOptions, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    data = str(Path(options.data).relative_to(files))
    folder = trained(replace(options, data=data, stop_after=1)).folder
    monkeypatch.chdir(tmp_path)
    advice = (
        f"The run's data, {data}, is not here. Run this in the folder where {folder} was trained, or give --data FILE."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(advice)}$"):
        train(TrainOptions(resume=str(folder)))
    assert trained(TrainOptions(resume=str(folder), data=options.data, stop_after=2)).folder == folder


def test_fast_dataloader_trains_on_the_same_pixels(options: TrainOptions) -> None:
    classic = trained(replace(options, name="a"))
    fast = trained(replace(options, name="b", fast_dataloader=True))
    assert results_of(classic.folder) == results_of(fast.folder)


def test_the_same_command_continues_to_the_same_end(options: TrainOptions) -> None:
    whole = trained(replace(options, name="whole"))
    for stop_after in (1, 3, 5):
        name = f"cut{stop_after}x"
        stopped = trained(replace(options, name=name, stop_after=stop_after))
        assert not stopped.finished
        resumed = trained(replace(options, name=name))
        assert resumed.finished
        assert resumed.folder == stopped.folder
        assert_same_end(resumed.folder, whole.folder)


def test_a_finished_run_gets_a_neighbour_and_a_fresh_one_too(options: TrainOptions) -> None:
    first = trained(replace(options, epochs=1))
    second = trained(replace(options, epochs=1))
    assert (first.folder.name, second.folder.name) == ("exp", "exp2")
    stopped = trained(replace(options, stop_after=1))
    fresh = trained(replace(options, epochs=2, fresh=True, stop_after=1))
    assert (stopped.folder.name, fresh.folder.name) == ("exp3", "exp4")


def test_resume_takes_everything_from_the_run(options: TrainOptions) -> None:
    stopped = trained(replace(options, stop_after=2))
    last = stopped.folder / "weights/last.pt"
    resumed = trained(TrainOptions(resume=str(last)))
    assert resumed.finished
    assert resumed.folder == stopped.folder
    assert len(results_of(resumed.folder)) == options.epochs
    with pytest.raises(CheckpointError, match="so it cannot be resumed"):
        train(TrainOptions(resume=str(last)))


def test_a_run_goes_on_with_other_options_that_change_no_bit_and_says_nothing(
    options: TrainOptions, one_run: TrainResult, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flatout")
    stopped = trained(replace(options, stop_after=3))
    resumed = trained(replace(options, fast_dataloader=True, workers=1, log_every=1))
    assert (resumed.folder, resumed.finished) == (stopped.folder, True)
    assert_same_end(resumed.folder, one_run.folder)
    assert not [text for text in caplog.messages if "->" in text]


def test_resume_accepts_flags_that_keep_the_training_the_same_and_refuses_the_others_with_a_list(
    options: TrainOptions, one_run: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(replace(options, stop_after=3)).folder
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    resume = ["yolo", "train", "--resume", str(folder)]
    assert main([*resume, "--batch", "16", "--workers", "1", "--img", "96", "--channels-last"]) == 2
    error = capsys.readouterr().err
    assert f"--resume {folder}: batch_size 32 -> 16, img_size [64, 64] -> [96, 96] would make it a different" in error
    assert "Leave these options out to continue the run as it was, or start a new run without --resume." in error
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
    assert main([*resume, "--workers", "1", "--fast_dataloader", "--log-every", "1"]) == 0
    assert "->" not in capsys.readouterr().out
    assert_same_end(folder, one_run.folder)


def test_resume_with_another_memory_layout_goes_on_and_says_so(
    options: TrainOptions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flatout")
    folder = trained(replace(options, stop_after=3)).folder
    assert trained(TrainOptions(resume=str(folder), channels_last=True)).finished
    message = "channels_last false -> true. Sums round differently from here on; samples and schedule stay the same."
    assert f"{folder}: {message}" in caplog.messages


def test_resume_takes_the_hyper_parameters_of_the_run_unless_another_file_is_named(
    options: TrainOptions, files: Path, tmp_path: Path
) -> None:
    """The file of that name may have changed since."""
    own = tmp_path / "hyp.yaml"
    own.write_bytes((files / "hyp.yaml").read_bytes())
    folder = trained(replace(options, hyp=str(own), stop_after=3)).folder
    other = yaml.safe_load(own.read_text()) | {"lr0": 0.02}
    own.write_text(yaml.safe_dump(other))
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    with pytest.raises(ConfigError, match=r"hyp\.lr0 0\.01 -> 0\.02 would make it a different training"):
        train(TrainOptions(resume=str(folder), hyp=str(tmp_path / "other.yaml")))
    assert trained(TrainOptions(resume=str(folder))).finished
    assert yaml.safe_load((folder / "hyp.yaml").read_text())["lr0"] == 0.01


def test_resume_refuses_a_file_that_is_not_the_newest_state(options: TrainOptions) -> None:
    stopped = trained(replace(options, stop_after=1))
    with pytest.raises(ConfigError, match="--weights"):
        train(TrainOptions(resume=str(stopped.folder / "weights/init.pt")))


def test_labels_that_changed_are_noticed(options: TrainOptions, files: Path) -> None:
    stopped = trained(replace(options, stop_after=1))
    label = next(path for path in sorted((files / "data/labels/train").iterdir()) if path.read_text().strip())
    before = label.read_bytes()
    try:
        label.write_bytes(b"0 0.5 0.5 0.25 0.25\n")
        with pytest.raises(DataError, match="--allow-data-change"):
            train(options)
        continued = trained(replace(options, allow_data_change=True))
        assert continued.folder == stopped.folder
    finally:
        label.write_bytes(before)


def test_nosave_writes_only_the_end(options: TrainOptions) -> None:
    result = trained(replace(options, nosave=True))
    assert {path.name for path in (result.folder / "weights").iterdir()} == {"last.pt", "best.pt"}


def test_notest_validates_only_the_last_epoch(options: TrainOptions) -> None:
    rows = results_of(trained(replace(options, notest=True)).folder)
    assert rows[0][8:] == ["0"] * 7
    assert rows[1][8:] != ["0"] * 7


@pytest.mark.parametrize(
    "switches",
    [
        {"multi_scale": True},
        {"rect": True},
        {"quad": True},
        {"adam": True, "linear_lr": True},
        {"image_weights": True},
        {"single_cls": True},
        {"freeze": (5,)},
        {"ota_from": 1},
        {"label_smoothing": 0.1, "cache_images": True},
        {"sequential": True, "v5_metric": True},
        {"amp": "bf16"},
        {"channels_last": True},
        {"device_augment": True},
        {"device_augment": True, "store_420": True},
        {"device_augment": True, "multi_scale": True},
        {"device_augment": True, "rect": True},
    ],
    ids=lambda switches: "-".join(switches),
)
def test_every_switch_trains(options: TrainOptions, switches: dict[str, Any]) -> None:
    result = trained(replace(options, **switches))
    assert result.finished
    assert len(results_of(result.folder)) == 2


def test_frozen_layers_keep_their_weights(options: TrainOptions) -> None:
    result = trained(replace(options, freeze=(5,)))
    start, end = weights_in(result.folder, "init.pt"), weights_in(result.folder, "epoch_001.pt")
    assert torch.equal(start["model.4.conv.weight"], end["model.4.conv.weight"])
    assert not torch.equal(start["model.5.conv.weight"], end["model.5.conv.weight"])


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ((500,), "the network has no layer 499, only 0 to 77; --freeze 77 freezes all layers but the last."),
        ((3, 500), "the network has no layer 500, only 0 to 77; --freeze 77 freezes all layers but the last."),
        ((78,), "nothing is left to train. --freeze 77 freezes all layers but the last."),
    ],
)
def test_freezing_too_much_is_refused(options: TrainOptions, layers: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        trained(replace(options, freeze=layers))


def test_training_goes_on_from_weights(options: TrainOptions) -> None:
    first = trained(replace(options, epochs=1))
    start = first.folder / "weights/last.pt"
    second = trained(replace(options, epochs=1, weights=str(start)))
    # Rounded to half precision once more, as the file already is.
    given = read_weights(start).state
    for key, value in weights_in(second.folder, "init.pt").items():
        if "anchor" not in key and value.is_floating_point():
            torch.testing.assert_close(value, given[key].float())


def test_patience_ends_a_training_that_gets_no_better(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.5, 0.1, 0.1, 0.1, 0.1])
    monkeypatch.setattr("flatout.yolo.metrics.evaluation.fitness", lambda **kw: next(scores))
    result = trained(replace(options, epochs=5, patience=2))
    assert len(results_of(result.folder)) == 3
    assert result.finished


def test_a_collapse_is_reported(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scores = iter([0.9, 0.05])
    monkeypatch.setattr("flatout.yolo.metrics.evaluation.fitness", lambda **kw: next(scores))
    result = trained(options)
    assert "may have collapsed" in caplog.text
    assert result.best_fitness == 0.9


def test_a_signal_while_the_last_files_are_written_does_not_prevent_that(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = YoloRecipe.plot

    def plot_with_signal(recipe: YoloRecipe, folder: Path) -> None:
        assert callable(signal.getsignal(signal.SIGTERM)), "it would kill the tests"
        signal.raise_signal(signal.SIGTERM)
        plot(recipe, folder)

    monkeypatch.setattr(YoloRecipe, "plot", plot_with_signal)
    result = trained(replace(options, epochs=1))
    assert result.finished
    assert read_weights(result.folder / "weights/last.pt").kind == "stripped"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_log_holds_every_epoch(options: TrainOptions) -> None:
    folder = trained(options).folder
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [event["epoch"] for event in events] == [0, 1]
    assert all(event["images_per_s"] > 0 for event in events)


def test_contradicting_switches_are_refused_before_a_folder_is_made(options: TrainOptions, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--rect"):
        train(replace(options, image_weights=True, rect=True))
    assert not (tmp_path / "runs").exists()


def test_data_is_checked_before_a_network_is_built_and_an_error_leaves_no_folder(
    options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.yolo.train.recipe.new_network", lambda *_: pytest.fail("built a network"))
    labels = SmallDataSet(tmp_path / "set")
    for path in (labels.folder / "labels/train").iterdir():
        path.write_text("0 32 24 10 10\n")
    with pytest.raises(DataError, match=r"4 of 4 labels cannot be used.*pixels"):
        train(replace(options, data=str(labels.yaml())))
    labels.values["nc"] = 3
    with pytest.raises(ConfigError, match="nc: 3 classes, but 2 names"):
        train(replace(options, data=str(labels.yaml())))
    assert not list((tmp_path / "runs").rglob("opt.yaml"))


def test_diagnose_compile_explains_and_trains_nothing(
    options: TrainOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert train(replace(options, diagnose_compile=True)) is None
    assert "DYNAMO EXPLANATION REPORT" in caplog.text
    assert "graph breaks: 0" in caplog.text
    assert not (tmp_path / "runs").exists()


MANY, DAMAGED = 110, 37


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """110 PNG files of noise."""
    folder = tmp_path_factory.mktemp("noise")
    (folder / "images").mkdir()
    (folder / "labels").mkdir()
    rng = np.random.default_rng(0)
    for number in range(MANY):
        height, width = rng.integers(40, 64, 2)
        cv2.imwrite(str(folder / f"images/{number:03}.png"), rng.integers(0, 256, (height, width, 3), np.uint8))
        (folder / f"labels/{number:03}.txt").write_text(f"{number % 6} 0.5 0.5 0.4 0.4\n")
    (folder / "val.txt").write_text(f"{folder}/images/000.png\n{folder}/images/001.png\n")
    data = {"train": str(folder / "images"), "val": str(folder / "val.txt"), "nc": 6, "names": [*"abcdef"]}
    (folder / "noise.yaml").write_text(yaml.safe_dump(data))
    return folder


@pytest.fixture
def damaged(noise: Path) -> Iterator[Path]:
    """One of the files with damaged pixels and an intact header: only decoding it reveals that."""
    path = noise / f"images/{DAMAGED:03}.png"
    content = path.read_bytes()
    at = content.index(b"IDAT") + 40
    path.write_bytes(content[:at] + bytes(byte ^ 0xFF for byte in content[at : at + 40]) + content[at + 40 :])
    yield path
    path.write_bytes(content)


def on_noise(options: TrainOptions, noise: Path, **changes: Any) -> TrainOptions:
    return replace(options, data=str(noise / "noise.yaml"), epochs=1, notest=True, **changes)


def test_one_damaged_png_of_110_does_not_end_a_default_training(noise, damaged, files, tmp_path, capsys):
    words = ["--data", str(noise / "noise.yaml"), "--cfg", "cfg/training/yolov7-tiny.yaml", "--weights", ""]
    words += ["--hyp", str(files / "hyp.yaml"), "--img-size", "64", "--batch-size", "32", "--epochs", "1"]
    words += ["--device", "cpu", "--workers", "2", "--notest", "--noautoanchor", "--project", str(tmp_path / "runs")]
    code = main(["yolo", "train", *words])
    output = capsys.readouterr()
    assert code == 0, output.err
    kept = (tmp_path / "runs/exp/run.log").read_text()
    assert kept.count(f"File {damaged} is replaced by a substitute") == 1
    assert f"1 file could not be read, and others were shown instead. Repair or remove: {damaged} (" in kept


@pytest.mark.parametrize("way", ["fast_dataloader", "device_augment"])
def test_one_damaged_png_does_not_end_a_training_with_another_input_either(noise, damaged, options, caplog, way):
    assert trained(on_noise(options, noise, **{way: True})).finished
    assert sum(f"File {damaged} is replaced by a substitute" in text for text in caplog.messages) >= 1
    assert any(text.startswith("1 file could not be read") and str(damaged) in text for text in caplog.messages)


def test_an_image_that_is_deleted_after_the_scan_does_not_end_a_training(noise, damaged, options, caplog):
    class Deletes(Callback):
        def start(self, run: RunStart) -> None:
            damaged.unlink()

    result = train(on_noise(options, noise), [Deletes()])
    assert result is not None and result.finished
    assert (
        sum(f"File {damaged} is replaced by a substitute: FileNotFoundError" in text for text in caplog.messages) == 1
    )


def test_more_damaged_images_than_tolerated_end_a_training_with_exit_code_3_and_their_names(noise, damaged, options):
    other = noise / "images/070.png"
    content = other.read_bytes()
    try:
        other.write_bytes(damaged.read_bytes())
        with pytest.raises(DataError, match=r"2 of 110 files .* more than the 1 ") as caught:
            train(on_noise(options, noise))
    finally:
        other.write_bytes(content)
    assert caught.value.exit_code == 3
    assert str(damaged) in str(caught.value) and str(other) in str(caught.value)


# The end of a run: finished means that all files are on the disk.


class Killed(BaseException):
    """Simulates a kill: the run does nothing after it."""


def kill(*args: Any, **keys: Any) -> None:
    raise Killed


def train_and_be_killed(options: TrainOptions, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, kill)
        with pytest.raises(Killed):
            train(options)


def files_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "weights").iterdir()}


@pytest.fixture(scope="module")
def one_epoch(files: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A training of one epoch without interruption."""
    torch.set_num_threads(1)
    return trained(replace(options_for(files, tmp_path_factory.mktemp("undisturbed")), epochs=1))


@pytest.mark.parametrize("name", [".last.final.pt", "run.json", "best.pt"])
def test_a_disk_that_is_full_at_the_end_costs_no_training(
    name: str,
    options: TrainOptions,
    one_epoch: TrainResult,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F15."""
    caplog.set_level("INFO")
    options = replace(options, epochs=1)

    def refuse(path: Path, needed_bytes: int) -> None:
        if path.name == name and any(Path(options.project).rglob("epoch_000.pt")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "check_room", refuse)
        with pytest.raises(ResourceError, match="not enough disk space: ") as caught:
            train(options)
    is_trained = name != "best.pt"  # best.pt is written before the last checkpoint, so its epoch end is repeated
    assert str(caught.value).endswith(
        "run the same command again to complete the run." if is_trained else "run the same command again to continue."
    )
    caplog.clear()
    result = trained(options)
    assert ("All epochs are trained; only the final files of the run are missing." in caplog.messages) == is_trained
    assert (result.folder.name, result.finished) == ("exp", True)
    assert result.outcome is not None
    assert_same_end(result.folder, one_epoch.folder)
    assert files_in(result.folder) == files_in(one_epoch.folder)
    expected, found = (weights_in(folder, "best.pt") for folder in (one_epoch.folder, result.folder))
    assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


def test_a_training_out_of_patience_that_is_killed_at_its_end_trains_no_further(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.5])
    monkeypatch.setattr("flatout.yolo.metrics.evaluation.fitness", lambda **kw: next(scores, 0.1))
    asked = replace(options, epochs=9, patience=1)
    train_and_be_killed(asked, monkeypatch, RunFolder, "finish")
    result = trained(asked)
    assert result.folder.name == "exp"
    assert len(results_of(result.folder)) == 2


def test_a_run_that_is_killed_after_it_was_marked_as_finished_gets_its_last_file_by_the_next_command(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    options = replace(options, epochs=1)
    train_and_be_killed(options, monkeypatch, CheckpointStore, "promote_final")
    weights = Path(options.project) / "exp/weights"
    assert read_weights(weights / "last.pt").kind == "full", "nothing is lost meanwhile"
    result = trained(replace(options, once=True))
    assert (result.folder, result.finished) == (weights.parent, True)
    assert caplog.messages[-1] == f"{result.folder}: this training is finished; nothing to do (--once)."
    assert read_weights(weights / "last.pt").kind == "stripped"
    assert files_in(result.folder) == {"init.pt", "last.pt", "best.pt", "epoch_000.pt"}
    assert [path.name for path in Path(options.project).iterdir()] == ["exp"]


def test_cudnn_tries_out_kernels_for_the_steps_of_a_long_training_and_not_for_its_validations(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr("flatout.yolo.train.recipe.LONG_RUN_PIXELS", 0)
    seen: list[tuple[bool, bool]] = []
    forward = Network.forward

    def watched(network: Network, x: torch.Tensor) -> Any:
        seen.append((network.training, torch.backends.cudnn.benchmark))
        return forward(network, x)

    monkeypatch.setattr(Network, "forward", watched)
    trained(replace(options, epochs=1))
    steps = [tries for training, tries in seen if training]
    validations = [tries for training, tries in seen if not training]
    assert steps[: STEPS - 1] == [True] * (STEPS - 1), "the last batch is short"
    assert validations and not any(validations)
