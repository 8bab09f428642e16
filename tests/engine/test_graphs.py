"""Which inputs get a CUDA graph, when it is captured, and the fallback if capturing fails. Real graphs need a GPU:
tests/yolo/train/test_training_gpu.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.engine import graphs
from flatout.engine.graphs import EAGER_RUNS, MAX_GRAPHS, Graphs, Padding, signature_of

PADDINGS = {"rows": Padding(8, -1.0)}


class FakeGraph:
    """A replacement for GraphedStep that needs no GPU."""

    pool = "memory"
    made: list["FakeGraph"]

    def __init__(self, step: Any, inputs: Any, paddings: Any, *, pool: Any = None) -> None:
        self.signature, self.shared = signature_of(inputs, paddings), pool
        FakeGraph.made.append(self)

    def matches(self, inputs: dict[str, Tensor]) -> bool:
        return signature_of(inputs, PADDINGS) == self.signature


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    monkeypatch.setattr(graphs, "GraphedStep", FakeGraph)
    FakeGraph.made = []
    return FakeGraph.made


def find_repeatedly(all_graphs: Graphs, given: dict[str, Tensor], times: int) -> list[Any]:
    return [all_graphs.find(given) for _ in range(times)]


def inputs(batch: int = 4, rows: int = 3) -> dict[str, Tensor]:
    return {"images": torch.zeros(batch, 3, 8, 8), "rows": torch.zeros(rows, 6)}


def new_graphs(*, enabled: bool = True) -> Graphs:
    return Graphs(lambda given: torch.zeros(1), PADDINGS, enabled=enabled)


def test_a_signature_runs_eagerly_before_it_is_captured(made: list[FakeGraph]) -> None:
    found = find_repeatedly(new_graphs(), inputs(), EAGER_RUNS + 2)
    assert found[:EAGER_RUNS] == [None] * EAGER_RUNS
    assert found[EAGER_RUNS] is found[EAGER_RUNS + 1] is made[0]


def test_the_number_of_ragged_rows_does_not_change_the_signature(made: list[FakeGraph]) -> None:
    all_graphs = new_graphs()
    for rows in range(8):
        all_graphs.find(inputs(rows=rows))
    assert len(made) == 1


def test_inputs_with_too_many_rows_run_eagerly_and_cost_no_graph(made: list[FakeGraph]) -> None:
    all_graphs = new_graphs()
    for _ in range(EAGER_RUNS + 1):
        all_graphs.find(inputs())
    assert all(all_graphs.find(inputs(rows=9)) is None for _ in range(EAGER_RUNS + 1))
    assert find_repeatedly(all_graphs, inputs(), 1) == made
    assert len(made) == 1


def test_graphs_share_memory_and_their_number_is_limited(made: list[FakeGraph]) -> None:
    all_graphs = new_graphs()
    for batch in range(1, MAX_GRAPHS + 3):
        for _ in range(EAGER_RUNS + 1):
            all_graphs.find(inputs(batch=batch))
    assert [each.shared for each in made] == [None] + ["memory"] * (MAX_GRAPHS - 1)


def test_a_changed_step_is_captured_again(made: list[FakeGraph]) -> None:
    all_graphs = new_graphs()
    for _ in range(EAGER_RUNS + 1):
        all_graphs.find(inputs())
    all_graphs.clear()
    assert all_graphs.find(inputs()) is None


def test_a_step_that_cannot_be_captured_runs_eagerly_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any, **names: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "GraphedStep", fails)
    all_graphs = new_graphs()
    assert all(all_graphs.find(inputs()) is None for _ in range(EAGER_RUNS + 3))
    assert not all_graphs.enabled
    assert caplog.text.count("operation not permitted") == 1


def test_a_step_that_cannot_be_captured_is_replaced_by_a_simpler_one_that_can(
    made: list[FakeGraph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any, **names: Any) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    def simplify() -> bool:
        monkeypatch.setattr(graphs, "GraphedStep", FakeGraph)
        return True

    monkeypatch.setattr(graphs, "GraphedStep", fails)
    all_graphs = Graphs(lambda given: torch.zeros(1), PADDINGS, enabled=True, simplify=simplify)
    assert find_repeatedly(all_graphs, inputs(), 2 * EAGER_RUNS + 1) == [None] * (2 * EAGER_RUNS + 1)
    assert find_repeatedly(all_graphs, inputs(), 1) == made
    assert all_graphs.enabled and len(made) == 1 and not caplog.records


def test_nothing_is_captured_unless_graphs_are_enabled(made: list[FakeGraph]) -> None:
    all_graphs = new_graphs(enabled=False)
    assert all(all_graphs.find(inputs()) is None for _ in range(EAGER_RUNS + 3))
    assert made == []
