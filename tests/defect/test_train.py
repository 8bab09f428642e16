"""A training learns, can be stopped anywhere without changing its result, and leaves the promised files."""

import csv
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from flatout.defect import step as job
from flatout.defect.data.items import Strips
from flatout.defect.demo_data import generate_strip, write_strip
from flatout.defect.evaluate.scores import rank_scores
from flatout.defect.input import grouped_order, open_input
from flatout.defect.model import DefectNet, detection_problem
from flatout.defect.options import TrainOptions
from flatout.defect.source import PatchSource
from flatout.defect.step import focal_loss
from flatout.defect.train import input_config, sample_recipe, train, training_images
from flatout.defect.weights import load_network
from flatout.errors import CheckpointError, ConfigError, DataError, Interrupted, ResourceError
from flatout.feed import Plan
from flatout.ranks.world import World
from flatout.safefiles import atomic
from flatout.safefiles.container import read_container
from tests.defect.golden_files import records
from tests.defect.small_runs import small_data, small_options
from tests.golden_cases import golden_cases
from tests.reference.plain_feed import plain_batches

CHECKOUT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return small_data(tmp_path_factory.mktemp("strips"))


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory):
    torch.set_num_threads(1)
    return train(small_options(data, tmp_path_factory.mktemp("unbroken")))


def tensors_of(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return read_container(folder / f"weights/{name}.pt")["weights"]["state"]  # type: ignore[index]


def test_a_training_leaves_weights_results_and_plots(unbroken):
    folder = unbroken.folder
    assert unbroken.finished
    for name in (
        "config.yaml",
        "results.csv",
        "results.png",
        "log.jsonl",
        "examples.png",
        "weights/best.pt",
        "weights/last.pt",
    ):
        assert (folder / name).stat().st_size > 0, name
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    losses = [float(row["loss"]) for row in rows]
    # Epochs of a few samples each: on some processors the last one is worse than the first. That a training learns is
    # tested with a hundred steps.
    assert min(losses[1:]) < losses[0]
    assert unbroken.outcome is not None and len(unbroken.outcome.rows) == 2
    _, weights = load_network(folder / "weights/best.pt")
    assert (weights.version, weights.base, weights.patch) == ("v1", 8, 32)
    assert 0 <= weights.threshold <= 1


@pytest.mark.parametrize("after", [1, 4, 7])
def test_stopped_anywhere_and_continued_it_ends_with_the_same_weights(after, data, unbroken, tmp_path):
    options = small_options(data, tmp_path)
    first = train(replace(options, stop_after=after))
    assert not first.finished
    again = train(options)
    assert again.finished and again.folder == first.folder
    expected = tensors_of(unbroken.folder)
    for name, tensor in tensors_of(again.folder).items():
        assert torch.equal(tensor, expected[name]), name
    assert (again.folder / "results.csv").read_text() == (unbroken.folder / "results.csv").read_text()


def test_a_run_that_was_stopped_in_its_first_epoch_still_gets_its_examples(data, tmp_path):
    options = small_options(data, tmp_path)
    first = train(replace(options, stop_after=1))
    assert not (first.folder / "examples.png").exists()
    again = train(options)
    assert (again.folder / "examples.png").stat().st_size > 0


def test_examples_of_the_first_batch_are_not_replaced_by_a_resumed_run(data, tmp_path, unbroken):
    options = small_options(data, tmp_path)
    train(replace(options, stop_after=7))
    again = train(options)
    assert (again.folder / "examples.png").read_bytes() == (unbroken.folder / "examples.png").read_bytes()


def test_a_new_training_starts_from_the_prior_and_one_from_weights_does_not(data, tmp_path, unbroken):
    def first_bias(**changes):
        options = small_options(data, tmp_path, lr=1e-12, epochs=1, **changes)
        return tensors_of(train(options).folder)["decoder.fin_out.0.bias"]

    assert float(first_bias(name="prior").diff()) == pytest.approx(np.log(0.01 / 0.99), abs=1e-4)
    random = float(first_bias(name="random", defect_prior=0.0).diff())
    assert abs(random) < 1
    trained = tensors_of(unbroken.folder)["decoder.fin_out.0.bias"]
    found = first_bias(name="weights", weights=str(unbroken.folder / "weights/last.pt"))
    torch.testing.assert_close(found, trained, rtol=0, atol=1e-4)


def test_a_network_that_finds_nothing_is_named_at_the_end(data, tmp_path, caplog, monkeypatch):
    def dead(network, probability):
        with torch.no_grad():
            network.last_layer.weight.zero_()

    monkeypatch.setattr(DefectNet, "predict_prior", dead)
    caplog.set_level("INFO", "flatout")
    train(small_options(data, tmp_path, lr=1e-12, epochs=1))
    *_, problem, results, _ = caplog.messages
    assert problem.startswith("This network cannot find defects: it predicts 0.")
    assert results.startswith("Results are in")


def test_a_network_that_has_hardly_learned_is_named_at_the_end(data, tmp_path, caplog):
    train(small_options(data, tmp_path, epochs=1))
    assert any("of other pixels. Train again with more --epochs" in text for text in caplog.messages)


def test_grey_training_images_are_explained(tmp_path, caplog):
    good = tmp_path / "grey/train/good"
    good.mkdir(parents=True)
    for number in range(2):
        cv2.imwrite(str(good / f"{number}.png"), generate_strip(number, (80, 64))[0].astype(np.uint8))
    training_images(TrainOptions(training_dataset_path=str(good), img_format="png_jpg"))
    (message,) = caplog.messages
    assert message.startswith(f"{good / '0.png'}: its three planes are equal (a grey file fills all three)")


def test_after_a_signal_it_is_saved_and_the_same_call_continues(data, unbroken, tmp_path, monkeypatch):
    calls = []

    def send_a_signal(*arguments, **settings):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return focal_loss(*arguments, **settings)

    monkeypatch.setattr(job, "focal_loss", send_a_signal)
    options = small_options(data, tmp_path)
    with pytest.raises(Interrupted, match="SIGTERM: saved at epoch 1, step 2"):
        train(options)
    again = train(options)
    expected = tensors_of(unbroken.folder)
    for name, tensor in tensors_of(again.folder).items():
        assert torch.equal(tensor, expected[name]), name


def test_the_weights_do_not_depend_on_workers_nor_on_where_patches_are_painted(data, unbroken, tmp_path):
    painted = train(small_options(data, tmp_path, device_strips="on", num_workers=0))
    expected = tensors_of(unbroken.folder)
    start = torch.cat([tensor.flatten().float() for tensor in expected.values()])
    found = torch.cat([tensor.flatten().float() for tensor in tensors_of(painted.folder).values()])
    torch.testing.assert_close(found, start, rtol=0.02, atol=2e-3)
    with_workers = train(small_options(data, tmp_path, num_workers=2, name="workers"))
    for name, tensor in tensors_of(with_workers.folder).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_run_is_resumed_with_its_own_options_and_only_on_its_own_images(data, tmp_path):
    options = small_options(data, tmp_path / "runs", epochs=1)
    stopped = train(replace(options, stop_after=1))
    with pytest.raises(DataError, match="no such folder"):
        train(replace(options, training_dataset_path=str(tmp_path / "elsewhere")))
    write_strip(data / "train/good/9999.tiff", generate_strip(7, (80, 64)))
    try:
        with pytest.raises(DataError, match=r"images have changed.*--fresh"):
            train(TrainOptions(resume=str(stopped.folder), gpu_id=-1))
    finally:
        (data / "train/good/9999.tiff").unlink()
    assert train(TrainOptions(resume=str(stopped.folder))).finished


def test_training_starts_from_older_weights_that_fit(data, unbroken, tmp_path):
    best = str(unbroken.folder / "weights/best.pt")
    start = tensors_of(unbroken.folder, "best")
    learned = [key for key in start if "running" not in key and "num_batches" not in key]
    ends = [
        tensors_of(train(small_options(data, tmp_path, weights=weights, epochs=1, lr=1e-9)).folder)
        for weights in (best, "")
    ]
    near, far = ([torch.allclose(end[key], start[key], atol=1e-6) for key in learned] for end in ends)
    assert all(near) and not all(far)
    with pytest.raises(CheckpointError, match="--base_width 8"):
        train(small_options(data, tmp_path, weights=best, base_width=16))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"patch_size": 48}, "multiple of 32"),
        ({"bs": 0}, "--bs 0 must be 1 or more"),
        ({"lr": 0.0}, "above 0"),
        ({"training_dataset_path": ""}, "training_dataset_path is missing"),
        ({"patch_size": 96}, "smaller than the patch"),
        ({"num_defects_range": (1, 4)}, "2 or more"),
    ],
)
def test_impossible_settings_are_refused_before_a_folder_is_created(changes, text, data, tmp_path):
    with pytest.raises(ConfigError, match=text):
        train(small_options(data, tmp_path / "runs", **changes))
    assert not (tmp_path / "runs").exists()


def test_a_missing_mask_is_a_warning_and_without_images_nothing_starts(data, tmp_path, caplog):
    shutil.copytree(data, tmp_path / "strips")
    masks = tmp_path / "strips/ground_truth_valid/bright_spots"
    shutil.rmtree(masks)
    options = small_options(tmp_path / "strips", tmp_path / "runs", epochs=1, stop_after=1)
    train(options)
    assert f"1 of 1 defective image in {tmp_path}/strips/valid without a mask in {masks}, such as " in caplog.text
    assert "there is no validation" in caplog.text
    for path in (tmp_path / "strips/train/good").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"train/good: no \.tiff or \.tif files"):
        train(replace(options, checkpoint_path=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("case", golden_cases("defect/bench_data.json", records("images")))
def test_strips_of_the_benchmark_have_the_golden_pixels(case):
    record, _ = case
    strip = generate_strip(record["i"])
    assert strip.mean((1, 2), dtype=np.float64) == pytest.approx(record["mean"], abs=1e-4)
    for (y, x), values in zip(record["points_yx"], record["values"], strict=True):
        assert strip[:, y, x] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("group", [1, 3, 100])
def test_a_grouped_order_visits_every_patch_once_and_one_group_at_a_time(group):
    order = grouped_order(10, 6, group, seed=3, epoch=2)
    assert sorted(order.tolist()) == list(range(60))
    images = order // 6
    for begin in range(0, 60, 6 * group):
        assert len(set(images[begin : begin + 6 * group].tolist())) == min(group, 10 - begin // 6)
    assert not np.array_equal(order, grouped_order(10, 6, group, seed=3, epoch=3))


@pytest.mark.parametrize(("group", "reads_per_file"), [(2, 1), (0, 6)])
def test_in_groups_every_file_is_read_once_an_epoch_if_one_group_fits(group, reads_per_file, data, monkeypatch):
    """Without groups the same cache keeps two of four files, and the others are read for each of their six patches."""
    options = small_options(data, data, group_images=group, cache_size=2)
    images = training_images(options)
    samples = sample_recipe(options, images)
    reads, decode = [], Strips.decode
    monkeypatch.setattr(Strips, "decode", lambda self, index: reads.append(index) or decode(self, index))
    with ExitStack() as stack:
        batches = open_input(images, samples, input_config(options), torch.device("cpu"), World(), stack)
        for epoch in range(2):
            reads.clear()
            assert sum(len(batch) for batch in batches.epoch(epoch)) == 24
            assert max(Counter(reads).values()) == reads_per_file
            assert epoch or not group or sorted(reads) == [0, 1, 2, 3]


def test_two_ranks_train_one_network(data, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "flatout", "defect", "train", "--training_dataset_path", str(data), "--checkpoint_path",
        str(tmp_path), "--base_width", "8", "--patch_size", "32", "--min_patches", "2", "2", "--bs", "8",
        "--epochs", "1", "--gpu_id", "-1", "--num_workers", "0",
    ]  # fmt: skip
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(CHECKOUT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    rows = list(csv.DictReader((tmp_path / "exp/results.csv").open()))
    assert len(rows) == 1 and float(rows[0]["loss"]) > 0
    assert not (tmp_path / "exp2").exists()
    assert json.loads((tmp_path / "exp/log.jsonl").read_text())["images_per_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_steps_teach_what_is_in_target_alone(tmp_path):
    """The reference case of the specification: base width 16, 64 x 64 texture, batch 16, Adam 1e-3, gamma 2."""
    for number in range(160):
        write_strip(tmp_path / f"train/good/{number:03}.tiff", generate_strip(number, (64, 64)))
    options = TrainOptions(
        training_dataset_path=str(tmp_path), checkpoint_path=str(tmp_path / "runs"), base_width=16, patch_size=64,
        epochs=13, gpu_id=-1, num_workers=0, seed=0, stop_after=101,
    )  # fmt: skip
    # 13 epochs, so that the learning rate is not reduced before the end; one more step, so that the tenth epoch ends.
    result = train(options)
    rows = list(csv.DictReader((result.folder / "results.csv").open()))
    assert np.mean([float(row["loss"]) for row in rows[5:]]) < 5e-3
    network, _ = load_network(result.folder / "weights/best.pt")
    for number in range(48):
        write_strip(tmp_path / f"fresh/train/good/{number:03}.tiff", generate_strip(5000 + number, (64, 64)))
    fresh = replace(options, training_dataset_path=str(tmp_path / "fresh"), defect_share=1.0)
    images = training_images(fresh)
    recipe = sample_recipe(fresh, images)
    (batch,) = plain_batches(PatchSource(recipe, images.strips), Plan(num_samples=48, batch_size=48, shuffle=False), 0)
    x, is_defect = torch.from_numpy(batch["images"]) / 255, torch.from_numpy(batch["masks"][:, 0] > 0)
    assert detection_problem(network, x, is_defect) == "", "a network that learns is not accused"
    with torch.inference_mode():
        heat = torch.softmax(network(x), 1)[:, 1].numpy()
    ranking = rank_scores(batch["masks"][:, 0], heat)
    assert ranking.auroc > 0.98
    assert ranking.average_precision > 0.4
    draws = recipe.draw(0, 0, batch.positions, batch.indices)
    means = [mean_probability(heat, draws, group) for group in range(4)]
    assert means[0] > max(means[1:])


def mean_probability(heat_BHW, draws, group: int) -> float:
    """Mean probability at the centres of the defects of a group: T, R1, R2 or B."""
    in_refs = [(False, False), (True, False), (False, True), (True, True)][group]
    used = np.arange(draws["kernel"].shape[1]) < draws["num"][:, None]
    chosen = used & (draws["amplitude"][..., 1:] != 0).__eq__(np.array(in_refs)).all(-1)
    sample, place = np.nonzero(chosen)
    x, y = draws["center"][sample, place].T
    return float(heat_BHW[sample, y, x].mean())


@pytest.mark.parametrize("device_strips", ["off", "on"])
@pytest.mark.parametrize("number", [0, 2])
def test_one_damaged_image_does_not_end_a_training_and_is_named(tmp_path, caplog, device_strips, number):
    images = damaged_strips(tmp_path, number)
    options = small_options(tmp_path / "data", tmp_path / "runs", epochs=1, device_strips=device_strips)
    assert train(options).finished
    assert sum(f"File {images[number]} is replaced by a substitute" in text for text in caplog.messages) == 1
    assert any(text.startswith("1 file could not be read") and str(images[number]) in text for text in caplog.messages)


@pytest.mark.parametrize("device_strips", ["off", "on"])
def test_more_damaged_images_than_tolerated_end_a_training_with_their_names(tmp_path, device_strips):
    images = damaged_strips(tmp_path, 1, 2)
    options = small_options(tmp_path / "data", tmp_path / "runs", epochs=1, device_strips=device_strips)
    with pytest.raises(DataError, match="2 of 4 files") as caught:
        train(options)
    assert str(images[1]) in str(caught.value) and str(images[2]) in str(caught.value)


def damaged_strips(folder: Path, *numbers: int) -> list[Path]:
    """The training images of a new data set, of which those with these numbers are damaged."""
    images = sorted(path for path in small_data(folder / "data").glob("train/good/*") if path.is_file())
    for number in numbers:
        images[number].write_bytes(b"nothing")
    return images


# The end of a run


@pytest.mark.parametrize("name", ["best.pt", "run.json"])
def test_a_disk_that_is_full_at_the_end_loses_no_training(name, data, tmp_path, monkeypatch):
    """F15: best.pt is written before the checkpoint that relies on it, run.json after everything."""
    options = small_options(data, tmp_path, epochs=1)
    whole = train(replace(options, name="whole"))
    train(replace(options, stop_after=1))  # run.json of a new run needs disk space too

    def check(path: Path, needed_bytes: int) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "check_room", check)
        with pytest.raises(
            ResourceError,
            match=r"not enough disk space: .* run the same command again to (complete the run|continue)\.$",
        ):
            train(options)
    result = train(options)
    assert (result.folder.name, result.finished) == ("exp", True)
    for file in ("best", "last"):
        mine, theirs = tensors_of(whole.folder, file), tensors_of(result.folder, file)
        assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []


def test_with_once_a_finished_run_is_not_repeated(data, tmp_path):
    options = small_options(data, tmp_path, epochs=1, once=True)
    first, second = train(options), train(options)
    assert (first.folder, first.finished) == (second.folder, second.finished)
    assert [path.name for path in tmp_path.iterdir()] == ["exp"]
