"""Training on a GPU: the host never waits within a step, and a CUDA graph changes nothing but the speed."""

import time
from statistics import median

import pytest
import torch

from flatout.engine.compile import Compiled
from flatout.engine.step import Amp
from flatout.engine.step_hash import HashedStep, hash_inputs
from flatout.feed.device import DeviceBatch
from tests.yolo.train.compare_with_eager import run_and_compare_with_eager, smooth
from tests.yolo.train.fixed_batches import FixedBatches, random_batch
from tests.yolo.train.small_training import make_loop, narrow_network, run_without_waits, tiny_hyp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZE, CLASSES, BATCH = 64, 3, 16


def given(num_steps: int) -> FixedBatches:
    return FixedBatches(
        [random_batch(n, batch_size=BATCH, size=SIZE, num_classes=CLASSES, device="cuda") for n in range(num_steps)]
    )


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("amp", ["bf16", "fp16", "off"])
def test_the_host_never_waits_inside_a_step(amp: Amp, graphs: bool) -> None:
    network = narrow_network(CLASSES).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    hashed: list[HashedStep] = []
    batches = given(40)
    loop, num_intervals = run_without_waits(
        network, tiny_hyp(), batches, num_steps=40, batch_size=BATCH, size=SIZE, amp=amp, graphs=graphs,
        on_hashes=hashed.extend,
    )  # fmt: skip
    assert num_intervals > 5
    assert loop.epoch == 1
    assert [each.step for each in hashed] == list(range(40))


def test_a_gpu_has_the_hashes_of_a_cpu() -> None:
    for number in range(3):
        batch = random_batch(number, batch_size=BATCH, size=512, num_classes=CLASSES, device="cuda")
        on_gpu = {"images": batch["images"], "targets": batch["targets"]}
        on_cpu = {name: tensor.cpu() for name, tensor in on_gpu.items()}
        assert hash_inputs(on_gpu).tolist() == hash_inputs(on_cpu).tolist()


@pytest.mark.timing
@pytest.mark.parametrize("graphs", [False, True])
def test_a_short_last_batch_costs_little_more_than_a_step_the_first_time_too(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that depend on the number of images are still compiled for it; nothing is tuned or captured."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    network = narrow_network(CLASSES).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sizes = [BATCH] * 12 + [BATCH - 1] + [BATCH] * 3 + [BATCH - 1] * 5
    batches = [
        random_batch(number, batch_size=size, size=SIZE, num_classes=CLASSES, device="cuda")
        for number, size in enumerate(sizes)
    ]
    loop, _ = make_loop(
        network, tiny_hyp(), FixedBatches(batches), num_steps=len(sizes), batch_size=BATCH, size=SIZE, amp="bf16",
        graphs=graphs, device="cuda",
    )  # fmt: skip
    seconds = list[float]()
    train_step = loop._train_step

    def timed(batch: DeviceBatch) -> None:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        train_step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)

    monkeypatch.setattr(loop, "_train_step", timed)
    loop.run()
    eager_s = median(seconds[1:3])  # before the first graph
    print(f"full batch {1e3 * median(seconds[6:12]):.1f} ms, short one {1e3 * seconds[12]:.1f} ms the first time")
    assert seconds[12] < 3 * eager_s + 0.2
    assert len(loop._training_step.graphs._graphs) == int(graphs)


@pytest.mark.parametrize("loss_ota", [0, 1])
def test_a_graph_computes_what_eager_steps_do(loss_ota: int) -> None:
    network = narrow_network(CLASSES).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    smooth(network)
    loop, _ = make_loop(
        network, tiny_hyp(loss_ota=loss_ota), given(16), num_steps=16, batch_size=BATCH, size=SIZE,
        graphs=True, device="cuda",
    )  # fmt: skip
    assert run_and_compare_with_eager(loop, network) >= 10


def test_compiled_steps_run_as_a_graph_and_compute_what_eager_ones_do() -> None:
    network = narrow_network(CLASSES).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    smooth(network)
    loop, _ = make_loop(
        network, tiny_hyp(loss_ota=0), given(10), num_steps=10, batch_size=BATCH, size=SIZE, graphs=True, device="cuda"
    )
    loop._training_step.use_forward(Compiled(network))
    assert run_and_compare_with_eager(loop, network) >= 5


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    network = narrow_network(CLASSES).cuda()
    batches = given(6)
    loop, end = make_loop(network, tiny_hyp(), batches, num_steps=6, batch_size=BATCH, size=SIZE, device="cuda")
    step = loop.job.step

    def poisoned(network: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        loss, items = step(network, inputs)
        return (loss * float("nan"), items) if loop.step == 3 else (loss, items)

    loop.job.step = poisoned  # type: ignore[method-assign, assignment]
    loop.run()
    assert end.reports[0].num_bad == 1
    assert all(torch.isfinite(value).all() for value in network.state_dict().values())
