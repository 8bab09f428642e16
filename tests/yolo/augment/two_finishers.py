"""The same labels finished by a worker, or deferred and finished by torch or the Triton kernel.

Run as a program, it compares the worker with the kernel in Triton's interpreter:

TRITON_INTERPRET=1 python -m tests.yolo.augment.two_finishers
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu.batches import FinishLabels
from flatout.yolo.augment.gpu.labels_torch import DeviceLabels
from flatout.yolo.augment.gpu.source import ParameterSource
from flatout.yolo.data.image_set import ImageSet
from tests.yolo.augment.scenes import UNWARPED, busy_set, image_set_of, labels_of, one_draw, written

SIZE = 64
CALM = AugmentConfig(paste_in=0)
TILTED = AugmentConfig(paste_in=0, perspective=0.001)
CHANGES: dict[str, dict[str, Any]] = {
    "mixed": {"mixup": 0.5, "degrees": 20, "shear": 5, "scale": 0.7, "flipud": 0.5},
    "stretched": {"aspect": 0.8, "degrees": 9, "mixup": 0.3},
    "far": {"translate": 0.6, "scale": 0.9, "mixup": 0.3},
    "perspective": {"perspective": 0.001, "degrees": 9, "mixup": 0.5},
    "single": {"mosaic": 0.3, "mixup": 0.4, "degrees": 5},
    "pasted": {"mixup": 0.3, "paste_in": 0.5},
}
Finisher = Callable[..., FinishLabels]


def both_ways(
    image_set: ImageSet, config: AugmentConfig, draws: Mapping[str, np.ndarray], finisher: Finisher, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Targets finished on the device, without padding, and those finished by the worker."""
    indices = np.zeros(len(draws["mix"]), np.int64)
    theirs, mine = (
        written(ParameterSource(image_set, config, size=SIZE, defer_labels=opens), indices, draws)
        for opens in (False, True)
    )
    params = {name: torch.from_numpy(array).to(device) for name, array in mine.items()}
    finish = finisher(DeviceLabels.of(image_set.labels, device), perspective=config.perspective > 0)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    targets = finish(params["targets"], params, (SIZE, SIZE), count).cpu().numpy()
    is_kept = targets[:, 0] >= 0
    assert (targets[~is_kept] == [-1, 0, 0, 0, 0, 0]).all() and count.tolist() == [is_kept.sum()]
    return targets[is_kept], theirs["targets"]


def random_ways(
    name: str, num: int, finisher: Finisher, device: str, *, polygons: str = "some"
) -> tuple[np.ndarray, np.ndarray]:
    """As `both_ways`, for random draws."""
    config = AugmentConfig(**{"paste_in": 0} | CHANGES[name])
    image_set = image_set_of(*busy_set(12, seed=3, polygons=polygons))
    source, positions = ParameterSource(image_set, config, size=SIZE), np.arange(num)
    return both_ways(image_set, config, source.draw(2, 0, positions, positions % 12), finisher, device)


def awkward_set() -> ImageSet:
    """Images of 64 x 64 px: polygons on, across and beyond borders; boxes; no labels; polygons of zeros."""
    ring = np.stack((np.cos(angle := np.linspace(0, 6, 2500)), np.sin(angle)), 1)
    outlines = [
        [(0.5, 0.5), (0.75, 0.5), (0.75, 0.8), (0.5, 0.8)],  # begins exactly on the border of an unwarped output
        [(0.0, 0.0), (0.3, 0.0), (0.3, 0.3)],  # beyond it
        [(0.5, 0.6), (0.5, 0.9)],  # a line along it: all its points are at x = 0
        [(0.7, 0.7)],  # one point, inside, on the border, beyond
        [(0.5, 0.5)],
        [(0.1, 0.9)],
        [(0.2, 0.6), (0.9, 0.55), (0.6, 1.0)],  # across it
        [(-0.5, 0.2), (1.6, 0.4), (0.5, 1.7)],  # beyond the image and its canvas
        0.6 + 0.3 * ring[:999:333],
        0.6 + 0.3 * ring[:999],  # as many corners as steps along it, and more
        0.6 + 0.3 * ring[:1000],
        0.6 + 0.2 * ring,
        [(0.0, 0.0), (0.0, 0.0), (0.0, 0.0)],
    ]
    polygons = [np.array(points, np.float32) for points in outlines]
    boxes = np.array(
        [[0, 0.6, 0.6, 0.3, 0.3], [1, 0.5, 0.5, 0.2, 0.4], [0, 0.1, 0.1, 0.1, 0.1], [1, 1, 1, 0.5, 0.1]], np.float32
    )
    own = [np.concatenate((points.min(0), points.max(0))) for points in polygons]
    outer = np.array([[k % 2, *(box[:2] + box[2:]) / 2, *(box[2:] - box[:2])] for k, box in enumerate(own)], np.float32)
    nothing, zeros = np.zeros((0, 5), np.float32), [np.zeros((3, 2), np.float32)] * 4
    middle = np.array([[1, 0.5, 0.5, 0.5, 0.5]], np.float32)
    labels = labels_of([outer, boxes, nothing, boxes, middle], [polygons, [], [], zeros, []])
    return image_set_of([np.zeros((SIZE, SIZE, 3), np.uint8)] * 5, labels)


def awkward_draws(*, tilt: float = 0.0) -> dict[str, np.ndarray]:
    turned, near = (0, 0, 17, 1.2, 3, -4, 0.4, 0.55), (tilt, -tilt, 0, 1.6, 0, 0, 0.62, 0.3)
    still = UNWARPED if tilt == 0 else (tilt, tilt / 2, 0, 1, 0, 0, 0.5, 0.5)
    four = {"tiles": [0, 1, 2, 3], "centre": (SIZE, SIZE)}
    samples = [
        one_draw([four | {"warp": still}]),
        one_draw([four | {"warp": still, "tiles": [3, 0, 1, 2]}], flip=[True, False]),
        # A canvas without polygons, and one with zero polygons only, beside one with real polygons.
        one_draw([four | {"warp": turned, "tiles": [1, 1, 2, 2]}, four | {"warp": turned}], flip=[True, True]),
        one_draw([four | {"warp": near, "tiles": [3, 3, 1, 2]}, four | {"warp": near, "tiles": [1, 1, 1, 1]}]),
        one_draw([{"tiles": [0, 1, 2, 3, 0, 1, 2, 3, 0], "centre": (30, 40), "warp": near}], flip=[False, True]),
        one_draw([{"tiles": [0], "warp": turned}]),
        # Slightly more than a tenth of a box is left, by less than float32 resolves: 3.2 of 32 px and 1.6e-8.
        one_draw([four | {"warp": (0, 0, 0, 1, 0, 0, (16 + 3.2 + 1.6e-8) / SIZE, 0.75), "tiles": [4, 2, 2, 2]}]),
    ]
    return {name: np.concatenate([draws[name] for draws in samples]) for name in samples[0]}


def main() -> None:
    from flatout.yolo.augment.gpu.labels_triton import TritonLabels

    for name, num in (("mixed", 2), ("single", 2), ("perspective", 1)):
        mine, theirs = random_ways(name, num, TritonLabels, "cpu")
        assert np.array_equal(mine, theirs) and len(theirs), name
    few = {name: array[[0, -1]] for name, array in awkward_draws().items()}
    mine, theirs = both_ways(awkward_set(), CALM, few, TritonLabels, "cpu")
    assert np.array_equal(mine, theirs) and set(theirs[:, 0]) == {0, 1}, "awkward"


if __name__ == "__main__":
    main()
