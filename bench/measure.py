"""Timing, facts about the machine, flags and result files. Shared by all benchmarks."""

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.clock import machine

RESULTS = Path(__file__).parent / "results"


class Timing(NamedTuple):
    """Median and spread of repeated durations, in seconds."""

    median: float
    p10: float
    p90: float

    def text(self, unit: str = "ms") -> str:
        """'1.20 ms (p10 1.10, p90 1.35)'."""
        median, p10, p90 = (seconds * {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit] for seconds in self)
        return f"{median:.2f} {unit} (p10 {p10:.2f}, p90 {p90:.2f})"


def measure(fn: Callable[[], object], *, warmup: int, repeats: int) -> Timing:
    """Call `fn` `warmup` times untimed, then time each of `repeats` calls."""
    for _ in range(warmup):
        fn()
    durations = []
    for _ in range(repeats):
        begin = time.perf_counter()
        fn()
        durations.append(time.perf_counter() - begin)
    return summarize(durations)


def summarize(durations: Sequence[float]) -> Timing:
    """Median and spread of durations that were measured elsewhere."""
    return Timing(*(float(q) for q in np.quantile(durations, (0.5, 0.1, 0.9))))


def facts() -> dict[str, str]:
    """Hardware and versions that results depend on; nothing that identifies the machine itself."""
    names = ("numpy", "torch", "opencv-python-headless")
    return {
        "CPU": f"{_cpu_model()}, {machine.cores().usable} cores",
        "RAM": f"{machine.memory().total / 2**30:.0f} GiB",
        **_gpu(),
        "Linux": platform.release().split("-")[0],
        "Python": platform.python_version(),
        **{name: _version(name) for name in names},
        "date": date.today().isoformat(),
    }


def _gpu() -> dict[str, str]:
    """The GPU, if the benchmark has imported torch and torch can use one."""
    torch = sys.modules.get("torch")
    return {"GPU": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {}


def facts_line(about: dict[str, str] | None = None) -> str:
    """The facts on one line, for the head of a report; those of this machine by default."""
    return ", ".join(f"{name} {value}" for name, value in (about or facts()).items())


def machine_label() -> str:
    """A short name for this kind of machine, such as '2core-epyc'."""
    words = re.findall(r"[a-z]+", re.sub(r"\(\w+\)", "", _cpu_model().lower()))
    family = [word for word in words if word not in ("intel", "amd", "arm", "cpu", "processor", "genuine")]
    return f"{machine.cores().usable}core-{(family or words or ['cpu'])[0]}"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a reduced run that only shows that the script works")
    parser.add_argument("--write", action="store_true", help="write the answer to bench/results/")
    parser.add_argument("--machine", default=machine_label(), help="label for the results file (default: %(default)s)")
    return parser


def report(
    name: str,
    text: str,
    numbers: dict[str, Any],
    options: argparse.Namespace,
    *,
    measured_on: dict[str, str] | None = None,
) -> None:
    """Print the answer; with --write also save it as <name>_<machine>_<yyyymm>.md and .json.

    `measured_on` are the facts of another machine, if the measurements were made there.
    """
    print(text)
    about = measured_on or facts()
    if options.write:
        stem = RESULTS / f"{name}_{options.machine}_{date.today():%Y%m}"
        RESULTS.mkdir(exist_ok=True)
        stem.with_suffix(".md").write_text(f"# {name}\n\n{facts_line(about)}\n\n```\n{text}\n```\n")
        stem.with_suffix(".json").write_text(json.dumps({"facts": about, **numbers}, indent=1) + "\n")
        print(f"written: {stem.relative_to(RESULTS.parent.parent)}.md and .json")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or os.uname().machine


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"
