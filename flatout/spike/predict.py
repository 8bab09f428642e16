"""Weights in use: score a split, or deblur a folder."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from flatout.config import build_config
from flatout.engine import DTYPES, default_fast_amp
from flatout.errors import CheckpointError, DataError
from flatout.ranks import choose_device
from flatout.spike.config import SpikeConfig
from flatout.spike.data.clip_set import ClipSet, clips_of, open_clips, validation_split
from flatout.spike.data.tree import VOXEL_EXTS, SequenceFiles, stems_in
from flatout.spike.evaluate import Evaluation, Restore, Restored, evaluate
from flatout.spike.input import FeedWishes, open_scoring_feed
from flatout.spike.pictures import as_bytes, side_by_side, write_image, write_video
from flatout.spike.step import ToClip
from flatout.spike.weights import load_network

logger = logging.getLogger(__name__)


class Ready(NamedTuple):
    """A network on its device with all it needs to restore clips."""

    config: SpikeConfig
    restore: Restore
    device: torch.device


@dataclass(frozen=True)
class Predicted:
    """What deblurring a folder left behind."""

    folder: Path
    frames: int
    seconds: float
    video: Path | None


def ready(
    weights: Path, device: str, config: SpikeConfig | None = None, *, tiles: Mapping[str, int] | None = None
) -> Ready:
    """Load weights; `config` overrules the one they were trained with, but not the network; `tiles`: keys of TEST."""
    network, about = load_network(weights)
    if config is None:
        config = build_config(about["config"], SpikeConfig, where=f"{weights}, config")
    if network.about["model"]["USE_SPIKE"] and config.DATA.channels != network.about["channels"]:
        raise CheckpointError(
            f"{weights} was trained with {network.about['channels']} spike channels, and DATA.NUM_VOXEL_BINS (or K) "
            f"says {config.DATA.channels}: use the config it was trained with."
        )
    chosen = choose_device(device)
    if config.MODEL.CHANNELS_LAST:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = replace(config, TEST=replace(config.TEST, **(tiles or {})))
    restore = Restore(network.to(chosen), ToClip(config.DATA), config.TEST, DTYPES[default_fast_amp(chosen)])
    return Ready(config, restore, chosen)


def score_split(network: Ready, split: str | None, folder: Path | None) -> Evaluation:
    """Score every frame of a split once; `folder` gets scores and pictures."""
    data = network.config.DATA
    split = split or validation_split(data)
    if split is None:
        raise DataError("There is no split to score: name one with --split.")
    clips = open_clips(data, split, scored=True)
    keep = _Pictures(folder / "visuals", clips, compare=True) if folder is not None else None
    with open_scoring_feed(clips, data, _wishes(network)) as feed:
        found = evaluate(network.restore, feed, [keep] if keep is not None else [])
    if folder is not None:
        _summary(folder, found.plain() | {"split": split})
    return found


def predict_folder(network: Ready, blur: Path, spikes: Path, output: Path, *, video: bool, compare: bool) -> Predicted:
    """Deblur the frames of a folder that have a spike file of the same name; every frame is written once."""
    clips = _clips_of_folders(network.config, blur, spikes)
    keep = _Pictures(output, clips, compare=False)
    start = time.perf_counter()
    with open_scoring_feed(clips, network.config.DATA, _wishes(network)) as feed:
        for restored in network.restore.over(feed):
            keep(restored)
            if compare:
                keep.compare_into(output / "side_by_side", restored)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 1e6 if network.device.type == "cuda" else 0.0
    _summary(output, {"frames": keep.count, "seconds": seconds, "fps": keep.count / seconds, "peak_mem_mb": peak})
    path = (
        output / "restored.avi" if video and keep.count and write_video(output / "restored.avi", keep.shown) else None
    )
    return Predicted(output, keep.count, seconds, path)


class _Pictures:
    """Writes every scored frame, under its own name."""

    def __init__(self, folder: Path, clips: ClipSet, *, compare: bool) -> None:
        self._folder, self._clips, self._compare = folder, clips, compare
        self.count = 0
        self.shown: list[np.ndarray] = []

    def __call__(self, restored: Restored) -> None:
        self._each(restored, self._write)

    def compare_into(self, folder: Path, restored: Restored) -> None:
        def write(row: int, place: int, name: str) -> None:
            frames = (restored.blur[row, place], restored.predicted[row, place])
            write_image(folder / name, side_by_side([as_bytes(each) for each in frames]))

        self._each(restored, lambda row, place, name, _: write(row, place, name))

    def _write(self, row: int, place: int, name: str, restored: Restored) -> None:
        frame = as_bytes(restored.predicted[row, place])
        if self._compare:
            others = (as_bytes(restored.blur[row, place]), as_bytes(restored.sharp[row, place]))
            frame = side_by_side((others[0], frame, others[1]))
        write_image(self._folder / name, frame)
        self.count += 1
        self.shown.append(frame)

    def _each(self, restored: Restored, do: Callable[[int, int, str, Restored], None]) -> None:
        for row, index in enumerate(restored.indices):
            for place, counts in enumerate(self._clips.score_NL[index].tolist()):
                if counts:
                    each = self._clips.frames[int(self._clips.windows_NL[index, place])]
                    sequence = self._clips.sequences[each.sequence].name
                    folder = f"{sequence}/" if len(self._clips.sequences) > 1 else ""
                    do(row, place, f"{folder}{each.stem}.png", restored)


def _clips_of_folders(config: SpikeConfig, blur: Path, spikes: Path) -> ClipSet:
    for flag, folder in (("--input_blur", blur), ("--input_spike", spikes)):
        if not folder.is_dir():
            raise DataError(f"{flag} {folder}: no such folder.")
    endings = VOXEL_EXTS if config.DATA.USE_PRECOMPUTED_VOXELS else (".dat",)
    frames = stems_in(blur, config.DATA.IMAGE_EXTS)
    # There is no truth: the blurry frame stands in for it, and nothing is scored.
    files = SequenceFiles(blur.name, blur, frames, frames, stems_in(spikes, endings))
    shortest = min((len(run) for run in files.runs()), default=1)
    data = replace(config.DATA, CLIP_LEN=min(config.DATA.CLIP_LEN, shortest), VAL_CLIP_STRIDE="clip")
    return clips_of(data, blur, [files], scored=True)


def _wishes(network: Ready) -> FeedWishes:
    test = network.config.TEST
    return FeedWishes(batch=test.BATCH_SIZE, workers=test.NUM_WORKERS, persistent=False, device=network.device)


def _summary(folder: Path, values: dict[str, object]) -> None:
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    (folder / "metrics" / "test_summary.json").write_text(json.dumps(values, indent=1))
