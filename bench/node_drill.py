"""Does a training on two nodes survive killed ranks and nodes with the same samples and state, and at what cost?

Each node is an agent of torchrun with one rank (gloo). If one ends, all are started again, as schedulers do. Ranks and
whole nodes are killed (SIGKILL) at random moments, some of them while the nodes are starting.

- Detection, always on two nodes: the samples of every step (their hashes), and weights, moving average and optimizer
  after the last step are compared, bit by bit, with those of a training that nobody disturbed.
- Spikes, after each kill on one or two nodes, by lot: the total batch stays, but sums over ranks round differently, so
  the final weights are compared with a limit that other samples would exceed. (This network has no batch norm, whose
  statistics are those of a rank's own images.) For comparison: undisturbed on one node, and with another seed.

Answer: bench/results/node_drill_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.measure import arguments, report
from flatout.ranks import free_port
from flatout.runs.step_record import read_steps
from tests.old_runs.compare import differences, tensors_of
from tests.old_runs.situations import SITUATIONS

ROOT = Path(__file__).resolve().parents[1]
RUN = "runs/old"
NODES = 2
GRACE_S = 20
"""Seconds in which the other node may end by itself after one has ended."""
LIMIT_S = 60
"""The most that one kill may cost."""
ROUNDING = 1e-5
"""The most that final weights may differ, relative to the largest, if the number of ranks changes on the way."""
EARLY = 0.25
"""Share of the kills that hit nodes while they start."""


class Kill(NamedTuple):
    """One kill, and what it cost."""

    what: str
    """rank | node."""
    early: bool
    seconds: float
    """Until the nodes had started again and saved steps that had not been saved before."""


class Nodes:
    """Machines, each an agent of torchrun with its rank. If one ends, all are ended and started again together."""

    def __init__(self, folder: Path, command: Sequence[str], num_nodes: Callable[[], int]) -> None:
        self._command, self._num_nodes = command, num_nodes
        self._environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLATOUT_DEBUG": "0"}
        self._folder, self._log = folder, (folder / "nodes.log").open("w")
        self.agents: list[subprocess.Popen[bytes]] = []
        self.sizes: list[int] = []
        """Nodes of every start."""
        self.thread = threading.Thread(target=self._supervise, daemon=True)
        self.thread.start()

    def _supervise(self) -> None:
        """As a scheduler does it: a job of several machines runs on all of them, or on none."""
        while True:
            size, port = self._num_nodes(), free_port()
            self.agents = [self._start(number, size, port) for number in range(size)]
            self.sizes.append(size)
            while all(agent.poll() is None for agent in self.agents):
                time.sleep(0.05)
            deadline_s = time.monotonic() + GRACE_S
            while any(agent.poll() is None for agent in self.agents) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            codes = [agent.poll() for agent in self.agents]
            for agent in self.agents:
                kill_all(agent)
            if codes == [0] * size:
                return

    def _start(self, number: int, size: int, port: int) -> "subprocess.Popen[bytes]":
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(size), "--nproc_per_node", "1",
            "--node_rank", str(number), "--master_addr", "127.0.0.1", "--master_port", str(port), "--max-restarts", "0",
        ]  # fmt: skip
        return subprocess.Popen(
            [*torchrun, "-m", "flatout", *self._command],
            cwd=self._folder,
            env=self._environ,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self, number: int, *, whole: bool) -> None:
        """Kill the rank of a node, or its agent and everything it started; returns when the nodes start again."""
        num_starts = len(self.sizes)
        while self.thread.is_alive() and not kill_all(self.agents[number], agent_too=whole):
            time.sleep(0.02)  # its rank has not started yet
        while self.thread.is_alive() and len(self.sizes) == num_starts:
            time.sleep(0.02)


def kill_all(agent: "subprocess.Popen[bytes]", *, agent_too: bool = True) -> int:
    """Kill the processes that an agent started, the agent first if it is to die as well; returns how many."""
    killed = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(agent.pid)
        started = process.children(recursive=True)
        for each in [process, *started] if agent_too else started:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
                killed += 1
    if agent_too:
        agent.wait()
    return killed


class Trained(NamedTuple):
    """A finished training."""

    seconds: float
    kills: list[Kill]
    sizes: list[int]
    """Nodes of every start."""


def train(
    folder: Path, job: str, command: Sequence[str], *, kills: int, rng: random.Random, sizes: Sequence[int]
) -> Trained:
    """Train to the end, with kills at random moments; the first start has sizes[0] nodes, others a size by lot."""
    folder.mkdir()
    SITUATIONS[job].prepare(folder)
    start_s = time.monotonic()
    drawn = chain(sizes[:1], iter(lambda: rng.choice(sizes), None))
    nodes = Nodes(folder, command, drawn.__next__)
    costs: list[Kill] = []
    place = -1, -1
    while len(costs) < kills and wait_for_progress(folder, place, nodes):
        early = costs != [] and rng.random() < EARLY
        if early:
            # Kill once without counting, and again while the nodes start.
            nodes.kill(0, whole=False)
        time.sleep(rng.uniform(0.0, 4.0 if early else 1.0))
        number, whole = rng.randrange(len(nodes.agents)), rng.random() < 0.5
        killed_s = time.monotonic()
        nodes.kill(number, whole=whole)
        # Back where it was: everything since the last save is trained again, and then some.
        place = max(place, saved(folder))
        if not wait_for_progress(folder, place, nodes):
            break
        costs.append(Kill("node" if whole else "rank", early, time.monotonic() - killed_s))
        place = max(place, saved(folder))
        print(f"{job}: kill {len(costs)}: {costs[-1].what}, {costs[-1].seconds:.1f} s", flush=True)
    nodes.thread.join()
    return Trained(time.monotonic() - start_s, costs, nodes.sizes)


def saved(folder: Path) -> tuple[int, int]:
    """Epoch and step of the newest checkpoint; before all others if there is none."""
    for path in (folder / RUN).glob("*/.last.position.json"):
        with suppress(OSError, ValueError, KeyError):
            record = json.loads(path.read_text())
            return record["epoch"], record["step"]
    return -1, -1


def wait_for_progress(folder: Path, place: tuple[int, int], nodes: Nodes) -> bool:
    """Wait until a position after `place` is saved; False if the training ended before."""
    while saved(folder) <= place:
        if not nodes.thread.is_alive():
            return False
        time.sleep(0.02)
    return True


class Drill(NamedTuple):
    """What one drill showed."""

    lines: list[str]
    is_met: bool
    numbers: dict[str, Any]


def same_ranks(place: Path, epochs: int, kills: int, seed: int) -> Drill:
    """Detection, always on two nodes."""
    command = [*SITUATIONS["yolo"].command, "--notest", "--save-every-steps", "25", "--once", "--epochs", str(epochs)]
    alone, disturbed = place / "alone", place / "disturbed"
    calm = train(alone, "yolo", command, kills=0, rng=random.Random(seed), sizes=[NODES])
    rough = train(disturbed, "yolo", command, kills=kills, rng=random.Random(seed), sizes=[NODES])
    expected, found = (read_steps(folder / RUN).steps for folder in (alone, disturbed))
    same = sum(found.get(key, ("",))[0] == hashes for key, (hashes, _) in expected.items())
    name = f"{RUN}/weights/epoch_{epochs - 1:03d}.pt"
    num_tensors, different = differences(tensors_of(alone / name), tensors_of(disturbed / name))
    num_steps = 4 * epochs
    lines = [
        f"detection, {num_steps} steps, always on {NODES} nodes; seed {seed}",
        f"  undisturbed {calm.seconds:.1f} s; with kills {rough.seconds:.1f} s",
        *_costs(rough.kills, kills),
        f"  steps with the same samples on every rank: {same} of {num_steps}",
        f"  weights, moving average and optimizer after the last step: {num_tensors} tensors, {len(different)} differ",
    ]
    met = (len(expected), len(found), same, different) == (num_steps, num_steps, num_steps, [])
    numbers = {"alone_s": calm.seconds, "disturbed_s": rough.seconds, "kills": rough.kills, "same_samples": same}
    return Drill(lines, met and _in_time(rough.kills, kills), {**numbers, "different_tensors": different})


def other_ranks(place: Path, epochs: int, kills: int, seed: int) -> Drill:
    """Spikes, on one or two nodes after each kill."""
    command = [*SITUATIONS["spike"].command, "--set", f"TRAIN.EPOCHS={epochs}", "--save-every-steps", "10", "--once"]

    def trained(name: str, sizes: Sequence[int], *words: str, kills: int = 0) -> Trained:
        return train(place / name, "spike", [*command, *words], kills=kills, rng=random.Random(seed), sizes=sizes)

    # The batch of a spike training is that of one rank; a run that continues on fewer keeps the total.
    trained("two", [NODES])
    trained("one", [1], "--set", "TRAIN.BATCH_SIZE=4")
    trained("other", [NODES], "--set", "SEED=12345")
    rough = trained("changing", [NODES, 1], kills=kills)
    apart = {name: _apart(place / name, place / "two") for name in ("changing", "one", "other")}
    changes = sum(before != after for before, after in pairwise(rough.sizes))
    labels = ("killed, on 1 or 2 nodes", "undisturbed, on one node", "undisturbed, another seed")
    lines = [
        f"spikes, {epochs} epochs, after each kill on 1 or {NODES} nodes; seed {seed}",
        f"  {len(rough.sizes)} starts; the number of nodes changed {changes} times",
        *_costs(rough.kills, kills),
        "  largest difference from the final weights of an undisturbed training on two nodes, relative to the largest"
        f" weight (limit {ROUNDING:g}):",
        *(f"    {label:<27}{apart[name]:.1e}" for name, label in zip(apart, labels, strict=True)),
    ]
    # Another seed is the negative control: with other samples, weights differ by more than the limit.
    met = changes > 0 and apart["changing"] <= ROUNDING < apart["other"]
    numbers = {"sizes": rough.sizes, "kills": rough.kills, "apart": apart}
    return Drill(lines, met and _in_time(rough.kills, kills), numbers)


def _costs(kills: list[Kill], wanted: int) -> list[str]:
    times = sorted(kill.seconds for kill in kills)
    return [
        f"  kills: {len(kills)} of {wanted}, of which {sum(kill.what == 'node' for kill in kills)} of a whole node and "
        f"{sum(kill.early for kill in kills)} while the nodes were starting",
        "  from a kill to new steps saved by the nodes that were started again: "
        f"median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s (limit {LIMIT_S} s)",
    ]


def _in_time(kills: list[Kill], wanted: int) -> bool:
    return len(kills) == wanted and all(kill.seconds <= LIMIT_S for kill in kills)


def _apart(folder: Path, other: Path) -> float:
    """The largest difference of the final weights of two runs, relative to the largest weight."""
    weights, expected = (tensors_of(each / RUN / "ckpts/last.pt") for each in (folder, other))
    worst = max(float((weights[name].double() - tensor.double()).abs().max()) for name, tensor in expected.items())
    return worst / max(float(tensor.abs().max()) for tensor in expected.values())


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=700, help="of the first training; enough for all kills")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    kills, epochs = (2, 100) if options.quick else (options.kills, options.epochs)
    with tempfile.TemporaryDirectory() as place:
        same = same_ranks(Path(place), epochs, kills, options.seed)
        other = other_ranks(Path(place), epochs // 7, max(2, kills // 4), options.seed)
    is_met = same.is_met and other.is_met
    text = "\n".join([*same.lines, "", *other.lines, "", "all met" if is_met else "MISSED"])
    report("node_drill", text, {"same_ranks": same.numbers, "other_ranks": other.numbers}, options)
    return int(not is_met)


if __name__ == "__main__":
    raise SystemExit(main())
