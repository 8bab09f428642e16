"""The model config in force: overrides applied, every top-level value checked."""

import copy
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.yolo.model.kinds import MAX_CHANNELS

KEYS = ("nc", "anchors", "backbone", "head", "depth_multiple", "width_multiple", "ch", "head_config")
"""Of a model config; the first four must be there."""

MAX_ANCHORS = 64
MAX_CLASSES = 20_000


def effective_config(config: object, nc: int | None, anchors: float | None) -> dict[str, Any]:
    """The config with overrides in force and every top-level value checked."""
    if not isinstance(config, Mapping):
        raise ValueError(f"a model config is a mapping with nc, anchors, backbone and head, not {config!r:.60}")
    if unknown := [key for key in config if key not in KEYS]:
        raise ValueError(f"unknown key {unknown[0]!r:.60}{similar(str(unknown[0]), KEYS)}")
    if missing := [key for key in KEYS[:4] if key not in config]:
        raise ValueError(f"key {missing[0]!r} is missing")
    kept = copy.deepcopy(dict(config))
    if nc is not None:
        kept["nc"] = nc
    if anchors is not None:
        if not is_number(anchors):
            raise ValueError(f"anchors={anchors!r:.60} must be the number of anchors per level")
        kept["anchors"] = round(anchors)
    kept.setdefault("ch", 3)
    for key in ("depth_multiple", "width_multiple"):
        kept.setdefault(key, 1.0)
        if not is_number(kept[key]) or not 0 < kept[key] <= 64:
            raise ValueError(f"{key}={kept[key]!r:.60} must be a number above 0, up to 64")
    for key, high in (("nc", MAX_CLASSES), ("ch", MAX_CHANNELS)):
        if not is_whole(kept[key], 1, high):
            raise ValueError(f"{key}={kept[key]!r:.60} must be a whole number from 1 to {high}")
    for key in ("backbone", "head"):
        if not isinstance(kept[key], list | tuple):
            raise ValueError(f"{key} must be a list of rows [from, number, module, args], not {kept[key]!r:.60}")
    check_anchors(kept["anchors"])
    return kept


def check_anchors(anchors: object) -> None:
    if is_whole(anchors, 1, MAX_ANCHORS):
        return
    levels = anchors if isinstance(anchors, list | tuple) else []
    lengths = {len(level) if isinstance(level, list | tuple) else 0 for level in levels}
    length = lengths.pop() if len(lengths) == 1 else 0
    if not 2 <= length <= 2 * MAX_ANCHORS or length % 2:
        raise ValueError(
            f"anchors={anchors!r:.80} must be one list [w0, h0, w1, h1, ...] per level, all equally long, "
            f"or the number of anchors per level (1 to {MAX_ANCHORS})"
        )
    if bad := [size for level in levels for size in level if not is_number(size) or not 0 <= size < 1e6]:
        raise ValueError(f"anchors contain {bad[0]!r:.40}; widths and heights are pixels")


def similar(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def is_whole(value: object, low: float, high: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object) -> bool:
    return is_whole(value, -math.inf, math.inf) or (isinstance(value, float) and math.isfinite(value))
