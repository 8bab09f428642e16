"""How long is a training step of YOLOv7's networks on prepared data, and what does each optimisation gain?

Forward, backward and SGD in bf16, channels_last, loss = the mean of the outputs; no detection loss, no input. Variants:
eager; eager with torch's kernels instead of ours (the gain of our kernels), or with every weight cast separately (the
gain of casting them together); compiled; and the whole step, eager or compiled, as one CUDA graph (no launches by the
host, as `train.py` runs with --fast, and with --compile on). Of the graph also without one kind of kernels: cuDNN for
every convolution; torch's copies and sums; 1 x 1 convolutions of the same map apart. The
figures of the original code are quoted: it was measured once, by the same method, on the same kind of machine. The host
limits the small cases, and its speed varies, so the variants of a case take turns.
Answer: bench/results/model_step_<machine>_<yyyymm>.md (rewritten with --write).
"""

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple
from unittest import mock

import torch

from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.yolo.model import convolutions, copies, fused, network
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network

Step = Callable[[], None]


class Case(NamedTuple):
    """A network, its input, and the ms of the original code (eager, compiled), if known."""

    name: str
    side_px: int
    batch: int
    original: tuple[float | None, float | None]

    def __str__(self) -> str:
        return f"{self.name} {self.side_px} px, batch {self.batch}"


CASES = [
    Case("yolov7-tiny", 320, 384, (76.9, 51.6)),
    Case("yolov7-tiny", 640, 128, (100.0, None)),
    Case("yolov7", 640, 64, (157.5, 123.3)),
    Case("yolov7", 320, 64, (48.0, 41.5)),
    Case("yolov7-tiny", 320, 16, (None, None)),
]
TURNS, CALLS = 15, 4
"""How often a variant is timed, and for how many steps."""
WAYS = (
    "torch kernels", "casts apart", "eager", "compiled",
    "cuDNN graph", "torch copies graph", "pairs apart graph", "graph", "compiled graph",
)  # fmt: skip


@dataclass
class Row:
    """Results of one case and variant."""

    case: str
    way: str
    step_ms: float
    fastest_ms: float
    slowest_ms: float
    images_per_s: float
    peak_gib: float


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all of them")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these: 'yolov7 640'")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/model_step.py needs a GPU, and this machine has none.")
        return 0
    torch.backends.cudnn.benchmark = True
    print(facts_line(), flush=True)
    chosen = [case for case in CASES if any(pattern in str(case) for pattern in options.only)]
    cases = CASES[-1:] if options.quick else chosen
    rows = [row for case in cases for row in measure_case(case, options.ways)]
    criteria = [criterion for case in cases for criterion in check_promises(case, rows)]
    write(rows, criteria, options)
    return int(not all(each.passed for each in criteria))


class WarmStep(NamedTuple):
    """A step that is warmed up, and its peak memory."""

    step: Step
    peak_gib: float


def measure_case(case: Case, ways: list[str]) -> list[Row]:
    """Time all variants of a case, in turns."""
    steps = {way: make_way(case, way) for way in ways}
    durations_ms: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, (step, _) in steps.items():
            with patched_for(way):
                durations_ms[way].append(timed(step, CALLS))
    rows = [row_of(case, way, durations_ms[way], steps[way].peak_gib) for way in ways]
    steps.clear()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def make_way(case: Case, way: str) -> WarmStep:
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated()
    with patched_for(way):
        step = make_step(case, way)
        timed(step, 1)
    return WarmStep(step, (torch.cuda.max_memory_allocated() - others) / 2**30)


def row_of(case: Case, way: str, durations_ms: list[float], peak_gib: float) -> Row:
    middle = median(durations_ms)
    print(f"{case}, {way}: {middle:.2f} ms", flush=True)
    return Row(str(case), way, middle, min(durations_ms), max(durations_ms), case.batch / middle * 1e3, peak_gib)


def make_step(case: Case, way: str, device: str = "cuda") -> Step:
    """A training step, warmed up."""
    torch.manual_seed(0)
    network = build_network(load_config(case.name)).to(device).train()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.937, nesterov=True, fused=True)
    images = torch.rand(case.batch, 3, case.side_px, case.side_px, device=device, dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last)
    forward = torch.compile(network) if way.startswith("compiled") else network

    def step() -> None:
        # A cast that is cached from before the capture would not be part of the graph.
        with torch.autocast(device, torch.bfloat16, cache_enabled=not way.endswith("graph")):
            loss = torch.stack([output.mean() for output in forward(images)]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    return captured(step) if way.endswith("graph") else step


def captured(step: Step) -> Step:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return Replay(step, graph)


@dataclass
class Replay:
    """Replays the step as a graph. It keeps the step alive, because a graph keeps only its own memory, not the weights
    and images of the step."""

    step: Step
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()


@contextmanager
def torch_kernels() -> Iterator[None]:
    """Use torch's kernels for everything."""
    with mock.patch.object(fused, "suits_kernels", _never):
        yield


@contextmanager
def casts_apart() -> Iterator[None]:
    """Let autocast cast every weight and gradient separately."""
    with mock.patch.object(network, "_should_cast", _never):
        yield


@contextmanager
def cudnn_only() -> Iterator[None]:
    with mock.patch.object(convolutions, "_half_of_autocast", return_value=None):
        yield


@contextmanager
def torch_copies() -> Iterator[None]:
    """Use torch's kernels for concatenation, upsampling, and sums of gradients."""
    with mock.patch.object(copies, "_suits_copies", _never):
        yield


@contextmanager
def pairs_apart() -> Iterator[None]:
    with mock.patch.object(network, "suits_pair", _never):
        yield


def _never(*_: object) -> bool:
    return False


WITHOUT: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "torch kernels": torch_kernels,
    "casts apart": casts_apart,
    "cuDNN graph": cudnn_only,
    "torch copies graph": torch_copies,
    "pairs apart graph": pairs_apart,
}
"""Variants without one of our optimisations."""


def patched_for(way: str) -> AbstractContextManager[None]:
    return WITHOUT.get(way, nullcontext)()


def timed(step: Step, calls: int) -> float:
    """Milliseconds per call on the device, which is idle before and after."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def check_promises(case: Case, rows: list[Row]) -> list[Criterion]:
    """Not slower than the original code, eager and compiled, with and without launches by the host."""
    ours = {row.way: row.step_ms for row in rows if row.case == str(case)}
    eager, compiled = case.original
    pairs = (("eager", eager), ("compiled", compiled), ("graph", eager), ("compiled graph", compiled))
    return [
        Criterion(promise=f"{case}, {way} / original", value=ours[way] / original, limit=1.0)
        for way, original in pairs
        if original is not None and way in ours
    ]


def write(rows: list[Row], criteria: list[Criterion], options: argparse.Namespace) -> None:
    lines = [f"{'case':36}{'way':>20}{'ms':>9}{'(fastest, slowest)':>20}{'img/s':>9}{'peak GiB':>10}"]
    for row in rows:
        spread = f"({row.fastest_ms:.1f}, {row.slowest_ms:.1f})"
        lines.append(
            f"{row.case:36}{row.way:>20}{row.step_ms:9.2f}{spread:>20}{row.images_per_s:9.0f}{row.peak_gib:10.1f}"
        )
    device = torch.cuda.get_device_name()
    text = "\n".join([device, "", *lines, "", *map(str, criteria)])
    numbers = {
        "device": device,
        "rows": list(map(asdict, rows)),
        "criteria": [asdict(each) | {"passed": each.passed} for each in criteria],
    }
    report("model_step", text, numbers, options)


if __name__ == "__main__":
    raise SystemExit(main())
