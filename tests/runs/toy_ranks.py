"""Ranks of a toy training, as a launcher would start them: real processes that meet through a store."""

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
    """`num` ranks; `each` has further arguments by rank."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num), "TOY_LOG": "DEBUG"}
    return [
        toys.start(
            project,
            *args,
            *(each or {}).get(rank, ()),
            env=meeting | (env or {}) | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num)
    ]


def run_ranks(toys: Toys, project: Path, *args: object, **knobs: Any) -> list[ToyRun]:
    """The same, to their good end."""
    runs = start_ranks(toys, project, *args, **knobs)
    codes = [run.wait() for run in runs]
    assert not any(codes), [run.said for run in runs]
    return runs


def seen_by(runs: list[ToyRun]) -> Samples:
    """What was trained on, of all ranks together, by epoch and step."""
    each = [samples_of(run.said) for run in runs]
    return {place: [index for samples in each for index in samples[place]] for place in each[0]}


def samples_of(said: str) -> Samples:
    found = re.findall(r"^epoch (\d+) step (\d+) samples \[([\d, ]+)\]$", said, re.MULTILINE)
    return {(int(epoch), int(step)): [int(index) for index in text.split(",")] for epoch, step, text in found}
