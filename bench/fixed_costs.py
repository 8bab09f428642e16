"""What does a short training cost besides its steps, and how long does it take from the command to the first step?

`train.py` with yolov7-tiny at 64 px for two epochs on one thread of a CPU, so that steps are a small part of it; the
data is generated, or that of `--data`. With `--code FOLDER`, another checkout trains the same in turns, and the
weights of both are compared. Every training is a process of its own. It is timed from outside: until the end of its
first step, until its end, and its CPU time. Warm: modules are compiled to .pyc files already. New machine: there are
none of Python's or torch's either, as when a machine has never imported them (its disk is not emptied of cached pages).
The ledger is the one that a run records itself (times.jsonl), as `flatout profile --run FOLDER` shows it.
With `--device 0` the training is `train.py --fast` on a GPU, 100 epochs at 320 px (--data: BCCD at 320 px): first, the
very first training on a machine that has none of its kernels, modules or data in a cache, if this is run there first;
then warm ones. Limits: 35 s and 18 s.
Answer: bench/results/fixed_costs_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import argparse
import importlib.abc
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
THIS_CHECKOUT = HERE.parent.parent
ROUNDS = {"warm": 5, "new machine": 3}
FLAGS = (
    "--weights", "", "--cfg", "cfg/training/yolov7-tiny.yaml", "--hyp", "data/hyp.demo.yaml", "--epochs", "2",
    "--batch-size", "16", "--img-size", "64", "64", "--device", "cpu", "--workers", "0", "--adam", "--fast-dataloader",
    "--seed", "1",
)  # fmt: skip

GPU_FLAGS = (
    "--weights", "", "--cfg", "cfg/training/yolov7-tiny.yaml", "--hyp", "data/hyp.scratch.tiny.yaml", "--epochs", "100",
    "--batch-size", "16", "--img-size", "320", "320", "--device", "0", "--workers", "2", "--fast", "--noautoanchor",
    "--seed", "1",
)  # fmt: skip
FIRST = "first ever"
GPU_ROUNDS = {FIRST: 1, "warm": 3}
GPU_LIMITS_S = {FIRST: 35.0, "warm": 18.0}


class Training(NamedTuple):
    """What one training took, in seconds."""

    checkout: str
    start: str
    """Warm, or as on a new machine."""
    first_step_s: float
    """From the command to the end of the first step."""
    whole_s: float
    cpu_s: float
    """CPU time of the training and its workers."""


TIMES: Sequence[Callable[[Training], float]] = (
    attrgetter("first_step_s"),
    attrgetter("whole_s"),
    attrgetter("cpu_s"),
)


# In the process of the training


class _AfterFirstStep(importlib.abc.MetaPathFinder):
    """Writes the time of the end of the first step to a file; works for any checkout."""

    def __init__(self, file: str) -> None:
        self._file = file

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name != "flatout.engine.loop":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            self._patch(module.Loop)

        spec.loader.exec_module = execute_and_patch
        return spec

    def _patch(self, loop: Any) -> None:
        train_step = loop._train_step

        def train(loop_self: Any, batch: Any) -> None:
            train_step(loop_self, batch)
            loop._train_step = train_step
            Path(self._file).write_text(str(time.time()))

        loop._train_step = train


def train_here(file: str, words: Sequence[str]) -> int:
    """Train with the checkout in the working folder."""
    sys.meta_path.insert(0, _AfterFirstStep(file))
    from flatout.__main__ import main as flatout_main

    return flatout_main(["yolo", "train", *words])


# In the process of the benchmark


def run(checkout: Path, label: str, start: str, data: Path, project: Path, flags: Sequence[str]) -> Training:
    """Train in a process of its own."""
    step_file = project / "first_step"
    command = [sys.executable, str(HERE), "--train", str(step_file), *flags, "--data", str(data)]
    command += ["--project", str(project), "--name", "run", "--exist-ok", "--fresh"]
    path = f"{checkout}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as empty:
        if start == "new machine":
            env["PYTHONPYCACHEPREFIX"] = empty
        cpu_s, began_s = _children_cpu_s(), time.time()
        subprocess.run(
            command, cwd=checkout, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # fmt: skip
        ended_s = time.time()
    first_step_s = float(step_file.read_text()) - began_s
    return Training(label, start, first_step_s, ended_s - began_s, _children_cpu_s() - cpu_s)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def same_weights(one: Path, other: Path) -> bool:
    """Whether the best weights of two runs are equal bit by bit."""
    import torch

    from flatout.safefiles import read_container

    files: list[Any] = [read_container(run / "run/weights/best.pt") for run in (one, other)]
    first, second = (file["weights"]["state"] for file in files)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def ledger(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Median seconds of each part of a run, and of the rest."""
    from flatout.runs.times import LABELS, REST

    names = [name for name in LABELS if any(name in run["parts"] for run in runs)]
    medians = {
        LABELS[name]: median(run["parts"].get(name, {"seconds": 0.0})["seconds"] for run in runs) for name in names
    }
    rest = median(run["wall_s"] - sum(part["seconds"] for part in run["parts"].values()) for run in runs)
    return [f"  {label:<40}{seconds:7.2f}" for label, seconds in {**medians, REST: rest}.items()]


def table(trainings: Sequence[Training], labels: Sequence[str]) -> list[str]:
    lines = [f"{'':14}{'':18}{'first step, s':>22}{'whole, s':>22}{'CPU time, s':>22}"]
    for start in {**GPU_ROUNDS, **ROUNDS}:
        own = {label: [each for each in trainings if each[:2] == (label, start)] for label in labels}
        if not any(own.values()):
            continue
        for label in labels:
            columns = (_spread([seconds(each) for each in own[label]]) for seconds in TIMES)
            lines.append(f"{start:14}{label:18}" + "".join(f"{text:>22}" for text in columns))
        if len(labels) > 1:
            pairs = list(zip(*own.values(), strict=True))
            ratios = ([seconds(after) / seconds(before) for before, after in pairs] for seconds in TIMES)
            lines.append(f"{'':14}{'ratio':18}" + "".join(f"{_spread(each):>22}" for each in ratios))
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        sys.path.remove(str(HERE.parent))  # the folder of this file, whose modules are not the checkout's
        return train_here(sys.argv[2], sys.argv[3:])
    sys.path.insert(0, str(THIS_CHECKOUT))
    from bench import noise
    from bench.measure import arguments, facts_line, report

    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="data.yaml of a small data set (default: generated images)")
    parser.add_argument("--code", type=Path, help="another checkout, to compare with")
    parser.add_argument("--device", default="cpu", help="cpu, or the number of a GPU (default: %(default)s)")
    options: argparse.Namespace = parser.parse_args()
    print(facts_line(), flush=True)
    load = noise.listen().line()
    checkouts = ({"before": options.code.resolve()} if options.code else {}) | {"this checkout": THIS_CHECKOUT}
    on_gpu = options.device != "cpu"
    all_rounds, flags = (GPU_ROUNDS, GPU_FLAGS) if on_gpu else (ROUNDS, FLAGS)
    rounds = {"warm": 1} if options.quick else all_rounds
    trainings, ledgers = list[Training](), {start: list[dict[str, Any]]() for start in rounds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = options.data.resolve() if options.data else _generated(folder / "data")
        for start, num in rounds.items():
            # Writes the .pyc files and the cache of labels, and is not counted.
            discards = start == "warm" and FIRST not in rounds
            for number in range(num + discards):
                for label, checkout in checkouts.items():
                    project = folder / label.replace(" ", "-")
                    project.mkdir(exist_ok=True)
                    done = run(checkout, label, start, data, project, flags)
                    if discards and number == 0:
                        continue
                    trainings.append(done)
                    print(done, flush=True)
                if not discards or number:
                    times = (folder / "this-checkout/run/times.jsonl").read_text()
                    ledgers[start].append(json.loads(times.splitlines()[-1]))
        compared = options.code and not on_gpu
        equal = same_weights(*(folder / label.replace(" ", "-") for label in checkouts)) if compared else None
    lines = [load, f"data: {data.parent.name if options.data else 'generated'}", ""]
    lines += table(trainings, list(checkouts))
    for start in (FIRST, "warm"):
        if ledgers.get(start):
            lines += ["", f"ledger of this checkout, {start}, in s:", *ledger(ledgers[start])]
    passed = equal is not False
    for start, limit_s in GPU_LIMITS_S.items() if on_gpu and not options.quick else ():
        whole_s = median(each.whole_s for each in trainings if each[:2] == ("this checkout", start))
        passed &= whole_s <= limit_s
        lines.append(f"{'PASS' if whole_s <= limit_s else 'FAIL'}  {start}: {whole_s:.1f} s <= {limit_s:g} s")
    if equal is not None:
        lines += ["", f"weights of both: {'equal, bit by bit' if equal else 'DIFFERENT'}"]
    numbers = {"trainings": [each._asdict() for each in trainings], "ledgers": ledgers, "equal_weights": equal}
    report("fixed_costs", "\n".join(lines), numbers, options)
    return int(not passed)


def _generated(folder: Path) -> Path:
    from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data

    return write_demo_data(folder, DemoDataConfig(), show_progress=False)


if __name__ == "__main__":
    sys.exit(main())
