"""What does a hash of every step cost, and how long does it take to replay one?

The hash must take less than 1 % of a training step: measured alone, on the batches of a real training of yolov7-tiny,
beside the steps themselves. On a GPU, where the host queues work ahead of it, the device's time counts: that of hashes
in a CUDA graph, ten at a time; what the host takes for one is printed beside it.
Answer: bench/results/replay_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch

import flatout.yolo
from bench import noise
from bench.measure import Timing, arguments, facts_line, measure, report, summarize
from flatout.engine import Batches, hash_inputs
from flatout.engine.step_hash import HashLog
from flatout.feed import DeviceBatch
from flatout.ranks import choose_device
from flatout.runs import Seams
from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import train

LIMIT = 0.01
REPLAY_LIMIT_S = 2.0
BATCH = 16


class Watched:
    """The batches of a training; notes when each is asked for, and keeps the last."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.began_s: list[float] = []
        self.inputs: dict[str, torch.Tensor] = {}

    @property
    def device_wait_s(self) -> float:
        return self._batches.device_wait_s

    @property
    def fill_wait_s(self) -> float:
        return self._batches.fill_wait_s

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DeviceBatch]:
        for batch in self._batches.epoch(epoch, start):
            self.began_s.append(time.perf_counter())
            self.inputs = {name: batch[name].clone() for name in ("images", "targets")}
            yield batch

    @property
    def step(self) -> Timing:
        """Time from one step to the next, without the first ones."""
        return summarize([after - before for before, after in pairwise(self.began_s[2:])])


def trained(folder: Path, size: int, num_images: int, device: str, batch: int) -> tuple[Path, Watched]:
    write_demo_data(folder / "data", DemoDataConfig(images=num_images, val=4, seed=1))
    options = TrainOptions(
        weights="",
        cfg="yolov7-tiny.yaml",
        data=str(next((folder / "data").glob("*.yaml"))),
        hyp="hyp.scratch.tiny.yaml",
        epochs=1,
        batch_size=batch,
        img_size=(size, size),
        device=device,
        workers=2,
        notest=True,
        noautoanchor=True,
        fast=device != "cpu",
        project=str(folder / "runs"),
    )
    watched: list[Watched] = []

    def watch(batches: Batches) -> Watched:
        watched.append(Watched(batches))
        return watched[0]

    result = train(options, seams=Seams(batches=watch, plots=False))
    assert result is not None
    return result.folder, watched[0]


def hash_time(inputs: dict[str, torch.Tensor], device: torch.device, repeats: int) -> Timing:
    """Time of the hash of one step, in blocks of ten that end with a wait for the device."""
    log = HashLog(20, device)

    def ten() -> None:
        for step in range(10):
            log.put(0, step, inputs)
        log.drain()

    block = measure(ten, warmup=3, repeats=repeats)
    return Timing(*(seconds / 10 for seconds in block))


def device_time(inputs: dict[str, torch.Tensor], repeats: int) -> Timing:
    """Time that a GPU takes for the hash of a step."""
    from bench.model_step import captured

    def hash_once() -> None:
        hash_inputs(inputs)

    replay = captured(hash_once)

    def ten() -> None:
        for _ in range(10):
            replay()
        torch.cuda.synchronize()

    return Timing(*(seconds / 10 for seconds in measure(ten, warmup=3, repeats=repeats)))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or the number of a GPU (default: %(default)s)")
    parser.add_argument("--size", type=int, default=320, help="side of the images in pixels (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples per step (default: %(default)s)")
    options = parser.parse_args()
    num_steps, repeats = (6, 5) if options.quick else (14, 21)
    print(facts_line())
    print(noise.listen().line())
    device = choose_device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        run, steps = trained(Path(folder), options.size, num_steps * options.batch, options.device, options.batch)
        host = hash_time(steps.inputs, device, repeats)
        hashed = device_time(steps.inputs, repeats) if device.type == "cuda" else host
        out = Path(folder) / "out"
        pixels = measure(
            lambda: flatout.yolo.replay(run, epoch=0, step=2, losses=False).save(out), warmup=1, repeats=repeats // 4
        )
        whole = measure(lambda: flatout.yolo.replay(run, epoch=0, step=2).save(out), warmup=1, repeats=repeats // 4)
        identical = flatout.yolo.replay(run, epoch=0, step=2, losses=False).identical
        file = measure(lambda: flatout.yolo.appearances(run, "0003.jpg"), warmup=1, repeats=repeats // 4)
    share = hashed.median / steps.step.median
    verdict = "PASS" if share < LIMIT and pixels.median < REPLAY_LIMIT_S and identical else "FAIL"
    shape = "x".join(map(str, steps.inputs["images"].shape))
    lines = [
        f"images {shape} {steps.inputs['images'].dtype} on {device}",
        f"training step             {steps.step.text()}",
        f"hash of a step            {hashed.text()}, {share:.3%} of it (limit {LIMIT:.0%})",
        *([f"the host takes            {host.text()} for it"] if device.type == "cuda" else []),
        f"replay, images and sheet  {pixels.text('s')} (limit {REPLAY_LIMIT_S:g} s for a batch of {BATCH} on a CPU)",
        f"the same with losses      {whole.text('s')}",
        f"appearances of a file     {file.text('s')}",
        f"{verdict}: identical: {identical}",
    ]
    numbers = {
        "share": share,
        "step_s": steps.step.median,
        "hash_s": hashed.median,
        "host_s": host.median,
        "replay_s": pixels.median,
    }
    report("replay", "\n".join(lines), numbers, options)
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
