"""Writes voxels as files: uint8 counts at spike resolution, and the number of spike frames behind each voxel.

Dimension key:  T spike frames   F bytes of a spike frame
"""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from flatout.errors import ConfigError
from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import open_clips
from flatout.spike.data.decode import whole_frame
from flatout.spike.data.frames import representation_of
from flatout.spike.data.layouts import VOXEL_METADATA_NAME
from flatout.spike.data.source import spike_dtype
from flatout.spike.data.stream_files import stream_bytes

logger = logging.getLogger(__name__)


def write_voxels(config: DataConfig, split: str) -> Iterator[Path]:
    """Write the voxels of every frame of a split beside its streams, and yield each .npy file when it is complete."""
    if config.SPIKE_REPR != "voxel":
        raise ConfigError(f"SPIKE_REPR: {config.SPIKE_REPR} cannot be written to files, only voxel can.")
    live = replace(config, USE_PRECOMPUTED_VOXELS=False, CLIP_LEN=1)
    clips, representation = open_clips(live, split, scored=True), representation_of(live)
    dtype = spike_dtype(clips, representation)
    for sequence, frames in groupby(range(len(clips.frames)), key=lambda frame: clips.frames[frame].sequence):
        folder = Path(config.ROOT) / split / clips.sequences[sequence].name / config.VOXEL_CACHE_DIRNAME
        folder.mkdir(exist_ok=True)
        counts = {}
        for frame in frames:
            files, layout = clips.frames[frame], clips.layout_of(frame)
            stream_TF = stream_bytes(files.spike, layout)
            voxel = representation.channels_of(stream_TF, layout, whole_frame(layout), dtype)
            _save(folder / f"{files.stem}.npy", np.ascontiguousarray(voxel))
            counts[files.stem] = files.num_spike_frames - sum(config.SPIKE_TRIM)
            yield folder / f"{files.stem}.npy"
        content = {"bins": config.channels, "kind": "counts", "frames": counts}
        (folder / VOXEL_METADATA_NAME).write_text(json.dumps(content, indent=1))


def _save(path: Path, voxel: np.ndarray) -> None:
    """Write a voxel completely or not at all."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            np.save(file, voxel)
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
