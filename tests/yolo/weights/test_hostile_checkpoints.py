"""Any file gives weights or one clear message; nothing is run, and nothing crashes, hangs or exhausts the memory."""

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
    """What the child process reported for the corpus."""

    outcomes: dict[str, dict[str, Any]]
    totals: dict[str, Any]
    words: dict[str, list[str]]
    mutations: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("hostile")
    words = write_corpus(folder)
    # Fewer of the large file, which is slow.
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
    """A checkpoint with everything it can contain, in a few kilobytes."""
    path = folder / "small.pt"
    torch.manual_seed(0)
    with yolov7_names():
        torch.save(training_checkpoint(Model(), Model().half()), path)
    return path


def test_every_bad_file_is_refused_with_a_sentence_that_says_why(run: Run):
    assert len(run.words) >= 30
    results = {name: run.outcomes[name]["result"] for name in run.words}
    wrong = [result for name, result in results.items() if not is_good_refusal(result, name, run.words[name])]
    assert wrong == []


def is_good_refusal(result: str, name: str, words: list[str]) -> bool:
    """One line that names the file and contains the words of this case."""
    one_line = result.startswith("refused: ") and "\n" not in result and len(result) < 1000
    return one_line and f"{name}: " in result and all(word in result for word in words)


def test_mutations_are_read_or_refused(run: Run):
    results = [run.outcomes[name]["result"] for name in run.mutations]
    assert len(results) >= 300
    assert [line for line in results if line != "read" and not line.startswith("refused: ")] == []
    assert any(line == "read" for line in results), "a mutation that changes nothing important is read"


def test_nothing_but_the_file_itself_is_touched(run: Run):
    assert [outcome for outcome in run.outcomes.values() if outcome["noted"]] == []
    assert not run.totals["ran"]


def test_the_audit_hook_would_have_noticed(run: Run):
    assert run.totals["missed"] == []


def test_no_file_takes_long(run: Run):
    slowest = max(run.outcomes.values(), key=lambda outcome: outcome["seconds"])
    assert slowest["seconds"] < MAX_SECONDS, slowest


def test_no_file_exhausts_the_memory(run: Run):
    assert run.totals["peak_bytes"] < MAX_BYTES
