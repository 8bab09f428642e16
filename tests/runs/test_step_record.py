"""replay.jsonl: every trained step once, with the facts by which it can be made again."""

import json
from pathlib import Path
from typing import Any

from flatout.engine import HashedStep
from flatout.ranks import World
from flatout.runs.folder import Records
from flatout.runs.step_record import STEPS_NAME, StepRecord, read_steps


def steps(epoch: int, *numbers: int, shift: int = 0) -> list[HashedStep]:
    return [HashedStep(epoch, number, (2**64 - 1 - number, number + shift)) for number in numbers]


def records_in(folder: Path) -> Records:
    return Records(folder, (STEPS_NAME,))


def test_steps_are_read_as_they_were_recorded(tmp_path: Path):
    with records_in(tmp_path) as records:
        record = StepRecord(records, World(), lambda: {"size": 64})
        record(steps(0, 8, 9) + steps(1, 0, 1))
        record([])
        record(steps(1, 2))
    found = read_steps(tmp_path)
    assert list(found.steps) == [(0, 8), (0, 9), (1, 0), (1, 1), (1, 2)]
    assert found.hashes_of(1, 2) == ("fffffffffffffffd", "0000000000000002")
    assert found.hashes_of(1, 3) is None
    assert found.facts_of(0, 9) == {"size": 64}
    assert len((tmp_path / STEPS_NAME).read_text().splitlines()) == 4  # facts, and three runs of consecutive steps


def test_facts_are_repeated_when_they_change_and_belong_to_the_steps_after_them(tmp_path: Path):
    facts = {"maps": [0.0]}
    with records_in(tmp_path) as records:
        record = StepRecord(records, World(), lambda: facts)
        record(steps(0, 0, 1))
        facts = {"maps": [0.5]}
        record(steps(1, 0))
        record(steps(1, 1))
    found = read_steps(tmp_path)
    assert found.inputs == [{"maps": [0.0]}, {"maps": [0.5]}]
    assert [found.facts_of(*at) for at in ((0, 1), (1, 0), (1, 1))] == [{"maps": [0.0]}, *2 * [{"maps": [0.5]}]]


def test_repeated_steps_replace_those_after_the_checkpoint(tmp_path: Path):
    """G: whatever a killed process has written since its checkpoint is gone, half of a line included."""
    with records_in(tmp_path) as records:
        record = StepRecord(records, World(), lambda: {"size": 64})
        record(steps(0, 0, 1))
        state = records.state_dict()
        record(steps(0, 2, 3))
    with (tmp_path / STEPS_NAME).open("a") as file:
        file.write('{"epoch": 0, "step": 4, "ha')
    assert list(read_steps(tmp_path).steps) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    with records_in(tmp_path) as records:
        records.load_state_dict(state)
        StepRecord(records, World(), lambda: {"size": 96})(steps(0, 2, shift=7))
    found = read_steps(tmp_path)
    assert list(found.steps) == [(0, 0), (0, 1), (0, 2)]
    assert found.hashes_of(0, 2) == ("fffffffffffffffd", "0000000000000009")
    assert (found.facts_of(0, 1), found.facts_of(0, 2)) == ({"size": 64}, {"size": 96})


def test_facts_that_were_cut_off_are_written_again(tmp_path: Path):
    with records_in(tmp_path) as records:
        record = StepRecord(records, World(), lambda: {"size": 64})
        state = records.state_dict()
        record(steps(0, 0, 1))
        records.load_state_dict(state)  # the training goes back to a checkpoint
        record(steps(0, 0))
    found = read_steps(tmp_path)
    assert list(found.steps) == [(0, 0)]
    assert found.inputs == [{"size": 64}]


class TwoRanks(World):
    """A rank of two; the other one has the steps that a test gives."""

    others: list[HashedStep] = []

    def gather(self, value: Any) -> list[Any] | None:
        return [value, self.others] if self.is_first else None


def test_the_first_rank_records_the_hashes_of_all(tmp_path: Path):
    world = TwoRanks(0, 2)
    TwoRanks.others = steps(0, 0, 1, shift=100)
    with records_in(tmp_path) as records:
        StepRecord(records, world, lambda: {"ranks": 2})(steps(0, 0, 1))
        StepRecord(None, TwoRanks(1, 2), lambda: {"ranks": 2})(steps(0, 0, 1))
    assert read_steps(tmp_path).hashes_of(0, 1) == (
        "fffffffffffffffe", "0000000000000001", "fffffffffffffffe", "0000000000000065",
    )  # fmt: skip


def test_a_run_without_the_file_has_recorded_nothing(tmp_path: Path):
    assert read_steps(tmp_path).steps == {}
    (tmp_path / STEPS_NAME).write_text(json.dumps({"missing": 3}) + "\n")
    assert read_steps(tmp_path).facts_of(0, 0) is None
