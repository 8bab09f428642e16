"""How many frames per second does `flatout spike simulate` make on one core, and what takes the time?

Folders of generated PNG frames that move by 6 px per frame, 1280 x 720 and 640 x 360; exposures of one frame, 8
sub-frames, 56 spike frames at half the size, with optical flow, blending, and shot noise. CPU time of the whole command
but for its start: frames are read, interpolated, exposed, and written as PNG and .dat files. Below it the camera alone,
against the one that makes the demo data (new arrays in float64 for every spike frame).
Answer: bench/results/spike_simulate_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

from bench.measure import arguments, report
from flatout.spike.demo_data import _fire
from flatout.spike.sensor import SensorConfig, SpikeSensor
from flatout.spike.simulate import SimulateConfig, simulate_set

WAYS = {
    "optical flow": SimulateConfig(),
    "blending": SimulateConfig(interpolation="blend"),
    "optical flow, --noise 0.1": SimulateConfig(sensor=SensorConfig(noise=0.1)),
}


def write_frames(folder: Path, width: int, height: int, count: int) -> None:
    """Frames of a texture that moves to the left by 6 px per frame."""
    noise = np.random.default_rng(1).integers(0, 256, (height // 8, width // 8 + 12, 3), np.uint8)
    texture = cv2.resize(noise, (width + 6 * count, height), interpolation=cv2.INTER_CUBIC)
    folder.mkdir()
    for number in range(count):
        cv2.imwrite(str(folder / f"{number:06d}.png"), texture[:, 6 * number : 6 * number + width])


def frames_per_s(source: Path, output: Path, config: SimulateConfig) -> float:
    """Frames per second of CPU time of one process."""
    begin = time.process_time()
    done = simulate_set(source, output, config)
    return done.written / (time.process_time() - begin)


def camera_ms(shape_hw: tuple[int, int], repeats: int) -> dict[str, float]:
    """Median CPU time for the 56 spike frames of one frame, in ms."""
    light = np.random.default_rng(2).random(shape_hw, np.float32)
    doubled = np.repeat(np.repeat(light, 2, 0), 2, 1)[..., None] * np.ones(3)
    sensor = SpikeSensor(shape_hw, SensorConfig(threshold=1.0), np.random.default_rng(3))
    ways = {
        "camera of this command": lambda: [sensor.expose(light, 7) for _ in range(8)],
        "camera of the demo data": lambda: _fire([doubled] * 8, np.zeros(shape_hw), 7),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            begin = time.process_time()
            work()
            found[name].append(1e3 * (time.process_time() - begin))
    return {name: float(np.median(times)) for name, times in found.items()}


def main() -> None:
    options = arguments(__doc__).parse_args()
    rounds, count = (1, 4) if options.quick else (5, 12)
    speeds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for width, height in ((640, 360),) if options.quick else ((1280, 720), (640, 360)):
            size = f"{width} x {height}"
            source = Path(name) / str(width)
            write_frames(source, width, height, count)
            for number in range(rounds):
                for way, (text, config) in enumerate(WAYS.items()):
                    output = Path(name) / f"{width}-{number}-{way}"
                    speeds.setdefault(size, {}).setdefault(text, []).append(frames_per_s(source, output, config))
    lines = [f"{'one core, median and range of rounds':42} frames/s of CPU time"]
    for size, ways in speeds.items():
        lines += [
            f"{f'{size}, {text}':42} {np.median(found):6.2f} ({min(found):.2f} to {max(found):.2f})"
            for text, found in ways.items()
        ]
    cameras = camera_ms((360, 640), 3 if options.quick else 15)
    lines += [f"{f'{text}, 56 x 360 x 640':42} {ms:6.1f} ms" for text, ms in cameras.items()]
    report("spike_simulate", "\n".join(lines), {"frames_per_s": speeds, "camera_ms": cameras}, options)


if __name__ == "__main__":
    main()
