"""The kernels of a run: the two standard spots, or a pool of drawn ones that follows from the seed."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import NamedTuple

import numpy as np

from flatout.defect.synth.blobs import SHAPES
from flatout.defect.synth.config import BoardShape, DefectMode, Range
from flatout.defect.synth.kernels import Kernels
from flatout.defect.synth.psf import Psf, camera_crop, cut_out
from flatout.errors import ConfigError

THREADS = 4
"""Fourier transforms release the GIL."""
FULL_SWING = 255.0


class PsfType(NamedTuple):
    """A family of optical defects: ranges to draw parameters from, the rest as it is, and how strong they are."""

    ranges: Mapping[str, Range]
    optics: Psf
    sensor_noise: float
    amplitude: Range


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


def make_kernels(
    mode: DefectMode, *, psf_type: str, pool_size: int, seed: int, board_shapes: Sequence[BoardShape] = ("blob",)
) -> Kernels:
    """Kernels for a mode of `SynthConfig`; takes a moment for optical ones. All shapes come equally often."""
    if mode == "gaussian":
        return Kernels.standard()
    if pool_size < 1:
        raise ConfigError(f"psf_pool_size={pool_size} must be 1 or more.")
    generators = [np.random.default_rng((seed, 0xDEF, number)) for number in range(pool_size)]
    if mode == "board":
        if not board_shapes:
            raise ConfigError(f"board_shapes is empty: name some of {', '.join(SHAPES)}.")
        return Kernels([SHAPES[shape](rng) for shape, rng in zip(cycle(board_shapes), generators, strict=False)])
    kind = psf_type_of(psf_type)
    with ThreadPoolExecutor(THREADS) as threads:
        return Kernels(list(threads.map(lambda rng: draw_psf(kind, rng), generators)))


def amplitudes_of(mode: DefectMode, psf_type: str, otherwise: tuple[Range, ...]) -> tuple[Range, ...]:
    """Magnitudes of a mode's defects; `otherwise` is what the settings say."""
    if mode == "board":
        return ((FULL_SWING, FULL_SWING),)
    return (psf_type_of(psf_type).amplitude,) if mode == "psf" else otherwise


def psf_type_of(name: str) -> PsfType:
    if name not in PSF_TYPES:
        raise ConfigError(f"psf_type={name!r} is unknown: use one of {', '.join(PSF_TYPES)}.")
    return PSF_TYPES[name]


def draw_psf(kind: PsfType, rng: np.random.Generator) -> np.ndarray:
    """One kernel of a family."""
    drawn = {name: rng.uniform(low, high) for name, (low, high) in kind.ranges.items()}
    optics = Psf(**{**vars(kind.optics), **drawn})
    offset_y, offset_x = rng.integers(0, optics.pixel_oversample, 2).tolist()
    crop = camera_crop(optics, offset=(offset_y, offset_x), rng=rng, noise=kind.sensor_noise)
    return cut_out(crop, optics.threshold_multiplier)
