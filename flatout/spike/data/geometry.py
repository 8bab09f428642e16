"""Width and height of spike frames: by name, as `400x250`, or from a small file beside the spikes (a sidecar).

Sidecars, nearest first: NAME.yaml, NAME.yml or NAME.json beside the stream NAME.dat; then config.yaml, as SpikeCV keeps
it, or config.json, in the folder of the stream or in one above it.

    spike_h: 250          or    geometry: 400x250          or    {"height": 250, "width": 400}
    spike_w: 400
"""

import logging
import os
import re
from pathlib import Path

from flatout.errors import ConfigError
from flatout.spike.data.stream_layout import KNOWN_HW
from flatout.yaml_strict import load_yaml

logger = logging.getLogger(__name__)

FOLDER_NAMES = ("config.yaml", "config.json")
ENDINGS = (".yaml", ".yml", ".json")
"""Endings of a sidecar of one stream."""
MAX_DEPTH = 8
"""Number of folders that are searched, from the spike files upwards."""
_NAME = re.compile(r"(\d{1,5})\s*[xX*]\s*(\d{1,5})")


def parse_geometry(name: str) -> tuple[int, int]:
    """(height, width) from a size as cameras state it, width first: `400x250`; ConfigError for anything else."""
    match = _NAME.fullmatch(name.strip())
    width, height = map(int, match.groups()) if match else (0, 0)
    if not (width and height):
        known = ", ".join(geometry_name(shape_hw) for shape_hw in KNOWN_HW)
        raise ConfigError(f"geometry {name!r}: give width x height in pixels, as in 400x250. Known ones: {known}.")
    if (height, width) not in KNOWN_HW and (width, height) in KNOWN_HW:
        logger.warning(
            "geometry %s is %d wide and %d high. Known cameras have %s, which is read differently: is that what you "
            "mean?", name, width, height, geometry_name((width, height)),
        )  # fmt: skip
    return height, width


def geometry_name(shape_hw: tuple[int, int]) -> str:
    """The name of a size of spike frames, width first; the inverse of `parse_geometry`."""
    return f"{shape_hw[1]}x{shape_hw[0]}"


def find_geometry(folder: Path) -> tuple[int, int] | None:
    """(height, width) from the nearest config.yaml or config.json that has both: above the folder as given, else above
    the folder that a link leads to."""
    given, original = Path(os.path.abspath(folder)), folder.resolve()
    for start in dict.fromkeys((given, original)):
        for above in (start, *start.parents)[:MAX_DEPTH]:
            for name in FOLDER_NAMES:
                if (above / name).is_file() and (found := _geometry_in(above / name)):
                    return found
    return None


def geometry_beside(stream: Path) -> tuple[int, int] | None:
    """(height, width) from the sidecar of one stream, else from `find_geometry`."""
    for ending in ENDINGS:
        sidecar = stream.with_suffix(ending)
        if sidecar.is_file() and (found := _geometry_in(sidecar)):
            return found
    return find_geometry(stream.parent)


def write_geometry(folder: Path, shape_hw: tuple[int, int]) -> None:
    """Write a config.yaml that `find_geometry` finds for everything below the folder."""
    (folder / FOLDER_NAMES[0]).write_text(f"spike_h: {shape_hw[0]}\nspike_w: {shape_hw[1]}\n")


def _geometry_in(path: Path) -> tuple[int, int] | None:
    """(height, width) from a sidecar; None if it has none, with a warning if it cannot be read."""
    where = ""  # errors of YAML name the file themselves
    try:
        values = load_yaml(path)  # JSON is YAML too
        where = f"{path}: "
        match values:
            case {"spike_h": height, "spike_w": width} | {"height": height, "width": width}:
                return parse_geometry(f"{width}x{height}")
            case {"geometry": str(name)}:
                return parse_geometry(name)
    except ConfigError as error:
        logger.warning("%s%s This file is ignored.", where, error)
    return None
