"""What does the OTA loss cost on a GPU, forward and backward down to the prediction maps?

It is compared with our plain loss and with the reference implementation, the twin, which assigns one image at a time
(tests/reference/ota_twin.py). Times are medians between CUDA events around consecutive calls, so they include the
launches; `graph` is a replay of the same calls captured in a CUDA graph. MiB: peak memory beyond the maps and their
gradients. Needs a CUDA GPU.

Answer: bench/results/loss_<machine>_<yyyymm>.md (rewritten with --write).
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from bench.detections import Case, make_case
from bench.device_copy import time_on_device
from bench.measure import arguments, facts_line, report
from flatout.yolo.loss import LossConfig, LossParts, ota_loss, plain_loss
from tests.reference.ota_twin import class_cost_in_closed_form, twin_assign, twin_loss

Loss = Callable[..., LossParts]
CONFIG = LossConfig()


class Setting(NamedTuple):
    """A network, input size and batch size; the maps of tiny and of yolov7 have the same shapes."""

    name: str
    size_px: int
    batch_size: int
    limit_ms: float | None
    original_ms: int | None
    """Forward pass of the original OTA loss on such a GPU, a quoted constant."""


SETTINGS = (
    Setting("tiny 320 b384", 320, 384, 5, 3046),
    Setting("yolov7 320 b64", 320, 64, 3, 488),
    Setting("yolov7 640 b64", 640, 64, 5, 532),
    Setting("tiny 640 b128", 640, 128, None, 766),
    Setting("tiny 320 b16", 320, 16, None, None),
)


class Cost(NamedTuple):
    """Milliseconds of the forward pass, of forward and backward, and of a CUDA graph of both; extra MiB."""

    forward_ms: float
    both_ms: float
    graph_ms: float
    extra_mib: float


def cost_of(loss: Loss, case: Case, repeats: int) -> Cost:
    """Measure one loss."""

    def forward() -> LossParts:
        return loss(*case, CONFIG)

    def both() -> list[torch.Tensor]:
        return list(torch.autograd.grad(forward().total, case.maps))

    forward_ms, both_ms = (1e3 * time_on_device(fn, repeats).median for fn in (forward, both))
    gradient_bytes = sum(one_map.nbytes for one_map in case.maps)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    extra = torch.cuda.max_memory_allocated() - before - gradient_bytes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    return Cost(forward_ms, both_ms, 1e3 * time_on_device(graph.replay, repeats).median, extra / 2**20)


def twin_ms(case: Case) -> float:
    """Wall clock of one forward pass of the reference implementation, which waits for the device all the time."""

    def forward() -> None:
        lists = twin_assign(*case[:2], *case.anchors, class_cost=class_cost_in_closed_form).lists
        twin_loss(*case[:2], lists, case.anchors.size_LA2, CONFIG)

    forward()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    forward()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def compare(setting: Setting, repeats: int, numbers: dict[str, Any]) -> Iterator[str]:
    """Compare plain loss, OTA and the reference implementation in one setting."""
    for dtype in (torch.float32, torch.float16):
        case = make_case(setting.batch_size, 16, setting.size_px, device="cuda", dtype=dtype)
        plain, ota = (cost_of(loss, case, repeats) for loss in (plain_loss, ota_loss))
        many = make_case(setting.batch_size, 60, setting.size_px, device="cuda", dtype=dtype)
        ota_60 = cost_of(ota_loss, many, repeats)
        name = f"{setting.name} {'fp32' if dtype == torch.float32 else 'fp16'}"
        numbers[name] = {"plain": plain._asdict(), "ota": ota._asdict(), "ota 60 boxes": ota_60._asdict()}
        for kind, cost in (("plain", plain), ("OTA", ota), ("OTA 60", ota_60)):
            yield f"{name:20} {kind:7}" + "".join(f"{number:9.2f}" for number in cost)
        if dtype == torch.float32:
            twin = numbers[name]["twin forward_ms"] = twin_ms(case)
            quoted = f", original {setting.original_ms} ms" if setting.original_ms else ""
            yield f"{'':20} twin   {twin:9.0f}   {twin / ota.forward_ms:.0f}x our OTA forward{quoted}"
        yield from promises(setting, plain, ota, ota_60)


def promises(setting: Setting, plain: Cost, ota: Cost, ota_60: Cost) -> Iterator[str]:
    """PASS or FAIL for each promised limit."""
    if setting.limit_ms:
        yield verdict(ota.both_ms <= setting.limit_ms, f"OTA forward + backward <= {setting.limit_ms} ms")
    yield verdict(ota.both_ms - plain.both_ms <= 2, f"OTA - plain {ota.both_ms - plain.both_ms:.2f} <= 2 ms")
    ratio = ota_60.both_ms / ota.both_ms
    yield verdict(ratio <= 2 and ota_60.extra_mib < 1024, f"60 boxes / 16 boxes {ratio:.2f} <= 2, extra < 1024 MiB")


def verdict(kept: bool, promise: str) -> str:
    return f"{'':20} {'PASS' if kept else 'FAIL'}: {promise}"


def sweep(repeats: int, numbers: dict[str, Any], *, quick: bool) -> Iterator[str]:
    """Time as a function of boxes per image and of the batch size, 320 px, fp16 maps."""
    boxes_and_batches = [(boxes, 384) for boxes in (1, 4, 16, 60, 120, 200)]
    boxes_and_batches += [(16, batch) for batch in (16, 64, 256, 1024)]
    if quick:
        boxes_and_batches = [(1, 16), (16, 16)]
    yield f"{'boxes':>6} {'batch':>6} {'forward':>9}{'both':>9}{'graph':>9}{'MiB':>9}   (OTA, 320 px, fp16)"
    for boxes, batch_size in boxes_and_batches:
        case = make_case(batch_size, boxes, 320, device="cuda", dtype=torch.float16)
        cost = cost_of(ota_loss, case, repeats)
        numbers[f"sweep {boxes} boxes, batch {batch_size}"] = cost._asdict()
        yield f"{boxes:6} {batch_size:6} " + "".join(f"{number:9.2f}" for number in cost)


def crowd(repeats: int, numbers: dict[str, Any]) -> Iterator[str]:
    """One image with 5,000 boxes in a batch of 16."""
    calm, full = (make_case(16, 16, 640, device="cuda", dtype=torch.float16, crowd=num) for num in (0, 5000))
    without, with_crowd = (cost_of(ota_loss, case, repeats) for case in (calm, full))
    numbers["crowd"] = with_crowd._asdict()
    more_ms, more_mib = with_crowd.both_ms - without.both_ms, with_crowd.extra_mib - without.extra_mib
    kept = more_ms < 1000 and more_mib < 2e9 / 2**20
    yield verdict(kept, f"an image with 5,000 boxes in a batch of 16: {more_ms:.2f} ms, {more_mib:.0f} MiB more")


def main() -> int:
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU.")
        return 1
    print(facts_line())
    repeats = 5 if options.quick else 30
    numbers: dict[str, Any] = {"GPU": torch.cuda.get_device_name()}
    lines = [f"GPU {numbers['GPU']}; 80 classes, 16 boxes per image, times in ms"]
    lines.append(f"{'':28}{'forward':>9}{'both':>9}{'graph':>9}{'MiB':>9}")
    for setting in SETTINGS[-1:] if options.quick else SETTINGS:
        lines += compare(setting, repeats, numbers)
    lines += sweep(repeats, numbers, quick=options.quick)
    lines += crowd(repeats, numbers)
    report("loss", "\n".join(lines), numbers, options)
    return int(any("FAIL" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
