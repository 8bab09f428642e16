"""Does a training on two nodes survive killed ranks and nodes with the same samples and weights, and at what cost?

Each node is an agent of torchrun with one rank (gloo). If one ends, both are started again, as schedulers do. Ranks
and whole nodes are killed (SIGKILL) at random moments. Then the samples of every step (their hashes) and the final
weights are compared with those of a training that nobody disturbed.
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
from contextlib import suppress
from pathlib import Path

import psutil

from bench.measure import arguments, report
from flatout.ranks import free_port
from tests.old_runs.compare import tensors_of
from tests.old_runs.situations import SITUATIONS

ROOT = Path(__file__).resolve().parents[1]
NODES = 2
GRACE_S = 20
"""Seconds in which the other node may end by itself after one has ended."""
LIMIT_S = 60
"""The most that one kill may cost."""


class Nodes:
    """Two machines, each an agent of torchrun with its rank. If one ends, all are ended and started again together."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self._command = [*SITUATIONS["yolo"].command, "--notest", "--save-every-steps", "25", "--once"]
        self._command[self._command.index("--epochs") + 1] = str(epochs)
        self._environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLATOUT_DEBUG": "0"}
        self._folder, self._log = folder, (folder / "nodes.log").open("w")
        self.agents: list[subprocess.Popen[bytes]] = []
        self.thread = threading.Thread(target=self._supervise, daemon=True)
        self.thread.start()

    def _supervise(self) -> None:
        """As a scheduler does it: a job of several machines runs on all of them, or on none."""
        while True:
            port = free_port()
            self.agents = [self._start(number, port) for number in range(NODES)]
            while all(agent.poll() is None for agent in self.agents):
                time.sleep(0.05)
            deadline_s = time.monotonic() + GRACE_S
            while any(agent.poll() is None for agent in self.agents) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            codes = [agent.poll() for agent in self.agents]
            for agent in self.agents:
                kill_all(agent)
            if codes == [0] * NODES:
                return

    def _start(self, number: int, port: int) -> "subprocess.Popen[bytes]":
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--nproc_per_node", "1",
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
        """Kill the rank of a node, or its agent and everything it started."""
        kill_all(self.agents[number], agent_too=whole)


def kill_all(agent: "subprocess.Popen[bytes]", *, agent_too: bool = True) -> None:
    """Kill the processes that an agent started, the agent first if it is to die as well."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(agent.pid)
        started = process.children(recursive=True)
        for each in [process, *started] if agent_too else started:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
    if agent_too:
        agent.wait()


def train(folder: Path, epochs: int, num_kills: int, rng: random.Random) -> tuple[float, list[tuple[str, float]]]:
    """Seconds of the whole training, and for each kill what was killed and the seconds until new steps were saved."""
    SITUATIONS["yolo"].prepare(folder)
    start_s, nodes = time.monotonic(), Nodes(folder, epochs)
    costs = []
    for _ in range(num_kills):
        before = wait_for_progress(folder, saved(folder), nodes)
        if before is None:
            break
        time.sleep(rng.uniform(0.0, 1.0))
        number, whole = rng.randrange(NODES), rng.random() < 0.5
        place, killed_s = saved(folder), time.monotonic()
        nodes.kill(number, whole=whole)
        # Back where it was: everything since the last save is trained again, and then some.
        wait_for_progress(folder, place, nodes)
        costs.append(("node" if whole else "rank", time.monotonic() - killed_s))
        print(f"kill {len(costs)}: {costs[-1][0]}, {costs[-1][1]:.1f} s", flush=True)
    nodes.thread.join()
    return time.monotonic() - start_s, costs


def saved(folder: Path) -> tuple[int, int]:
    """Epoch and step of the newest checkpoint; before all others if there is none."""
    try:
        record = json.loads((folder / "runs/old/weights/.last.position.json").read_text())
        return record["epoch"], record["step"]
    except (OSError, ValueError, KeyError):
        return -1, -1


def wait_for_progress(folder: Path, place: tuple[int, int], nodes: Nodes) -> tuple[int, int] | None:
    """The next saved position after `place`; None if the training ended."""
    while saved(folder) <= place:
        if not nodes.thread.is_alive():
            return None
        time.sleep(0.02)
    return saved(folder)


def hashes(folder: Path) -> dict[tuple[int, int], str]:
    """Hash of the samples of every recorded step, by epoch and step."""
    rows = [json.loads(line) for line in (folder / "runs/old/replay.jsonl").read_text().splitlines()]
    return {(row["epoch"], row["step"]): json.dumps(row) for row in rows if "epoch" in row and "step" in row}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=700)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        alone, disturbed = Path(place) / "alone", Path(place) / "disturbed"
        alone.mkdir()
        disturbed.mkdir()
        alone_s, _ = train(alone, options.epochs, 0, random.Random(options.seed))
        disturbed_s, costs = train(disturbed, options.epochs, options.kills, random.Random(options.seed))
        expected, found = hashes(alone), hashes(disturbed)
        same_samples = {key: found.get(key) == value for key, value in expected.items()}
        name = "runs/old/weights/last.pt"
        weights, others = dict(tensors_of(alone / name)), dict(tensors_of(disturbed / name))
        same_weights = weights.keys() == others.keys() and all(weights[key].equal(others[key]) for key in weights)
    times = sorted(seconds for _, seconds in costs)
    text = "\n".join(
        [
            f"training of {4 * options.epochs} steps on {NODES} nodes, undisturbed: {alone_s:.1f} s",
            f"kills: {len(costs)}, of which {sum(what == 'node' for what, _ in costs)} of a whole node; "
            f"seed {options.seed}; whole training: {disturbed_s:.1f} s",
            f"from a kill to new steps saved: median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s "
            f"(limit {LIMIT_S} s)",
            f"steps with the same samples: {sum(same_samples.values())} of {len(same_samples)} recorded",
            f"final weights: {'the same bits' if same_weights else 'DIFFERENT'}, {len(weights)} tensors",
        ]
    )
    numbers = {"alone_s": alone_s, "disturbed_s": disturbed_s, "kills": costs, "same_weights": same_weights}
    report("node_drill", text, numbers, options)
    return int(not same_weights or not all(same_samples.values()) or times[-1] > LIMIT_S)


if __name__ == "__main__":
    raise SystemExit(main())
