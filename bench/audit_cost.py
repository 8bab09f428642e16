"""What do the sums per label that `--audit` gathers inside a step cost?

They must take less than 2 % of a training step (forward, loss, backward). Measured with and without them, in turns, and
the sums alone: yolov7-tiny with 80 classes, OTA loss, as many labels as COCO has and 15 targets per image, as in its
mosaics. On a GPU all of these are CUDA graphs. Answer: bench/results/audit_cost_<machine>_<yyyymm>.md (rewrite it with
--write).
"""

import time
from collections.abc import Callable

import torch

from bench import noise
from bench.measure import Timing, arguments, facts_line, report, summarize
from flatout.ranks import choose_device
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import load_hyp
from flatout.yolo.label_audit.in_step import LabelSums
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network
from flatout.yolo.train.step import DetectionJob, DetectionLoss, StepInputs

LIMIT = 0.02
TARGETS_PER_IMAGE, NUM_LABELS = 15, 860_000

Call = Callable[[], None]


class Steps:
    """Training steps of one network on one batch, with and without sums per label."""

    def __init__(self, size: int, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self._network = build_network(load_config("yolov7-tiny")).to(device).train()
        self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        head = self._network.head
        config = load_hyp(find_file("hyp.scratch.tiny.yaml", flag="--hyp")).loss()
        loss = DetectionLoss(head, config.scaled(num_layers=head.nl, num_classes=head.nc, image_size_px=size), ota=True)
        self.sums = LabelSums(NUM_LABELS, loss.anchors, loss.config, device)
        on_gpu = device.type == "cuda"
        self._dtype = torch.bfloat16 if on_gpu else torch.float32
        inputs = StepInputs(dtype=self._dtype, channels_last=True, size=size, grid=32, seed=1)
        self._jobs = {has_sums: DetectionJob(inputs, loss, label_sums=self.sums if has_sums else None)
                      for has_sums in (False, True)}  # fmt: skip
        num = batch * TARGETS_PER_IMAGE
        box_T4 = torch.cat((torch.rand(num, 2), 0.03 + 0.3 * torch.rand(num, 2)), 1)
        columns = (torch.arange(num) // TARGETS_PER_IMAGE, torch.randint(head.nc, (num,)))
        self.inputs = {
            "images": torch.randint(256, (batch, 3, size, size), dtype=torch.uint8).to(device),
            "targets": torch.cat((torch.stack(columns, 1).float(), box_T4), 1).to(device),
            "label_ids": torch.randint(NUM_LABELS, (num, 1), dtype=torch.int32).to(device),
        }
        with torch.no_grad(), self._autocast():
            self._maps = self._network(self.inputs["images"].to(self._dtype) / 255)
            assigned = loss("ota", self._maps, self.inputs["targets"]).assigned
        assert assigned is not None
        self._assigned = assigned

    def _autocast(self) -> torch.autocast:
        device = self.inputs["images"].device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False)

    def step(self, *, has_sums: bool) -> None:
        with self._autocast():
            total, _ = self._jobs[has_sums].step(self._network, self.inputs)
        total.backward()
        for parameter in self._network.parameters():
            parameter.grad = None

    def sums_alone(self) -> None:
        self.sums.add(self._maps, self._assigned, self.inputs["label_ids"])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or the number of a GPU (default: %(default)s)")
    parser.add_argument("--size", type=int, default=320, help="side of the images in pixels (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="samples per step (default: %(default)s)")
    options = parser.parse_args()
    print(facts_line())
    print(noise.listen().line())
    device = choose_device(options.device)
    steps = Steps(options.size, options.batch, device)
    calls: dict[str, Call] = {
        "without": lambda: steps.step(has_sums=False),
        "with": lambda: steps.step(has_sums=True),
        "alone": steps.sums_alone,
    }
    timings = in_turns(calls, device, rounds=3 if options.quick else 41)
    share = timings["alone"].median / timings["without"].median
    whole = timings["with"].median / timings["without"].median - 1
    verdict = "PASS" if share < LIMIT else "FAIL"
    lines = [
        f"yolov7-tiny, {options.size} px, batch {options.batch}, {len(steps.inputs['targets'])} targets, "
        f"{NUM_LABELS:,} labels; device {device.type}",
        f"step without sums  {timings['without'].text()}",
        f"step with sums     {timings['with'].text()}, {100 * whole:+.2f} %",
        f"the sums alone     {timings['alone'].text()}, {100 * share:.2f} % of a step",
        f"{verdict}  the sums take {100 * share:.2f} % of a step < {100 * LIMIT:.0f} %",
    ]
    numbers = {"step": {name: timing._asdict() for name, timing in timings.items()}, "share": share}
    report("audit_cost", "\n".join(lines), numbers, options)
    return int(verdict == "FAIL")


def in_turns(calls: dict[str, Call], device: torch.device, *, rounds: int) -> dict[str, Timing]:
    """Times of the calls, one after the other in every round; on a GPU as graphs, in blocks of ten."""
    num = 1
    if device.type == "cuda":
        from bench.model_step import captured

        calls, num = {name: captured(call) for name, call in calls.items()}, 10
    durations: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds + 2):
        for name, call in calls.items():
            wait(device)
            began = time.perf_counter()
            for _ in range(num):
                call()
            wait(device)
            if round_number >= 2:
                durations[name].append((time.perf_counter() - began) / num)
    return {name: summarize(each) for name, each in durations.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
