"""Mean probability of painted defects, by amplitude and by the planes they are in.

A good network detects target-only defects and nothing else, at every amplitude that occurs. One that was trained on a
narrow range of amplitudes also detects every strong difference outside of it, which this table reveals.

Dimension key:  C planes   H W image   K defects
"""

import numpy as np

from flatout.defect.data.pairs import three_planes
from flatout.defect.evaluate.maps import HeatMapper
from flatout.defect.options import TestOptions
from flatout.defect.predict import open_inspection
from flatout.defect.synth.draw import IN_PLANE_GC
from flatout.defect.synth.paint import paint
from flatout.defect.synth.pool import Kernels

AMPLITUDES = (10, 20, 40, 80)
"""In grey levels."""
NAMES = ("T", "R1", "R2", "B")
"""Groups of defects by the planes they are in; see `flatout.defect.synth.draw`."""
SPACING_PX = 24
"""Distance of neighbouring defects along each axis."""


def sweep(mapper: HeatMapper, planes_CHW: np.ndarray) -> dict[str, list[float]]:
    """Mean probability on the pixels of painted defects, by group, for each amplitude; half bright, half dark."""
    kernels = Kernels.standard()
    return {
        name: [_mean_probability(mapper, planes_CHW, kernels, group, amplitude) for amplitude in AMPLITUDES]
        for group, name in enumerate(NAMES)
    }


def sweep_table(options: TestOptions) -> str:
    """The table for the first test image."""
    way = open_inspection(options)
    assert way.mapper is not None  # it has refused options without weights
    found = sweep(way.mapper, three_planes(way.read(way.images[0].path), way.align))
    lines = ["mean probability   " + "".join(f"{f'+-{amplitude}':>8}" for amplitude in AMPLITUDES)]
    return "\n".join(
        lines + [f"  {name:<17}" + "".join(f"{value:8.3f}" for value in row) for name, row in found.items()]
    )


def _mean_probability(
    mapper: HeatMapper, planes_CHW: np.ndarray, kernels: Kernels, group: int, amplitude: float
) -> float:
    height, width = planes_CHW.shape[1:]
    y, x = np.meshgrid(*(np.arange(SPACING_PX // 2, side, SPACING_PX) for side in (height, width)), indexing="ij")
    num = y.size
    sign_K = np.where(np.arange(num) % 2, -1.0, 1.0)
    painted, mask_HW = planes_CHW.copy(), np.zeros((height, width), np.bool_)
    sample = {
        "num": np.array(num),
        "center": np.stack((x.reshape(-1), y.reshape(-1)), axis=1),
        "kernel": np.arange(num) // 2 % len(kernels),
        "amplitude": ((sign_K * amplitude)[:, None] * IN_PLANE_GC[group]).astype(np.float32),
        "labelled": np.ones(num, np.bool_),
    }
    paint(painted, mask_HW, sample, kernels, full_swing=False)
    return float(mapper(painted)[mask_HW].mean())
