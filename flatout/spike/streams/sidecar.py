"""config.yaml beside spike files, as SpikeCV writes it: `spike_h` and `spike_w`, in their folder or any above it."""

import logging
from pathlib import Path

from flatout.errors import ConfigError
from flatout.yaml_strict import load_yaml

logger = logging.getLogger(__name__)

NAME = "config.yaml"
MOST_LEVELS = 8


def find_geometry(folder: Path) -> tuple[int, int] | None:
    """(height, width) from the nearest config.yaml that says both; links are followed, so the raw tree's counts."""
    start = folder.resolve()
    for above in (start, *start.parents)[:MOST_LEVELS]:
        if (above / NAME).is_file() and (found := _geometry_in(above / NAME)):
            return found
    return None


def _geometry_in(path: Path) -> tuple[int, int] | None:
    try:
        values = load_yaml(path)
    except ConfigError as error:
        logger.warning("%s It is left aside.", error)
        return None
    match values:
        case {"spike_h": int(height), "spike_w": int(width)} if height > 0 and width > 0:
            return height, width
    return None
