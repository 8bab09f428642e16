"""What do voxels cost on the GPU, and does a training with the shipped config wait for its input?

Generated 720p data: one sequence of PNG frames and packed streams of 88 x 360 x 640. A batch of
data/spike/gopro_balanced.yaml (4 clips of 5 crops of 256 px, 5 bins) is made on the GPU from resident packed bytes -
unpack and count, then also crop the frames, then convert the bytes to the network's input - and by one core from the
store; the bytes are compared. Trainings with that config by `flatout spike train` are timed as shipped (store), with
everything resident on the GPU, and without a store (PNG files on every visit): the share of the step that waits for
input, from the second epoch on. Needs a CUDA GPU.
Exit code 1 if the shipped config waits more than 2 % of the step. If interrupted (Ctrl-C, SIGINT, SIGTERM), it reports
what was completed. Answer: bench/results/spike_gpu_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.cut_short import NOTE, heed_signals
from bench.device_copy import time_on_device
from bench.measure import Timing, arguments, facts_line, measure, report
from bench.promises import Criterion
from bench.spike_clips import write_frames
from flatout.clock import machine
from flatout.feed import Out
from flatout.feed.device_store import DeviceStore
from flatout.spike.config import DataConfig, SpikeConfig, load_config
from flatout.spike.data.clip_set import ClipSet, open_clips
from flatout.spike.data.frames import Frames
from flatout.spike.data.source import ClipParameterSource, crop_boxes
from flatout.spike.input import GIB, ClipRenderer, open_store, training_source
from flatout.spike.step import ToClip

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "data/spike/gopro_balanced.yaml"
SIZE_HW = (720, 1280)
NUM_FRAMES = 104
EPOCHS = 4
SHIPPED = "shipped: store"
WAYS = {
    SHIPPED: (),
    "all resident on the GPU": ("TRAIN.DEVICE_RESIDENT=true",),
    "no store: PNG every time": ("DATA.USE_RAM_CACHE=false",),
}
MAX_WAIT_SHARE = 0.02
QUICK = (
    "DATA.CROP_SIZE=32", "DATA.CLIP_LEN=2", "DATA.CACHE_SIZE_GB=0.1", "DATALOADER.TOTAL_WORKERS=1",
    "MODEL.WIDTH=4", "MODEL.ENC_BLOCKS=[1,1]", "MODEL.DEC_BLOCKS=[1,1]",
)  # fmt: skip


class InputWait(NamedTuple):
    """Means per step of a training from its second epoch on."""

    step_ms: float
    wait_ms: float
    clips_per_s: float
    seconds: float
    """Duration of the whole command."""

    @property
    def share(self) -> float:
        return self.wait_ms / self.step_ms


def main() -> int:
    """Generate data, measure, report, and check the promise; returns the exit code."""
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available() and not options.quick:
        print("This benchmark needs a CUDA GPU.")
        return 2
    heed_signals()
    print(facts_line(), flush=True)
    found = Measurements()
    try:
        measure_all(found, options.quick)
    except KeyboardInterrupt:
        print(NOTE, flush=True)
    return _write_report(found, options)


@dataclass
class Measurements:
    """The measurements so far."""

    binning: dict[str, Timing] = field(default_factory=dict)
    trainings: dict[str, InputWait] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.trainings) == len(WAYS)

    def promise(self) -> Criterion:
        """The promise about the shipped config; only after its training."""
        share = 100 * self.trainings[SHIPPED].share
        return Criterion(promise="shipped config: waiting / step", value=share, limit=100 * MAX_WAIT_SHARE, unit=" %")


def measure_all(found: Measurements, quick: bool) -> None:
    """Measure everything; first what the promise is about."""
    size_hw, num_frames = ((72, 128), 8) if quick else (SIZE_HW, NUM_FRAMES)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        write_sequence(Path(name) / "train/seq", size_hw, num_frames)
        print(f"{num_frames} frames generated in {time.perf_counter() - began:.1f} s", flush=True)
        changes = [*(QUICK if quick else ()), f"DATA.ROOT={name}"]
        changes += [f"DATA.SPIKE_H={size_hw[0] // 2}", f"DATA.SPIKE_W={size_hw[1] // 2}"]
        found.trainings[SHIPPED] = train(Path(name), SHIPPED, changes)
        print(found.promise(), flush=True)
        found.binning = measure_binning(load_config(CONFIG, changes), device, repeats=3 if quick else 30)
        print("\n".join(_binning_lines(found.binning)), flush=True)
        for way, extra in WAYS.items():
            if way not in found.trainings:
                found.trainings[way] = train(Path(name), way, [*changes, *extra])


def write_sequence(folder: Path, size_hw: tuple[int, int], num_frames: int) -> None:
    """Write a sequence with as many processes as there are cores, because PNG compression takes time."""
    cores = machine.cores().usable
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        parts = [range(first, num_frames, cores) for first in range(min(cores, num_frames))]
        list(pool.map(write_frames, *zip(*((folder, *size_hw, part) for part in parts), strict=True)))


def measure_binning(config: SpikeConfig, device: torch.device, *, repeats: int) -> dict[str, Timing]:
    """Time one batch made on the device and by one core; AssertionError unless the bytes are equal."""
    data, batch = config.DATA, config.TRAIN.BATCH_SIZE
    clips = open_clips(data, data.TRAIN_SPLIT, scored=False)
    store = open_store(clips, data, budget_bytes=int(data.CACHE_SIZE_GB * GIB), workers=machine.cores().usable)
    assert store is not None and data.CROP_SIZE is not None
    indices = np.arange(batch)
    with store:
        whole, frames = training_source(clips, data, store), Frames(clips, data, store)
        numbers = ClipParameterSource(frames, crop=data.CROP_SIZE, augment=data.AUGMENT)
        draws = whole.draw(1, 0, indices, indices)
        small, host = _arrays(numbers, batch), _arrays(whole, batch)
        numbers.read(indices, draws, Out(small))
        resident = DeviceStore(store, device, batch_items=3 * clips.clip_length * batch)
        params = {name: torch.from_numpy(array).to(device) for name, array in small.items()}
        sources = resident.sources_of(small["items"], params["items"])
        render = ClipRenderer(whole, crop=data.CROP_SIZE)
        out = {
            name: torch.empty((batch, *each.shape), dtype=each.dtype, device=device)
            for name, each in render.outputs.items()
        }
        to_clip = ToClip(data)
        on_device = {
            "GPU: unpack and count": lambda: render.count(sources, params, out["spikes"]),
            "GPU: the same, and frames cropped": lambda: render(sources, params, out),
            "GPU: bytes to rates and 0..1": lambda: to_clip(out | {"spike_frames": params["spike_frames"]}),
        }
        timed = time_on_device if device.type == "cuda" else _time_on_host
        times = {name: timed(work, repeats) for name, work in on_device.items()}
        times["one core: unpack and count"] = measure(
            lambda: _count_on_host(clips, data, frames, draws["origin"]),
            warmup=1,
            repeats=repeats,
        )
        times["one core: the same, and frames cropped"] = measure(
            lambda: whole.read(indices, draws, Out(host)), warmup=1, repeats=repeats
        )
        for name in out:
            assert np.array_equal(out[name].cpu().numpy(), host[name]), f"{name} differs between GPU and CPU"
    return times


def _arrays(source: Any, batch: int) -> dict[str, np.ndarray]:
    return {name: np.zeros((batch, *field.shape), field.dtype) for name, field in source.fields.items()}


def _time_on_host(work: Any, repeats: int) -> Timing:
    return measure(work, warmup=1, repeats=repeats)


def _count_on_host(clips: ClipSet, data: DataConfig, frames: Frames, origin_N2: np.ndarray) -> None:
    for clip, origin in enumerate(origin_N2.tolist()):
        _, box = crop_boxes(clips.sequence_of(clip), origin, data.CROP_SIZE)
        for frame in clips.windows_NL[clip].tolist():
            frames.spikes(frame, box, np.dtype(np.uint8))


def train(root: Path, way: str, changes: Sequence[str]) -> InputWait:
    """Run a training in its own process, and read its log from the second epoch on."""
    run = root / f"run-{list(WAYS).index(way)}"
    command = [sys.executable, "-m", "flatout", "spike", "train", "--config", str(CONFIG)]
    for change in (f"TRAIN.EPOCHS={EPOCHS}", f"LOG.SAVE_DIR={run}", *changes):
        command += ["--set", change]
    began = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"{way}: exit code {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()][1:]
    step_ms, wait_ms, clips_per_s = (
        mean(row[name] for row in rows) for name in ("step_ms", "wait_ms", "samples_per_s")
    )
    found = InputWait(step_ms, wait_ms, clips_per_s, seconds)
    print(_training_line(way, found), flush=True)
    return found


def _training_line(way: str, found: InputWait) -> str:
    return (
        f"{way:28} step {found.step_ms:7.1f} ms, of which waiting {found.wait_ms:7.2f} ms ({found.share:6.1%}), "
        f"{found.clips_per_s:6.1f} clips/s; command {found.seconds:.0f} s"
    )


def _binning_lines(times: dict[str, Timing]) -> list[str]:
    ratios = {
        part: times[f"one core: {part}"].median / times[f"GPU: {part}"].median
        for part in ("unpack and count", "the same, and frames cropped")
    }
    return [
        *(f"{name:42} {timing.text()}" for name, timing in times.items()),
        *(f"GPU over one core, {part}: {ratio:.1f} x" for part, ratio in ratios.items()),
    ]


def _write_report(found: Measurements, options: argparse.Namespace) -> int:
    if SHIPPED not in found.trainings:
        return 1
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = [f"GPU {name}. A batch: 4 clips of 5 frames, crop 256, 88 spike frames in 5 bins."]
    lines += _binning_lines(found.binning) if found.binning else []
    lines += ["", f"gopro_balanced.yaml, {NUM_FRAMES} frames, epochs 2 to {EPOCHS}:"]
    lines += [_training_line(way, waiting) for way, waiting in found.trainings.items()]
    lines += [str(found.promise()), *(() if found.is_whole else (NOTE,))]
    numbers = {
        "batch_ms": {way: 1e3 * timing.median for way, timing in found.binning.items()},
        "trainings": {way: waiting._asdict() | {"share": waiting.share} for way, waiting in found.trainings.items()},
    }
    report("spike_gpu", "\n".join(lines), numbers, options)
    return 0 if found.promise().passed or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
