"""How many clips per second do 1 to 8 workers load from a slow disk, and how much does the store gain?

Simulated clips of five frames (10 images, 5 streams) of 128 x 96 pixels; every read of a file takes 0, 5 or 15 ms
longer. Clips per second of a feed whose batches are discarded, in the second epoch; with the store, nothing is read any
more. Answer: bench/results/spike_loader_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import arguments, report
from flatout.feed import Feed, FeedConfig, Plan, Store
from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import ClipSet, open_clips
from flatout.spike.data.decode import Box
from flatout.spike.data.frames import Frames, Part
from flatout.spike.data.source import ClipSource
from flatout.spike.demo_data import DemoConfig, write_demo_data
from flatout.spike.input import open_store

BATCH = 4
DELAYS_MS = (0.0, 5.0, 15.0)
WORKERS = (1, 2, 4, 8)


class SlowFrames(Frames):
    """Frames on a slow disk; what a store holds is not delayed."""

    delay_s = 0.0

    def image(self, frame: int, part: Part) -> np.ndarray:
        self._wait()
        return super().image(frame, part)

    def spikes(self, frame: int, box: Box, dtype: np.dtype) -> np.ndarray:
        self._wait()
        return super().spikes(frame, box, dtype)

    def _wait(self) -> None:
        if self._store is None and self.delay_s:
            time.sleep(self.delay_s)


def main() -> None:
    """Measure and report."""
    from bench.spike_loader import SlowFrames  # under the module name that workers can import

    options = arguments(__doc__).parse_args()
    delays, workers = ((0.0,), (1, 2)) if options.quick else (DELAYS_MS, WORKERS)
    seconds = 0.5 if options.quick else 3.0
    with tempfile.TemporaryDirectory() as name:
        write_demo_data(Path(name) / "clips", DemoConfig(train=2, test=1, frames=12))
        data = DataConfig(ROOT=f"{name}/clips", CROP_SIZE=64, CLIP_LEN=5, USE_RAM_CACHE=True, CACHE_SIZE_GB=0.1)
        clips = open_clips(data, "train", scored=False)
        numbers: dict[str, Any] = {}
        lines = [f"{'clips/s, batches of ' + str(BATCH):<28}" + "".join(f"{num:>3} workers" for num in workers)]
        for delay_ms in delays:
            rates = [clips_per_s(SlowFrames, clips, data, None, num, delay_ms, seconds) for num in workers]
            numbers[f"files, {delay_ms} ms"] = dict(zip(map(str, workers), rates, strict=True))
            lines.append(f"files, {delay_ms:4.1f} ms more per read" + "".join(f"{rate:11.1f}" for rate in rates))
        store = open_store(clips, data, budget_bytes=1 << 27, workers=1)
        assert store is not None
        with store:
            rates = [clips_per_s(SlowFrames, clips, data, store, num, 15.0, seconds) for num in workers]
        numbers["store"] = dict(zip(map(str, workers), rates, strict=True))
        lines.append(f"{'store, any disk':<28}" + "".join(f"{rate:11.1f}" for rate in rates))
    report("spike_loader", "\n".join(lines), numbers, options)


def clips_per_s(
    kind: type[SlowFrames],
    clips: ClipSet,
    data: DataConfig,
    store: Store | None,
    workers: int,
    delay_ms: float,
    seconds: float,
) -> float:
    """Clips per second after the first epoch, measured for `seconds`."""
    frames = kind(clips, data, store)
    frames.delay_s = delay_ms / 1e3  # on the instance, because workers get a copy of it
    source = ClipSource(frames, crop=data.CROP_SIZE, augment=data.AUGMENT)
    plan = Plan(num_samples=len(clips), batch_size=BATCH, seed=0)
    with Feed(source, plan, FeedConfig(workers=workers, micro_batch=1, slots=6)) as feed:
        for _ in feed:
            pass
        began, num_clips = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for batch in feed:
                num_clips += len(batch)
        return num_clips / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
