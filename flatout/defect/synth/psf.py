"""Kernels from optics: what a point looks like through an annular pupil with aberrations, on a sensor.

    pupil * phase --FFT--> intensity --bin, noise, crop--> camera picture --threshold, cut out--> kernel

Dimension key:  N side of the pupil's grid
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flatout.errors import ConfigError

ABERRATIONS = ("defocus", "astig_x", "astig_y", "coma_x", "coma_y", "spherical", "trefoil_x", "trefoil_y")
POLARISATIONS = ("linX", "linY", "lin45", "circR", "circL", "radial")
_OBSTRUCTIONS = ("square_eps", "h_stripe_w", "v_stripe_w", "h_outer_crop", "v_outer_crop")


@dataclass(frozen=True, kw_only=True)
class Psf:
    """One kernel's optics; lengths in pixels of the pupil's grid, aberrations in radians."""

    psf_size: int = 256
    crop_size: int = 32
    outer_r: float = 31.0
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
            raise ConfigError(f"crop_size={self.crop_size} must lie in 1..psf_size, pixel_oversample be 1 or more.")


def intensity(psf: Psf) -> np.ndarray:
    """float64 [N, N], zero frequency in the middle; N = psf_size * pixel_oversample."""
    side = psf.psf_size * psf.pixel_oversample
    y, x = np.meshgrid(*[np.arange(side) - side // 2] * 2, indexing="ij")
    pupil = _pupil(psf, x, y) * np.exp(1j * _phase(psf, x, y))
    fields = _vector_fields(psf, pupil, x, y) if psf.vector_mode else iter((pupil,))
    return np.asarray(sum(np.abs(np.fft.fftshift(np.fft.fft2(field))) ** 2 for field in fields))


def camera_crop(
    psf: Psf, *, offset: tuple[int, int] = (0, 0), rng: np.random.Generator | None = None, noise: float = 0.0
) -> np.ndarray:
    """float64 [crop, crop] as a sensor sees it; `rng` None: without noise."""
    binned = _binned(intensity(psf), psf.pixel_oversample, offset)
    picture = binned * (psf.brightness / binned.sum()) + psf.background
    if rng is not None:
        picture = rng.poisson(picture) + rng.normal(0, noise, picture.shape)
    picture = np.clip(picture, 0, None)
    first = len(picture) // 2 - psf.crop_size // 2
    return np.asarray(picture[first : first + psf.crop_size, first : first + psf.crop_size])


def cut_out(crop: np.ndarray, threshold_multiplier: float) -> np.ndarray:
    """The bright spot of a crop as a kernel float32 [h, w] from 0 to 1: its connected part above the threshold."""
    above = crop > crop.mean() + threshold_multiplier * crop.std()
    brightest = np.unravel_index(np.argmax(crop), crop.shape)
    inside = _connected(above, (int(brightest[0]), int(brightest[1])))
    spot = np.where(inside, np.clip(crop - np.median(crop), 0, None), 0)
    rows, columns = (np.flatnonzero(inside.any(axis=axis)) for axis in (1, 0))
    spot = spot[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return np.asarray(spot / max(spot.max(), np.finfo(np.float64).tiny), np.float32)


def _pupil(psf: Psf, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where light passes, bool [N, N]."""
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
    """The three components of the field behind a lens of high aperture."""
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


def _binned(picture: np.ndarray, factor: int, offset: tuple[int, int]) -> np.ndarray:
    """Sums over factor x factor blocks that begin at `offset` (y, x)."""
    if factor == 1:
        return picture
    side = len(picture) // factor
    rolled = np.roll(picture, (-offset[0], -offset[1]), axis=(0, 1))
    return np.asarray(rolled.reshape(side, factor, side, factor).sum(axis=(1, 3)))


def _connected(above: np.ndarray, start: tuple[int, int]) -> np.ndarray:
    """The 4-connected part of `above` around `start`."""
    inside = np.zeros_like(above)
    inside[start] = True
    while True:
        grown = inside.copy()
        grown[1:] |= inside[:-1]
        grown[:-1] |= inside[1:]
        grown[:, 1:] |= inside[:, :-1]
        grown[:, :-1] |= inside[:, 1:]
        grown &= above
        grown[start] = True
        if np.array_equal(grown, inside):
            return inside
        inside = grown
