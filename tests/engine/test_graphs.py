"""Which inputs get a CUDA graph, when it is captured, and the fallback if capturing fails. Real graphs need a GPU:
tests/yolo/train/test_training_gpu.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.engine import graphs
from flatout.engine.graphs import EAGER_RUNS, MAX_GRAPHS, Graphs, Padding, num_samples, signature_of, without_tuning
from flatout.engine.optim import make_optimizer
from flatout.engine.step import Precision, Step
from flatout.ranks.world import World

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


def inputs(batch: int = 4, rows: int = 3, size: int = 8) -> dict[str, Tensor]:
    return {"images": torch.zeros(batch, 3, size, size), "rows": torch.zeros(rows, 6)}


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
    for size in range(1, MAX_GRAPHS + 3):
        for _ in range(EAGER_RUNS + 1):
            all_graphs.find(inputs(size=size))
    assert [each.shared for each in made] == [None] + ["memory"] * (MAX_GRAPHS - 1)


def test_the_short_last_batch_of_an_epoch_is_never_captured(made: list[FakeGraph]) -> None:
    all_graphs = new_graphs()
    for _ in range(3 * EAGER_RUNS):  # epochs
        for _ in range(3):
            all_graphs.find(inputs(batch=4))
        assert all_graphs.is_short(inputs(batch=3)) and all_graphs.find(inputs(batch=3)) is None
    assert [graph.signature for graph in made] == [signature_of(inputs(batch=4), PADDINGS)]


def test_a_run_that_continues_at_a_short_batch_captures_the_full_ones(made: list[FakeGraph]) -> None:
    all_graphs = new_graphs()
    assert all_graphs.find(inputs(batch=1)) is None and not all_graphs.is_short(inputs(batch=1))
    assert find_repeatedly(all_graphs, inputs(batch=4), EAGER_RUNS + 1)[-1] is made[0]
    assert all_graphs.is_short(inputs(batch=1)) and all_graphs.find(inputs(batch=1)) is None


def test_ragged_rows_are_not_samples() -> None:
    assert num_samples(inputs(batch=4, rows=9), PADDINGS) == 4
    assert not any(new_graphs().is_short(inputs(batch=4, rows=rows)) for rows in (8, 0, 3))


def test_kernels_are_not_tried_out_for_a_short_batch_and_are_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without graphs, as with several ranks."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    tuned = list[bool]()

    class Job:
        paddings: dict[str, Padding] = {}

        def step(self, network: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            tuned.append(torch.backends.cudnn.benchmark)
            loss = network(given["x"]).sum()
            return loss, loss.detach().reshape(1)

    network = nn.Linear(2, 1)
    optimizer = make_optimizer("sgd", [list(network.parameters())], lr=0.1, momentum=0.9, decays=(0.0,))
    precision = Precision("off", torch.device("cpu"))
    step = Step(
        Job(), network, network, optimizer, None,  # type: ignore[arg-type]
        precision=precision, clip_norm=None, graphs=False, world=World(),
    )  # fmt: skip
    for batch in (4, 4, 3, 4):
        step.forward_backward({"x": torch.zeros(batch, 2)}, window_ends=True)
    assert tuned == [True, True, False, True]
    with pytest.raises(ZeroDivisionError), without_tuning():
        raise ZeroDivisionError
    assert torch.backends.cudnn.benchmark


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
