"""`python -m flatout.profile_any` finds the loop of a script, changes nothing it computes, and keeps its exit code."""

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flatout import Loader
from flatout.clock import clock
from flatout.profile_any import _run, main
from flatout.profiler import load_measurement, make_ledger, watch, watch_any
from flatout.profiler.observe.line_counts import LineCounter
from tests.profiler import slow_loops

ROOT = Path(__file__).parents[2]

LOADER_SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
optimizer, loss_fn = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
train, test = DataLoader(data, 8, shuffle=True, num_workers=int(sys.argv[1])), DataLoader(data, 8)
for epoch in range(2):
    for x, y in train:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in test:
            model(x)
    torch.save(model.state_dict(), sys.argv[2])
print(sum(weight.double().sum().item() for weight in model.parameters()))
sys.exit(int(sys.argv[3]))
"""

BATCHES_BY_HAND = """
import torch
from torch import nn

torch.manual_seed(0)
text, model = torch.randint(0, 16, (500,)), nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(40):
    at = torch.randint(0, 490, (4,)).tolist()
    x, y = (torch.stack([text[i + s : i + s + 8] for i in at]) for s in (0, 1))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
print(model[1].weight.double().sum().item())
"""


class Done(NamedTuple):
    """What a script printed, and its exit code."""

    stdout: str
    stderr: str
    code: int


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script under the watch, with its words; `options` are those of profile_any. None: without the watch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])

    def run_script(script, *words, options=()):
        (tmp_path / "train.py").write_text(script)
        words = ["train.py", *map(str, words)]
        code = _run(words, is_module=False) if options is None else main([*map(str, options), *words])
        return Done(*capsys.readouterr(), code)

    return run_script


@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_computes_the_same_and_its_exit_code_is_kept(run, tmp_path, workers):
    plain = run(LOADER_SCRIPT, workers, "weights.pt", 3, options=None)
    watched = run(LOADER_SCRIPT, workers, "weights.pt", 3)
    assert (watched.stdout, watched.code) == (plain.stdout, plain.code)
    assert float(plain.stdout) and plain.code == 3
    assert "Verdict:" in watched.stderr and "profile/profile.html" in watched.stderr
    measurement = load_measurement(tmp_path / "profile" / "profile.json")
    ledger = make_ledger(measurement)
    assert ledger.images == 8
    assert measurement.num_workers == workers
    stages = {"forward", "loss", "backward", "optimizer", "validate", "checkpoint"}
    assert stages <= {row.stage for row in ledger.lane("host")}
    assert ledger.ms("workers" if workers else "host", "fetch") > 0


def test_a_loop_without_a_dataloader_is_found_by_its_optimizer(run, tmp_path):
    plain = run(BATCHES_BY_HAND, options=None)
    watched = run(BATCHES_BY_HAND)
    assert watched.stdout == plain.stdout
    ledger = make_ledger(load_measurement(tmp_path / "profile" / "profile.json"))
    assert ledger.images == 4
    assert 30 <= ledger.num_steps <= 38


def test_after_some_steps_the_report_comes_and_the_script_goes_on_or_ends(run):
    on = run(BATCHES_BY_HAND, options=("--steps", 5))
    assert on.code == 0 and on.stdout and "5 steps of 4 images" in on.stderr
    ended = run(BATCHES_BY_HAND, options=("--steps", 5, "--stop"))
    assert ended.code == 0 and not ended.stdout and "Verdict:" in ended.stderr


def test_an_error_of_the_script_is_shown_as_python_shows_it(run):
    done = run("def f():\n    raise KeyError('lost')\nf()\n")
    assert done.code == 1
    assert "KeyError: 'lost'" in done.stderr and 'train.py", line 2' in done.stderr
    assert "runpy" not in done.stderr and "profile_any.py" not in done.stderr
    assert "no profile: Only 0 steps were observed" in done.stderr


def test_ctrl_c_ends_a_script_with_a_report(run):
    interrupted = BATCHES_BY_HAND.replace(
        "optimizer.step()", "optimizer.step()\n    if step == 30: raise KeyboardInterrupt"
    )
    done = run(interrupted)
    assert (done.code, done.stdout) == (130, "")
    assert "flatout: interrupted" in done.stderr and "Verdict:" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", 2), "--steps 2 is too few for a conclusion. Use --steps 3 or more."),
        (("--stop",), "--stop needs --steps"),
        (("--out", "x", "missing.py"), "there is no script missing.py"),
    ],
)
def test_wrong_arguments_are_refused_before_the_script_runs(run, options, message):
    done = run("print('ran')", options=options)
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr


def test_its_help_needs_no_torch():
    code = "import sys, flatout.profile_any as p\ntry: p.main(['-h'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.endswith("False\n")
    assert "--steps" in done.stdout


def train(loader, network, *, per_step=lambda: None):
    optimizer, loss_fn = torch.optim.SGD(network.parameters(), 0.01), nn.CrossEntropyLoss()
    for images, labels in loader:
        optimizer.zero_grad()
        loss_fn(network(images), labels).backward()
        optimizer.step()
        per_step()


def test_torch_is_as_it_was_after_a_watch():
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    network, before = slow_loops.small_network(), (DataLoader.__iter__, torch.save, torch.autograd.backward)
    with watch_any():
        train(DataLoader(slow_loops.ready_samples(96), batch_size=8), network)
    assert (DataLoader.__iter__, torch.save, torch.autograd.backward) == before
    assert not (modules._global_forward_hooks or modules._global_forward_pre_hooks)
    assert not (optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in network.modules())


@pytest.mark.timing
def test_accumulated_gradients_are_one_step(one_thread):
    network, loader = slow_loops.small_network(), DataLoader(slow_loops.ready_samples(320), batch_size=8)
    optimizer, seen = torch.optim.SGD(network.parameters(), 0.01), set()
    network[0].register_forward_pre_hook(lambda _, args: seen.add(len(args[0])))
    with watch_any() as watched:
        for number, (images, labels) in enumerate(loader, start=1):
            nn.functional.cross_entropy(network(images), labels).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert watched.ledger.images == 32
    # Larger batches were tried in calls that are as much larger.
    assert {8 * run.images / 32 for run in watched.measurement.network_runs} == seen > {8}


def test_two_optimizers_and_two_loaders_are_one_loop():
    first, second = slow_loops.small_network(), slow_loops.small_network()
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (first, second)]
    loaders = [DataLoader(slow_loops.ready_samples(96), batch_size=8) for _ in range(2)]
    with watch_any() as watched:
        for batches in zip(*loaders, strict=True):
            for network, optimizer, (images, labels) in zip((first, second), optimizers, batches, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(images), labels).backward()
                optimizer.step()
    assert watched.ledger.images == 8
    forward = next(row for row in watched.ledger.lane("host") if row.stage == "forward")
    assert forward.runs == 2


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer and calls its step()."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_that_wraps_another_ends_its_stage():
    network, loader = slow_loops.small_network(), DataLoader(slow_loops.ready_samples(96), batch_size=8)
    optimizer, running = Lookahead(torch.optim.SGD(network.parameters(), 0.01)), []
    with watch_any() as watched:
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
            running.append(clock.innermost())
    assert running == [None] * 12
    assert next(row.runs for row in watched.ledger.lane("host") if row.stage == "optimizer") == 1


@pytest.mark.parametrize(
    "begin_watch", [watch_any, lambda loader: watch(loader, None, None)], ids=["watch_any", "watch"]
)
def test_workers_of_our_loader_are_seen_and_go_on_filling_batches_together(begin_watch):
    network, loader = slow_loops.small_network(), Loader(slow_loops.ready_samples(96), batch_size=8, num_workers=1)
    modes = set()
    with begin_watch(*([] if begin_watch is watch_any else [loader])) as watched:
        train(loader, network, per_step=lambda: modes.add(loader._collate_mode))
    assert (watched.ledger.images, modes) == (8, {"rows"})
    assert watched.ledger.ms("workers", "fetch") > 0


def test_a_validation_without_no_grad_is_recognized_by_its_lack_of_updates():
    network = slow_loops.small_network()
    with watch_any() as watched:
        held_out = DataLoader(slow_loops.ready_samples(64), batch_size=8)
        for _ in range(4):
            train(DataLoader(slow_loops.ready_samples(48), batch_size=8), network)
            for images, _ in held_out:
                network(images)
    assert watched.ledger.ms("host", "validate") > 0


@pytest.mark.timing
def test_sleeping_is_waiting_and_takes_no_core(one_thread):
    """The measurement; what a verdict makes of it is in situations.py, where other programs do not disturb it."""
    samples = slow_loops.ready_samples(56)

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return len(samples)

        def __getitem__(self, index):
            time.sleep(0.004)
            return samples[index]

    for workers in (0, 1):
        with watch_any() as watched:
            train(DataLoader(Slow(), batch_size=4, num_workers=workers), slow_loops.small_network())
        measurement = watched.measurement
        assert measurement.worker_blocked_ms > 0.8 * 4 * 4
        assert measurement.main_cpu_ms + (measurement.worker_cpu_ms or 0) < watched.ledger.step_ms
        assert "time.sleep" in " ".join(line.text for line in measurement.lines)


class Student(nn.Module):
    """Learns from a slower copy of itself, which no optimizer updates."""

    def __init__(self):
        super().__init__()
        self.learner, self.target = slow_loops.small_network(), slow_loops.small_network()

    def forward(self, images):
        return self.learner(images), self.target(images)


def test_gradients_that_no_optimizer_uses_are_found_and_left_out_of_one_run():
    network, loader = Student(), DataLoader(slow_loops.ready_samples(96), batch_size=8)
    optimizer = torch.optim.SGD(network.learner.parameters(), 0.01)
    with watch_any() as watched:
        for images, _ in loader:
            first, second = network(images)
            (first - second).square().mean().backward()
            optimizer.step()
            network.zero_grad()
    (run,) = [each for each in watched.measurement.network_runs if each.without]
    assert (run.without, run.detail) == ("unneeded gradients", "target.0.weight, target.0.bias and 2 more")
    assert all(weight.requires_grad for weight in network.parameters())


@pytest.mark.timing
def test_a_critic_is_updated_by_another_optimizer_and_needs_its_gradients():
    first, second = slow_loops.small_network(), slow_loops.small_network()
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (first, second)]
    with watch_any() as watched:
        for images, _ in DataLoader(slow_loops.ready_samples(96), batch_size=8):
            for optimizer in optimizers:
                optimizer.zero_grad()
                (first(images) - second(images)).square().mean().backward()
                optimizer.step()
    assert watched.measurement.network_runs
    assert not any(run.without for run in watched.measurement.network_runs)


def statistics_of(weights, file):
    for weight in weights:
        save_line(file, str(weight.norm()))


def save_line(file, text):
    file.write(text)


def test_a_function_that_calls_one_that_writes_is_known_to_write(tmp_path):
    counter = LineCounter()
    with (tmp_path / "log").open("w") as file, counter.counting():
        statistics_of([torch.ones(2)], file)
        sum_of([torch.ones(2)])
    assert counter.writes(__file__, "statistics_of")
    assert counter.writes(__file__, "save_line")
    assert not counter.writes(__file__, "sum_of")


def sum_of(weights):
    return sum(weight.sum() for weight in weights)


class Opening(torch.utils.data.Dataset):
    """Each worker process opens something before its first sample."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if not hasattr(self, "opened"):
            self.opened = time.sleep(0.05)
        return torch.zeros(3, 32, 32), 0


@pytest.mark.timing
def test_what_workers_do_for_their_first_sample_is_told_from_the_others(one_thread):
    with watch_any() as watched:
        for _ in range(3):
            train(DataLoader(Opening(), batch_size=4, num_workers=1), slow_loops.small_network())
    # 50 ms once in each pass of 8 steps.
    assert watched.measurement.worker_start_ms == pytest.approx(50 / 8, rel=0.3)
