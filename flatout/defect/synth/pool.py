"""Kernels, the shapes of defects: Gaussian spots, circuit-board shapes, optical diffraction patterns.

A kernel is a small array of values from 0 to 1. The kernels of a run are made once.

Conventions that are easy to confuse: a size is (height, width), a centre is (x, y), a sigma is (x, y).

Dimension key:  Q kernels   h w sides of one kernel   S side of a common square   N side of the pupil grid   W waves
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import numpy as np

from flatout.defect.synth.config import BoardShape, DefectMode, Range
from flatout.errors import ConfigError

LABEL_ABOVE = 0.1
"""A pixel is labelled where the kernel exceeds this, regardless of amplitude and saturation."""
STANDARD = ("3x3_s1.3", "3x5_s1.0_1.5")
"""Standard spots, each with probability 1/2. The narrow sigma of the second is along its wide axis; it is kept for
comparability."""
FULL_SWING = 255.0
"""Amplitude that takes any pixel to black or white."""
THREADS = 4
"""Threads that make optical kernels; Fourier transforms release the GIL."""

_ID = re.compile(r"(\d+)x(\d+)_s(\d+(?:\.\d+)?)(?:_(\d+(?:\.\d+)?))?")


def gaussian_kernel(kernel_id: str) -> np.ndarray:
    """A Gaussian kernel, float64 [h, w], 1 at the centre, from an id `<h>x<w>_s<sigma_x>[_<sigma_y>]`."""
    found = _ID.fullmatch(kernel_id)
    if not found:
        raise ConfigError(f"kernel {kernel_id!r} is unknown: write <h>x<w>_s<sigma_x>[_<sigma_y>], as in 3x5_s1.0_1.5.")
    height, width = int(found[1]), int(found[2])
    sigma_x, sigma_y = float(found[3]), float(found[4] or found[3])
    if min(height, width) < 1 or min(sigma_x, sigma_y) <= 0:
        raise ConfigError(f"kernel {kernel_id!r}: sides and sigmas must be positive.")
    dy, dx = (np.arange(-(side // 2), side // 2 + 1, dtype=np.float64) for side in (height, width))
    return np.asarray(np.exp(-(dx**2 / (2 * sigma_x**2) + (dy**2 / (2 * sigma_y**2))[:, None])))


def label_of(kernel_hw: np.ndarray) -> np.ndarray:
    """Pixels of a kernel that are labelled, bool [h, w]."""
    return np.asarray(kernel_hw > LABEL_ABOVE)


class Kernels:
    """Kernels by number, zero-padded to squares of one size whose middle is placed on the centre of a defect.

    Painting the zeros changes nothing, and one size for all kernels lets them be painted by a few array operations.
    """

    def __init__(self, kernels: Sequence[np.ndarray]) -> None:
        if not kernels:
            raise ConfigError("There are no kernels to paint with.")
        self.size_Q2 = np.array([kernel.shape for kernel in kernels], np.int64)
        """Height and width of each kernel."""
        self.reach = int(self.size_Q2.max()) // 2
        """Maximum distance of a kernel's pixels from its anchor, which is at (h // 2, w // 2)."""
        side = 2 * self.reach + 1
        self.value_QSS = np.zeros((len(kernels), side, side), np.float32)
        self.label_QSS = np.zeros((len(kernels), side, side), np.bool_)
        for number, kernel in enumerate(kernels):
            top, left = (self.reach - length // 2 for length in kernel.shape)
            box = slice(top, top + kernel.shape[0]), slice(left, left + kernel.shape[1])
            self.value_QSS[number][box], self.label_QSS[number][box] = kernel, label_of(kernel)

    @classmethod
    def standard(cls) -> "Kernels":
        return cls([gaussian_kernel(kernel_id) for kernel_id in STANDARD])

    def __len__(self) -> int:
        return len(self.value_QSS)


def make_kernels(
    mode: DefectMode, *, psf_type: str, pool_size: int, seed: int, board_shapes: Sequence[BoardShape] = ("blob",)
) -> Kernels:
    """Make the kernels for a mode of `SynthConfig`; every one of `board_shapes` is equally frequent."""
    if mode == "gaussian":
        return Kernels.standard()
    if pool_size < 1:
        raise ConfigError(f"psf_pool_size={pool_size}: it must be 1 or more.")
    generators = [np.random.default_rng((seed, 0xDEF, number)) for number in range(pool_size)]
    if mode == "board":
        if not board_shapes:
            raise ConfigError(f"board_shapes is empty: name some of {', '.join(SHAPES)}.")
        return Kernels([SHAPES[shape](rng) for shape, rng in zip(cycle(board_shapes), generators, strict=False)])
    assert mode == "psf"
    family = psf_type_of(psf_type)
    with ThreadPoolExecutor(THREADS) as threads:
        return Kernels(list(threads.map(lambda rng: draw_psf(family, rng), generators)))


def amplitudes_of(mode: DefectMode, psf_type: str, configured: tuple[Range, ...]) -> tuple[Range, ...]:
    """Ranges of amplitudes for a mode; only gaussian defects use the configured ones."""
    if mode == "board":
        return ((FULL_SWING, FULL_SWING),)
    return (psf_type_of(psf_type).amplitude,) if mode == "psf" else configured


# Shapes of defects on circuit boards: ragged blobs, cuts, bridges, thorns and pinholes.
#
# Copper is removed or added, depending on the pixels under a shape: a blob inside copper is a hole, at the edge of
# copper a mouse bite, elsewhere residual copper; a cut across a trace is an open, a bridge between two traces a short,
# and a thorn at an edge a spur.

WAVES = 4
"""Waves that deform the outline of a blob."""
RADIUS_PX = (1.5, 8.0)
"""Range of the radius of a blob."""
MAX_ELONGATION = 2.5
"""Maximum ratio of length to width of a blob."""
CUT_PX: tuple[Range, Range] = ((6, 24), (2, 6))
"""Ranges of length and width."""
BRIDGE_PX: tuple[Range, Range] = ((8, 32), (2, 4))
"""Ranges of length and width."""
THORN_PX: tuple[Range, Range] = ((4, 14), (3, 6))
"""Ranges of length, and of the width at the base."""
PINHOLE_PX: Range = (1.0, 3.0)
"""Range of the radius."""


def blob(rng: np.random.Generator) -> np.ndarray:
    """A ragged blob: float32 [h, w] with odd sides, 1 inside, falling to 0 over about a pixel at its outline."""
    low, high = RADIUS_PX
    radius = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    stretch = float(np.sqrt(rng.uniform(1, MAX_ELONGATION)))
    angle = rng.uniform(0, np.pi)
    weight_W, phase_W = rng.uniform(0, 0.25, WAVES), rng.uniform(0, 2 * np.pi, WAVES)
    along, across = _turned(angle, reach=radius * stretch * (1 + weight_W.sum() / 2))
    along, across = along / stretch, across * stretch
    theta = np.arctan2(across, along)
    bulge = sum(
        weight * np.cos(number * theta + phase)
        for number, (weight, phase) in enumerate(zip(weight_W, phase_W, strict=True), start=1)
    )
    value = np.clip(radius * (1 + bulge / 2) - np.hypot(along, across) + 0.5, 0, 1)
    return _trimmed(np.asarray(value, np.float32))


def bar(rng: np.random.Generator, sizes: tuple[Range, Range]) -> np.ndarray:
    """A ragged stripe in a random direction; values as in `blob`."""
    length, width = (float(rng.uniform(*size)) for size in sizes)
    wave, phase = rng.uniform(0.3, 1.0), rng.uniform(0, 2 * np.pi)
    along, across = _turned(rng.uniform(0, np.pi), reach=length / 2 + width)
    half = width / 2 * (1 + 0.25 * np.sin(wave * along + phase))
    return _filled(np.maximum(np.abs(across) - half, np.abs(along) - length / 2))


def thorn(rng: np.random.Generator, sizes: tuple[Range, Range]) -> np.ndarray:
    """A stripe that narrows to a point; values as in `blob`."""
    length, width = (float(rng.uniform(*size)) for size in sizes)
    along, across = _turned(rng.uniform(0, 2 * np.pi), reach=length / 2 + width)
    half = width / 2 * np.clip(0.5 - along / length, 0, 1)
    return _filled(np.maximum(np.abs(across) - half, np.abs(along) - length / 2))


def pinhole(rng: np.random.Generator) -> np.ndarray:
    """A small disc; values as in `blob`."""
    radius = float(rng.uniform(*PINHOLE_PX))
    along, across = _turned(0, reach=radius)
    return _filled(np.hypot(along, across) - radius)


SHAPES: Mapping[BoardShape, Callable[[np.random.Generator], np.ndarray]] = {
    "blob": blob,
    "open": lambda rng: bar(rng, CUT_PX),
    "short": lambda rng: bar(rng, BRIDGE_PX),
    "spur": lambda rng: thorn(rng, THORN_PX),
    "pinhole": pinhole,
}


def _turned(angle: float, *, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates along and across a direction, relative to the middle."""
    side = int(np.ceil(reach)) + 1
    y, x = np.meshgrid(*[np.arange(-side, side + 1)] * 2, indexing="ij")
    return x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)


def _filled(outside_px: np.ndarray) -> np.ndarray:
    """Values of a shape from its signed distance: 1 inside, 0 outside, linear over one pixel in between."""
    return _trimmed(np.clip(0.5 - outside_px, 0, 1).astype(np.float32))


def _trimmed(value: np.ndarray) -> np.ndarray:
    """Remove empty borders, keeping the centre in the middle."""
    middle = len(value) // 2
    rows, columns = (np.flatnonzero(value.any(axis=axis)) for axis in (1, 0))
    up, left = (max(int(abs(found - middle).max()), 1) for found in (rows, columns))
    return value[middle - up : middle + up + 1, middle - left : middle + left + 1]


# Optical kernels: the image of a point through an annular pupil with aberrations, on a sensor.
#
#     pupil * phase --FFT--> intensity --bin, noise, crop--> camera image --threshold, cut out--> kernel

ABERRATIONS = ("defocus", "astig_x", "astig_y", "coma_x", "coma_y", "spherical", "trefoil_x", "trefoil_y")
POLARISATIONS = ("linX", "linY", "lin45", "circR", "circL", "radial")
_OBSTRUCTIONS = ("square_eps", "h_stripe_w", "v_stripe_w", "h_outer_crop", "v_outer_crop")


@dataclass(frozen=True, kw_only=True)
class Psf:
    """Optics of one point spread function; aberrations (defocus to trefoil_y) in radians.

    Obstructions (square_eps to v_outer_crop) are shares of outer_r. brightness is the sum over the sensor, background
    per pixel, both in counts. threshold_multiplier is in standard deviations of the crop.
    """

    psf_size: int = 256
    """Side of the sensor image, in sensor pixels."""
    crop_size: int = 32
    """Side of its centre that is used, in sensor pixels."""
    outer_r: float = 31.0
    """Outer radius of the annulus, in pixels of the pupil grid."""
    epsilon: float = 0.0
    """Inner radius of the annulus as a share of the outer one."""
    ellipticity: float = 0.0
    ellip_angle: float = 0.0
    """Radians."""
    brightness: float = 3000.0
    background: float = 5.0
    threshold_multiplier: float = 1.0
    defocus: float = 0.0
    astig_x: float = 0.0
    astig_y: float = 0.0
    coma_x: float = 0.0
    coma_y: float = 0.0
    spherical: float = 0.0
    trefoil_x: float = 0.0
    trefoil_y: float = 0.0
    square_eps: float = 0.0
    h_stripe_w: float = 0.0
    v_stripe_w: float = 0.0
    h_outer_crop: float = 0.0
    v_outer_crop: float = 0.0
    vector_mode: bool = False
    na: float = 0.95
    pol_type: str = "linX"
    pixel_oversample: int = 1

    def __post_init__(self) -> None:
        if self.pol_type not in POLARISATIONS:
            raise ConfigError(f"pol_type={self.pol_type!r} is unknown: use one of {', '.join(POLARISATIONS)}.")
        if self.pixel_oversample < 1 or not 0 < self.crop_size <= self.psf_size:
            raise ConfigError(
                f"crop_size={self.crop_size} must lie in 1..{self.psf_size} (psf_size), and "
                f"pixel_oversample={self.pixel_oversample} must be 1 or more."
            )


def intensity(psf: Psf) -> np.ndarray:
    """Intensity behind the lens, float64 [N, N] with zero frequency in the middle; N = psf_size * pixel_oversample."""
    side = psf.psf_size * psf.pixel_oversample
    y, x = np.meshgrid(*[np.arange(side) - side // 2] * 2, indexing="ij")
    pupil = _pupil(psf, x, y) * np.exp(1j * _phase(psf, x, y))
    fields = _vector_fields(psf, pupil, x, y) if psf.vector_mode else iter((pupil,))
    return np.asarray(sum(np.abs(np.fft.fftshift(np.fft.fft2(field))) ** 2 for field in fields))


def camera_crop(
    psf: Psf, *, offset: tuple[int, int] = (0, 0), rng: np.random.Generator | None = None, noise: float = 0.0
) -> np.ndarray:
    """The centre of the sensor image, float64 [crop_size, crop_size]; without noise if `rng` is None."""
    binned = _binned(intensity(psf), psf.pixel_oversample, offset)
    image = binned * (psf.brightness / binned.sum()) + psf.background
    if rng is not None:
        image = rng.poisson(image) + rng.normal(0, noise, image.shape)
    image = np.clip(image, 0, None)
    first = len(image) // 2 - psf.crop_size // 2
    return np.asarray(image[first : first + psf.crop_size, first : first + psf.crop_size])


def cut_out(crop: np.ndarray, threshold_multiplier: float) -> np.ndarray:
    """The bright spot of a crop as a kernel, float32 [h, w] from 0 to 1: the connected area above the threshold."""
    above = crop > crop.mean() + threshold_multiplier * crop.std()
    brightest = np.unravel_index(np.argmax(crop), crop.shape)
    inside = _connected(above, (int(brightest[0]), int(brightest[1])))
    spot = np.where(inside, np.clip(crop - np.median(crop), 0, None), 0)
    rows, columns = (np.flatnonzero(inside.any(axis=axis)) for axis in (1, 0))
    spot = spot[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return np.asarray(spot / max(spot.max(), np.finfo(np.float64).tiny), np.float32)


def _pupil(psf: Psf, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where light passes the pupil, bool [N, N]."""
    cos, sin = np.cos(psf.ellip_angle), np.sin(psf.ellip_angle)
    radius = np.hypot((x * cos + y * sin) / (1 + psf.ellipticity), (-x * sin + y * cos) / (1 - psf.ellipticity))
    passes = (radius <= psf.outer_r) & (radius >= psf.outer_r * psf.epsilon)
    square, h_stripe, v_stripe, h_crop, v_crop = (getattr(psf, name) * psf.outer_r for name in _OBSTRUCTIONS)
    if square:
        passes &= ~((abs(x) <= square) & (abs(y) <= square))
    if h_stripe:
        passes &= ~(abs(y) <= h_stripe)
    if v_stripe:
        passes &= ~(abs(x) <= v_stripe)
    if h_crop:
        passes &= ~(abs(y) > psf.outer_r - h_crop)
    if v_crop:
        passes &= ~(abs(x) > psf.outer_r - v_crop)
    return np.asarray(passes)


def _phase(psf: Psf, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    rho, theta = np.hypot(x, y) / psf.outer_r, np.arctan2(y, x)
    shapes: Mapping[str, np.ndarray] = {
        "defocus": 2 * rho**2 - 1,
        "astig_x": rho**2 * np.cos(2 * theta),
        "astig_y": rho**2 * np.sin(2 * theta),
        "coma_x": (3 * rho**2 - 2) * rho * np.cos(theta),
        "coma_y": (3 * rho**2 - 2) * rho * np.sin(theta),
        "spherical": 6 * rho**4 - 6 * rho**2 + 1,
        "trefoil_x": rho**3 * np.cos(3 * theta),
        "trefoil_y": rho**3 * np.sin(3 * theta),
    }
    return np.asarray(sum(getattr(psf, name) * shapes[name] for name in ABERRATIONS))


def _vector_fields(psf: Psf, pupil: np.ndarray, x: np.ndarray, y: np.ndarray) -> Iterator[np.ndarray]:
    """The three field components behind a lens of high numerical aperture."""
    sine = np.hypot(x, y) / psf.outer_r * psf.na
    inside = sine < 1
    sine = np.where(inside, sine, 0)
    cosine = np.sqrt(1 - sine**2)
    azimuth = np.arctan2(y, x)
    c, s = np.cos(azimuth), np.sin(azimuth)
    px, py = _polarisation(psf.pol_type, c, s)
    weight = np.where(inside, pupil * np.sqrt(cosine), 0)
    yield weight * ((cosine * c**2 + s**2) * px + (cosine - 1) * c * s * py)
    yield weight * ((cosine - 1) * c * s * px + (cosine * s**2 + c**2) * py)
    yield weight * (-sine * (c * px + s * py))


def _polarisation(kind: str, c: np.ndarray, s: np.ndarray) -> tuple[np.ndarray | complex, np.ndarray | complex]:
    half = np.sqrt(0.5)
    uniform: dict[str, tuple[complex, complex]] = {
        "linX": (1, 0),
        "linY": (0, 1),
        "lin45": (half, half),
        "circR": (half, 1j * half),
        "circL": (half, -1j * half),
    }
    return (c, s) if kind == "radial" else uniform[kind]


def _binned(image: np.ndarray, factor: int, offset: tuple[int, int]) -> np.ndarray:
    """Sums over factor x factor blocks that begin at `offset` (y, x)."""
    if factor == 1:
        return image
    side = len(image) // factor
    rolled = np.roll(image, (-offset[0], -offset[1]), axis=(0, 1))
    return np.asarray(rolled.reshape(side, factor, side, factor).sum(axis=(1, 3)))


def _connected(above: np.ndarray, start: tuple[int, int]) -> np.ndarray:
    """The 4-connected area of `above` that contains `start`."""
    import cv2

    seeded = above.astype(np.uint8)
    seeded[start] = 1
    _, number = cv2.connectedComponents(seeded, connectivity=4)
    return np.asarray(number == number[start])


class PsfType(NamedTuple):
    """A family of optical defects."""

    ranges: Mapping[str, Range]
    """Ranges of the fields of `Psf` that are drawn at random."""
    optics: Psf
    """The other fields."""
    sensor_noise: float
    """Standard deviation of the sensor's noise."""
    amplitude: Range
    """Range of the amplitude of defects, in grey levels."""


_RING: dict[str, Range] = {"outer_r": (30, 32), "epsilon": (0.90, 0.92)}
_RING_OPTICS = Psf(ellipticity=0.15)
PSF_TYPES = {
    "type1": PsfType(_RING | {"brightness": (1500, 3000)}, _RING_OPTICS, 1.5, (60, 80)),
    "type2": PsfType(_RING | {"brightness": (10000, 12000)}, _RING_OPTICS, 1.5, (60, 80)),
    "type3": PsfType(_RING | {"brightness": (1500, 3000)}, _RING_OPTICS, 1.5, (60, 80)),
    "type4_vector": PsfType(
        {}, Psf(outer_r=60, brightness=5000, vector_mode=True, na=0.95, pixel_oversample=4), 1.5, (8, 12)
    ),
    "type_low_intensity": PsfType(
        _RING | {"brightness": (1500, 3000)}, Psf(ellipticity=0.15, vector_mode=True, na=0.95), 1.5, (6, 12)
    ),
}


def psf_type_of(name: str) -> PsfType:
    if name not in PSF_TYPES:
        raise ConfigError(f"psf_type={name!r} is unknown: use one of {', '.join(PSF_TYPES)}.")
    return PSF_TYPES[name]


def draw_psf(family: PsfType, rng: np.random.Generator) -> np.ndarray:
    """A kernel of a family with randomly drawn optics."""
    drawn = {name: rng.uniform(low, high) for name, (low, high) in family.ranges.items()}
    optics = Psf(**{**vars(family.optics), **drawn})
    offset_y, offset_x = rng.integers(0, optics.pixel_oversample, 2).tolist()
    crop = camera_crop(optics, offset=(offset_y, offset_x), rng=rng, noise=family.sensor_noise)
    return cut_out(crop, optics.threshold_multiplier)
