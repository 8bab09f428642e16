"""Whatever a file holds: weights or one clear sentence, nothing run, no crash, no hang, no flood of memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.golden_cases import SHIPPED
from tests.yolo.weights.hostile_checkpoints import write_corpus, write_mutations
from tests.yolo.weights.legacy_files import Model, training_checkpoint, yolov7_names

REAL = SHIPPED / "yolov7-models/legacy-stripped.pt"
ROOT = Path(__file__).parents[3]
MAX_SECONDS = 5
MAX_BYTES = 1_000_000_000


class Run(NamedTuple):
    """What the child told about the corpus."""

    outcomes: dict[str, dict[str, Any]]
    totals: dict[str, Any]
    words: dict[str, list[str]]
    mutations: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("hostile")
    words = write_corpus(folder)
    # Of a large file, which is slow, fewer.
    mutations = write_mutations(folder, REAL, count=60, seed=1)
    mutations += write_mutations(folder, _small_real_file(folder), count=300, seed=2)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.yolo.weights.hostile_child", str(folder), str(REAL)],
        input="\n".join([*words, *mutations]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        timeout=110,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 0, f"after {lines[-1:]}: {ran.stderr[-3000:]}"
    *outcomes, totals = lines
    return Run({outcome["file"]: outcome for outcome in outcomes}, totals, words, mutations)


def _small_real_file(folder: Path) -> Path:
    """With everything a checkpoint can hold, in a few kilobytes."""
    path = folder / "small.pt"
    torch.manual_seed(0)
    with yolov7_names():
        torch.save(training_checkpoint(Model(), Model().half()), path)
    return path


def test_every_bad_file_is_refused_with_a_sentence_that_says_why(run: Run):
    assert len(run.words) >= 30
    wrong = [
        told for name in run.words if not is_good_refusal(told := run.outcomes[name]["told"], name, run.words[name])
    ]
    assert wrong == []


def is_good_refusal(told: str, name: str, words: list[str]) -> bool:
    """One line that names the file and holds the words of this case."""
    one_line = told.startswith("refused: ") and "\n" not in told and len(told) < 1000
    return one_line and f"{name}: " in told and all(word in told for word in words)


def test_mutations_are_read_or_refused(run: Run):
    told = [run.outcomes[name]["told"] for name in run.mutations]
    assert len(told) >= 300
    assert [line for line in told if line != "read" and not line.startswith("refused: ")] == []
    assert any(line == "read" for line in told), "a mutation that changes nothing important is read"


def test_nothing_but_the_file_itself_is_touched(run: Run):
    assert [outcome for outcome in run.outcomes.values() if outcome["noted"]] == []
    assert not run.totals["ran"]


def test_the_audit_hook_would_have_noticed(run: Run):
    assert run.totals["missed"] == []


def test_no_file_takes_long(run: Run):
    slowest = max(run.outcomes.values(), key=lambda outcome: outcome["seconds"])
    assert slowest["seconds"] < MAX_SECONDS, slowest


def test_no_file_floods_the_memory(run: Run):
    assert run.totals["peak_bytes"] < MAX_BYTES
