"""How long does a training of COCO's size take from the command to the weights, and how fast is it on small machines?

118,287 JPEG files of 640 x 480 px and about 115 kB to train, 5,000 to validate, 80 classes, 7 labels per image. Files
are hard links to a few hundred different images, so that they are quickly written: decoding costs the same, and pages
are cached as after the first pass over a real set.

whole   `train.py --fast`, yolov7-tiny, 320 px, batch 384, 3 epochs, beside another checkout (--code) in the same run.
        The GPU's load is sampled from outside (NVML): when it first is busy, and how long it idles after that.
caps    The same at batch 128 for --steps steps: on the whole machine, then with 24 and 12 GB of GPU memory left (a
        ballast takes the rest), 32 GB of RAM (a control group, or a ballast) and 8 and 4 cores (taskset). Another
        process holds the decoded images in its memory, as an earlier run would, so that the runs do not wait for
        decoding; what decoding costs is in `whole`.
Answer: bench/results/coco_sized_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import cv2
import numpy as np

from bench.measure import arguments, facts_line, report

ROOT = Path(__file__).resolve().parents[1]
NUM_CLASSES, LABELS_PER_IMAGE = 80, 7
WIDTH, HEIGHT, BYTES = 640, 480, 115_000
STEP = re.compile(r"(\d+)/(\d+)\s+\d+ %")
LEFT = re.compile(r"(?:(\d+):)?(\d+):(\d\d) left")
RATE = re.compile(r"([\d,.]+) (?:img|images|samples)/s")


# The data set


def write_set(folder: Path, num_train: int, num_val: int, num_different: int) -> Path:
    """Images, labels and a data YAML, unless they are there."""
    yaml = folder / "coco_sized.yaml"
    if yaml.is_file():
        return yaml
    originals = folder / "originals"
    originals.mkdir(parents=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_original, [originals] * num_different, range(num_different), chunksize=8))
        for split, count in (("train", num_train), ("val", num_val)):
            for kind in ("images", "labels"):
                (folder / kind / split).mkdir(parents=True)
            parts = [range(begin, count, 64) for begin in range(64)]
            jobs = [(folder, split, part, num_different) for part in parts]
            list(pool.map(write_files, *zip(*jobs, strict=True)))
    names = ", ".join(f"class{number}" for number in range(NUM_CLASSES))
    paths = {split: (folder / "images" / split).resolve() for split in ("train", "val")}
    yaml.write_text(f"train: {paths['train']}\nval: {paths['val']}\nnames: [{names}]\n")
    return yaml


def write_original(folder: Path, number: int) -> None:
    """A smooth image with as much noise as makes a file of about BYTES."""
    rng = np.random.default_rng(number)
    coarse = cv2.resize(rng.integers(0, 256, (12, 16, 3), np.uint8), (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    noise = cv2.GaussianBlur(rng.normal(0, 40, (HEIGHT, WIDTH, 3)).astype(np.float32), (0, 0), 0.8)
    image = np.clip(coarse + noise, 0, 255).astype(np.uint8)
    for quality in range(96, 50, -3):
        encoded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
        if len(encoded) <= BYTES:
            break
    (folder / f"{number:04}.jpg").write_bytes(encoded.tobytes())


def write_files(folder: Path, split: str, numbers: range, num_different: int) -> None:
    for number in numbers:
        rng = np.random.default_rng([1, number, len(split)])
        os.link(folder / f"originals/{number % num_different:04}.jpg", folder / f"images/{split}/{number:06}.jpg")
        wh_n2 = rng.uniform(0.05, 0.4, (LABELS_PER_IMAGE, 2))
        centre_n2 = wh_n2 / 2 + rng.random((LABELS_PER_IMAGE, 2)) * (1 - wh_n2)
        rows = np.column_stack((rng.integers(NUM_CLASSES, size=LABELS_PER_IMAGE), centre_n2, wh_n2))
        text = "".join(f"{int(row[0])} " + " ".join(f"{value:.6f}" for value in row[1:]) + "\n" for row in rows)
        (folder / f"labels/{split}/{number:06}.txt").write_text(text)


# One training, watched from outside


class Watched(NamedTuple):
    """A training and what was seen of it. Times are seconds since the command."""

    lines: list[tuple[float, str]]
    busy: list[tuple[float, int]]
    """Load of the GPU in percent, sampled."""
    whole_s: float
    exit_code: int

    @property
    def first_busy_s(self) -> float:
        """From when on the GPU works: the first two seconds in a row with a load of at least 50 %."""
        for at_s, _ in self.busy:
            loads = [load for then_s, load in self.busy if at_s <= then_s < at_s + 2]
            if min(loads, default=0) >= 50:
                return at_s
        return float("nan")

    def idle(self, until_s: float) -> list[tuple[float, float]]:
        """Begin and length of every time in which the GPU did nothing for half a second, after it was first busy."""
        found, began_s = [], None
        for at_s, load in self.busy:
            if not self.first_busy_s <= at_s <= until_s:
                continue
            if load < 5 and began_s is None:
                began_s = at_s
            if load >= 5 and began_s is not None:
                if at_s - began_s >= 0.5:
                    found.append((began_s, at_s - began_s))
                began_s = None
        return found

    @property
    def left_off(self) -> float:
        """The largest factor by which a line after the first 20 steps was wrong about the time left."""
        worst = 1.0
        for at_s, line in self.lines:
            step, left = STEP.search(line), LEFT.search(line)
            true_s = self.whole_s - at_s
            if not step or not left or int(step[1]) < 20 or true_s < 5:
                continue
            said_s = int(left[1] or 0) * 3600 + int(left[2]) * 60 + int(left[3])
            worst = max(worst, (said_s + 1) / true_s, true_s / (said_s + 1))
        return worst

    @property
    def rates(self) -> list[float]:
        return [float(found[1].replace(",", "")) for _, line in self.lines if (found := RATE.search(line))]


def train(
    checkout: Path,
    data: Path,
    project: Path,
    *,
    batch: int,
    size: int = 320,
    epochs: int = 3,
    device: str,
    words: Sequence[str] = (),
    cores: int = 0,
    steps: int = 0,
    group: Path | None = None,
) -> Watched:
    """`train.py --fast` in a process of its own."""
    command = [
        sys.executable,
        "train.py",
        "--fast",
        "--weights",
        "",
        "--cfg",
        "cfg/training/yolov7-tiny.yaml",
        "--data",
    ]
    command += [str(data), "--hyp", "data/hyp.scratch.tiny.yaml", "--epochs", str(epochs), "--batch-size", str(batch)]
    command += ["--img-size", str(size), str(size), "--device", device, "--project", str(project), "--name", "run"]
    command += ["--exist-ok", "--fresh", "--log-to", "none", "--noautoanchor", *words]
    if cores:
        command = ["taskset", "-c", f"0-{cores - 1}", *command]
    env = os.environ | {"PYTHONPATH": f"{checkout}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    if steps:
        env["FLATOUT_STOP_AFTER"] = str(steps)
    lines: list[tuple[float, str]] = []
    busy: list[tuple[float, int]] = []
    began_s = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=(lambda: join_group(group)) if group else None,
    )  # fmt: skip
    ended = threading.Event()
    sampler = threading.Thread(target=sample_load, args=(busy, began_s, ended), daemon=True)
    if device != "cpu":
        sampler.start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.perf_counter() - began_s, line.rstrip()))
        print(f"  {lines[-1][0]:6.1f} s  {lines[-1][1][:150]}", flush=True)
    exit_code = process.wait()
    whole_s = time.perf_counter() - began_s
    ended.set()
    return Watched(lines, busy, whole_s, exit_code)


def sample_load(busy: list[tuple[float, int]], began_s: float, ended: threading.Event) -> None:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    while not ended.wait(0.05):
        busy.append((time.perf_counter() - began_s, int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)))


# A smaller machine


@contextmanager
def gpu_memory_left(gigabytes: float) -> Iterator[None]:
    """A process that takes all GPU memory but this."""
    code = (
        "import sys, torch\n"
        "free = torch.cuda.mem_get_info()[0] - int(float(sys.argv[1]) * 1e9)\n"
        "held = torch.empty(max(free, 1), dtype=torch.uint8, device='cuda')\n"
        "torch.cuda.synchronize()\n"
        "print(torch.cuda.mem_get_info()[0] / 1e9, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(gigabytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    print(f"GPU memory left: {float(process.stdout.readline()):.1f} GB", flush=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def ram_limit(gigabytes: float) -> Iterator[tuple[Path | None, str]]:
    """A control group with this much memory, and what it is called in the report; a ballast where none can be made."""
    for root, file in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup/unified", "memory.max"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(root) / "flatout_bench"
        with suppress(OSError):
            group.mkdir(exist_ok=True)
            (group / file).write_text(str(int(gigabytes * 1e9)))
            try:
                yield group, "a control group"
            finally:
                with suppress(OSError):
                    group.rmdir()
            return
    with suppress(OSError):
        group.rmdir()
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    code = (
        "import sys, numpy as np\nfrom concurrent.futures import ThreadPoolExecutor as P\n"
        "held = np.empty(int(sys.argv[1]), np.uint8)\n"
        "list(P(16).map(lambda part: part.fill(1), np.array_split(held, 64)))\n"
        "print('held', flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(max(1, int(available - gigabytes * 1e9)))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield None, "a ballast"
    finally:
        process.kill()
        process.wait()


def join_group(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def images_held(data: Path, size: int) -> Iterator[None]:
    """A process that keeps the decoded training images in its memory, as a run with workers does."""
    code = (
        "import sys\n"
        "from flatout.feed import Store, StoreConfig\n"
        "from flatout.ranks import World\n"
        "from flatout.yolo.augment.samples import ResizedImages\n"
        "from flatout.yolo.data.data_yaml import read_data_yaml\n"
        "from flatout.yolo.options import TrainOptions\n"
        "from flatout.yolo.train.input import open_images\n"
        "if __name__ == '__main__':\n"
        "    options = TrainOptions(data=sys.argv[1])\n"
        "    images = open_images(read_data_yaml(sys.argv[1]), options.split_config(silent=True), World())\n"
        "    items = ResizedImages(images.train, size=int(sys.argv[2]), augment=True, shrunk=True)\n"
        "    with Store.open(items, StoreConfig()) as store:\n"
        "        print(store.statistics(), flush=True)\n"
        "        sys.stdin.read()\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        began_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, file.name, str(data), str(size)],
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        print(f"{process.stdout.readline().strip()} ({time.perf_counter() - began_s:.0f} s)", flush=True)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


class Cap(NamedTuple):
    """A smaller machine; 0: as much as there is."""

    gpu_gb: float
    ram_gb: float
    cores: int

    def __str__(self) -> str:
        if not any(self):
            return "whole machine"
        cores = f"{self.cores} cores" if self.cores else "all cores"
        return f"{self.gpu_gb:g} GB of GPU memory, {self.ram_gb:g} GB of RAM, {cores}"


CAPS = (Cap(0, 0, 0), Cap(24, 32, 8), Cap(12, 32, 8), Cap(12, 32, 4))


# Parts


def whole(data: Path, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    numbers = {}
    checkouts = {"before": Path(options.code).resolve()} if options.code else {}
    for name, checkout in (checkouts | {"this checkout": ROOT}).items():
        seen = train(checkout, data, folder / "runs", batch=options.batch, epochs=options.epochs, device=options.device)
        rates = seen.rates
        idle = seen.idle(until_s=seen.whole_s - 3)
        numbers[name] = seen._asdict() | {"first_busy_s": seen.first_busy_s, "idle": idle}
        gaps = ", ".join(f"{length:.1f} s at {at:.0f} s" for at, length in idle if length >= 1) or "none"
        yield (
            f"{name:14} exit {seen.exit_code}: {seen.whole_s:6.1f} s in all; GPU busy from {seen.first_busy_s:.1f} s "
            f"on, idle for {sum(length for _, length in idle):.1f} s after that (a second or longer: {gaps}); "
            f"{median(rates) if rates else 0:,.0f} img/s; time left wrong by up to {seen.left_off:.1f}x",
            None,
        )
    yield "", numbers


def caps(data: Path, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    numbers: dict[str, Any] = {}
    with images_held(data, 320):
        for cap in CAPS[: 1 if options.quick else None]:
            with ExitStack() as stack:
                how, group = "", None
                if cap.gpu_gb:
                    stack.enter_context(gpu_memory_left(cap.gpu_gb))
                if cap.ram_gb:
                    group, how = stack.enter_context(ram_limit(cap.ram_gb))
                seen = train(
                    ROOT, data, folder / "runs", batch=128 if not options.quick else 8, device=options.device,
                    words=("--notest", *options.words), cores=cap.cores, steps=options.steps, group=group,
                )  # fmt: skip
            rate = median(seen.rates[1:] or seen.rates or [0.0])
            chosen = next((line for _, line in seen.lines if "in device memory" in line), "")
            numbers[str(cap)] = {"rate": rate, "chosen": chosen, "exit": seen.exit_code, "ram": how}
            yield f"{cap!s:52} {rate:8,.0f} img/s  exit {seen.exit_code}  {how}  {chosen}", None
    yield "", numbers


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="0", help="cpu, or the number of a GPU (default: %(default)s)")
    parser.add_argument("--part", nargs="+", choices=("whole", "caps"), default=["whole", "caps"])
    parser.add_argument("--code", default="", help="another checkout, trained first (part whole)")
    parser.add_argument("--folder", default="", help="keep the data set here")
    parser.add_argument("--images", type=int, default=118_287, help="training images (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=384, help="batch size of part whole (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of part whole (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="steps of each run of caps (default: %(default)s)")
    parser.add_argument("--words", nargs="*", default=[], help="more flags for the trainings of caps")
    options = parser.parse_args()
    num_val, num_different = 5000, 512
    if options.quick:
        options.images, num_val, num_different, options.batch, options.epochs, options.steps = 64, 16, 8, 8, 2, 6
    print(facts_line(), flush=True)
    lines: list[str] = []
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        began_s = time.perf_counter()
        data = write_set(folder, options.images, num_val, num_different)
        print(f"data set: {time.perf_counter() - began_s:.1f} s", flush=True)
        for part in options.part:
            for line, found in (whole if part == "whole" else caps)(data, folder, options):
                if line:
                    print(line, flush=True)
                    lines.append(line)
                numbers |= {part: found} if found is not None else {}
    report("coco_sized", "\n".join(lines), numbers, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
