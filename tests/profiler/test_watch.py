"""A watch around a plain loop names the planted cause, changes nothing, and removes everything again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from flatout.clock import machine
from flatout.errors import ConfigError
from flatout.profiler import watch
from tests.profiler import slow_loops

ROOT = Path(__file__).parents[2]


pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timing]


@pytest.mark.parametrize(
    ("loop", "cause", "line"),
    [
        (slow_loops.slow_decode, "decode", "cv2.imdecode"),
        (slow_loops.item_loop, "python loop", "value.item()"),
        (slow_loops.gc_pauses, "garbage collector", ""),
        pytest.param(
            slow_loops.too_few_workers,
            "too few workers",
            "np.",
            marks=pytest.mark.skipif(machine.cores().usable < 2, reason="needs a second core"),
        ),
    ],
)
def test_the_planted_cause_is_named_with_its_line(loop, cause, line):
    watched = loop()
    assert watched.verdict.cause == cause, watched.text()
    assert line in watched.text()
    assert watched.verdict.best.gain > 1.03


def test_a_step_that_is_all_network_needs_no_remedy():
    watched = slow_loops.healthy()
    assert watched.verdict.cause == "nothing", watched.text()
    assert watched.verdict.remedies == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_ledger_sums_to_the_wall_clock(num_workers):
    loader = DataLoader(slow_loops.Warped(96), batch_size=8, num_workers=num_workers)
    ledger = slow_loops.train(loader).ledger
    assert ledger.places == (["host", "workers"] if num_workers else ["host"])
    for place in ledger.places:
        assert sum(row.ms for row in ledger.lane(place)) == pytest.approx(ledger.step_ms)
        assert ledger.lane(place)[-1].stage == ("unexplained" if place == "host" else "idle")
        assert all(row.ms >= 0 for row in ledger.lane(place))
    stages = {row.stage for row in ledger.rows}
    assert {"feed.wait", "forward", "loss", "backward", "optimizer", "fetch", "collate"} <= stages


def test_everything_is_restored_afterwards():
    loader = DataLoader(slow_loops.ready_samples(96), batch_size=8)
    kind, dataset, collate, backward = type(loader), loader.dataset, loader.collate_fn, torch.Tensor.backward
    slow_loops.train(loader)
    assert (type(loader), loader.dataset, loader.collate_fn) == (kind, dataset, collate)
    assert torch.Tensor.backward is backward
    assert "item" not in vars(torch.Tensor)
    assert not any(module._forward_hooks for module in slow_loops.small_network().modules())


def test_an_error_in_the_loop_propagates_and_everything_is_restored():
    loader = DataLoader(slow_loops.ready_samples(96), batch_size=8)
    kind, model = type(loader), slow_loops.small_network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop():
        with watch(loader, model, optimizer):
            for _ in loader:
                raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert type(loader) is kind
    assert not model._forward_pre_hooks


def test_training_is_the_same_with_and_without_a_watch():
    def weights(watched):
        torch.manual_seed(3)
        model, loader = slow_loops.small_network(), DataLoader(slow_loops.ready_samples(64), batch_size=8)
        optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss()

        def loop():
            for images, labels in loader:
                loss_fn(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()

        if watched:
            with watch(loader, model, optimizer, loss_fn=loss_fn):
                loop()
        else:
            loop()
        return model.state_dict()

    expected, seen = weights(False), weights(True)
    assert all(torch.equal(expected[name], seen[name]) for name in expected)


def test_too_few_steps_are_refused_with_a_number():
    watched = slow_loops.train(DataLoader(slow_loops.ready_samples(24), batch_size=8))
    with pytest.raises(
        ConfigError, match=r"Only 3 steps were observed; a profile needs at least 7\. A step is a batch"
    ):
        watched.text()


def test_a_watch_of_another_loader_than_the_loop_iterates_says_which_one_to_pass():
    loader, other = (DataLoader(slow_loops.ready_samples(24), batch_size=8) for _ in range(2))
    with watch(loader, None, None) as watched:
        list(other)
    with pytest.raises(ConfigError, match=r"Only 0 steps .* pass it the object that your loop iterates\."):
        watched.text()


def test_a_profile_that_is_asked_for_inside_the_block_is_not_called_too_short():
    loader = DataLoader(slow_loops.ready_samples(80), batch_size=8)
    model = torch.nn.Linear(2, 2)
    with watch(loader, model, torch.optim.SGD(model.parameters())) as watched:
        for _ in loader:
            pass
        with pytest.raises(ConfigError, match="has not ended yet, so there is no profile"):
            watched.text()


def test_a_generator_is_refused_with_advice():
    model = slow_loops.small_network()
    watching = watch((_ for _ in range(3)), model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match="Pass the loader object itself"):
        watching.__enter__()


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(96):
            yield torch.rand(3, 32, 32), number % 2


def test_an_iterable_dataset_is_timed():
    ledger = slow_loops.train(DataLoader(Stream(), batch_size=8)).ledger
    assert ledger.ms("host", "fetch") > 0


def test_a_loss_that_is_a_plain_function_has_a_stage_of_its_own():
    def slow_loss(logits, labels):
        total = logits.sum() * 0
        for _ in range(150):
            total = total + torch.logsumexp(logits, 1).sum() * 0.01
        return total

    # Seconds of steps: the sampler looks at the stack every 40 ms.
    model, loader = slow_loops.small_network(), DataLoader(slow_loops.ready_samples(2400), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch(loader, model, optimizer, loss_fn=slow_loss) as watched:
        for images, labels in loader:
            slow_loss(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watched.ledger.ms("host", "loss") > 0.1 * watched.ledger.step_ms


def test_the_example_is_short_and_names_its_cause():
    example = ROOT / "examples" / "watch_slow_loop.py"
    assert len(example.read_text().splitlines()) < 40
    # Torch's threads would wait for each other while other tests keep cores busy.
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, example], env=alone, capture_output=True, text=True, cwd=ROOT, timeout=110, check=True
    )
    assert re.search(r"Verdict: decode\.", done.stdout), done.stdout
    assert "cv2.imdecode" in done.stdout
