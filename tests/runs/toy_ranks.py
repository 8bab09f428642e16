"""Ranks of a toy training, as a launcher would start them: real processes that join through a store."""

import re
from pathlib import Path
from typing import Any

from flatout.ranks.launch import free_port
from tests.runs.toy_runs import ToyRun, Toys

Samples = dict[tuple[int, int], list[int]]


def start_ranks(
    toys: Toys,
    project: Path,
    *args: object,
    num: int = 2,
    each: dict[int, tuple[object, ...]] | None = None,
    env: dict[str, str] | None = None,
) -> list[ToyRun]:
    """Start `num` ranks; `each` has further arguments by rank."""
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num),
        "TOY_LOG": "DEBUG",
    }
    return [
        toys.start(
            project,
            *args,
            *(each or {}).get(rank, ()),
            env=rendezvous | (env or {}) | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num)
    ]


def run_ranks(toys: Toys, project: Path, *args: object, **settings: Any) -> list[ToyRun]:
    """Start ranks and wait until all have succeeded."""
    runs = start_ranks(toys, project, *args, **settings)
    codes = [run.wait() for run in runs]
    assert not any(codes), [run.output for run in runs]
    return runs


def seen_by(runs: list[ToyRun]) -> Samples:
    """The samples of all ranks together, by epoch and step."""
    each = [samples_of(run.output) for run in runs]
    return {position: [index for samples in each for index in samples[position]] for position in each[0]}


def samples_of(output: str) -> Samples:
    found = re.findall(r"^epoch (\d+) step (\d+) samples \[([\d, ]+)\]$", output, re.MULTILINE)
    return {(int(epoch), int(step)): [int(index) for index in text.split(",")] for epoch, step, text in found}
