"""How many images and labels are scanned in a second, and how long does a start take with COCO's 118,287 images?

Three questions: scanning with processes against a pool of threads that calls the same function; a start from the
label cache against a scan; decoding JPEG through simplejpeg against OpenCV. Files are links to a few originals, so
everything comes from memory: a cold disk adds its own time to both sides.
Answer: bench/results/scan_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import cv2
import numpy as np

from bench import noise
from bench.items import draw_jpeg
from bench.measure import arguments, facts_line, report
from flatout.images import decode
from flatout.yolo.data.find import Pair, find_images, pair_up
from flatout.yolo.data.label_cache import scan_cached
from flatout.yolo.data.scan import ScanConfig, scan, scan_image, table_of

COCO = 118_287
LABELS_PER_IMAGE = 7
LINKS = 5000
"""To one original; file systems allow no more than some tens of thousands."""


def main() -> int:
    options = arguments(__doc__).parse_args()
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    cv2.setNumThreads(1)
    print(facts_line(), flush=True)
    num_images = 2000 if options.quick else COCO
    before = noise.listen().line()
    with tempfile.TemporaryDirectory() as folder:
        make_data_set(Path(folder), num_images)
        numbers = start_times(Path(folder), num_images)
    numbers |= decode_rates(3 if options.quick else 200)
    report("scan", "\n".join([before, *lines(numbers)]), numbers, options)
    return 0


def make_data_set(folder: Path, num_images: int) -> None:
    """Links to originals: images of 640 x 480 with seven boxes each."""
    rng = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir()
    for number in range(num_images):
        name, original = f"{number:012}", f"{number - number % LINKS:012}"
        if number % LINKS == 0:
            (folder / "images" / f"{name}.jpg").write_bytes(draw_jpeg(number).tobytes())
            boxes = rng.uniform(0.2, 0.4, (LABELS_PER_IMAGE, 4))
            rows = [f"{index} " + " ".join(f"{value:.6f}" for value in box) for index, box in enumerate(boxes)]
            (folder / "labels" / f"{name}.txt").write_text("\n".join(rows) + "\n")
        else:
            os.link(folder / "images" / f"{original}.jpg", folder / "images" / f"{name}.jpg")
            os.link(folder / "labels" / f"{original}.txt", folder / "labels" / f"{name}.txt")
    # A file that is younger than this is scanned again at every start.
    time.sleep(2.1)


def start_times(folder: Path, num_images: int) -> dict[str, float]:
    find_s, found = timed(lambda: find_images([str(folder / "images")]))
    pairs = pair_up(found.paths)
    assert len(pairs) == num_images
    config, cache = ScanConfig(progress=False), folder / "cache"
    threads_s, in_threads = timed(lambda: scan_in_threads(pairs))
    alone_s, _ = timed(lambda: scan(pairs, ScanConfig(progress=False, workers=0)))
    scan_s, scanned = timed(lambda: scan(pairs, config))
    assert scanned.pack() == in_threads.pack()
    first_s, _ = timed(lambda: scan_cached(pairs, config, folder=cache))
    cached_s, cached = timed(lambda: scan_cached(pairs, config, folder=cache))
    assert cached.pack() == scanned.pack()
    cache_bytes = sum(file.stat().st_size for file in cache.iterdir())
    return {
        "pictures": num_images,
        "find_s": find_s,
        "threads_s": threads_s,
        "one_process_s": alone_s,
        "scan_s": scan_s,
        "scan_and_save_s": first_s,
        "cached_s": cached_s,
        "cache_mb": cache_bytes / 1e6,
    }


def scan_in_threads(pairs: list[Pair]):
    """The usual way: a pool of eight threads."""
    with ThreadPoolExecutor(8) as pool:
        return table_of(list(pool.map(lambda pair: scan_image(*pair), pairs, chunksize=64)))


def decode_rates(repeats: int) -> dict[str, float]:
    """CPU time of both, turn by turn, so that a busy machine slows both alike."""
    content = draw_jpeg(1).tobytes()
    ways = {
        "opencv_decode_ms": lambda: cv2.imdecode(np.frombuffer(content, np.uint8), 1),
        "decode_ms": lambda: decode(content),
    }
    durations_s: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            durations_s[name].append(time.process_time() - begin)
    return {name: median(listed) * 1e3 for name, listed in durations_s.items()}


def timed(fn: Callable[[], object]):
    begin = time.perf_counter()
    result = fn()
    return time.perf_counter() - begin, result


def lines(numbers: dict[str, float]) -> list[str]:
    count, threads_s = numbers["pictures"], numbers["threads_s"]
    rows = [
        ("find the images", numbers["find_s"]),
        ("scan, 8 threads", threads_s),
        ("scan, this process alone", numbers["one_process_s"]),
        ("scan, processes", numbers["scan_s"]),
        ("scan, processes, and write the cache", numbers["scan_and_save_s"]),
        ("start from the cache", numbers["cached_s"]),
    ]
    return [
        f"{count:.0f} images with {LABELS_PER_IMAGE} boxes each",
        *(f"{name:<38} {s:7.2f} s {count / s:9.0f} images/s {threads_s / s:6.1f} x" for name, s in rows),
        f"cache: {numbers['cache_mb']:.0f} MB",
        "decode JPEG 640 x 480, CPU time: "
        f"OpenCV {numbers['opencv_decode_ms']:.2f} ms, ours {numbers['decode_ms']:.2f} ms, "
        f"{numbers['opencv_decode_ms'] / numbers['decode_ms']:.2f} x",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
