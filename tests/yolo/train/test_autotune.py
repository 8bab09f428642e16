"""`--fast` measures what a sample and a step cost, chooses by it, caches the result, and changes nothing else."""

import json
import logging
import threading
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.clock import machine
from flatout.errors import ConfigError
from flatout.feed import Store
from flatout.ranks.world import World
from flatout.yolo.augment.layout import decoded_bytes
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.train import autotune
from flatout.yolo.train import input as input_module
from flatout.yolo.train.autotune import (
    StepCosts,
    TuningCache,
    TuningInputs,
    fingerprint,
    input_choices,
    is_long,
    measure,
    measuring_budget_s,
    this_machine,
    unmeasured,
)
from flatout.yolo.train.choose_input import Choice, choose_input, most_workers
from flatout.yolo.train.input import InputConfig, num_workers, open_input
from tests.yolo.train.input_cases import CPU, GPU, costs_of, machine_of
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


@pytest.fixture
def long_runs(monkeypatch):
    """Every run is long enough to measure."""
    monkeypatch.setattr(autotune, "LONG_RUN_PIXELS", {})


def by_rule(images, config, options) -> tuple[Choice, ...]:
    return choose_input(options.asked, this_machine(config), unmeasured(images, config))


def test_what_is_measured_is_positive_and_leaves_the_network_as_it_was(images, config, options):
    network = narrow_network(6).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    random = torch.get_rng_state()
    found = measure(images, config, options.asked, network, graphs=False)
    assert min(found.step_ms, found.main_cpu_ms, found.decode_ms, found.augment_ms, found.draw_ms) > 0
    assert network.training and all(parameter.grad is None for parameter in network.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_size_of_the_images_is_known_without_measuring(images, config):
    costs, here = unmeasured(images, config), this_machine(config)
    assert 0 < costs.decoded_bytes == decoded_bytes(images.size_wh_N2, 64) <= len(images) * 3 * 64 * 64
    assert costs.measured is None and not here.has_gpu and not here.nvjpeg


@pytest.mark.usefixtures("long_runs")
def test_a_measurement_is_made_once_per_machine_data_and_network(images, config, options, tmp_path, monkeypatch):
    network, file = narrow_network(6), tmp_path / "cache" / "cache.json"
    fast = replace(options, fast=True, workers=8).asked
    first = input_choices(images, config, fast, network, file=file)
    assert 0 <= first[0].settings.workers <= machine.cores().usable
    assert not first[0].settings.on_device and first[0].settings.slots >= 4
    monkeypatch.setattr(autotune, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert input_choices(images, config, fast, network, file=file) == first
    also = replace(options, fast=True, workers=8, device_augment=True, cache_images=True).asked
    assert input_choices(images, config, also, network, file=file) == first, "nothing of that changes what is measured"
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        input_choices(images, replace(config, batch_size=4), fast, network, file=file)
    elsewhere = replace(images, paths=tuple(f"/mnt/slow{path}" for path in images.paths))
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        input_choices(elsewhere, config, fast, network, file=file)


@pytest.mark.usefixtures("long_runs")
def test_a_cached_measurement_gives_the_same_choices_whatever_memory_is_free_now(
    images, config, options, tmp_path, monkeypatch
):
    monkeypatch.setattr(autotune, "measure", lambda *_, **__: CPU)
    fast, file = replace(options, fast=True).asked, tmp_path / "cache.json"
    first = input_choices(images, config, fast, narrow_network(6), file=file)
    full = replace(machine.memory(), free=1)
    monkeypatch.setattr(machine, "memory", lambda: full)
    assert input_choices(images, config, fast, narrow_network(6), file=file) == first


@pytest.mark.usefixtures("long_runs")
@pytest.mark.parametrize("keeps", [False, True])
def test_workers_auto_leaves_everything_else_as_the_command_says(images, config, options, tmp_path, keeps):
    auto = replace(options, workers="auto", cache_images=keeps).asked
    (choice,) = input_choices(images, config, auto, narrow_network(6), file=tmp_path / "cache.json")
    settings = choice.settings
    assert 0 <= settings.workers <= min(machine.cores().usable, config.batch_size)
    assert settings.keep == ("ram" if keeps else "off")
    assert (settings.shrunk, settings.gpu_decode) == (False, False)


def test_workers_auto_may_use_every_core_and_a_number_is_the_most(images, config, options, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(6, 6, None, 6))

    def most(config, workers):
        asked = replace(options, workers=workers).asked
        return most_workers(asked, this_machine(config), unmeasured(images, config))

    assert most(config, "auto") == 6
    assert most(config, 2) == 2
    assert most(replace(config, batch_size=4), "auto") == 4
    assert num_workers("auto", 64, World()) == 4, "by rule: 80 % of the cores"


def test_ranks_on_other_machines_do_not_take_cores_from_this_one(config, options, monkeypatch):
    """Sixteen ranks on two machines of 16 cores: eight ranks share the cores of a machine, so each has two."""
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(16, 16, None, 16))

    def first(world):
        here = replace(this_machine(replace(config, world=world)), ram_free_bytes=0)
        return choose_input(replace(options, workers="auto").asked, here, costs_of(200, GPU))[0]

    on_two_machines, on_one = first(World(0, 16, 0, 8)), first(World(0, 8, 0, 8))
    assert on_two_machines == on_one
    assert on_two_machines.settings.workers == 2


def test_a_run_too_short_to_measure_follows_a_rule_and_says_so(images, config, options, monkeypatch, caplog):
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(6, 6, None, 6))
    monkeypatch.setattr(autotune, "measure", lambda *_, **__: pytest.fail("measured"))
    assert not is_long(images, config)
    assert is_long(images, replace(config, epochs=10_000))
    assert not is_long(images, replace(config, epochs=10_000, device=torch.device("cuda")))
    caplog.set_level(logging.INFO, "flatout")
    input_choices(images, config, replace(options, workers="auto").asked, narrow_network(6))
    (message,) = caplog.messages
    assert message.startswith(
        "--workers auto: the run is too short to measure, so it gets 4 workers (80 % of the cores"
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 4 << 30))
    on_gpu = replace(config, device=torch.device("cuda"))
    input_choices(images, on_gpu, replace(options, fast=True).asked, narrow_network(6))
    assert "--fast: the run is too short to measure, so images are kept and augmented on the device." in caplog.messages


@pytest.mark.usefixtures("long_runs")
def test_fast_says_every_choice_with_its_reason(images, config, options, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(autotune, "measure", lambda *_, **__: CPU)
    caplog.set_level(logging.INFO, "flatout")
    fast = replace(options, fast=True).asked
    choices = input_choices(images, config, fast, narrow_network(6), file=tmp_path / "cache.json")
    measured, *lines = caplog.messages
    assert measured.startswith("--fast, measured in ")
    assert measured.endswith(f" s: {choices[0].what}: {choices[0].img_s:,.0f} img/s expected.")
    assert lines == [f"--fast, choice {number}: {choice}." for number, choice in enumerate(choices, 1)]
    caplog.clear()
    input_choices(images, config, options.asked, narrow_network(6))
    assert not caplog.messages, "nothing is logged if the command decides everything"


def test_all_ranks_follow_the_first(images, config, options, monkeypatch):
    """The second rank has another machine, and nothing to measure."""
    sent = asdict(TuningInputs(machine_of(8, 2), costs_of(3, GPU)))
    monkeypatch.setattr(World, "broadcast", lambda self, value: sent)
    monkeypatch.setattr(autotune, "_tuned", lambda *_: pytest.fail("the second measured"))
    second = replace(config, world=World(1, 2))
    fast = replace(options, fast=True).asked
    assert input_choices(images, second, fast, narrow_network(6)) == choose_input(
        fast, machine_of(8, 2), costs_of(3, GPU)
    )


# Opening the choices


@pytest.fixture
def device_choices(options) -> tuple[Choice, ...]:
    """Augmented on the device, decoded there or on the CPU, and augmented by workers."""
    asked = replace(options, fast=True, gpu_decode=True).asked
    return choose_input(asked, machine_of(8, 2), costs_of(3, None))


class FakeDeviceInput:
    """Replaces the input on a device and records what was tried."""

    def __init__(self, monkeypatch, *, decodes: bool = True, augments: bool = True) -> None:
        self.tried: list[str] = []
        self._decodes, self._augments = decodes, augments
        monkeypatch.setattr(input_module, "decoded_on_device", self._decode)
        monkeypatch.setattr(input_module, "training_input", self._open)

    def _decode(self, *_: object, **__: object) -> object:
        self.tried.append("GPU decodes")
        return object() if self._decodes else None

    def _open(self, *_: object, **__: object) -> Any:
        self.tried.append("device augments")
        if not self._augments:
            raise ConfigError("It cannot.")
        return SimpleNamespace(feed=EmptyFeed(self.tried))


class EmptyFeed(list[object]):
    """A feed without batches."""

    def __init__(self, tried: list[str]) -> None:
        super().__init__()
        self._tried = tried

    def log_replaced(self) -> None: ...

    def close(self) -> None:
        self._tried.append("closed")


def test_the_next_choice_is_tried_where_the_gpu_does_not_decode(images, config, device_choices, monkeypatch):
    device = FakeDeviceInput(monkeypatch, decodes=False)
    with ExitStack() as stack:
        open_input(images, config, device_choices, stack)
        assert device.tried == ["GPU decodes", "device augments"]


def test_workers_augment_where_the_device_cannot_and_the_log_says_so(
    images, config, device_choices, monkeypatch, caplog
):
    FakeDeviceInput(monkeypatch, augments=False)
    with ExitStack() as stack:
        batches, _ = open_input(images, config, device_choices, stack)
        assert len(batches) == -(-len(images) // config.batch_size)
    assert "It cannot. --fast augments on the CPU instead." in caplog.messages


def test_an_error_is_raised_if_only_the_device_was_requested_and_it_cannot_augment(
    images, config, options, monkeypatch
):
    FakeDeviceInput(monkeypatch, augments=False)
    with pytest.raises(ConfigError, match="It cannot"):
        open_input(images, config, by_rule(images, config, replace(options, device_augment=True)), ExitStack())


def test_a_rank_that_can_use_the_device_follows_ranks_that_cannot(images, config, device_choices, monkeypatch):
    device = FakeDeviceInput(monkeypatch)
    answers = iter([True, True])  # another rank can neither decode nor augment on its device
    monkeypatch.setattr(World, "any", lambda self, flag: next(answers))
    with ExitStack() as stack:
        batches, _ = open_input(images, config, device_choices, stack)
        assert device.tried == ["GPU decodes", "device augments", "closed", "device augments", "closed"]
        assert len(batches) == -(-len(images) // config.batch_size)


@pytest.mark.parametrize("left_out", [False, True])
def test_decoding_at_a_smaller_size_is_a_part_of_fast_that_can_be_left_out(
    images, config, options, monkeypatch, left_out
):
    opened = []
    monkeypatch.setattr(Store, "open", lambda resized, config: opened.append(resized) or nullcontext(resized))
    monkeypatch.setattr(ResizedImages, "statistics", lambda self: "", raising=False)
    fast = replace(options, fast=True, no_scaled_decode=left_out)
    with ExitStack() as stack:
        open_input(images, config, by_rule(images, config, fast), stack)
        (resized,) = opened
        assert ("decoded small" in resized.parameters) != left_out


@pytest.mark.parametrize(("given", "decodes"), [({}, False), ({"gpu_decode": True}, True)])
def test_the_gpu_decodes_only_on_request_because_its_pixels_differ(
    images, config, options, monkeypatch, given, decodes
):
    device = FakeDeviceInput(monkeypatch)
    fast = replace(options, fast=True, **given).asked
    with ExitStack() as stack:
        open_input(images, config, choose_input(fast, machine_of(8, 2), costs_of(3, None)), stack)
        assert device.tried == [*(["GPU decodes"] if decodes else []), "device augments"]


@pytest.mark.parametrize(
    ("given", "why"),
    [({"fast": True}, "images are not kept on the GPU"),
     ({"device_augment": True}, "that takes an NVIDIA GPU and torchvision")],
)  # fmt: skip
def test_the_log_says_that_decoding_on_the_gpu_has_no_effect_without_one(images, config, options, caplog, given, why):
    asked = replace(options, gpu_decode=True, **given).asked
    input_choices(images, config, asked, narrow_network(6))
    assert f"--gpu-decode has no effect: {why}." in caplog.messages


@pytest.mark.parametrize("left_out", [False, True])
def test_workers_stay_from_epoch_to_epoch_or_end_with_the_last_batch(images, config, options, monkeypatch, left_out):
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(2, 2, None, 2))
    choices = by_rule(images, config, replace(options, workers=2))
    with ExitStack() as stack:
        batches, _ = open_input(images, replace(config, persistent_workers=not left_out), choices, stack)
        pids, left = [], []
        for epoch in range(2):
            a_pass = batches.epoch(epoch)
            for step in range(len(batches)):  # like the loop, which counts steps
                next(a_pass)
                pids += [set(batches.feed.worker_pids.values())] if step == 0 else []
            left.append(len(batches.feed.worker_pids))
    assert left == ([0, 0] if left_out else [2, 2])
    assert pids[0].isdisjoint(pids[1]) == left_out


# The cache

FACTS = {"GPU": "H200", "data": "abc"}
FOUND = TuningInputs(machine_of(8, 2), costs_of(3, GPU))


def test_measuring_takes_a_twentieth_of_the_run_and_never_over_a_minute():
    assert measuring_budget_s(100) == 5
    assert measuring_budget_s(1e6) == 60


def test_a_cuda_graph_is_measured_by_its_kernels(images, config, options, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(autotune, "step_costs", lambda *_, graph: asked.append(graph) or StepCosts(5.0, 1.0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 4 << 30))
    on_gpu = replace(config, device=torch.device("cuda"), epochs=10**6)
    for device, graphs in ((on_gpu, True), (on_gpu, False), (replace(config, epochs=10**6), True)):
        file = tmp_path / f"{len(asked)}.json"
        input_choices(images, device, replace(options, fast=True).asked, narrow_network(6), graphs=graphs, file=file)
    assert asked == [True, False, False]


def test_a_measurement_is_cached_for_the_same_facts_only(tmp_path):
    cache = TuningCache(tmp_path / "cache" / "cache.json")
    assert cache.load(FACTS) is None
    cache.save(FACTS, FOUND)
    assert cache.load(FACTS) == FOUND
    assert cache.load({**FACTS, "data": "abd"}) is None
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 3}', '{"x": {"choice": {"keep": "ram"}}}'])
def test_a_damaged_or_older_cache_counts_as_empty(tmp_path, content):
    (tmp_path / "t.json").write_text(content.replace("x", fingerprint(FACTS)))
    cache = TuningCache(tmp_path / "t.json")
    assert cache.load(FACTS) is None
    cache.save(FACTS, FOUND)
    assert cache.load(FACTS) == FOUND


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("machine", {"cores": "many"}),
        ("machine", {"cores": -3}),
        ("machine", {"cores": 10**9}),
        ("machine", {"ram_free_bytes": None}),
        ("machine", {"more": 1}),
        ("costs", {"measured": 3}),
        ("costs", {"measured": {"step_ms": 1.0}}),
        ("costs", {"epochs": float("inf")}),
        ("costs", {"batch_size": 2.5}),
    ],
)
def test_impossible_numbers_are_not_loaded_from_the_cache(tmp_path, part, wrong):
    file = tmp_path / "t.json"
    TuningCache(file).save(FACTS, FOUND)
    content = json.loads(file.read_text())
    content[fingerprint(FACTS)]["situation"][part] |= wrong
    file.write_text(json.dumps(content))
    assert TuningCache(file).load(FACTS) is None


def test_processes_with_equal_ids_do_not_write_into_the_same_temporary_file(tmp_path):
    """In containers that share a home directory every process may have id 1."""
    file = tmp_path / "t.json"
    writers = [
        threading.Thread(target=lambda name=name: [TuningCache(file).save({"x": name}, FOUND) for _ in range(20)])
        for name in "abcd"
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not file.exists() or json.loads(file.read_text())
    for writer in writers:
        writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
