"""The samples for the comparison of loaders, defined once for both sides. Does not import torch.

sleeping   waits a fixed time and uses almost no CPU: shows scheduling, even with more workers than cores
real       JPEG decode, random affine warp, BGR -> RGB, CHW: shows throughput
trivial    a constant image: shows the overhead of the loader itself
"""

import time
from collections.abc import Callable, Mapping
from functools import cache, partial

import cv2
import numpy as np

from flatout.feed import Field, Out, SampleSource
from flatout.feed.plan import keyed_uniform

SHAPE = (3, 320, 320)
SLEEP_S = 0.002
NUM_PHOTOS = 64

Sample = Callable[[int, np.random.Generator], np.ndarray]
"""(index, rng) -> image uint8 [3, 320, 320], RGB."""


def sleeping(index: int, rng: np.random.Generator) -> np.ndarray:
    time.sleep(SLEEP_S)
    return IMAGES[index % len(IMAGES)]


def trivial(index: int, rng: np.random.Generator) -> np.ndarray:
    return np.full(SHAPE, index & 255, np.uint8)


def real(index: int, rng: np.random.Generator, *, jpegs: list[np.ndarray]) -> np.ndarray:
    image_HWC = cv2.imdecode(jpegs[index % len(jpegs)], cv2.IMREAD_COLOR)
    assert image_HWC is not None  # the files are generated below
    image_HWC = cv2.warpAffine(image_HWC, _random_affine(rng, image_HWC.shape), SHAPE[:0:-1], borderValue=(114,) * 3)
    return np.ascontiguousarray(image_HWC[..., ::-1].transpose(2, 0, 1))


@cache
def real_items() -> Sample:
    """`real` with its JPEG files, which are generated here."""
    return partial(real, jpegs=[draw_jpeg(seed) for seed in range(NUM_PHOTOS)])


def draw_jpeg(seed: int) -> np.ndarray:
    """A JPEG file of 640 x 480, quality 90, about as large and as costly to decode as a photograph."""
    rng = np.random.default_rng(seed)
    image = np.full((480, 640, 3), 128, np.float32)
    # Detail at all scales, stronger at coarser ones, mostly grey: like the spectrum of a photograph.
    for cells, strength in ((4, 70), (16, 45), (64, 22), (200, 10)):
        detail = rng.normal(0, strength, (cells * 3 // 4 + 1, cells + 1, 3)).astype(np.float32)
        detail = 0.4 * detail + 1.2 * detail.mean(2, keepdims=True)
        image += cv2.resize(detail, (640, 480), interpolation=cv2.INTER_CUBIC)
    image = np.clip(image + rng.normal(0, 4, (480, 640, 1)), 0, 255).astype(np.uint8)
    for _ in range(12):
        centre, axes = rng.integers((0, 0), (640, 480)).tolist(), rng.integers(10, 90, 2).tolist()
        color, angle = rng.integers(0, 256, 3).tolist(), float(rng.uniform(0, 180))
        cv2.ellipse(image, centre, axes, angle, 0, 360, color, -1, cv2.LINE_AA)
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 90])[1]


def _random_affine(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rotation by up to 10 degrees and scaling to about the output's size, around the centre."""
    scale = SHAPE[2] / shape[1] * rng.uniform(0.8, 1.5)
    matrix = cv2.getRotationMatrix2D((shape[1] / 2, shape[0] / 2), rng.uniform(-10, 10), scale)
    to_middle = np.array([[0, 0, (SHAPE[2] - shape[1]) / 2], [0, 0, (SHAPE[1] - shape[0]) / 2]])
    return np.asarray(matrix + to_middle)


class ItemSource(SampleSource):
    """The items as a source of a Feed, one sample at a time, as most users write it."""

    fields = {"image": Field(SHAPE)}

    def __init__(self, sample: Sample, num_samples: int) -> None:
        self._sample = sample
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        return {"image": self._sample(index, rng)}


class TrivialSource:
    """`trivial` as a source of a Feed, a micro-batch at a time: written directly into the batch, without a copy."""

    fields = {"image": Field(SHAPE)}

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"unused": keyed_uniform(seed, epoch, positions, 1)}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out["image"][:] = (indices & 255).astype(np.uint8)[:, None, None, None]

    def where(self, index: int) -> str:
        return f"sample {index}"


IMAGES = [np.full(SHAPE, value, np.uint8) for value in range(4)]
