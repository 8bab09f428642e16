"""Inference with trained weights: score a split, or deblur a folder.

Dimension key:  N clips   L frames of a clip
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.engine import DTYPES, default_amp
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.feed import FeedConfig
from flatout.ranks import choose_device
from flatout.spike.check import warn_of_mismatch
from flatout.spike.config import SpikeConfig, config_from
from flatout.spike.data.clip_set import ClipFrame, ClipSet, clips_of, open_clips, validation_split
from flatout.spike.data.frames import read_frame
from flatout.spike.data.stream_files import STREAM_EXTS
from flatout.spike.data.tree import VOXEL_EXTS, SequenceFiles, files_by_stem, ordered
from flatout.spike.evaluate import BatchObserver, DeblurEvaluation, RestoredBatch, Restorer, evaluate
from flatout.spike.input import ClipFeed, open_scoring_feed
from flatout.spike.lpips import Lpips, LpipsMeter
from flatout.spike.step import ToClip
from flatout.spike.visuals import (
    BeforeAfter,
    as_bytes,
    side_by_side,
    write_image,
    write_slider_page,
    write_video,
)
from flatout.spike.weights import load_network

logger = logging.getLogger(__name__)

USED_KEYS = ("DATA.", "TEST.", "MODEL.CHANNELS_LAST")
"""Keys of a config that matter once a network is trained; the network itself is that of the weights."""


class DeblurPredictor(NamedTuple):
    """A trained network on its device, with its config."""

    config: SpikeConfig
    restorer: Restorer
    device: torch.device


@dataclass(frozen=True)
class PredictedFolder:
    """The result of deblurring a folder."""

    folder: Path
    """Where the frames were written."""
    frames: int
    """Number of frames."""
    seconds: float
    video: Path | None
    """The video file; None if none was written."""
    page: Path | None = None
    """The page with a slider between blurry and restored frames; None if none was written."""


@dataclass(frozen=True, kw_only=True)
class SplitScores(DeblurEvaluation):
    """The scores of a split, with LPIPS if its weights were given."""

    lpips: float | None = None
    """Mean LPIPS of restored frames: 0 is equal to the sharp frame, lower is better."""
    blurry_lpips: float | None = None
    """Mean LPIPS of the blurry input."""

    def __str__(self) -> str:
        if self.lpips is None:
            return super().__str__()
        return f"{super().__str__()}, LPIPS {self.lpips:.4f} (blurry input: {self.blurry_lpips:.4f})"


def load_predictor(
    weights: Path, device: str, config: SpikeConfig | None = None, *, overrides: Sequence[str] = ()
) -> DeblurPredictor:
    """Load weights. `config` replaces the config in the file, except for the network.

    `overrides`, in the form that `--set` takes, replace keys of the config in the file; `config` has them already.
    """
    network, metadata = load_network(weights)
    if config is None:
        config = config_from(metadata["config"], overrides, where=f"{weights}, config")
    for text in (text for text in overrides if not text.startswith(USED_KEYS)):
        logger.warning("--set %s has no effect here: only DATA, TEST and MODEL.CHANNELS_LAST are used.", text)
    if network.spec["model"]["USE_SPIKE"] and config.DATA.channels != network.spec["channels"]:
        raise CheckpointError(
            f"{weights} was trained with {network.spec['channels']} spike channels, but DATA.NUM_VOXEL_BINS (or K) "
            f"says {config.DATA.channels}. Use the config that it was trained with."
        )
    chosen = choose_device(device)
    if config.MODEL.CHANNELS_LAST:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    restorer = Restorer(network.to(chosen), ToClip(config.DATA), config.TEST, DTYPES[default_amp(chosen)])
    return DeblurPredictor(config, restorer, chosen)


def score_split(
    predictor: DeblurPredictor, split: str | None, folder: Path | None, *, lpips: str | Path | None = None
) -> SplitScores:
    """Score every frame of a split once; writes scores and images to `folder` if it is given.

    `split` None: the validation split; DataError if there is none. `lpips`: a file with weights of LPIPS.
    """
    meter = LpipsMeter(Lpips(lpips).to(predictor.device)) if lpips is not None else None
    data = predictor.config.DATA
    if not Path(data.ROOT).is_dir():
        raise DataError(f"DATA.ROOT={data.ROOT}: no such folder. Say where it is now with --set DATA.ROOT=FOLDER.")
    split = split or validation_split(data)
    if split is None:
        raise DataError("There is no split to score: name one with --split.")
    clips = open_clips(data, split, scored=True)
    warn_of_mismatch(clips)

    def write(batch: RestoredBatch) -> None:
        assert folder is not None
        for _, name, *frames in _scored(clips, batch):
            write_image(folder / "visuals" / name, side_by_side([as_bytes(each) for each in frames]))

    observers: list[BatchObserver] = [*([write] if folder else []), *([meter] if meter else [])]
    with _open_feed(predictor, clips) as feed:
        scores = evaluate(predictor.restorer, feed, observers)
    found = SplitScores(**asdict(scores) | (meter.means() if meter else {}))
    if folder is not None:
        _write_summary(folder, found.as_dict() | {"split": split})
    return found


def predict_folder(
    predictor: DeblurPredictor,
    blur: Path,
    spikes: Path,
    output: Path,
    *,
    video: bool,
    compare: bool,
    page: bool = False,
) -> PredictedFolder:
    """Deblur the frames of a folder that have a spike file of the same name; every frame is written once.

    `blur` and `spikes` may also be one frame and its stream, whatever their names.
    Also writes, as requested, a video, images side by side (`compare`), and a page with a slider.
    """
    clips = _clips_of(predictor.config, blur, spikes)
    if any(os.path.realpath(output / f"{each.stem}.png") == os.path.realpath(each.blur) for each in clips.frames):
        raise ConfigError(f"{output}: restored frames would replace the blurry ones. Choose another folder for them.")
    warn_of_mismatch(clips)
    written: list[BeforeAfter] = []
    start = time.perf_counter()
    with _open_feed(predictor, clips) as feed:
        for batch in predictor.restorer.restore_all(feed):
            for files, name, blurry, restored, _ in _scored(clips, batch):
                frame = as_bytes(restored)
                write_image(output / name, frame)
                written.append(BeforeAfter(files.stem, Path(files.blur), output / name))
                if compare:
                    write_image(output / "side_by_side" / name, side_by_side((as_bytes(blurry), frame)))
    seconds, count = time.perf_counter() - start, len(written)
    peak = torch.cuda.max_memory_allocated() / 1e6 if predictor.device.type == "cuda" else 0.0
    _write_summary(output, {"frames": count, "seconds": seconds, "fps": count / seconds, "peak_mem_mb": peak})
    # From the files again: a long sequence would not fit into memory.
    restored_frames = (read_frame(str(each.after)) for each in written)
    path = (
        output / "restored.avi" if video and count and write_video(output / "restored.avi", restored_frames) else None
    )
    page_path = output / "before_after.html" if page and count else None
    if page_path is not None:
        title = f"{Path(os.path.abspath(blur)).parent.name}/{blur.name}: blurry and restored"
        write_slider_page(page_path, written, title=title)
    return PredictedFolder(output, count, seconds, path, page_path)


def _scored(clips: ClipSet, batch: RestoredBatch) -> Iterator[tuple[ClipFrame, str, Tensor, Tensor, Tensor]]:
    """Files and name of every scored frame, and the frame blurry, restored and sharp."""
    for row, index in enumerate(batch.indices):
        for position in np.flatnonzero(clips.score_NL[index]).tolist():
            files = clips.frames[int(clips.windows_NL[index, position])]
            folder = f"{clips.sequences[files.sequence].name}/" if len(clips.sequences) > 1 else ""
            blurry, restored, sharp = (each[row, position] for each in (batch.blur, batch.predicted, batch.sharp))
            yield files, f"{folder}{files.stem}.png", blurry, restored, sharp


def _clips_of(config: SpikeConfig, blur: Path, spikes: Path) -> ClipSet:
    """The frames that have spikes, each scored once: of two folders, or one frame and its stream."""
    for flag, path in (("--input_blur", blur), ("--input_spike", spikes)):
        if not path.exists():
            raise DataError(f"{flag} {path}: no such folder or file.")
    if blur.is_file() != spikes.is_file():
        one = "--input_blur" if blur.is_file() else "--input_spike"
        raise DataError(f"{one} is a file, the other one a folder: give two folders, or one frame and its stream.")
    endings = VOXEL_EXTS if config.DATA.USE_PRECOMPUTED_VOXELS else STREAM_EXTS
    if blur.is_file():
        if spikes.suffix.lower() not in endings:
            raise DataError(f"--input_spike {spikes}: not a spike file by its name. Endings: {', '.join(endings)}.")
        frames, streams, root = {blur.stem: blur}, {blur.stem: spikes}, blur.parent
    else:
        frames, streams, root = files_by_stem(blur, config.DATA.IMAGE_EXTS), files_by_stem(spikes, endings), blur
        if not frames.keys() & streams.keys():
            raise DataError(_no_common_name(blur, spikes, frames, streams))
    # There are no sharp frames: the blurry ones take their place, and nothing is scored.
    files = SequenceFiles(root.name, root, frames, frames, streams)
    shortest = min((len(run) for run in files.runs()), default=1)
    data = replace(config.DATA, CLIP_LEN=min(config.DATA.CLIP_LEN, shortest), VAL_CLIP_STRIDE="clip")
    return clips_of(data, root.parent, [files], scored=True)


def _no_common_name(blur: Path, spikes: Path, frames: Mapping[str, Path], streams: Mapping[str, Path]) -> str:
    found = [
        f"{len(files)} {what} in {folder}" + (f" (such as {ordered(files)[0]})" if files else "")
        for what, folder, files in (("frames", blur, frames), ("spike files", spikes, streams))
    ]
    return f"No frame has a spike file of the same name: {found[0]}, {found[1]}. So there is nothing to deblur."


def _open_feed(predictor: DeblurPredictor, clips: ClipSet) -> AbstractContextManager[ClipFeed]:
    test, data = predictor.config.TEST, predictor.config.DATA
    workers = FeedConfig(workers=test.NUM_WORKERS, persistent_workers=False)
    return open_scoring_feed(clips, data, workers, test.BATCH_SIZE, predictor.device)


def _write_summary(folder: Path, values: dict[str, object]) -> None:
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    (folder / "metrics" / "test_summary.json").write_text(json.dumps(values, indent=1))
