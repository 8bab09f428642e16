"""`--fast` measures what a picture and a step cost, chooses by it, remembers, and disturbs nothing."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from flatout.engine.distributed import World
from flatout.feed import Store
from flatout.profiler import machine
from flatout.profiler.tuning import Costs
from flatout.yolo.augment.pictures import ResizedPictures
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.train import autotune
from flatout.yolo.train import input as input_module
from flatout.yolo.train.autotune import (
    fixed_rule,
    is_left_to_us,
    is_worth_measuring,
    measure_costs,
    most_workers,
    tuned,
)
from flatout.yolo.train.input import InputConfig, num_workers, open_input
from flatout.yolo.train.input_costs import decoded_bytes
from tests.yolo.train.small_training import narrow_network, tiny_hyp


@pytest.fixture
def images(options):
    return open_split(open_data_set(options.data), "train", SplitConfig(cache_folder=None)).images


@pytest.fixture
def config():
    return InputConfig(
        augment=tiny_hyp().augment(),
        size=64,
        batch_size=8,
        seed=0,
        grid=32,
        epochs=3,
        device=torch.device("cpu"),
        dtype=torch.float32,
        world=World(),
    )


def test_what_is_measured_is_positive_and_leaves_the_network_as_it_was(images, config, options):
    network = narrow_network(6).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    random = torch.get_rng_state()
    costs = measure_costs(images, config, options, network)
    assert min(costs.step_ms, costs.main_cpu_ms, costs.decode_ms, costs.augment_ms, costs.draw_ms) > 0
    assert costs.render_ms is None and costs.device_free_bytes == 0
    assert 0 < costs.decoded_bytes == decoded_bytes(images, 64) <= len(images) * 3 * 64 * 64
    assert network.training and all(parameter.grad is None for parameter in network.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_choice_is_made_once_per_machine_data_and_network(images, config, options, tmp_path, monkeypatch):
    network, file = narrow_network(6), tmp_path / "cache" / "tunings.json"
    fast = replace(options, fast=True, workers=8).resolved(cuda=False, bf16=False)
    first = tuned(images, config, fast, network, file=file)
    assert 0 <= first[1].workers <= machine.cores().usable
    assert not first[1].device_augment and first[0].slots >= 4
    monkeypatch.setattr(autotune, "measure_costs", lambda *arguments: pytest.fail("measured again"))
    assert tuned(images, config, fast, network, file=file) == first
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        tuned(images, replace(config, batch_size=4), fast, network, file=file)
    elsewhere = replace(images, paths=tuple(f"/mnt/slow{path}" for path in images.paths))
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        tuned(elsewhere, config, fast, network, file=file)


@pytest.mark.parametrize("keeps", [False, True])
def test_workers_auto_leaves_everything_else_as_the_command_says(images, config, options, tmp_path, keeps):
    auto = replace(options, workers="auto", cache_images=keeps)
    assert is_left_to_us(auto) and not is_left_to_us(replace(auto, device_augment=True))
    chosen, told = tuned(images, config, auto, narrow_network(6), file=tmp_path / "tunings.json")
    assert 0 <= told.workers <= min(machine.cores().usable, config.batch_size)
    assert chosen.keeps is keeps
    assert replace(told, workers="auto") == auto


def test_workers_auto_may_use_every_core_and_a_number_is_the_most(config, options, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(6, 6, None, 6))
    assert most_workers(config, replace(options, workers="auto")) == 6
    assert most_workers(config, replace(options, workers=2)) == 2
    assert most_workers(replace(config, batch_size=4), replace(options, workers="auto")) == 4
    assert num_workers("auto", 64, World()) == 4, "by rule: 80 % of the cores"


def test_a_run_too_short_to_measure_follows_a_rule_and_says_so(images, config, options, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(6, 6, None, 6))
    assert not is_worth_measuring(images, config)
    assert is_worth_measuring(images, replace(config, epochs=10_000))
    assert not is_worth_measuring(images, replace(config, epochs=10_000, device=torch.device("cuda")))
    told = fixed_rule(config, replace(options, workers="auto"))
    assert told.startswith("--workers auto, too short a run to measure: 4 workers (80 % of the cores")
    assert "on the device" in fixed_rule(config, replace(options, fast=True, device_augment=True))


def test_a_lossy_format_is_chosen_only_where_it_is_allowed(images, config, options, tmp_path, monkeypatch):
    """Large pictures that fit on the device as 4:2:0 alone: the way over the bus would take longer than the step."""
    gpu = Costs(
        images=8, step_ms=5, main_cpu_ms=1, decode_ms=4, augment_ms=4, draw_ms=0.01, cores=2, render_ms=0.1,
        decoded_bytes=2 << 30, picture_bytes=16 << 20, ram_free_bytes=64 << 30, device_free_bytes=2 << 30, epochs=9,
    )  # fmt: skip
    for allowed in (False, True):
        monkeypatch.setattr(autotune, "measure_costs", lambda *_, may=allowed: replace(gpu, may_subsample=may))
        fast = replace(options, fast=True, store_420=allowed).resolved(cuda=True, bf16=True)
        _, told = tuned(images, config, fast, narrow_network(6), file=tmp_path / "tunings.json")
        assert told.device_augment and told.store_420 is allowed


def test_one_epoch_is_not_worth_a_store(images, config, options, tmp_path):
    fast = replace(options, fast=True).resolved(cuda=False, bf16=False)
    chosen, _ = tuned(images, replace(config, epochs=1), fast, narrow_network(6), file=tmp_path / "tunings.json")
    assert chosen.keeps is False


def test_what_fast_leaves_out_is_not_chosen(images, config, options, tmp_path, monkeypatch):
    """Where the device would be best by far, and RAM second."""
    gpu = Costs(
        images=8, step_ms=5, main_cpu_ms=1, decode_ms=400, augment_ms=4, draw_ms=0.01, cores=2, render_ms=0.1,
        decoded_bytes=1 << 20, ram_free_bytes=64 << 30, device_free_bytes=2 << 30, epochs=9,
    )  # fmt: skip

    def measured(images, config, options, network):
        may = options.fast and not options.no_device_augment
        return replace(gpu, place=autotune.place_given(options), render_ms=0.1 if may else None)

    monkeypatch.setattr(autotune, "measure_costs", measured)

    def chosen(**left_out):
        fast = replace(options, fast=True, **left_out).resolved(cuda=True, bf16=True)
        if not is_left_to_us(fast):
            return fast.device_augment, None
        told_config, told = tuned(images, config, fast, narrow_network(6), file=tmp_path / "tunings.json")
        return told.device_augment, told_config.keeps

    assert chosen() == (True, None)
    assert chosen(no_device_augment=True) == (False, True)
    assert chosen(no_fast_dataloader=True) == (True, None)
    assert chosen(no_device_augment=True, no_fast_dataloader=True) == (False, False)


def test_the_device_is_not_measured_where_it_may_not_augment(images, config, options, monkeypatch):
    monkeypatch.setattr(autotune, "step_costs", lambda *_, **__: (5.0, 1.0))
    monkeypatch.setattr(autotune, "picture_costs", lambda *_, **__: (4.0, 4.0, 0.01))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 4 << 30))
    on_gpu = replace(config, device=torch.device("cuda"))
    for left_out in (False, True):
        fast = replace(options, fast=True, no_device_augment=left_out).resolved(cuda=True, bf16=True)
        costs = measure_costs(images, on_gpu, fast, narrow_network(6))
        assert (costs.render_ms is None) == left_out


@pytest.mark.parametrize("left_out", [False, True])
def test_decoding_at_a_smaller_size_is_a_part_of_fast_that_can_be_left_out(
    images, config, options, monkeypatch, left_out
):
    opened = []
    monkeypatch.setattr(Store, "open", lambda pictures, config: opened.append(pictures) or nullcontext(pictures))
    monkeypatch.setattr(ResizedPictures, "statistics", lambda self: "", raising=False)
    fast = replace(options, fast=True, no_scaled_decode=left_out).resolved(cuda=False, bf16=False)
    with open_input(images, config, fast):
        (pictures,) = opened
        assert ("decoded small" in pictures.parameters) != left_out


@pytest.mark.parametrize("left_out", [False, True])
def test_decoding_by_the_gpu_is_a_part_of_fast_that_can_be_left_out(images, config, options, monkeypatch, left_out):
    asked = []
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(2, 2, None, 2))
    monkeypatch.setattr(input_module, "decoded_on_device", lambda *_, **__: asked.append(True))
    monkeypatch.setattr(input_module, "training_input", lambda *_, **__: None)
    fast = replace(options, fast=True, no_gpu_decode=left_out).resolved(cuda=True, bf16=True)
    with open_input(images, replace(config, keeps=False), fast):
        assert asked == ([] if left_out else [True])


@pytest.mark.parametrize("left_out", [False, True])
def test_workers_stay_from_epoch_to_epoch_or_end_with_the_last_batch(images, config, options, monkeypatch, left_out):
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(2, 2, None, 2))
    asked = replace(options, workers=2, no_persistent_workers=left_out)
    with open_input(images, config, asked) as source:
        pids, left = [], []
        for epoch in range(2):
            batches = source.batches.epoch(epoch)
            for step in range(source.steps_per_epoch):  # as the loop does, which counts steps
                next(batches)
                pids += [set(source.feed.worker_pids.values())] if step == 0 else []
            left.append(len(source.feed.worker_pids))
    assert left == ([0, 0] if left_out else [2, 2])
    assert pids[0].isdisjoint(pids[1]) == left_out
