"""How many boards per second does a GPU inspect, and what is included?

Answer: bench/results/defect_pairs_gpu_<machine>_<yyyymm>.md (rewrite it with --write).

Boards are pairs of 640 x 640: those of $FLATOUT_DATA/deeppcb_mini (or ../shared/data, shared/data), else generated.
Networks have base width 8 and random weights, so that the verdicts mean nothing, but the work is the same: patches of
128 px, which is the default (36 per board), or one patch of 640 px; float32 (TF32 in cuDNN, as torch does) or bfloat16.

    network               aligned planes on the GPU -> heat maps on the GPU
    alignment + network   two planes of bytes on the GPU -> aligned planes, heat maps and differences on the GPU
    files to verdicts     two JPEG files per board, read from the page cache and decoded in threads -> copied to the
                          GPU, aligned, mapped, compared, copied back -> components and heat in threads, pass or fail

Not included in files to verdicts: writing heat maps, masks, plots, tables and the report, which `flatout defect
predict` does unless it is told not to. `board by board` is as before there were batches: alignment and differences by
OpenCV, the network on the GPU; `one thread` is as it was, in the others files are read and components labelled in
threads.

`--device cpu --quick` shows that the script works. The bar is for the network alone.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.measure import arguments, measure, report
from flatout.clock import machine
from flatout.defect.compare.align import AlignConfig
from flatout.defect.compare.align_torch import align_batch
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.pairs import PairReader, list_pair_images
from flatout.defect.evaluate.blobs import Blob, inspect_blobs
from flatout.defect.evaluate.maps import (
    DeviceMapMaker,
    HeatMapper,
    HostMapMaker,
    MapMaker,
    Mapped,
    _Found,
    _Graph,
    map_images,
    open_mapper,
)
from flatout.defect.model import DefectNet
from flatout.defect.patches import Grid
from flatout.ranks import choose_device

MIN_BOARDS_PER_S = 1500
SIDE = 640
LATEST_S = 46
"""Seconds after which nothing further is begun."""
STREAM_S = 1.2
"""Seconds that a rate from files to verdicts is measured for."""
NETWORKS = {
    f"{name}, {patches}": (dtype, patch)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    for patches, patch in (("patches of 128 px", 128), ("one patch of 640 px", SIDE))
}

TYPICAL = "bfloat16, patches of 128 px"
LAUNCHED = (f"network, {TYPICAL}", f"alignment and network, {TYPICAL}")
"""What is also measured without a CUDA graph."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="", help="number of the GPU, or cpu (default: the first GPU)")
    options = parser.parse_args()
    run = Run(choose_device(options.device), is_quick=options.quick)
    with tempfile.TemporaryDirectory() as folder:
        run.everything(_boards(Path(folder), 4 if options.quick else 90))
    report("defect_pairs_gpu", "\n".join(run.lines), run.numbers, options)
    if run.has_failed:
        raise SystemExit(1)


def _boards(folder: Path, num: int) -> list[EvaluationImage]:
    """Pairs of 640 x 640."""
    for root in (os.environ.get("FLATOUT_DATA"), "../shared/data", "shared/data"):
        data = Path(root or "none") / "deeppcb_mini"
        if data.is_dir():
            return [*list_pair_images(data / "val"), *list_pair_images(data / "train")][:num]
    rng = np.random.default_rng(0)
    for number in range(num):
        wide = cv2.GaussianBlur(rng.random((SIDE + 8, SIDE + 8)).astype(np.float32), (0, 0), 7)
        board = ((wide > np.median(wide)) * 255).astype(np.uint8)
        for kind, image in (("temp", board[4:-4, 4:-4]), ("test", board[2:-6, 5:-3].copy())):
            if kind == "test":
                for y, x in rng.integers(40, SIDE - 40, (6, 2)):
                    image[y : y + 9, x : x + 9] = 255 - image[y : y + 9, x : x + 9]
            (folder / kind).mkdir(exist_ok=True)
            cv2.imwrite(str(folder / kind / f"{number:03}.jpg"), image)
    return list_pair_images(folder)


class Run:
    """Measures part after part; a part that fails is reported, and the others go on."""

    def __init__(self, device: torch.device, *, is_quick: bool) -> None:
        self._device, self._is_quick = device, is_quick
        self._began_s = time.monotonic()
        self.lines: list[str] = []
        self.numbers: dict[str, Any] = {}
        self.has_failed = False

    def everything(self, images: list[EvaluationImage]) -> None:
        """All parts, the bar first."""
        self._images, self._read = images, PairReader(images, None).stored
        self._size = 2 if self._is_quick else DeviceMapMaker(None, self._device).batch_size((SIDE, SIDE))
        stored = np.stack([self._read(image.path) for image in islice(cycle(images), self._size)])
        self._stored = torch.from_numpy(stored).to(self._device)
        self._mappers = {name: self._mapper(*network) for name, network in NETWORKS.items()}
        self._say(f"boards of {SIDE} x {SIDE}, {self._size} in a batch; boards per second")
        parts = (
            self._networks, self._on_device, self._from_files, self._board_by_board, self._agreement, self._stages,
            self._kernels, self._tuned,
        )  # fmt: skip
        for part in parts:
            with self._guarded(part.__name__.strip("_")):
                part()
        self._say(f"took {time.monotonic() - self._began_s:.0f} s")

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            self._say(f"  {name}: {error}")
        except Exception as error:  # broad, so that one failure does not cost the other results
            self.has_failed = True
            self._say(f"  {name}: FAILED: {type(error).__name__}: {str(error)[:300]}")

    def _say(self, line: str) -> None:
        """A line of the answer, also shown at once: a run that is cut off has then not been for nothing."""
        self.lines.append(line)
        print(line, file=sys.stderr, flush=True)

    def _check_time(self) -> None:
        if not self._is_quick and time.monotonic() - self._began_s > LATEST_S:
            raise TimeoutError(f"the rest is left out, because {LATEST_S} s are over")

    # Parts

    def _networks(self) -> None:
        planes = self._stored[:, [0, 1, 1]].float()
        self._say("network, aligned planes and heat maps on the GPU")
        for name, mapper in self._mappers.items():
            rate = self._both_ways(f"network, {name}", partial(_heat, mapper), planes)
            self._say(f"    {'PASS' if rate >= MIN_BOARDS_PER_S else 'FAIL'}: at least {MIN_BOARDS_PER_S}")
        network = DefectNet("v1", 8).eval().to(self._device)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        kept = HeatMapper(network, partial(Grid.over, patch=128), self._device)
        self._both_ways("network, float32, patches of 128 px, as it was trained", partial(_heat, kept), planes)

    def _on_device(self) -> None:
        self._say("on the GPU, from two planes of bytes to aligned planes, heat maps and differences")
        self._both_ways("alignment", self._aligned, self._stored)
        self._both_ways("alignment and classical method", self._maker(None)._map, self._stored)
        for name, mapper in self._mappers.items():
            self._both_ways(f"alignment and network, {name}", self._maker(mapper)._map, self._stored)

    def _from_files(self) -> None:
        self._say("files to verdicts, in batches on the GPU")
        self._stream("classical method", self._maker(None))
        for name, mapper in self._mappers.items():
            self._stream(name, self._maker(mapper))

    def _board_by_board(self) -> None:
        self._say("files to verdicts, board by board: alignment and differences on the CPU")
        mapper = self._mappers["float32, patches of 128 px"]
        for name, mapped in (("classical method", None), ("float32, patches of 128 px", mapper)):
            maker = HostMapMaker(mapped, align=AlignConfig(), refines=True)
            self._stream(f"{name}, one thread", maker, threads=0)
            self._stream(f"{name}, in threads", maker)

    def _stages(self) -> None:
        """What the host does for the batches, each alone."""
        self._say(f"stages of the host alone, {machine.cores().usable} threads")
        num = 6 if self._is_quick else 400
        images = list(islice(cycle(self._images), num))
        with ThreadPoolExecutor(machine.cores().usable) as threads:
            for name, call in (
                ("files to planes", lambda image: self._read(image.path)),
                ("components and verdict", self._finisher()),
            ):
                list(threads.map(call, images[:8]))
                began = time.perf_counter()
                list(threads.map(call, images))
                self._note(name, num / (time.perf_counter() - began))

    def _agreement(self) -> None:
        """How far the batches on the GPU are from the board-by-board way."""
        few = self._images[: 2 if self._is_quick else 90]
        mapper = HeatMapper(SmoothDifference().eval(), partial(Grid.over, patch=128), self._device)
        for name, mapped in (("classical method", None), ("a smoothed difference as network", mapper)):
            both = [
                list(map_images(few, self._read, maker, _blobs))
                for maker in (HostMapMaker(mapped, align=AlignConfig(), refines=True), self._maker(mapped))
            ]
            matched = [
                [min((_distance(blob, each) for each in others), default=(np.inf, np.inf)) for blob in blobs]
                for blobs, others in zip(*both, strict=True)
            ]
            distances = np.array([each for board in matched for each in board] or [(0, 0)])
            is_near = distances[:, 0] <= 3
            num = [sum(map(len, each)) for each in both]
            self._say(
                f"  {name}: {num[0]} blobs board by board, {num[1]} in batches; {int((~is_near).sum())} without one "
                f"within 3 px; scores of the others differ by at most {distances[is_near, 1].max(initial=0):.4f}"
            )
            self.numbers[f"agreement, {name}"] = {"blobs": num, "far": int((~is_near).sum())}
        planes = self._stored[:2, [0, 1, 1]].float()
        full, half = (
            self._mappers[f"{name}, patches of 128 px"].probability(planes) for name in ("float32", "bfloat16")
        )
        self._say(f"  network, bfloat16 and float32: probabilities differ by at most {(full - half).abs().max():.4f}")

    def _kernels(self) -> None:
        """Where the time of a batch goes."""
        if self._device.type != "cuda":
            return
        run = self._maker(self._mappers[TYPICAL])._map
        with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run(self._stored)
            torch.cuda.synchronize()
        rows = sorted(profiled.key_averages(), key=lambda row: -row.self_device_time_total)
        total_us = sum(row.self_device_time_total for row in rows)
        self._say(f"kernels of a batch, {TYPICAL}: {total_us / 1e3:.1f} ms")
        for row in rows[:16]:
            self._say(f"  {row.self_device_time_total / 1e3:7.2f} ms  {row.count:4}x  {row.key[:90]}")

    def _tuned(self) -> None:
        """What cuDNN's search for the fastest kernels would bring; commands do not search, because it takes seconds."""
        if self._device.type != "cuda":
            return
        planes = self._stored[:, [0, 1, 1]].float()
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            self._both_ways(f"network, {TYPICAL}, kernels searched", partial(_heat, self._mappers[TYPICAL]), planes)
        finally:
            torch.backends.cudnn.benchmark = before

    # Ways

    def _mapper(self, dtype: torch.dtype, patch: int) -> HeatMapper:
        torch.manual_seed(0)
        return open_mapper(DefectNet("v1", 8).eval(), partial(Grid.over, patch=patch), self._device, dtype=dtype)

    def _maker(self, mapper: HeatMapper | None) -> DeviceMapMaker:
        maker = DeviceMapMaker(mapper, self._device, align=AlignConfig(), refines=True)
        maker.batch_size = lambda shape_hw: self._size  # type: ignore[method-assign]
        return maker

    def _aligned(self, stored: Tensor) -> _Found:
        return _Found({}, align_batch(stored[:, 0].float(), stored[:, 1].float()).reference_BHW[:, None])

    def _finisher(self) -> Callable[[EvaluationImage], object]:
        (finish,) = self._maker(self._mappers["float32, one patch of 640 px"]).run([self._read(self._images[0].path)])()
        return lambda image: _blobs(image, finish())

    # Timing

    @torch.inference_mode()
    def _both_ways(self, name: str, run: Callable[[Tensor], _Found], batch: Tensor) -> float:
        """Boards per second as a CUDA graph, as folders are inspected; of LAUNCHED also launched by the host."""
        self._check_time()
        if self._device.type != "cuda" or name in LAUNCHED:
            launched = self._rate(name, lambda: run(batch))
        else:
            self._drained(lambda: run(batch))  # kernels are compiled
        if self._device.type != "cuda":
            return launched
        try:
            graph = _Graph(run, batch.clone())
        except RuntimeError as error:
            self.has_failed = True
            self._say(f"    it cannot be captured as a graph: {str(error)[:300]}")
            return self._rate(name, lambda: run(batch))
        return self._rate(f"{name}, as a graph", lambda: graph(batch))

    def _rate(self, name: str, call: Callable[[], object]) -> float:
        warmup, repeats = (0, 1) if self._is_quick else (3, 9)
        timing = measure(partial(self._drained, call), warmup=warmup, repeats=repeats)
        rate, slow, fast = (self._size / seconds for seconds in (timing.median, timing.p90, timing.p10))
        self.numbers[name] = {"median": rate, "p10": slow, "p90": fast}
        self._say(f"  {name:<72} {rate:8.1f} (p10 {slow:.1f}, p90 {fast:.1f})")
        return rate

    def _drained(self, call: Callable[[], object]) -> None:
        call()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _stream(self, name: str, maker: MapMaker, threads: int | None = None) -> None:
        """Boards per second from files to verdicts, after a warm-up that tells how many boards take STREAM_S."""
        self._check_time()
        few = 2 if self._is_quick else 4 * self._size if isinstance(maker, DeviceMapMaker) else 12
        num = few
        if not self._is_quick:
            self._verdicts(maker, few, threads)  # kernels are compiled and graphs captured
            began = time.perf_counter()
            self._verdicts(maker, few, threads)
            num = max(few, int(few / (time.perf_counter() - began) * STREAM_S))
        began, cpu_began = time.perf_counter(), time.process_time()
        assert len(self._verdicts(maker, num, threads)) == num
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        self._note(name, num / seconds, f", {num} boards, {1e3 * cpu_s / num:.1f} ms of CPU time each")

    def _verdicts(self, maker: MapMaker, num: int, threads: int | None) -> list[bool]:
        """Whether the first `num` boards fail; from the beginning again if there are not so many."""
        images = islice(cycle(self._images), num)
        return [bool(blobs) for blobs in map_images(images, self._read, maker, _blobs, threads=threads)]

    def _note(self, name: str, rate: float, more: str = "") -> None:
        self._say(f"  {name:<72} {rate:8.1f}{more}")
        self.numbers[f"{len(self.numbers)}: {name}"] = rate


class SmoothDifference(nn.Module):
    """A network that knows what a defect is: the difference of target and ref1, averaged over 3 x 3 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        difference = F.avg_pool2d((x[:, :1] - x[:, 1:2]).abs(), 3, 1, 1)
        return torch.cat((torch.zeros_like(difference), 12 * (difference - 0.35)), 1)


def _heat(mapper: HeatMapper, planes_BCHW: Tensor) -> _Found:
    return _Found({"heat": mapper.probability(planes_BCHW)}, None)


def _blobs(image: EvaluationImage, mapped: Mapped) -> list[Blob]:
    """What a verdict needs: an image passes if it has no blob."""
    return inspect_blobs(mapped.heat_HW, 0.5).blobs


def _distance(one: Blob, other: Blob) -> tuple[float, float]:
    """Largest distance of the sides of two boxes, and difference of the scores."""
    return max(abs(a - b) for a, b in zip(one[:4], other[:4], strict=True)), abs(one.score - other.score)


if __name__ == "__main__":
    main()
