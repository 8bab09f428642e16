"""What do several heads cost in the detection layer and in the loss?

Two measurements with yolov7-tiny-1b4h, 320 px, batch 384 (small batches on a CPU): one convolution per level for all
heads against one per head; and the loss router, plain and OTA, against the loss of a single head with 80 classes on the
same targets (promised: at most 1.3 times). The whole step: bench/multihead_step.py. The accuracy after a transfer:
bench/multihead_accuracy.py.
Answer: bench/results/multihead_<machine>_<yyyymm>.md (rewritten with --write).
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.detections import Case, make_case
from bench.device_copy import time_on_device
from bench.measure import Timing, arguments, facts_line, measure, report
from bench.promises import Criterion
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.loss import LossConfig, ota_loss, ota_router_loss, plain_loss, plain_router_loss
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network
from flatout.yolo.multihead.head_config import HeadConfig, read_head_config
from flatout.yolo.multihead.layer import MultiHeadDetect

CONFIG = LossConfig()
MAX_ROUTER = 1.3
Forward = Callable[[MultiHeadDetect, list[Tensor]], list[Tensor]]
GROUPINGS = ("standard", "geometry", "anticonfusion")


def main() -> int:
    options = arguments(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(facts_line(), flush=True)
    numbers: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    criteria: list[Criterion] = []
    lines = [numbers["device"], ""]
    for part in (convolutions, routers):
        lines += [*part(device, numbers, criteria, options), ""]
    numbers["criteria"] = [asdict(each) | {"passed": each.passed} for each in criteria]
    report("multihead", "\n".join([*lines, *map(str, criteria)]), numbers, options)
    return int(not all(each.passed for each in criteria))


def timed(fn: Callable[[], object], device: str, *, quick: bool) -> Timing:
    repeats = 3 if quick else 15
    return time_on_device(fn, repeats) if device == "cuda" else measure(fn, warmup=1, repeats=repeats)


def grouping(name: str) -> HeadConfig:
    return read_head_config(shipped_folder("data") / f"coco_320_1b4h_{name}.yaml")


# -- one convolution or four ---------------------------------------------------------------------------------------


def convolutions(
    device: str, numbers: dict[str, Any], _: list[Criterion], options: argparse.Namespace
) -> Iterator[str]:
    """Forward and backward of the detection layer alone."""
    head = build_network(load_config("yolov7-tiny-1b4h"), heads=grouping("standard")).head.to(device).train()
    assert isinstance(head, MultiHeadDetect)
    batch = 384 if device == "cuda" and not options.quick else 8
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    head.to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    xs = [
        torch.randn(batch, channels, 40 >> level, 40 >> level, device=device, dtype=dtype)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
        for level, channels in enumerate((128, 256, 512))
    ]
    ways: dict[str, Forward] = {"one per level": MultiHeadDetect.__call__, "one per head": one_by_one}
    yield f"detection layer, 320 px, batch {batch}, forward and backward"
    times = {}
    for name, forward in ways.items():
        step = functools.partial(_forward_and_backward, forward, head, xs)
        times[name] = timed(step, device, quick=options.quick)
        yield f"  convolutions: {name:14} {times[name].text()}"
    numbers["convolutions_ms"] = {name: 1e3 * timing.median for name, timing in times.items()}
    yield f"  ratio {times['one per head'].median / times['one per level'].median:.2f}"


def one_by_one(head: MultiHeadDetect, xs: list[Tensor]) -> list[Tensor]:
    """One convolution for every head and level, as in the original program."""
    levels = range(len(xs))
    return [
        F.conv2d(xs[level], conv.weight, conv.bias)
        for level in levels
        for conv in (convs[level] for convs in head.heads)  # type: ignore[index]
    ]


def _forward_and_backward(forward: Forward, head: MultiHeadDetect, xs: list[Tensor]) -> None:
    total = torch.stack([one_map.float().mean() for one_map in forward(head, xs)]).sum()
    torch.autograd.grad(total, [*head.heads.parameters(), *xs])


# -- the router ----------------------------------------------------------------------------------------------------


def routers(
    device: str, numbers: dict[str, Any], criteria: list[Criterion], options: argparse.Namespace
) -> Iterator[str]:
    """Losses with their backward pass, against that of a single head on the same targets."""
    batch = 384 if device == "cuda" and not options.quick else 8
    dtype = torch.float16 if device == "cuda" else torch.float32
    single = make_case(batch, 16, 320, device=device, dtype=dtype)
    yield f"loss with backward, 320 px, batch {batch}, 16 boxes per image" + (
        ", in a graph" if device == "cuda" else ""
    )
    for kind, loss, router in (("plain", plain_loss, plain_router_loss), ("OTA", ota_loss, ota_router_loss)):
        alone = loss_time(functools.partial(loss, *single, CONFIG), single, device, options)
        yield f"  {kind:6} one head      {alone.text()}"
        for name in GROUPINGS:
            groups = grouping(name)
            several = joined_case(single, groups)
            timing = loss_time(functools.partial(router, *several, CONFIG, groups), several, device, options)
            ratio = timing.median / alone.median
            yield f"  {kind:6} {name:13} {timing.text()}   {ratio:.2f}x"
            numbers[f"router {kind} {name}"] = {"ms": 1e3 * timing.median, "ratio": ratio}
            if device == "cuda":
                criteria.append(Criterion(promise=f"{kind} router, {name} / one head", value=ratio, limit=MAX_ROUTER))


def joined_case(single: Case, groups: HeadConfig) -> Case:
    """Joined maps for the same targets."""
    maps = []
    for one_map in single.maps:
        batch, anchors, rows, columns, _ = one_map.shape
        joined = torch.randn(batch, rows, columns, anchors * sum(groups.outputs_H), device=one_map.device).sub_(2)
        maps.append(joined.to(one_map.dtype).permute(0, 3, 1, 2).requires_grad_())
    return single._replace(maps=maps)


def loss_time(loss: Callable[[], Any], case: Case, device: str, options: argparse.Namespace) -> Timing:
    def both() -> None:
        torch.autograd.grad(loss().total, case.maps)

    if device == "cpu":
        return timed(both, device, quick=options.quick)
    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    return timed(graph.replay, device, quick=options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
