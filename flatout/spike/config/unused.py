"""Keys of the early VRT-based code that mean nothing here: accepted, so that old files keep working, and told about."""

from typing import Any

Extra = dict[str, Any] | list[Any] | str | int | float | bool | None
"""Whatever such a key holds."""

DEAD = {
    "MODEL": ("VRT_CFG", "CHANNELS_PER_SCALE", "LAYERS", "VRT", "SPIKE_ENCODER", "SPIKE_TSA", "FUSE", "WINDOW_SIZE",
              "IMG_SIZE_H", "IMG_SIZE_W"),
    "LOG": ("ENABLE_TIMING_LOG", "TIMING_CONSOLE", "TIMING_FILE", "TIMING_CONSOLE_INTERVAL", "TIMING_FILE_INTERVAL"),
}  # fmt: skip
"""Keys that are accepted and not used."""
