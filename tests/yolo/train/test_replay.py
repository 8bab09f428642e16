"""`flatout yolo replay`: a replayed step is what the network saw, and says so only if it is."""

import csv
import json
import math
import os
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import flatout.yolo
from flatout.__main__ import main
from flatout.errors import ConfigError, DataError, DivergedError
from flatout.runs import Seams, read_steps
from flatout.yolo.commands.replay import main as replay_command
from flatout.yolo.find_file import find_data_of_run
from flatout.yolo.loss import losses
from flatout.yolo.options import TrainOptions
from flatout.yolo.replays.run import ReplayRun
from flatout.yolo.train import YoloRecipe, train
from flatout.yolo.train.step import DetectionJob
from flatout.yolo.weights import read_weights
from tests.yolo.comparing_matches import list_matches
from tests.yolo.train.conftest import BATCH, options_for

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Seams(plots=False)
STEPS = 3


class Seen:
    """What a training gave to its network, and the losses it got, step by step."""

    def __init__(self) -> None:
        self.inputs: list[dict[str, np.ndarray]] = []
        self.items: list[list[float]] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    kept, step = Seen(), DetectionJob.step

    def keeping(self: DetectionJob, network: torch.nn.Module, inputs: Any) -> Any:
        kept.inputs.append({name: tensor.clone().numpy() for name, tensor in inputs.items()})
        loss, items = step(self, network, inputs)
        kept.items.append(items.tolist())
        return loss, items

    monkeypatch.setattr(DetectionJob, "step", keeping)
    return kept


def run_of(options: TrainOptions) -> Path:
    result = train(replace(options, notest=True), seams=QUIET)
    assert result is not None
    return result.folder


def replayed_pixels(run: Path, epoch: int, step: int, **settings: Any) -> flatout.yolo.Replayed:
    return flatout.yolo.replay(run, epoch=epoch, step=step, losses=False, **settings)


@pytest.fixture(scope="module")
def small_run(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short finished training; tests must not change it."""
    torch.set_num_threads(1)
    return run_of(options_for(files, tmp_path_factory.mktemp("small_run")))


WAYS: dict[str, dict[str, Any]] = {
    "classic": {},
    "workers": {"workers": 2},
    "fast": {"fast": True, "workers": 2},
    "device": {"device_augment": True, "fast_dataloader": True},
    "multi-scale": {"multi_scale": True},
    "quad": {"quad": True},
    "rect": {"rect": True},
    "image weights": {"image_weights": True},
    "shuffled otherwise": {"seed": 11, "single_cls": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_is_what_the_network_saw(way: str, options: TrainOptions, seen: Seen):
    epochs = 2 if way == "image weights" else 1
    run = run_of(replace(options, epochs=epochs, **WAYS[way]))
    assert len(seen.inputs) == STEPS * epochs
    for number in (0, *range(STEPS - 1, len(seen.inputs))):
        again = replayed_pixels(run, *divmod(number, STEPS))
        assert again.comparison == (True, "identical to what the network saw", ())
        assert again.images.dtype == seen.inputs[number]["images"].dtype
        assert np.array_equal(again.images, seen.inputs[number]["images"])
        assert np.array_equal(again.targets, seen.inputs[number]["targets"])


def test_the_samples_of_a_replay_differ_from_step_to_step(small_run: Path):
    """Negative control of the test above."""
    one, other = replayed_pixels(small_run, 0, 0), replayed_pixels(small_run, 1, 0)
    assert not np.array_equal(one.images, other.images)
    assert {sample.kind for sample in one.samples} >= {"mosaic of 4", "mosaic of 9"}


def test_every_step_is_recorded_once_after_interruptions(options: TrainOptions, small_run: Path):
    for _ in range(2):
        result = train(replace(options, notest=True, stop_after=2), seams=QUIET)
        assert result is not None
        # A process that was killed leaves steps that its checkpoint does not know, and half of a line.
        with (result.folder / "replay.jsonl").open("a") as file:
            file.write('{"epoch": 0, "step": 2, "hashes": [["00", "00"]]}\n{"epoch": 1, "st')
    run = run_of(options)
    assert read_steps(run).steps.keys() == {(epoch, step) for epoch in range(2) for step in range(STEPS)}
    hashes = {position: found[0] for position, found in read_steps(run).steps.items()}
    assert hashes == {position: found[0] for position, found in read_steps(small_run).steps.items()}
    lines = [json.loads(line) for line in (run / "replay.jsonl").read_text().splitlines()]
    assert sum(len(line.get("hashes", ())) for line in lines) == 2 * STEPS
    assert replayed_pixels(run, 1, 1).identical


def test_the_hashes_change_no_weight(options: TrainOptions, small_run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(YoloRecipe, "input_facts", lambda self: None)
    run = run_of(options)
    assert not (run / "replay.jsonl").exists()
    one, other = (read_weights(each / "weights/epoch_001.pt").state for each in (small_run, run))
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


# Changed data


@pytest.fixture
def own_files(files: Path, tmp_path: Path) -> Path:
    """A copy of the files that a test may change."""
    shutil.copytree(files, tmp_path / "files")
    for path in (tmp_path / "files/data").glob("*.yaml"):
        path.write_text(path.read_text().replace(str(files), str(tmp_path / "files")))
    return tmp_path / "files"


@pytest.fixture
def own_run(own_files: Path, tmp_path: Path) -> Path:
    return run_of(replace(options_for(own_files, tmp_path), epochs=1))


def test_a_changed_pixel_is_noticed_and_its_file_is_named(own_run: Path):
    before = replayed_pixels(own_run, 0, 0)
    path = before.samples[3].path
    image = cv2.imread(path)
    assert image is not None
    cv2.imwrite(path, 255 - image)
    shown_in = {(each.epoch, each.step) for each in flatout.yolo.appearances(own_run, path) if each.visible}
    for step in range(STEPS):
        after = replayed_pixels(own_run, 0, step)
        assert after.identical == ((0, step) not in shown_in)
        assert (path in after.comparison.changed_files) >= ((0, step) in shown_in)
    after = replayed_pixels(own_run, 0, 0)
    assert after.comparison.text == (f"NOT what the network saw: other images. Changed since the training: {path}.")
    assert np.array_equal(after.targets, before.targets)


def test_a_copied_data_set_names_only_the_files_that_differ(own_run: Path, own_files: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(own_files, copy, copy_function=shutil.copyfile)  # all files get another time of change
    (data,) = (copy / "data").glob("*.yaml")
    data.write_text(data.read_text().replace(str(own_files), str(copy)))
    before = replayed_pixels(own_run, 0, 0, data=str(data))
    assert before.identical
    image = Path(before.samples[0].path)
    cv2.imwrite(str(image), np.zeros_like(cv2.imread(str(image))))
    after = replayed_pixels(own_run, 0, 0, data=str(data))
    assert after.comparison.text == f"NOT what the network saw: other images. Changed since the training: {image}."
    removed = sorted(image.parent.glob("*.jpg"))[1]
    removed.unlink()
    with pytest.raises(DataError, match=r"1 file changed since") as raised:
        replayed_pixels(own_run, 0, 0, data=str(data))
    assert f"{removed}: removed, or no longer usable" in str(raised.value)


def test_a_changed_label_ends_a_replay_with_the_name_of_its_file(own_run: Path, own_files: Path):
    label = sorted((own_files / "data/labels/train").glob("*.txt"))[2]
    label.write_text("0 0.5 0.5 0.25 0.25\n")
    image = str(label).replace("labels", "images").replace(".txt", ".jpg")
    with pytest.raises(DataError) as raised:
        replayed_pixels(own_run, 0, 0)
    assert f"1 file changed since {own_run} ({image}: other labels)" in str(raised.value)
    assert str(raised.value).endswith("--allow-data-change")
    found = [replayed_pixels(own_run, 0, step, allow_data_change=True).identical for step in range(STEPS)]
    assert False in found


def test_removed_and_new_images_are_named(own_run: Path, own_files: Path):
    first, second, *_ = sorted((own_files / "data/images/train").glob("*.jpg"))
    second.rename(second.with_name("zzz.jpg"))
    with pytest.raises(DataError, match=r"2 files changed") as raised:
        replayed_pixels(own_run, 0, 0)
    assert f"{second}: removed, or no longer usable" in str(raised.value)
    assert f"{second.with_name('zzz.jpg')}: new" in str(raised.value)
    assert str(first) not in str(raised.value)


def test_a_data_file_that_is_not_here_is_answered_with_the_folder_to_go_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = (
        r"^The run's data, bolts\.yaml, is not here\. Run this in the folder where runs/exp was trained, or give "
    )
    with pytest.raises(ConfigError, match=sentence + r"--data FILE\.$"):
        find_data_of_run("", "bolts.yaml", Path("runs/exp"))
    with pytest.raises(ConfigError, match=r"^--data nuts\.yaml: no such file") as refused:
        find_data_of_run("nuts.yaml", "bolts.yaml", Path("runs/exp"))
    assert "trained" not in str(refused.value)


def test_a_data_set_that_was_moved_is_the_same(own_run: Path, own_files: Path):
    moved = own_files.with_name("moved")
    own_files.rename(moved)
    (data,) = (moved / "data").glob("*.yaml")
    data.write_text(data.read_text().replace(str(own_files), str(moved)))
    with pytest.raises(ConfigError, match=r"^The run's data, /.*, does not exist any more\. Give its new path with"):
        replayed_pixels(own_run, 0, 1)
    assert replayed_pixels(own_run, 0, 1, data=data).identical


def test_a_run_that_was_trained_on_a_folder_is_replayed(own_files: Path, tmp_path: Path):
    (data,) = (own_files / "data").glob("*.yaml")
    voc = tmp_path / "voc"
    flatout.yolo.convert_data(data, voc, to="voc")
    (voc / "data.yaml").unlink()  # the folder itself is the data set
    run = run_of(replace(options_for(own_files, tmp_path), data=str(voc), epochs=1))
    assert replayed_pixels(run, 0, 1).identical


def test_a_file_that_was_unreadable_in_the_training_is_replaced_again(own_files: Path, tmp_path: Path, seen: Seen):
    path = sorted((own_files / "data/images/train").glob("*.jpg"))[5]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3])  # its header is intact, so that the scan accepts it
    for way in ("classic", "device"):
        seen.inputs.clear()
        run = run_of(replace(options_for(own_files, tmp_path / way), epochs=1, **WAYS[way]))
        for step in range(STEPS):
            again = replayed_pixels(run, 0, step)
            assert again.identical
            assert np.array_equal(again.images, seen.inputs[step]["images"])
            assert str(path) not in {file.path for sample in again.samples for file in sample.files if file.visible}


# Old runs


def test_a_run_without_a_record_is_replayed_but_not_called_identical(small_run: Path, tmp_path: Path):
    old = tmp_path / "old"
    shutil.copytree(small_run, old)
    (old / "replay.jsonl").unlink()
    (old / "train_files.csv").unlink()
    found, expected = replayed_pixels(old, 1, 1), replayed_pixels(small_run, 1, 1)
    assert found.identical is None
    why = "it was trained by a version that did not record hashes"
    assert found.comparison.text == f"cannot be compared: old has no hashes: {why}"
    (old / "replay.jsonl").write_text('{"inp')
    assert replayed_pixels(old, 0, 0).comparison.text.endswith("old has no hashes: its replay.jsonl is damaged")
    assert np.array_equal(found.images, expected.images)
    assert np.array_equal(found.targets, expected.targets)


def test_a_run_of_a_gpu_that_is_replayed_without_one_is_not_called_bit_equal(small_run: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(small_run, run)
    text = (run / "replay.jsonl").read_text().replace('"device": "cpu"', '"device": "cuda"')
    (run / "replay.jsonl").write_text(text)
    assert replayed_pixels(run, 0, 0).identical, "workers make the same images with and without a GPU"
    facts, first = text.splitlines()[:2]
    first = re.sub('"[0-9a-f]{16}"', '"0123456789abcdef"', first, count=1)  # the images of the first step
    (run / "replay.jsonl").write_text(f"{facts}\n{first}\n")
    found = replayed_pixels(run, 0, 0)
    assert found.identical is False
    assert found.comparison.text == (
        "NOT what the network saw: other images. The run made it on a GPU and this replay on the CPU: without a GPU it "
        "is not bit-equal."
    )


def test_a_run_that_an_older_version_began_is_recorded_from_its_next_step_on(options: TrainOptions):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(YoloRecipe, "input_facts", lambda self: None)
        result = train(replace(options, notest=True, stop_after=2), seams=QUIET)
    assert result is not None
    (result.folder / "train_files.csv").unlink()
    run = run_of(options)
    epoch, step = min(read_steps(run).steps)
    assert (0, 0) < (epoch, step) < (1, 1)
    assert replayed_pixels(run, 1, 0).identical
    assert replayed_pixels(run, 0, 0).comparison.text == (
        "cannot be compared: the run has not recorded this step "
        f"(only those from epoch {epoch}, step {step} to epoch 1, step 2)"
    )


# Matches and losses


def test_losses_are_those_of_the_training_where_its_weights_were_saved(
    options: TrainOptions, seen: Seen, monkeypatch: pytest.MonkeyPatch
):
    assigned = []
    assign = losses.assign_ota

    def keeping(*args: Any) -> Any:
        assigned.append(assign(*args))
        return assigned[-1]

    monkeypatch.setattr(losses, "assign_ota", keeping)
    run = run_of(options)
    trained_items, matches = list(seen.items), list(assigned)
    for epoch, weights in ((0, "init.pt"), (1, "epoch_000.pt")):
        found = flatout.yolo.replay(run, epoch=epoch, step=0).losses
        assert found is not None
        assert (found.weights.name, found.is_exact) == (weights, True)
        assert list(found.items.values()) == trained_items[epoch * STEPS]
        expected = [
            (stride, *row)
            for layer, stride in enumerate((8, 16, 32))
            for row in list_matches(matches[epoch * STEPS], layer).tolist()
        ]
        got = [(each.stride_px, each.sample, each.anchor, each.row, each.column, each.target) for each in found.matches]
        assert sorted(got) == sorted(expected)
        assert all(np.isfinite(each.cost) and 0 <= each.iou <= 1 for each in found.matches)


def test_weights_of_another_step_are_named_and_not_called_exact(small_run: Path):
    for step, weights, about in ((1, "epoch_000.pt", "saved 1 step before"), (2, "epoch_001.pt", "saved 1 step after")):
        found = flatout.yolo.replay(small_run, epoch=1, step=step).losses
        assert found is not None
        assert (found.weights.name, found.is_exact) == (weights, False)
        assert found.about_weights == f"{about} this step: matches and losses are those of this file"
    found = flatout.yolo.replay(small_run, epoch=1, step=0, weights="best.pt").losses
    assert found is not None
    assert not found.is_exact
    assert found.about_weights.startswith("averaged or rounded weights")


def test_weights_for_other_classes_are_refused(small_run: Path):
    other = Path(__file__).parents[3] / "weights/yolov7-tiny.safetensors"
    with pytest.raises(
        ConfigError, match=r"yolov7-tiny\.safetensors: trained for 80 classes, but .* for \d\. Its losses"
    ):
        flatout.yolo.replay(small_run, epoch=0, step=0, weights=str(other))


def test_costs_are_what_ota_minimises(small_run: Path):
    """In each sample a cell goes to the target for which it is cheapest, by class error + 3 * -ln(IoU)."""
    found = flatout.yolo.replay(small_run, epoch=1, step=0).losses
    assert found is not None
    for match in found.matches:
        assert match.cost >= -3 * np.log(match.iou + 1e-8) - 1e-3


# A file's appearances


def test_appearances_agree_with_a_search_sample_by_sample(small_run: Path):
    run = small_run
    paths = ReplayRun(run).images.paths
    searched: dict[str, list[tuple[object, ...]]] = {path: [] for path in paths}
    for epoch in range(2):
        for step in range(STEPS):
            for sample in replayed_pixels(run, epoch, step).samples:
                for file in sample.files:
                    searched[file.path].append((epoch, step, sample.number, sample.position, file.role, file.visible))
    for path in paths[::7]:
        found = flatout.yolo.appearances(run, path)
        assert [tuple(each)[:6] for each in found] == searched[path]
        assert all(each.recorded for each in found)
    only = flatout.yolo.appearances(run, paths[0], epochs=range(1, 2))
    assert [tuple(each)[:6] for each in only] == [row for row in searched[paths[0]] if row[0] == 1]


def test_a_file_is_found_by_the_end_of_its_path(small_run: Path):
    full = ReplayRun(small_run).images.paths[4]
    assert flatout.yolo.appearances(small_run, "train/0004.jpg") == flatout.yolo.appearances(small_run, full)
    with pytest.raises(ConfigError, match=r"nothing\.jpg: not among the 70 training images"):
        flatout.yolo.appearances(small_run, "nothing.jpg")


# Divergence


@pytest.fixture
def diverging(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Losses become infinite from step 1 of epoch 1 on; holds the finite parts of the last bad first step."""
    first_bad: list[list[float]] = []
    inputs, step = DetectionJob.inputs, DetectionJob.step
    at = (0, 0)

    def noting(self: DetectionJob, batch: Any, epoch: int, number: int) -> Any:
        nonlocal at
        at = (epoch, number)
        return inputs(self, batch, epoch, number)

    def breaking(self: DetectionJob, network: torch.nn.Module, tensors: Any) -> Any:
        loss, items = step(self, network, tensors)
        if at < (1, 1):
            return loss, items
        if at == (1, 1):
            first_bad.append(items.tolist())
        return loss * torch.inf, items

    monkeypatch.setattr(DetectionJob, "inputs", noting)
    monkeypatch.setattr(DetectionJob, "step", breaking)
    return first_bad


@pytest.mark.parametrize("save_every_steps", [1, 1000])
def test_the_state_before_a_diverged_step_is_kept_and_the_replay_is_exact(
    save_every_steps: int, options: TrainOptions, diverging: list[list[float]], capsys: pytest.CaptureFixture[str]
):
    """Whether the last checkpoint was saved among the bad steps, or long before them."""
    with pytest.raises(DivergedError) as raised:
        run_of(replace(options, epochs=4, save_every_steps=save_every_steps))
    (run,) = Path(options.project).iterdir()
    first, *_ = json.loads((run / "weights/diverged.json").read_text())
    assert (first["epoch"], first["step"], first["weights"]) == (1, 1, "before_e001_s0001.pt")
    assert first["command"] == f"flatout yolo replay {run} --epoch 1 --step 1"
    assert str(raised.value).endswith(first["command"])
    # The training, and two returns to a checkpoint; one that was saved among the bad steps comes after the first.
    assert len(diverging) == (3 if save_every_steps > 1 else 1)
    found = flatout.yolo.replay(run, epoch=1, step=1)
    assert found.identical
    assert found.losses is not None
    assert (found.losses.is_exact, found.losses.weights.name) == (True, "before_e001_s0001.pt")
    assert list(found.losses.items.values()) == diverging[-1]
    assert [sample.path for sample in found.samples] == first["names"]
    assert main([*first["command"].split()[1:], "--out", str(run.parent / "out")]) == 0
    assert "the state with which this step was trained" in capsys.readouterr().out


# Files and commands


def test_the_command_writes_a_sheet_and_arrays(small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert main(["yolo", "replay", str(small_run), "--epoch", "1", "--step", "2", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    expected = replayed_pixels(small_run, 1, 2)
    assert text.splitlines()[0] == (
        f"{small_run}, epoch 1, step 2: 6 samples, 64 x 64 px, {len(expected.targets)} targets"
    )
    assert "input    identical to what the network saw" in text
    with np.load(out / "batch.npz") as arrays:
        assert np.array_equal(arrays["images"], expected.images)
        assert np.array_equal(arrays["targets"], expected.targets)
    assert cv2.imread(str(out / "sheet.jpg")) is not None
    with (out / "matches.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses_found = json.loads((out / "losses.json").read_text())
    assert len(rows) == losses_found["num_matches"] > 0
    assert losses_found["weights"].endswith("epoch_001.pt")
    samples = json.loads((out / "samples.json").read_text())
    assert [each["position"] for each in samples["samples"]] == list(range(2 * BATCH, 70))


def test_the_files_are_named_after_the_run_however_its_folder_is_given(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = ["yolo", "replay", str(small_run / "weights" / ".."), "--epoch", "1", "--step", "2", "--no-losses"]
    assert main(words) == 0
    assert [path.name for path in (tmp_path / "runs/replay").iterdir()] == [f"{small_run.name}_e001_s0002"]


def test_the_files_are_written_although_nobody_reads_the_text_to_its_end(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As with `flatout yolo replay ... | head -3`."""

    def closed(text: str) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(sys.stdout, "write", closed)
    with pytest.raises(BrokenPipeError):
        replay_command([str(small_run), "--epoch", "0", "--step", "0", "--out", str(tmp_path / "out")])
    assert {"sheet.jpg", "batch.npz", "losses.json"} < {path.name for path in (tmp_path / "out").iterdir()}


def test_a_loss_that_is_not_finite_is_null_because_json_has_no_nan(small_run: Path, tmp_path: Path):
    found = flatout.yolo.replay(small_run, epoch=0, step=0)
    assert found.losses is not None
    bad = replace(found.losses, items={"box": math.nan, "obj": math.inf, "cls": 0.5})
    replace(found, losses=bad).save(tmp_path)
    content = json.loads((tmp_path / "losses.json").read_text(), parse_constant=pytest.fail)
    assert content["items"] == {"box": None, "obj": None, "cls": 0.5}


def test_a_replay_without_losses_leaves_none_of_another_replay_beside_it(small_run: Path, tmp_path: Path):
    flatout.yolo.replay(small_run, epoch=0, step=1).save(tmp_path)
    assert (tmp_path / "losses.json").is_file() and (tmp_path / "matches.csv").is_file()
    replayed_pixels(small_run, 0, 2).save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sheet.jpg", "batch.npz", "samples.json"}


def test_a_sample_is_shown_with_its_sources(small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["yolo", "replay", str(small_run), "--epoch", "0", "--step", "0", "--no-losses", "--out", str(tmp_path)]
    assert main([*words, "--sample", "3"]) == 0
    text = capsys.readouterr().out
    sample = replayed_pixels(small_run, 0, 0).samples[3]
    for file in sample.files:
        assert f"  {file.role:<9} {file.path}" in text
    assert "hue " in text and "degrees " in text
    assert "losses" not in text
    sheet = cv2.imread(str(tmp_path / "sheet.jpg"))
    assert sheet is not None
    assert sheet.shape[1] > 768 + 184
    assert main([*words, "--sample", "32"]) == 2
    assert "--sample 32: the step has 32 samples. Use 0 to 31." in capsys.readouterr().err


def test_the_command_lists_the_steps_of_a_file(small_run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["yolo", "replay", str(small_run), "--file", "0003.jpg", "--epochs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = flatout.yolo.appearances(small_run, "0003.jpg", epochs=range(1))
    assert lines[0].split() == ["epoch", "step", "sample", "position", "role"]
    assert [line.split()[:4] for line in lines[1:-1]] == [list(map(str, each[:4])) for each in found]
    assert lines[-1].startswith(f"{len(found)} times in ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epoch", "2", "--step", "0"], "--epoch 2: {run} is a training of 2 epochs. Use 0 to 1."),
        (["--epoch", "1", "--step", "3"], "--step 3: an epoch of {run} has 3 steps. Use 0 to 2."),
        (["--epoch", "1"], "Give --epoch E and --step S"),
        (["--file", "a.jpg", "--step", "1"], "--file lists steps: leave out --step and --sample."),
        (["--file", "0000.jpg", "--epochs", "3"], "--epochs 3: {run} is a training of 2 epochs."),
        (["--file", "0000.jpg", "--epoch", "2"], "--epoch 2: {run} is a training of 2 epochs. Use 0 to 1."),
        (["--file", "0000.jpg", "--epochs", "0"], "--epochs 0: give the number of epochs to search, 1 or more."),
        (["--epoch", "0", "--step", "0", "--weights", "none.pt"], "--weights none.pt: no such file"),
        (
            ["--epoch", "0", "--step", "0", "--data", "none.yaml"],
            "--data none.yaml: no such file here or in a subfolder",
        ),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str, small_run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["yolo", "replay", str(small_run), *words]) == 2
    assert message.format(run=small_run) in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"not a run of flatout yolo: there is no opt\.yaml in it"):
        replayed_pixels(tmp_path, 0, 0)


def test_a_replay_changes_nothing_in_the_run_folder(small_run: Path, tmp_path: Path):
    before = {path: path.stat().st_mtime_ns for path in small_run.rglob("*")}
    flatout.yolo.replay(small_run, epoch=0, step=1).save(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in small_run.rglob("*")} == before


@pytest.mark.timing
def test_a_batch_of_16_takes_less_than_two_seconds(files: Path, tmp_path: Path):
    options = options_for(files, tmp_path)
    run = run_of(replace(options, epochs=1, batch_size=16, img_size=(320, 320), stop_after=1))
    took_s = []
    for attempt in range(3):
        began = time.process_time()  # by one thread, so that other programs on the machine do not count
        flatout.yolo.replay(run, epoch=0, step=1).save(tmp_path / str(attempt))
        took_s.append(time.process_time() - began)
    assert min(took_s) < 2, f"{took_s} s, load {os.getloadavg()}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("way", ["classic", "fast", "device"])
def test_a_run_on_a_gpu_is_replayed_on_it_and_without_it_the_difference_is_explained(way: str, options: TrainOptions):
    run = run_of(replace(options, epochs=1, device="0", **WAYS[way]))
    assert replayed_pixels(run, 0, 1).identical
    without = replayed_pixels(run, 0, 1, device="cpu")
    assert without.identical or "without a GPU it is not bit-equal" in without.comparison.text
