"""`--fast` measures what a picture and a step cost, chooses by it, remembers, and disturbs nothing."""

from dataclasses import replace

import pytest
import torch

from flatout.engine.distributed import World
from flatout.profiler import machine
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.train import autotune
from flatout.yolo.train.autotune import decoded_bytes, measure_costs, tuned
from flatout.yolo.train.input import InputConfig
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


def test_one_epoch_is_not_worth_a_store(images, config, options, tmp_path):
    fast = replace(options, fast=True).resolved(cuda=False, bf16=False)
    chosen, _ = tuned(images, replace(config, epochs=1), fast, narrow_network(6), file=tmp_path / "tunings.json")
    assert chosen.keeps is False
