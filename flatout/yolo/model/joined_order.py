"""The order of the channels in a joined map of several heads.

First come the boxes and classes, (x, y, w, h, classes ...), of every head and anchor; then the objectness of all of
them beside each other. The loss reads the objectness of every cell and little else: so it finds it in one place of a
pixel's memory instead of a dozen, and writes its gradient there.

Dimension key:  H heads   A anchors per level   O = 5 + the classes a head predicts
"""

from collections.abc import Sequence

OBJECTNESS = 4
"""Its number among the outputs of a head's own convolution."""


def channels_of_planes(outputs_H: Sequence[int], num_anchors: int) -> list[list[int]]:
    """Per head and anchor, in this order: where its outputs (x, y, w, h, objectness, classes ...) are."""
    first_objectness = num_anchors * sum(outputs - 1 for outputs in outputs_H)
    planes: list[list[int]] = []
    begin = 0
    for outputs in outputs_H:
        for _ in range(num_anchors):
            others = list(range(begin, begin + outputs - 1))
            others.insert(OBJECTNESS, first_objectness + len(planes))
            planes.append(others)
            begin += outputs - 1
    return planes


def channels_of_outputs(outputs_H: Sequence[int], num_anchors: int) -> list[int]:
    """Where every output of the heads' own convolutions, head after head, is in a joined map."""
    return [channel for plane in channels_of_planes(outputs_H, num_anchors) for channel in plane]
