"""Check that two checkouts train the same weights bit by bit: python -m tests.old_runs.compare OTHER_CHECKOUT [JOB ...]

Runs small seeded trainings with the code of this tree and with that of the other one, on this machine and with the same
data: first stopped in the middle of an epoch, when the optimizer and everything else is in the checkpoint, then to the
end. Compares all weights files of both, tensor by tensor; of the final last.pt only the weights, since versions differ
in how much of the state they keep there. Recorded digests of weights could not be used: they depend on the processor.
Exits with 1 if anything differs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.safefiles.container import read_container
from tests.old_runs.situations import SITUATIONS, Situation

ROOT = Path(__file__).parents[2]


class Comparison(NamedTuple):
    """The comparison of one file of one job."""

    job: str
    file: str
    num_tensors: int
    differences: list[str]
    """Tensors that differ or are missing on one side, with the largest difference."""

    def __str__(self) -> str:
        outcome = f"{len(self.differences)} differ" if self.differences else "equal"
        return f"{self.job:<8} {self.file:<22} {self.num_tensors:>4} tensors  {outcome}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.old_runs.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT", help="a checkout of the version to compare with")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"any of {', '.join(SITUATIONS)} (default: all)")
    parser.add_argument(
        "--here", default="", metavar="FLAGS",
        help="more flags for the trainings of this tree, which switch off what the other does not have yet: "
        "defect --here='--defect_prior 0'",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    if unknown := [job for job in arguments.jobs if job not in SITUATIONS]:
        parser.error(f"unknown job {unknown[0]!r}; use {', '.join(SITUATIONS)}")
    other = arguments.other.resolve()
    if not (other / "flatout/__main__.py").exists():
        parser.error(f"{other} is not a checkout of flatout: it has no flatout/__main__.py")
    found = [
        comparison
        for job in arguments.jobs or SITUATIONS
        for comparison in compare(job, ROOT, other, arguments.here.split())
    ]
    for comparison in found:
        print(comparison)
        for difference in comparison.differences:
            print(f"    {difference}")
    return int(any(comparison.differences for comparison in found))


def compare(job: str, tree: Path, other: Path, more: Sequence[str] = ()) -> list[Comparison]:
    """Train a job with the code of both trees, the first with more flags, and compare their weights, file by file."""
    situation = SITUATIONS[job]
    with tempfile.TemporaryDirectory() as name:
        here, there = Path(name, "here"), Path(name, "there")
        here.mkdir()
        situation.prepare(here)
        # Copied, not generated again, because two versions might generate different data.
        shutil.copytree(here, there)
        found = []
        for when, stop_after in (("stopped", situation.stop_after), ("finished", None)):
            for code, folder, flags in ((tree, here, more), (other, there, ())):
                train(situation, folder, code, stop_after, flags)
            ours, theirs = (_files(folder / situation.run) for folder in (here, there))
            if when == "finished":
                for files in (ours, theirs):
                    files["last.pt"] = _final(files["last.pt"])
                    files.pop("last.prev.pt", None)
            for name in sorted({**ours, **theirs}):
                compared = differences(ours.get(name, {}), theirs.get(name, {}))
                found.append(Comparison(job, f"{when} {name}", *compared))
        return found


def train(situation: Situation, folder: Path, code: Path, stop_after: int | None, more: Sequence[str] = ()) -> None:
    """Run the training in a process that imports flatout from the tree `code`; RuntimeError if it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLATOUT_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(code), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {} if stop_after is None else {"FLATOUT_STOP_AFTER": str(stop_after)}
    # The process checks that it has not imported an installed flatout instead.
    program = "import sys, flatout, runpy; assert flatout.__file__.startswith(sys.argv.pop(1)), flatout.__file__; "
    program += "runpy.run_module('flatout', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", program, f"{code}/flatout/", *situation.command, *more]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(situation.command[:2])} with the code of {code} failed:\n{done.stderr[-2000:]}")


def differences(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> tuple[int, list[str]]:
    """The number of compared tensors, and a line for each that differs."""
    names = list({**here, **there})
    lines = (_difference(name, here.get(name), there.get(name)) for name in names)
    return len(names), [line for line in lines if line]


def _difference(name: str, here: Tensor | None, there: Tensor | None) -> str:
    if here is None or there is None:
        return f"{name}: only {'there' if here is None else 'here'}"
    if (here.dtype, here.shape) != (there.dtype, there.shape):
        return f"{name}: {here.dtype} {tuple(here.shape)} here, {there.dtype} {tuple(there.shape)} there"
    if here.numpy().tobytes() == there.numpy().tobytes():
        return ""
    return f"{name}: up to {(here.double() - there.double()).abs().max():.3g} apart"


def _files(run: Path) -> dict[str, dict[str, Tensor]]:
    """All tensors of a run, by file and path in it: weights, moving averages, optimizer state."""
    found = {path.name: tensors_of(path) for path in run.glob("*/*.pt")}
    assert {"last.pt", "best.pt"} <= found.keys(), f"{run} holds {sorted(found)}"
    return found


def _final(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The final weights of a training: of a whole checkpoint, the moving average if there is one."""
    average = {name.replace("weights.ema.", ""): each for name, each in tensors.items() if "weights.ema." in name}
    plain = {name.replace("weights.state.", ""): each for name, each in tensors.items() if "weights.state." in name}
    return average or plain


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a file by their path in it."""
    return dict(_tensors_in(read_container(path), ""))


def _tensors_in(value: object, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors_in(item, f"{where}[{number}]")


if __name__ == "__main__":
    sys.exit(main())
