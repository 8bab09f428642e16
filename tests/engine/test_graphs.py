"""Which inputs get a graph, when it is captured, and what happens if it cannot be. The graphs themselves need a GPU:
tests/yolo/train/test_training_gpu.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.engine import graphs
from flatout.engine.graphs import EAGER_RUNS, MOST_GRAPHS, Graphs, Padding, form_of

FILLINGS = {"rows": Padding(8, -1.0)}


class Pretended:
    """Says what a graph would say, without a GPU."""

    pool = "memory"
    made: list["Pretended"]

    def __init__(self, work: Any, inputs: Any, paddings: Any, *, pool: Any = None) -> None:
        self.form, self.shared = form_of(inputs, paddings), pool
        Pretended.made.append(self)

    def suits(self, inputs: dict[str, Tensor]) -> bool:
        return form_of(inputs, FILLINGS) == self.form


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Pretended]:
    monkeypatch.setattr(graphs, "GraphedWork", Pretended)
    Pretended.made = []
    return Pretended.made


def find_again(all_graphs: Graphs, given: dict[str, Tensor], times: int) -> list[Any]:
    return [all_graphs.find(given) for _ in range(times)]


def inputs(batch: int = 4, rows: int = 3) -> dict[str, Tensor]:
    return {"images": torch.zeros(batch, 3, 8, 8), "rows": torch.zeros(rows, 6)}


def new_graphs(*, wanted: bool = True) -> Graphs:
    return Graphs(lambda given: torch.zeros(1), FILLINGS, wanted=wanted)


def test_a_form_runs_eagerly_before_it_is_captured(made: list[Pretended]) -> None:
    found = find_again(new_graphs(), inputs(), EAGER_RUNS + 2)
    assert found[:EAGER_RUNS] == [None] * EAGER_RUNS
    assert found[EAGER_RUNS] is found[EAGER_RUNS + 1] is made[0]


def test_the_number_of_ragged_rows_does_not_make_another_form(made: list[Pretended]) -> None:
    all_graphs = new_graphs()
    for rows in range(8):
        all_graphs.find(inputs(rows=rows))
    assert len(made) == 1


def test_rows_that_have_no_room_run_eagerly_and_cost_no_graph(made: list[Pretended]) -> None:
    all_graphs = new_graphs()
    for _ in range(EAGER_RUNS + 1):
        all_graphs.find(inputs())
    assert all(all_graphs.find(inputs(rows=9)) is None for _ in range(EAGER_RUNS + 1))
    assert find_again(all_graphs, inputs(), 1) == made
    assert len(made) == 1


def test_forms_share_memory_and_are_few(made: list[Pretended]) -> None:
    all_graphs = new_graphs()
    for batch in range(1, MOST_GRAPHS + 3):
        for _ in range(EAGER_RUNS + 1):
            all_graphs.find(inputs(batch=batch))
    assert [each.shared for each in made] == [None] + ["memory"] * (MOST_GRAPHS - 1)


def test_another_work_is_captured_anew(made: list[Pretended]) -> None:
    all_graphs = new_graphs()
    for _ in range(EAGER_RUNS + 1):
        all_graphs.find(inputs())
    all_graphs.forget()
    assert all_graphs.find(inputs()) is None


def test_what_cannot_be_captured_runs_eagerly_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any, **names: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "GraphedWork", fails)
    all_graphs = new_graphs()
    assert all(all_graphs.find(inputs()) is None for _ in range(EAGER_RUNS + 3))
    assert not all_graphs.wanted
    assert caplog.text.count("operation not permitted") == 1


def test_work_that_cannot_be_captured_makes_way_for_simpler_work_that_can(
    made: list[Pretended], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any, **names: Any) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    def simplify() -> bool:
        monkeypatch.setattr(graphs, "GraphedWork", Pretended)
        return True

    monkeypatch.setattr(graphs, "GraphedWork", fails)
    all_graphs = Graphs(lambda given: torch.zeros(1), FILLINGS, wanted=True, simplify=simplify)
    assert find_again(all_graphs, inputs(), 2 * EAGER_RUNS + 1) == [None] * (2 * EAGER_RUNS + 1)
    assert find_again(all_graphs, inputs(), 1) == made
    assert all_graphs.wanted and len(made) == 1 and not caplog.records


def test_nothing_is_captured_unless_it_is_wanted(made: list[Pretended]) -> None:
    all_graphs = new_graphs(wanted=False)
    assert all(all_graphs.find(inputs()) is None for _ in range(EAGER_RUNS + 3))
    assert made == []
