"""Simulates a small data set: moving shapes, filmed by a slow camera and by a spike camera.

    scene(t) --mean over an exposure--> blur     --middle of it--> sharp     --integrate and fire at half size--> spikes

It shows that everything works and that spikes help, but says nothing about real cameras.

Dimension key:  H W frame   h w spike frame   T spike frames
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from flatout.demo_folder import draw_set
from flatout.errors import ConfigError
from flatout.spike.data.decode import pack
from flatout.spike.data.geometry import write_geometry
from flatout.spike.visuals import write_image
from flatout.yaml_strict import quoted

VERSION = 1
"""Version of the simulation: raised when the same settings give other scenes."""
GENERATED_FILES = re.compile(r"(demo|config)\.yaml|(train|test)/scene_\d+/(blur|sharp|spike)/\d+\.(png|dat)")
"""Files of a demo set, relative to its folder."""
THRESHOLD = 1.0
"""Brightness that triggers a spike, in units of full scale per spike frame."""
SUBFRAMES = 8
"""Moments of an exposure at which the scene is rendered."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The size of a demo set."""

    train: int = 6
    """Training sequences."""
    test: int = 2
    """Test sequences."""
    frames: int = 10
    """Frames per sequence."""
    width: int = 128
    height: int = 96
    spike_frames: int = 168
    """Spike frames per frame; a multiple of SUBFRAMES."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.train, self.test, self.frames) < 1:
            raise ConfigError("a demo set needs at least one sequence of each split, with at least one frame.")
        if self.width % 16 or self.height % 2 or self.spike_frames % SUBFRAMES:
            raise ConfigError(
                f"width={self.width} must be a multiple of 16, height={self.height} an even number, and "
                f"spike_frames={self.spike_frames} a multiple of {SUBFRAMES}."
            )


class MovingScene:
    """A textured background and textured shapes, each with its own velocity."""

    def __init__(self, rng: np.random.Generator, height: int, width: int) -> None:
        self._height, self._width = height, width
        self._back = _texture(rng, 2 * height, 2 * width, contrast=0.5)
        self._drift = rng.uniform(-3, 3, 2)
        self._shapes = [_Shape(rng, height, width) for _ in range(6)]

    def at(self, time: float) -> np.ndarray:
        """The image of the scene, float64 [H, W, 3] in 0..1; `time` in frames."""
        y, x = np.mgrid[0 : self._height, 0 : self._width].astype(np.float64)
        image = _sampled(self._back, y + self._drift[0] * time, x + self._drift[1] * time)
        for shape in self._shapes:
            shape.paint(image, y, x, time)
        return image


class _Shape:
    """A textured disc or box that moves in a straight line and wraps around at the edges."""

    def __init__(self, rng: np.random.Generator, height: int, width: int) -> None:
        self._size = rng.uniform(0.08, 0.2) * height
        self._start = rng.uniform(0, 1, 2) * (height, width)
        self._speed = rng.uniform(-9, 9, 2)
        self._is_disc = bool(rng.integers(2))
        self._around = np.array((height, width), np.float64)
        self._texture = _texture(rng, 64, 64, contrast=0.9)

    def paint(self, image_HW3: np.ndarray, y: np.ndarray, x: np.ndarray, time: float) -> None:
        centre = self._start + self._speed * time
        # The shortest distance across the edges, so that shapes leave on one side and return on the other.
        dy, dx = (
            (axis - middle + side / 2) % side - side / 2
            for axis, middle, side in zip((y, x), centre, self._around, strict=True)
        )
        inside = dy**2 + dx**2 < self._size**2 if self._is_disc else np.maximum(abs(dy), abs(dx)) < self._size
        image_HW3[inside] = _sampled(self._texture, dy[inside] + 32, dx[inside] + 32)


def write_demo_data(folder: Path, config: DemoConfig) -> Path:
    """Simulate a data set in a folder, unless the same one exists there; returns its training YAML."""

    def generate() -> None:
        write_geometry(folder, (config.height // 2, config.width // 2))
        for split, count in (("train", config.train), ("test", config.test)):
            for number in range(count):
                seed = (config.seed, split == "test", number)
                _write_sequence(folder / split / f"scene_{number:02d}", config, seed=seed)

    draw_set(folder, {"job": "spike", "version": VERSION, **asdict(config)}, GENERATED_FILES, generate)
    path = folder / "demo.yaml"
    # Also for an existing set, because its folder may have been moved.
    values = {"root": quoted(folder), "runs": quoted(folder / "runs/demo"), "crop": min(64, config.height)}
    path.write_text(_YAML.format(**values), encoding="utf-8")
    return path


def _write_sequence(folder: Path, config: DemoConfig, *, seed: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    scene = MovingScene(rng, config.height, config.width)
    charge = rng.uniform(0, 1, (config.height // 2, config.width // 2))
    (folder / "spike").mkdir(parents=True, exist_ok=True)
    for number in range(config.frames):
        lights = [scene.at(number + (sub + 0.5) / SUBFRAMES) for sub in range(SUBFRAMES)]
        spikes, charge = _fire(lights, charge, config.spike_frames // SUBFRAMES)
        name = f"{number + 1:06d}"
        write_image(folder / "blur" / f"{name}.png", _bytes(np.mean(lights, axis=0)))
        write_image(folder / "sharp" / f"{name}.png", _bytes(scene.at(number + 0.5)))
        (folder / "spike" / f"{name}.dat").write_bytes(pack(spikes).tobytes())


def _fire(lights: list[np.ndarray], charge: np.ndarray, hold: int) -> tuple[np.ndarray, np.ndarray]:
    """Spikes uint8 [T, h, w] of pixels that integrate light and fire, and their charge afterwards.

    Each sub-frame lasts for `hold` spike frames.
    """
    spikes = []
    for light in lights:
        grey = light @ np.array([0.299, 0.587, 0.114])
        half = grey.reshape(grey.shape[0] // 2, 2, grey.shape[1] // 2, 2).mean(axis=(1, 3))
        for _ in range(hold):
            charge = charge + half / THRESHOLD
            fired = charge >= 1
            charge = charge - fired
            spikes.append(fired.astype(np.uint8))
    return np.stack(spikes), charge


def _texture(rng: np.random.Generator, height: int, width: int, *, contrast: float) -> np.ndarray:
    """Coloured waves in many directions, float64 [H, W, 3] in 0..1; periodic at the edges."""
    y, x = np.mgrid[0:height, 0:width]
    total = np.zeros((height, width, 3))
    for _ in range(10):
        waves_y, waves_x = rng.integers(-8, 9, 2)
        phase = rng.uniform(0, 2 * np.pi, 3)
        angle = 2 * np.pi * (waves_y * y / height + waves_x * x / width)
        total += rng.uniform(0.3, 1) * np.sin(angle[..., None] + phase)
    return np.asarray(np.clip(0.5 + contrast * total / (2 * total.std() + 1e-9) / 2, 0.02, 0.98))


def _sampled(texture_HW3: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Bilinearly interpolated values of a periodic texture."""
    height, width = texture_HW3.shape[:2]
    y0, x0 = np.floor(y).astype(int), np.floor(x).astype(int)
    fy, fx = (y - y0)[..., None], (x - x0)[..., None]

    def at(dy: int, dx: int) -> np.ndarray:
        return np.asarray(texture_HW3[(y0 + dy) % height, (x0 + dx) % width])

    top = at(0, 0) * (1 - fx) + at(0, 1) * fx
    return np.asarray(top * (1 - fy) + (at(1, 0) * (1 - fx) + at(1, 1) * fx) * fy)


def _bytes(light_HW3: np.ndarray) -> np.ndarray:
    return np.asarray(np.round(np.clip(light_HW3, 0, 1) * 255), np.uint8)


_YAML = """\
# A training that takes a minute or two on two cores.
DATA:
  ROOT: {root}
  VAL_SPLIT: test
  CROP_SIZE: {crop}
  CLIP_LEN: 3
  NUM_VOXEL_BINS: 7
  VOXEL_NORM: rate
  USE_RAM_CACHE: true
  CACHE_SIZE_GB: 0.1
DATALOADER:
  TOTAL_WORKERS: 1
TRAIN:
  EPOCHS: 12
  BATCH_SIZE: 2
  OPTIM: {{TYPE: adamw, LR: 2e-3, BETAS: [0.9, 0.9], WEIGHT_DECAY: 1e-4}}
  SCHED: {{TYPE: cosine, WARMUP_STEPS: 20}}
  EMA_DECAY: 0.99
MODEL:
  WIDTH: 8
  ENC_BLOCKS: [1, 1]
  DEC_BLOCKS: [1, 1]
LOG:
  SAVE_DIR: {runs}
  VAL_EVERY_STEPS: 80
"""
