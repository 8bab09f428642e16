"""The small parts of the training loop, each alone."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatout.engine import step as engine_step
from flatout.engine.compile import Compiled, compile_pays, never_compiled
from flatout.engine.job import StepSettings
from flatout.engine.meter import DeviceRows, Meter
from flatout.engine.optim import apply_settings, load_optimizer, make_optimizer, step_unless
from flatout.engine.reproducible import random_state, seed_all, set_random_state
from flatout.engine.step import Precision, Step
from flatout.errors import ConfigError
from flatout.ranks.world import World, read_world

CPU = torch.device("cpu")


class TestOptimizer:
    @pytest.mark.parametrize("kind", ["sgd", "adam"])
    def test_a_bad_step_changes_nothing_not_even_as_the_first(self, kind: str) -> None:
        parameter = nn.Parameter(torch.ones(5))
        optimizer = make_optimizer(kind, [[parameter]], lr=0.1, momentum=0.9, decays=(0.0,))  # type: ignore[arg-type]
        precision = Precision("off", CPU)
        parameter.grad = torch.tensor([1.0, math.nan, 1, 1, 1])
        step_unless(optimizer, precision.check([parameter.grad]))
        assert torch.equal(parameter, torch.ones(5))
        parameter.grad = torch.ones(5)
        step_unless(optimizer, precision.check([parameter.grad]))
        assert torch.isfinite(parameter).all()
        assert (parameter < 1).all()

    def test_an_unknown_kind_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"optimizer 'adamw' is unknown: use 'sgd' or 'adam'\."):
            make_optimizer("adamw", [[nn.Parameter(torch.ones(2))]], lr=0.1, momentum=0.9, decays=(0.0,))  # type: ignore[arg-type]

    def test_sgd_is_nesterov_with_decay_by_group(self) -> None:
        ours, plain = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
        optimizer = make_optimizer("sgd", [[ours]], lr=0.1, momentum=0.9, decays=(0.01,))
        twin = torch.optim.SGD([plain], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False)
        for step in range(4):
            for parameter in (ours, plain):
                parameter.grad = torch.full((7,), 0.3 * (step + 1))
            step_unless(optimizer, torch.zeros(()))
            twin.step()
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("kind", ["sgd", "adam"])
    def test_it_moves_weights_as_torchs_own_does_bit_for_bit_and_reads_its_state(self, kind: str) -> None:
        def optimizer_of(parameter: nn.Parameter) -> torch.optim.Optimizer:
            group = {"params": [parameter], "weight_decay": 0.01}
            if kind == "adam":
                return torch.optim.Adam([group], lr=0.1, betas=(0.9, 0.999), fused=True)
            return torch.optim.SGD([group], lr=0.1, momentum=0.9, nesterov=True, fused=True)

        ours, plain = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
        optimizer = make_optimizer(kind, [[ours]], lr=0.1, momentum=0.9, decays=(0.01,))  # type: ignore[arg-type]
        twin = optimizer_of(plain)
        for step in range(4):
            if step == 2:
                saved, other = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(twin.state_dict())
                assert saved["param_groups"] == other["param_groups"]
                optimizer.load_state_dict(other)
                twin.load_state_dict(saved)
            for parameter in (ours, plain):
                parameter.grad = torch.linspace(-1, 2, 7) * (step + 1)
            step_unless(optimizer, torch.zeros(()))
            twin.step()
            assert torch.equal(ours, plain)
        optimizer.zero_grad(set_to_none=False)
        assert ours.grad is not None and not ours.grad.any() and ours.grad.grad_fn is None

    @pytest.mark.parametrize("kind", ["sgd", "adam"])
    def test_a_state_of_another_memory_layout_moves_the_same_weights(self, kind: str) -> None:
        def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
            parameter.grad = torch.zeros_like(parameter).copy_(torch.linspace(-1, 1, 54).view(2, 3, 3, 3))
            step_unless(optimizer, torch.zeros(()))

        first = nn.Parameter(torch.ones(2, 3, 3, 3).contiguous(memory_format=torch.channels_last))
        saved = make_optimizer(kind, [[first]], lr=0.1, momentum=0.9, decays=(0.0,))  # type: ignore[arg-type]
        step(first, saved)
        second = nn.Parameter(first.detach().contiguous())
        resumed = make_optimizer(kind, [[second]], lr=0.1, momentum=0.9, decays=(0.0,))  # type: ignore[arg-type]
        load_optimizer(resumed, copy.deepcopy(saved.state_dict()))
        step(first, saved)
        step(second, resumed)
        assert torch.equal(first, second)

    def test_settings_reach_every_group(self) -> None:
        groups = [[nn.Parameter(torch.ones(1))] for _ in range(3)]
        optimizer = make_optimizer("sgd", groups, lr=1.0, momentum=0.5, decays=(0, 0, 0))
        apply_settings(optimizer, StepSettings((0.1, 0.2, 0.3), 0.7, step_optimizer=True))
        assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [
            (0.1, 0.7), (0.2, 0.7), (0.3, 0.7),
        ]  # fmt: skip


class TestClipping:
    SCALE, MAX_NORM = 1024.0, 0.5

    def moved_by(self, gradients: list[float], *, clip_norm: float | None) -> torch.Tensor:
        """By how much a step with a scaled loss lowers the weights, one parameter per gradient."""
        network = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in gradients)
        precision = Precision("off", CPU)
        precision.load_state_dict({"amp": "off", "scale": self.SCALE, "streak": 0})
        job: Any = SimpleNamespace(paddings={})
        step = Step(
            job, network, network, make_optimizer("sgd", [list(network)], lr=1.0, momentum=0.9, decays=(0.0,)), None,
            precision=precision, clip_norm=clip_norm, graphs=False, world=World(),
        )  # fmt: skip
        for parameter, gradient in zip(network, gradients, strict=True):
            parameter.grad = torch.full((1,), gradient * self.SCALE)
        step.optimizer_step()
        return -torch.cat([parameter.detach() for parameter in network])

    def test_clipped_gradients_keep_their_direction(self) -> None:
        free, clipped = (self.moved_by([3.0, 4.0], clip_norm=norm) for norm in (None, self.MAX_NORM))
        torch.testing.assert_close(clipped, free * self.MAX_NORM / 5)

    def test_the_norm_is_that_of_unscaled_gradients(self) -> None:
        free, clipped = (self.moved_by([0.3, 0.3], clip_norm=norm) for norm in (None, self.MAX_NORM))
        assert torch.equal(clipped, free)


class TestPrecision:
    def test_unknown_and_impossible_formats_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="unknown"):
            Precision("fp8", CPU)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="needs a GPU"):
            Precision("fp16", CPU)

    @pytest.mark.parametrize(
        ("features", "native"), [({"avx512_bf16"}, True), ({"amx_bf16"}, True), ({"avx512f"}, False)]
    )
    def test_bf16_is_native_where_the_cpu_has_instructions_for_it(
        self, monkeypatch: pytest.MonkeyPatch, features: set[str], native: bool
    ) -> None:
        monkeypatch.setattr(engine_step, "cpu_features", lambda: frozenset(features))
        assert engine_step.has_native_bf16(CPU) is native
        assert engine_step.default_amp(CPU) == "off", "results on a CPU are exact unless something else is requested"

    def test_its_state_comes_back(self) -> None:
        first, second = Precision("bf16", CPU), Precision("bf16", CPU)
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()

    def test_gradients_are_not_divided_by_the_scale_of_another_format(self) -> None:
        precision, gradient = Precision("off", CPU), torch.ones(3)
        precision.load_state_dict({"amp": "fp16", "scale": 65536.0, "streak": 5})
        precision.check([gradient])
        assert torch.equal(gradient, torch.ones(3))


class TestLogAndMeter:
    def test_rows_come_back_once_and_in_order(self) -> None:
        log = DeviceRows(2, capacity=4, device=CPU)
        seen: list[float] = []
        for step in range(11):
            log.put(torch.tensor([float(step), 10.0 * step]))
            if (step + 1) % 4 == 0:
                seen += log.swap()[:, 0].tolist()
        rows = log.drain()
        assert seen + rows[:, 0].tolist() == [float(step) for step in range(11)]

    def test_the_numbers_of_a_step_end_with_its_two_flags(self) -> None:
        """Inside an accumulation window gradients are not checked: the flag of the step before must not stay."""

        network = nn.Linear(1, 1, bias=False)
        optimizer = make_optimizer("sgd", [list(network.parameters())], lr=0.1, momentum=0.9, decays=(0.0,))
        job: Any = SimpleNamespace(
            paddings={}, step=lambda forward, inputs: (forward(inputs["x"][:, None]).sum(), torch.ones(1))
        )
        step = Step(
            job, network, network, optimizer, None,
            precision=Precision("off", CPU), clip_norm=None, graphs=False, world=World(),
        )  # fmt: skip
        script = [(1.0, True), (math.inf, True), (1.0, False), (math.nan, False)]
        numbers = [step({"x": torch.tensor([x])}, window_ends=ends).tolist() for x, ends in script]
        assert numbers == [[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]

    @pytest.mark.parametrize("parts", [[7], [3, 4], [1] * 7])
    def test_a_mean_does_not_depend_on_where_it_was_interrupted(self, parts: list[int]) -> None:
        rows = np.random.default_rng(0).standard_normal((7, 2)) * 1e3
        whole = Meter(("a", "b"))
        whole.add(rows, np.zeros(7, bool))
        meter, begin = Meter(("a", "b")), 0
        for part in parts:
            meter.add(rows[begin : begin + part], np.zeros(part, bool))
            resumed = Meter(("a", "b"))
            resumed.load_state_dict(meter.state_dict())
            meter, begin = resumed, begin + part
        assert meter.means() == whole.means()

    def test_bad_steps_are_counted_and_not_averaged(self) -> None:
        meter = Meter(("loss",))
        meter.add(np.array([[1.0], [math.nan], [3.0]]), np.array([False, True, False]))
        assert meter.report().items == {"loss": 2.0}
        assert meter.report().num_bad == 1

    def test_a_slow_start_does_not_count_for_steady_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s = 100.0
        monkeypatch.setattr("flatout.engine.meter.time.perf_counter", lambda: now_s)
        meter = Meter(("loss",))
        for duration_s in [5.0, 3.0, 0.01, 0.01, 0.01, 0.01]:
            now_s += duration_s
            meter.count(4)
        stats = meter.end_interval(0, 6, steps_done=6, steps_left=94)
        assert stats.step_ms == pytest.approx(8040 / 6)
        assert stats.steady_ms == pytest.approx(10)
        now_s += 0.2
        meter.count(4)
        assert meter.end_interval(0, 7, steps_done=7, steps_left=93).steady_ms == pytest.approx(200)

    @pytest.mark.parametrize("num_full", [1, 3, 9, 20])
    def test_a_slow_short_last_batch_does_not_count_for_steady_steps(
        self, num_full: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now_s = 100.0
        monkeypatch.setattr("flatout.engine.meter.time.perf_counter", lambda: now_s)
        meter = Meter(("loss",))
        for duration_s, samples in [*[(0.01, 4)] * num_full, (14.0, 1)]:
            now_s += duration_s
            meter.count(samples)
        stats = meter.end_interval(0, num_full + 1, steps_done=num_full + 1, steps_left=0)
        assert stats.steady_ms == pytest.approx(10) and stats.step_ms > 600
        now_s += 14.0
        meter.count(1)  # alone: nothing new is known about full batches
        assert meter.end_interval(1, 1, steps_done=num_full + 2, steps_left=0).steady_ms == pytest.approx(10)

    def test_waiting_for_what_is_read_once_does_not_count_for_steady_steps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now_s = 100.0
        monkeypatch.setattr("flatout.engine.meter.time.perf_counter", lambda: now_s)
        meter = Meter(("loss",))
        for _ in range(6):
            now_s += 0.31
            meter.waited(0.302, once=0.3)
            now_s += 0.01
            meter.count(4)
        stats = meter.end_interval(0, 6, steps_done=6, steps_left=94)
        assert stats.step_ms == pytest.approx(320) and stats.wait_ms == pytest.approx(302)
        assert stats.steady_ms == pytest.approx(20) and stats.fill_wait_ms == pytest.approx(300)
        now_s += 0.02
        meter.count(4)
        stats = meter.end_interval(0, 7, steps_done=7, steps_left=93)
        assert stats.steady_ms == pytest.approx(20) and stats.fill_wait_ms == 0


def graphed_step(network: nn.Module) -> Step:
    """A step that would be captured, if there were a GPU."""
    return Step(
        SimpleNamespace(paddings={}),
        network,
        network,
        torch.optim.SGD(network.parameters(), 0.1),
        None,
        precision=Precision("off", torch.device("cpu")),
        clip_norm=None,
        graphs=True,
        world=World(0, 1, 0),
    )


class TestCompiling:
    def test_auto_compiles_only_when_the_run_is_long_enough(self) -> None:
        short = compile_pays(step_ms=40, steps_left=1000, num_layers=58)
        long = compile_pays(step_ms=40, steps_left=1_000_000, num_layers=58)
        assert not short.pays
        assert long.pays
        assert "1000 steps of 40.0 ms" in short.text
        assert "it does not pay" in short.text

    def test_a_network_that_cannot_be_compiled_runs_as_it_is(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(network: nn.Module) -> object:
            def call(x: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("no compiler here")

            return call

        monkeypatch.setattr(torch, "compile", fails)
        network = nn.Linear(2, 2)
        compiled = Compiled(network)
        x = torch.ones(1, 2)
        assert torch.equal(compiled(x), network(x))
        assert torch.equal(compiled(x), network(x))
        assert [record.message for record in caplog.records] == [
            "The network cannot be compiled (RuntimeError: no compiler here): training goes on uncompiled."
        ]
        assert list(compiled.parameters()) == []

    def test_a_function_that_is_never_compiled_runs_uncompiled_inside_a_compiled_one(self) -> None:
        graphs, seen = list[int](), list[bool]()

        def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
            graphs.append(len(graph.graph.nodes))
            return graph

        @never_compiled
        def middle(x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            for _ in range(5):
                x = helper(x)
            return x

        def helper(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        compiled = torch.compile(lambda x: middle(x * 2) * 3, backend=backend)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 21.0))
        assert torch.equal(middle(torch.ones(3)), torch.full((3,), 6.0))
        assert seen == [False, False]
        assert len(graphs) == 2, "x * 2, then x * 3; nothing of the function between them"

    def test_a_short_last_batch_is_not_compiled_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []

        def records(network: nn.Module) -> object:
            def call(x: torch.Tensor) -> object:
                sizes.append(len(x))
                return network(x)

            return call

        monkeypatch.setattr(torch, "compile", records)
        network = nn.Linear(2, 2)
        compiled = Compiled(network)
        for batch_size in (8, 8, 3, 8):
            x = torch.rand(batch_size, 2)
            assert torch.equal(compiled(x), network(x))
        assert sizes == [8, 8, 8]

    def test_a_compiled_forward_whose_steps_cannot_be_captured_is_reverted(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        network, compiled = nn.Linear(2, 2), nn.Linear(2, 2)
        step = graphed_step(network)
        assert not step.graphs.simplify(), "the plain network has nothing simpler"
        step.use_forward(compiled)
        assert step.graphs.simplify() and step._forward is network
        assert [record.message for record in caplog.records] == [
            "A step of the compiled network cannot be captured as a CUDA graph: training goes on uncompiled."
        ]
        assert not step.graphs.simplify() and step.has_reverted

    def test_a_plain_forward_that_is_used_again_is_not_reverted_to_the_compiled_one(self) -> None:
        network, compiled = nn.Linear(2, 2), nn.Linear(2, 2)
        step = graphed_step(network)
        step.use_forward(compiled)
        step.use_forward(network)
        assert not step.graphs.simplify() and step._forward is network


class TestWorld:
    def test_alone_without_a_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        assert read_world() == World(0, 1, 0)

    def test_all_launcher_conventions_are_understood(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert read_world() == World(3, 4, 1)
        assert read_world().ranks_here == 4
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert read_world().ranks_here == 2, "of two machines"
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        monkeypatch.delenv("LOCAL_RANK")
        assert read_world(2) == World(3, 4, 2)
        with pytest.raises(ConfigError, match="LOCAL_RANK"):
            read_world()

    def test_a_batch_that_ranks_cannot_divide_is_refused_with_one_they_can(self) -> None:
        with pytest.raises(ConfigError, match="use 15 or another multiple of 3"):
            World(0, 3).batch_per_rank(16)


def test_random_generators_continue_where_they_were() -> None:
    seed_all(5)
    state = random_state(CPU)
    first = (torch.rand(3).tolist(), np.random.random(3).tolist())  # noqa: NPY002
    set_random_state(state, CPU)
    assert (torch.rand(3).tolist(), np.random.random(3).tolist()) == first  # noqa: NPY002
