"""Decides how the spike files of a split are read: one decision for the whole split, which is logged."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError, counted
from flatout.spike.config import DataConfig
from flatout.spike.data.decode import content_of
from flatout.spike.data.frames import open_voxel
from flatout.spike.data.geometry import geometry_beside
from flatout.spike.data.stream_files import ARRAY_EXTS, array_layout
from flatout.spike.data.stream_layout import Layout, decide_layout, highest_content
from flatout.spike.data.tree import SequenceFiles
from flatout.spike.data.voxels import centre_window, tfp_centres, trimmed

logger = logging.getLogger(__name__)

FILES_EXAMINED = 16
"""Files, spread over a split, whose content is examined."""
VOXEL_METADATA_NAME = "voxels.json"
"""File beside precomputed voxels: number of bins, and the spike frames behind each voxel."""


class SequenceFrames(NamedTuple):
    """A sequence, and the frames of it that are in clips."""

    files: SequenceFiles
    stems: list[str]


def stream_layouts(config: DataConfig, kept: Sequence[SequenceFrames]) -> dict[Path, Layout]:
    """The layout of every stream, all decided alike for the split."""
    streams = [[each.spike[stem] for stem in stems] for each, stems in kept]
    paths = [path for sequence in streams for path in sequence if path.suffix.lower() not in ARRAY_EXTS]
    numbers = np.unique(np.linspace(0, len(paths) - 1, FILES_EXAMINED).astype(int)) if paths else ()
    content = highest_content([content_of(paths[number]) for number in numbers])
    settings, layouts = config.stream_settings, {}
    for sequence in streams:
        # From the files themselves: `predict` is given frames and spikes in unrelated folders.
        sidecar_hw = geometry_beside(sequence[0])
        for path in sequence:
            if path.suffix.lower() in ARRAY_EXTS:
                layouts[path] = array_layout(path, settings)
            else:
                size = os.stat(path).st_size
                layouts[path] = decide_layout(size, content, settings, sidecar_hw, where=str(path))
    _log_layouts(config, layouts, f"content: {content}" if paths else "arrays")
    if len(paths) < len(layouts) and not config.USE_RAM_CACHE:
        logger.warning(
            "Spikes in .npz, .npy and .h5 files are read and packed whole for every crop. USE_RAM_CACHE: true does so "
            "only once."
        )
    return layouts


def _log_layouts(config: DataConfig, layouts: Mapping[Path, Layout], files: str) -> None:
    """Log the decision, and warn of what looks wrong; `files` says what the files hold."""
    first = next(iter(layouts.values()))
    logger.info(
        "Spikes: %s %d x %d (height x width), %d frames in the first of %s, rows %s (%s).",
        first.format, first.height, first.width, first.frames, counted(len(layouts), "file"),
        "bottom-up" if first.flipud else "top-down", files,
    )  # fmt: skip
    if first.warning == "legacy_geometry":
        logger.warning(
            "SPIKE_H and SPIKE_W repeat a known misreading of GoPro-Spike, whose files are bit-packed 360 x 640. They "
            "are read as such; remove the two keys."
        )
    if first.warning == "all_zero":
        logger.warning("The spike files that were examined hold nothing but zeros. Check that they are complete.")
    path, shortest = _check_lengths(config, layouts)
    if config.SPIKE_REPR == "voxel" and shortest < config.channels:
        logger.warning(
            "%s: %d spike frames leave some of the %d voxel bins empty. Use a smaller NUM_VOXEL_BINS.",
            path, shortest, config.channels,
        )  # fmt: skip


def _check_lengths(config: DataConfig, layouts: Mapping[Path, Layout]) -> tuple[Path, int]:
    """The shortest stream and its length after trimming; raises ConfigError or DataError if it is too short."""
    path = min(layouts, key=lambda each: layouts[each].frames)
    kept = trimmed(layouts[path].frames, config.SPIKE_TRIM)
    length = kept.stop - kept.start
    try:
        if config.SPIKE_REPR == "window":
            centre_window(length, config.channels)
        if config.SPIKE_REPR == "tfp":
            tfp_centres(length, config.channels, config.TFP_HALF_WINDOW)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return path, length


def voxel_layouts(config: DataConfig, kept: Sequence[SequenceFrames]) -> dict[Path, Layout]:
    """The layout of precomputed voxels: geometry from their headers, spike frames from the metadata beside them."""
    layouts = {}
    for each, stems in kept:
        facts = _spike_frames_by_stem(each.folder / config.VOXEL_CACHE_DIRNAME)
        if not facts and config.VOXEL_NORM == "rate":
            raise ConfigError(
                f"VOXEL_NORM: rate needs the number of spike frames of each voxel, but {each.folder} has no "
                f"{VOXEL_METADATA_NAME}. Write the voxels with `flatout spike cache`, or use log1p or none."
            )
        for stem in stems:
            path = each.spike[stem]
            shape = open_voxel(str(path)).shape
            if len(shape) != 3:
                raise ConfigError(
                    f"{path} has shape {shape}, but voxels are [bins, height, width]. Write it again with "
                    "`flatout spike cache`."
                )
            if shape[0] != config.channels:
                raise ConfigError(
                    f"{path} has {shape[0]} voxel bins (shape {shape}), but DATA.NUM_VOXEL_BINS (or K) is "
                    f"{config.channels}. Set it to {shape[0]}, or write the voxels again with `flatout spike cache`."
                )
            layouts[path] = Layout("uint8", facts.get(stem, 0), shape[1], shape[2], False)
    return layouts


def _spike_frames_by_stem(folder: Path) -> dict[str, int]:
    """Number of spike frames by stem; empty if there is no valid metadata."""
    try:
        frames = json.loads((folder / VOXEL_METADATA_NAME).read_text())["frames"]
        return {str(stem): int(count) for stem, count in frames.items()}
    except (OSError, ValueError, KeyError, AttributeError):
        return {}
