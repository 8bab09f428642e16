"""What would a step cost with 2, 4 and 8 GPUs, and how well does the calculation predict two ranks on a CPU?

Nothing here was measured on several GPUs. Computed: gradients of the real networks, in the buckets of
DistributedDataParallel, become ready one after the other during backward (layer by layer, in proportion to a layer's
roofline, within the step time and the share of backward that layer_roofline measured on one H200); each bucket is
summed by a ring over an assumed link as soon as it and those before it are ready, while backward continues; whatever is
not over when backward is, is added to the step. CUDA graphs, which several ranks do not use, would be needed for these
step times.

Checked: the same simulation for two gloo ranks on this CPU, one thread each. Latency and bandwidth of gloo, how much
sums and backward slow each other down, the speed of memory, and when each gradient is ready are measured in the same
run, without DistributedDataParallel; then its step is measured, with several sizes of buckets, in turns with steps
without sums. Of all times the fifth counts that other programs disturb least. The error is that of the predicted step.
Answer: bench/results/several_gpus_<machine>_<yyyymm>.md (rewrite it with --write).

Dimension key:  P parameters, in the order in which their gradients are ready
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from bench import noise
from bench.measure import RESULTS, arguments, facts_line, report
from flatout.yolo.model.configs import find_config, load_config
from flatout.yolo.model.network import Network
from flatout.yolo.model.spec import parse_model

MB = 1e6
FIRST_BUCKET = 2**20
"""DistributedDataParallel's limit for its first bucket, bytes; then that of `bucket_cap_mb`, 25 by default."""
DEFAULT_CAP = 25 * 2**20


class Link(NamedTuple):
    """What connects the ranks: assumed for GPUs, measured for gloo."""

    name: str
    bytes_per_s: float
    """Speed from each rank to its neighbour in the ring, in one direction."""
    latency_s: float
    """Latency of one hop."""

    def all_reduce_s(self, nbytes: float, ranks: int) -> float:
        """A ring: 2 (R - 1) hops, each with 1/R of the bytes."""
        hops = 2 * (ranks - 1)
        return hops * (self.latency_s + nbytes / ranks / self.bytes_per_s)


LINKS = (
    Link("NVLink, 350 GB/s, 8 us", 350e9, 8e-6),
    Link("PCIe 5, 40 GB/s, 12 us", 40e9, 12e-6),
    Link("PCIe 4, 18 GB/s, 12 us", 18e9, 12e-6),
)
"""Assumptions: what well-tuned rings reach, not what data sheets state."""


# The simulation


class Sharing(NamedTuple):
    """How fast backward and a sum run while the other does, relative to alone; 1: they do not disturb each other."""

    compute: float = 1.0
    communicate: float = 1.0


ALONE = Sharing()


def bucket_ends(nbytes_P: Sequence[int], cap: int) -> list[int]:
    """Where buckets end, as DistributedDataParallel forms them: each is closed once it has reached its limit."""
    ends, size, limit = [], 0, min(FIRST_BUCKET, cap)
    for number, nbytes in enumerate(nbytes_P, start=1):
        size += nbytes
        if size >= limit:
            ends.append(number)
            size, limit = 0, cap
    return ends if ends and ends[-1] == len(nbytes_P) else [*ends, len(nbytes_P)]


def simulate(
    ready_P: Sequence[float],
    nbytes_P: Sequence[int],
    backward_s: float,
    *,
    cap: int,
    all_reduce_s: Callable[[float], float],
    sharing: Sharing = ALONE,
) -> float:
    """Seconds from the start of backward until all gradients are summed. `ready_P`: when each gradient is ready."""
    ends = bucket_ends(nbytes_P, cap)
    starts = [0, *ends[:-1]]
    # What backward has to do before each bucket is ready, and how long each sum takes, both alone. Sums are in order.
    needed = [min(backward_s, max(ready_P[:end])) for end in ends]
    sums = [all_reduce_s(sum(nbytes_P[start:end])) for start, end in zip(starts, ends, strict=True)]
    now = done = 0.0
    for need, left in zip(needed, sums, strict=True):
        if done < need:  # backward alone
            now, done = now + need - done, need
        shared = min(left / sharing.communicate, (backward_s - done) / sharing.compute)
        done += shared * sharing.compute
        now += shared + max(0.0, left - shared * sharing.communicate)
    return now + backward_s - done


# Networks on paper


class Layer(NamedTuple):
    """A convolution with its norm: what its backward needs, and the bytes of its gradients in float32."""

    flops: float
    nbytes: float
    gradients: list[int]


def network_of(name: str) -> Network:
    return Network(parse_model(load_config(find_config(name))))


def layers_of(name: str, size: int, batch: int) -> list[Layer]:
    """The layers that have parameters, in the order of forward; shapes come from the meta device."""
    with torch.device("meta"):
        network = network_of(name).train()
    found: list[Layer] = []
    owned: set[int] = set()

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        parameters = [each for each in module.parameters(recurse=False) if id(each) not in owned]
        owned.update(map(id, parameters))
        if not parameters or not isinstance(output, torch.Tensor):
            return
        elements = inputs[0].numel() + output.numel()
        flops = 2 * output.numel() * module.weight[0].numel() if isinstance(module, nn.Conv2d) else 0
        # Gradients of inputs and weights; activations in bf16.
        found.append(Layer(2.0 * batch * flops, 2.0 * 2 * batch * elements, [4 * each.numel() for each in parameters]))

    for module in network.modules():
        module.register_forward_hook(note)
    network(torch.empty(1, 3, size, size, device="meta"))
    rest = [4 * each.numel() for each in network.parameters() if id(each) not in owned]
    return [*found, Layer(0.0, 0.0, rest)]  # of the head, whose gradients come first


def gradients_of(
    layers: Sequence[Layer], ceilings: dict[str, float], backward_s: float
) -> tuple[list[float], list[int]]:
    """When each gradient is ready, and its bytes, in the order of backward."""
    floors = [max(each.flops / ceilings["flops_per_s"], each.nbytes / ceilings["bytes_per_s"]) for each in layers]
    scale = backward_s / sum(floors)
    ready, sizes, now = [], [], 0.0
    for layer, floor in zip(reversed(layers), reversed(floors), strict=True):
        now += scale * floor
        ready += [now] * len(layer.gradients)
        sizes += layer.gradients
    return ready, sizes


class Case(NamedTuple):
    """A training whose step layer_roofline has measured."""

    cfg: str
    size: int
    batch: int
    step_s: float
    backward_share: float


def measured_cases() -> tuple[list[Case], dict[str, float], str]:
    """The cases of layer_roofline, with the share of backward in the rows that were timed, and the GPU's ceilings."""
    content = json.loads((RESULTS / "layer_roofline_h200_202611.json").read_text())
    cases = []
    for case in content["cases"]:
        name, size, batch = (
            case["case"].replace(",", "").split(" ")[0],
            *(int(word) for word in case["case"].replace(",", "").split() if word.isdigit()),
        )
        spent = [(row["ms"] * row["count"], row["direction"] in ("backward", "dgrad", "wgrad")) for row in case["rows"]]
        share = sum(ms for ms, is_backward in spent if is_backward) / sum(ms for ms, _ in spent)
        cases.append(Case(name, size, batch, case["step_ms"] / 1e3, share))
    return cases, content["ceilings"], content["facts"]["GPU"]


WAYS = {"25 MB": (DEFAULT_CAP, 1.0), "4 MB": (4 * 2**20, 1.0), "1 MB": (2**20, 1.0), "bf16": (DEFAULT_CAP, 0.5)}
"""Limit of a bucket, and the share of its bytes that is sent; by default buckets of 25 MB, in float32."""


def _added_s(
    ready: Sequence[float], sizes: Sequence[int], backward_s: float, link: Link, ranks: int, *, cap: int, share: float
) -> float:  # fmt: skip
    """What sums add to the step."""

    def sum_s(nbytes: float) -> float:
        return link.all_reduce_s(share * nbytes, ranks)

    return simulate(ready, sizes, backward_s, cap=cap, all_reduce_s=sum_s) - backward_s


def on_paper() -> tuple[list[str], list[dict[str, Any]]]:
    """Tables of predicted steps for several GPUs."""
    cases, ceilings, gpu = measured_cases()
    lines, numbers = [f"Computed from steps on one {gpu}, the batch of each GPU as it was there"], []
    for case in cases:
        layers = layers_of(case.cfg, case.size, case.batch)
        backward_s = case.step_s * case.backward_share
        ready, sizes = gradients_of(layers, ceilings, backward_s)
        total = sum(sizes)
        lines += [
            "",
            f"{case.cfg} {case.size} px, batch {case.batch} per GPU: step {1e3 * case.step_s:.1f} ms, of it backward "
            f"{1e3 * backward_s:.1f}; gradients {total / MB:.1f} MB in float32, {total / 2 / MB:.1f} in bf16",
            f"{'':26}{'GPUs':>5}{'sum':>8}{'added to the step, ms, by buckets':>36}{'efficiency':>15}{'needs':>12}",
            f"{'':26}{'':5}{'ms':>8}{'25 MB':>9}{'4 MB':>9}{'1 MB':>9}{'bf16':>9}{'':4}{'25 MB':>11}{'img/s':>12}",
        ]
        for link in LINKS:
            for ranks in (2, 4, 8):
                added = {
                    name: _added_s(ready, sizes, backward_s, link, ranks, cap=cap, share=share)
                    for name, (cap, share) in WAYS.items()
                }
                alone = link.all_reduce_s(total, ranks)
                step_s = case.step_s + added["25 MB"]
                needs = ranks * case.batch / step_s
                numbers.append(
                    {"case": case._asdict(), "link": link._asdict(), "ranks": ranks, "all_reduce_s": alone,
                     "added_s": added, "efficiency": case.step_s / step_s, "images_per_s": needs}
                )  # fmt: skip
                cells = "".join(f"{1e3 * seconds:9.2f}" for seconds in added.values())
                lines.append(
                    f"{link.name:26}{ranks:5}{1e3 * alone:8.2f}{cells}{'':4}{case.step_s / step_s:11.1%}{needs:12,.0f}"
                )
    lines += ["", *input_lines(numbers)]
    return lines, numbers


def input_lines(numbers: Sequence[dict[str, Any]]) -> list[str]:
    """How many cores would decode the images of every step, where they are not kept."""
    content = json.loads((RESULTS / "augment_store_h200_202611.json").read_text())
    text = (RESULTS / "augment_store_h200_202611.md").read_text()
    cores = int(content["facts"]["CPU"].split(",")[-1].split()[0])
    found = re.findall(r"^(\d+) px, CPU: ([\d,]+) img/s", text, re.MULTILINE)
    rates = {int(size): float(rate.replace(",", "")) / cores for size, rate in found}
    per_core = ", ".join(f"{rate:.0f} img/s per core at {size} px" for size, rate in rates.items())
    lines = [f"Cores that decode as fast, if images are not kept decoded (JPEG of 640 x 480, {per_core}):"]
    for number in numbers:
        size, link = number["case"]["size"], number["link"]["name"]
        if link == LINKS[0].name and size in rates:
            needed = number["images_per_s"] / rates[size]
            lines.append(f"  {number['case']['cfg']} {size} px, {number['ranks']} GPUs: {needed:,.0f} cores, "
                         f"{needed / number['ranks']:.0f} per GPU")  # fmt: skip
    return lines


# Two ranks on this machine

RANKS = 2
CAPS = {"25 MB": DEFAULT_CAP, "4 MB": 4 * 2**20, "1 MB": 2**20}
SIZE, BATCH = 96, 4
SUM_BYTES = [2**18, 2**20, 2**22, 2**24]


def rank_main(rank: int, folder: str, rounds: int) -> None:
    """One rank: measure the parts, then whole steps; the first rank writes what it found."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    found = _measure(rounds)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measure(rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    images = torch.rand(BATCH, 3, SIZE, SIZE)
    plain = network_of("yolov7-tiny").train()
    wrapped = {
        name: nn.parallel.DistributedDataParallel(network_of("yolov7-tiny").train(), bucket_cap_mb=cap / 2**20)
        for name, cap in CAPS.items()
    }
    order, ready = _ready_times(plain, images)
    for each in wrapped.values():  # the first steps find the order of gradients and form buckets by it
        for _ in range(3):
            _step(each, images)
    alone, together, sums, busy_sums, copies = [], list[float](), list[list[float]](), list[float](), []
    steps: dict[str, list[float]] = {name: [] for name in wrapped}
    readies = [ready]
    group = dist.new_group(backend="gloo")
    for _ in range(rounds):
        _step(plain, images)  # the weights and activations of another network are in the caches
        alone.append(_timed(lambda: _step(plain, images)))
        readies.append(_ready_times(plain, images)[1])
        sums.append([_timed(partial(dist.all_reduce, torch.ones(nbytes // 4))) for nbytes in SUM_BYTES])
        computing_s, busy_s = _both(plain, images, group)
        together.append(computing_s)
        busy_sums.append(busy_s)
        copies.append(_copy_bytes_per_s())
        for name, each in wrapped.items():
            _step(each, images)
            steps[name].append(_timed(partial(_step, each, images)))
    nbytes_P = [4 * plain.get_parameter(name).numel() for name in order]
    return {
        "ready_share_P": np.median([[each[name] for name in order] for each in readies], 0).tolist(),
        "nbytes_P": nbytes_P,
        "alone_s": alone,
        "together_s": together,
        "sums_s": sums,
        "busy_sum_s": busy_sums,
        "copy": copies,
        "steps_s": steps,
    }


def _step(network: nn.Module, images: torch.Tensor) -> None:
    for parameter in network.parameters():
        parameter.grad = None
    sum(each.float().square().mean() for each in network(images)).backward()


def _timed(work: Callable[[], object]) -> float:
    """Seconds of work that all ranks begin together, as long as the slowest takes."""
    dist.barrier()
    began = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _ready_times(network: nn.Module, images: torch.Tensor) -> tuple[list[str], dict[str, float]]:
    """The names of parameters in the order in which their gradients are ready, and when, as a share of the step.

    A parameter without a gradient is ready at the end.
    """
    times: dict[str, float] = {}
    began = [0.0]
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: times.__setitem__(name, time.perf_counter() - began[0])
        )
        for name, parameter in network.named_parameters()
    ]
    dist.barrier()
    began[0] = time.perf_counter()
    _step(network, images)
    step_s = time.perf_counter() - began[0]
    for hook in hooks:
        hook.remove()
    found = {name: times.get(name, step_s) / step_s for name, _ in network.named_parameters()}
    return sorted(found, key=lambda name: found[name]), found


def _both(network: nn.Module, images: torch.Tensor, group: Any) -> tuple[float, float]:
    """Seconds of a step while sums of 4 MB run one after the other, and of such a sum meanwhile."""
    buffers = [torch.ones(2**20) for _ in range(40)]
    dist.barrier()
    began = time.perf_counter()
    pending = [dist.all_reduce(each, group=group, async_op=True) for each in buffers]
    _step(network, images)
    computing_s = time.perf_counter() - began
    done = sum(work.is_completed() for work in pending)
    for work in pending:
        work.wait()
    found = torch.tensor([computing_s, computing_s / max(1, done)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def _copy_bytes_per_s() -> float:
    source = torch.ones(2**22)
    target = torch.empty_like(source)
    began = time.perf_counter()
    target.copy_(source)
    return 4 * 2**22 / (time.perf_counter() - began)


def undisturbed(seconds: Sequence[float]) -> float:
    """The fifth of the times that other programs disturbed least: their upper end."""
    return float(np.quantile(seconds, 0.2))


def check(rounds: int) -> tuple[list[str], dict[str, Any]]:
    """Predicted and measured steps of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, rounds), nprocs=RANKS)  # type: ignore[attr-defined]
        found = json.loads(Path(folder, "found.json").read_text())
    alone_s = undisturbed(found["alone_s"])
    # One hop each way for two ranks: latency and bandwidth from a line through the medians.
    slope, latency_s = np.polyfit(SUM_BYTES, [undisturbed(each) for each in zip(*found["sums_s"], strict=True)], 1)
    slope = max(slope, 1e-12)

    def sum_s(nbytes: float) -> float:
        return max(float(latency_s), 0.0) + nbytes * float(slope)

    sharing = Sharing(
        min(1.0, alone_s / undisturbed(found["together_s"])),
        min(1.0, sum_s(2**22) / undisturbed(found["busy_sum_s"])),
    )
    ready_P, nbytes_P = [alone_s * share for share in found["ready_share_P"]], found["nbytes_P"]
    copied_s = 2 * sum(nbytes_P) / max(found["copy"])  # each gradient goes to its bucket and back
    lines = [
        "",
        f"Checked: {RANKS} gloo ranks of one thread, yolov7-tiny {SIZE} px, batch {BATCH} per rank, {rounds} rounds",
        f"gradients {sum(nbytes_P) / MB:.1f} MB; gloo {max(latency_s, 0) * 1e3:.2f} ms and {1 / slope / 1e9:.2f} GB/s; "
        f"a step without sums {1e3 * alone_s:.0f} ms; while sums run, backward has {sharing.compute:.0%} of its speed, "
        f"and a sum {sharing.communicate:.0%}",
        f"{'buckets':>10}{'predicted, ms':>16}{'measured, ms (range)':>28}{'error':>9}",
    ]
    errors = {}
    for name, cap in CAPS.items():
        predicted_s = copied_s + simulate(ready_P, nbytes_P, alone_s, cap=cap, all_reduce_s=sum_s, sharing=sharing)
        measured = found["steps_s"][name]
        errors[name] = predicted_s / undisturbed(measured) - 1
        spread = f"{1e3 * undisturbed(measured):.0f} ({1e3 * min(measured):.0f}-{1e3 * max(measured):.0f})"
        lines.append(f"{name:>10}{1e3 * predicted_s:16.0f}{spread:>28}{errors[name]:9.0%}")
    naive = {name: (alone_s + sum_s(sum(nbytes_P))) / undisturbed(found["steps_s"][name]) - 1 for name in CAPS}
    lines.append(
        f"without overlap (step and one sum added): error {', '.join(f'{each:+.0%}' for each in naive.values())}"
    )
    return lines, {"found": found, "sharing": sharing._asdict(), "errors": errors, "naive_errors": naive}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    options = parser.parse_args()
    print(facts_line(), flush=True)
    load = noise.listen().line()
    lines, computed = on_paper()
    checked_lines, checked = check(3 if options.quick else options.rounds)
    report(
        "several_gpus", "\n".join([load, *lines, *checked_lines]), {"computed": computed, "checked": checked}, options
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
