"""Checks a configuration before training: packages, data, one sample, loader and network.

It reports in one pass what four separate test tools of the original guide report.

Dimension key:  N clips   L frames of a clip
"""

import csv
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.errors import DataError, FlatoutError
from flatout.feed import DecodeError, Feed, FeedConfig, Plan
from flatout.findings import Finding
from flatout.spike.config import SpikeConfig
from flatout.spike.data.clip_set import ClipSet, open_clips, sequence_files, validation_split
from flatout.spike.data.decode import decode
from flatout.spike.data.frames import Frames, Part, read_frame
from flatout.spike.data.source import ClipSource
from flatout.spike.data.stream_files import stream_bytes
from flatout.spike.data.stream_layout import Orientation, compare_with_frame, grey_at
from flatout.spike.data.tree import ordered
from flatout.spike.input import check_memory, loading_summary, plan_for, training_source

if TYPE_CHECKING:
    from flatout.feed import Batch

logger = logging.getLogger(__name__)


PACKAGES = ("torch", "numpy", "opencv-python-headless", "PyYAML", "pydantic")
BATCHES = 3
"""Batches whose loading is timed."""
TYPICAL_RATE = (0.05, 0.45)
"""Typical range of the mean spike rate."""
ORIENTATION_FILES = 3
"""Number of spike files that are compared with their frames."""


# Exposure times from align logs: CSV lines `frame_idx,t0,t1,event_count,seq`


def read_align_logs(paths: Iterable[str]) -> dict[tuple[str, int], tuple[float, float]]:
    """Start and end of exposures by (sequence, frame number); a missing log is skipped with a warning."""
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for path in map(Path, paths):
        if not path.is_file():
            logger.warning("ALIGN_LOG_PATHS: %s does not exist; exposure times stay 0.", path)
            continue
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    found[row["seq"], int(row["frame_idx"])] = float(row["t0"]), float(row["t1"])
                except (KeyError, TypeError, ValueError):
                    raise DataError(
                        f"{path}:{number}: not a valid line of an align log, whose columns are "
                        "frame_idx,t0,t1,event_count,seq."
                    ) from None
    return found


# The checks


def as_text(finding: Finding) -> str:
    """PASS or FAIL with the topic, then the result line by line."""
    lines = (f"       {line}" for line in finding.value.splitlines())
    return "\n".join([f"[{'FAIL' if finding.level == 'bad' else 'PASS'}] {finding.topic}", *lines])


def examine(config: SpikeConfig, *, gpus: int = 1) -> Iterator[Finding]:
    """Run all checks in order, for a training with this many GPUs; one that fails does not stop the others."""
    open_once = cache(lambda: open_clips(config.DATA, config.DATA.TRAIN_SPLIT, scored=False))
    checks: dict[str, Callable[[], Iterable[str]]] = {
        "packages": lambda: (f"{name} {_version(name)}" for name in PACKAGES),
        "data tree": lambda: _tree(config, open_once()),
        "configuration and loader plan": lambda: _plan(config, open_once(), gpus),
        "spike format": lambda: _format(config, open_once()),
        "one sample, live": lambda: _sample(config, open_once()),
        "training loader": lambda: _loader(config, open_once()),
        "network": lambda: _network(config),
    }
    for name, check in checks.items():
        try:
            yield Finding(name, "\n".join(check()), "ok")
        except (FlatoutError, CheckFailed, OSError) as error:
            yield Finding(name, str(error), "bad")


def orientation_of(clips: ClipSet, frame: int, *, part: Part = "blur") -> Orientation:
    """Compare the stream of a frame with the blurry or the sharp frame."""
    layout = clips.layout_of(frame)
    spikes = decode(stream_bytes(clips.frames[frame].spike, layout), layout)
    image = grey_at(read_frame(getattr(clips.frames[frame], part)), (layout.height, layout.width))
    return compare_with_frame(spikes.mean(axis=0), image, flipud=layout.flipud)


def orientations_of(clips: ClipSet) -> dict[int, Orientation]:
    """The same for some frames, from the first to the last one."""
    chosen = np.unique(np.linspace(0, len(clips.frames) - 1, ORIENTATION_FILES).astype(int)).tolist()
    return {frame: orientation_of(clips, frame) for frame in chosen}


def warn_of_mismatch(clips: ClipSet) -> None:
    """Warn if not a single stream looks like its frame, as when the size of spike frames or the flip is wrong.

    Only a warning: in the dark, or of a uniform area, no stream looks like its frame.
    """
    if clips.precomputed:
        return
    # What cannot be read is reported by whoever needs it.
    with suppress(FlatoutError, DecodeError, OSError):
        problems = [found.problem for found in orientations_of(clips).values()]
        if all(problems):
            logger.warning("%s: %s `flatout spike check` shows more.", clips.where, problems[0])


class CheckFailed(Exception):
    """A check found a problem; the text describes it."""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed under this name"


def _tree(config: SpikeConfig, train: ClipSet) -> Iterator[str]:
    yield f"root {config.DATA.ROOT}"
    for split in filter(None, (config.DATA.TRAIN_SPLIT, validation_split(config.DATA))):
        clips = train if split == config.DATA.TRAIN_SPLIT else open_clips(config.DATA, split, scored=True)
        first = sequence_files(config.DATA, split)[0]
        parts = ", ".join(
            f"{len(files)} {name}" for name, files in zip(("blur", "sharp", "spike"), first[2:], strict=True)
        )
        yield f"{split}: {len(clips.sequences)} sequences, {len(clips.frames)} frames, {len(clips)} clips"
        yield f"  first sequence {first.name}: {parts}, from {ordered(first.blur)[0]}"


def _plan(config: SpikeConfig, clips: ClipSet, gpus: int) -> tuple[str, ...]:
    data, train = config.DATA, config.TRAIN
    plan = plan_for(config, clips, gpus=gpus, batch=train.BATCH_SIZE)
    check_memory(plan)
    mode = "precomputed voxels" if data.USE_PRECOMPUTED_VOXELS else "live"
    return (
        f"clips of {data.CLIP_LEN}, crop {data.CROP_SIZE}, batch {train.BATCH_SIZE}, {data.channels} bins, {mode}",
        str(plan.workers),
        *loading_summary(plan, config.LOG.LANG),
    )


def _format(config: SpikeConfig, clips: ClipSet) -> Sequence[str]:
    """How spike files are read, and whether they match their frames."""
    if config.DATA.USE_PRECOMPUTED_VOXELS:
        return ("precomputed voxels: there is no format to decide",)
    layout = clips.layout_of(0)
    lines = [
        f"{layout.format} {layout.height} x {layout.width}, {layout.frames} spike frames, flipped: {layout.flipud}"
    ]
    compared = orientations_of(clips)
    for frame, found in compared.items():
        listed = ", ".join(f"{orientation} {value:.2f}" for orientation, value in found.correlation.items())
        usual = "" if TYPICAL_RATE[0] <= found.mean_rate <= TYPICAL_RATE[1] else " (unusual: 0.05 to 0.45 is typical)"
        lines.append(
            f"frame {clips.frames[frame].stem}: rate {found.mean_rate:.3f}{usual}, gain {found.gain:.2f}, {listed}"
        )
    if problem := next(filter(None, (found.problem for found in compared.values())), ""):
        raise CheckFailed("\n       ".join([problem, *lines]))
    return lines


def _sample(config: SpikeConfig, clips: ClipSet) -> tuple[str, ...]:
    """Shapes and ranges of the first clip, with whole frames."""
    source = ClipSource(Frames(clips, config.DATA), crop=None)
    one = Plan(num_samples=len(clips), batch_size=1, order=np.zeros(1, np.int64), shapes=lambda e, s: source.shapes(0))
    with Feed(source, one, FeedConfig(workers=0)) as feed:
        batch = next(iter(feed))
        _check_voxels(batch, config)
        times = _exposure(config, clips)
        return (f"{len(clips)} samples; {clips.name_of(0)}{times}", *_describe(batch))


def _exposure(config: SpikeConfig, clips: ClipSet) -> str:
    """Exposure times of the first frame as text; empty if no align log has them."""
    first = clips.frames[int(clips.windows_NL[0, 0])]
    logged = read_align_logs(config.DATA.ALIGN_LOG_PATHS)
    found = logged.get((clips.sequences[first.sequence].name, int(first.stem))) if first.stem.isdigit() else None
    return ", exposed from {:g} to {:g}".format(*found) if found is not None else ""


def _describe(batch: "Batch") -> Iterator[str]:
    """Shapes, as the network gets them, and value ranges of a batch."""
    for part in ("blur", "sharp"):
        num, length, height, width, _ = batch[part].shape
        low, high = batch[part].min() / 255, batch[part].max() / 255
        yield f"{part} ({num}, {length}, 3, {height}, {width}), values {low:.3f} to {high:.3f}"
    spikes = batch["spikes"]
    share = 100 * np.count_nonzero(spikes) / spikes.size
    yield f"spike_vox {spikes.shape}, values {spikes.min():g} to {spikes.max():g}, {share:.1f} % not zero"


def _check_voxels(batch: "Batch", config: SpikeConfig) -> None:
    """Raise CheckFailed if voxels have impossible values."""
    spikes, frames = batch["spikes"], batch["spike_frames"]
    if not np.isfinite(spikes).all() or spikes.min() < 0:
        raise CheckFailed("voxels are negative or not finite")
    if not spikes.any():
        raise CheckFailed(
            "all voxels are zero: the streams are empty, or are read in a wrong format. See the check 'spike format'."
        )
    counts = config.DATA.SPIKE_REPR == "voxel" and config.DATA.SPIKE_FORMAT != "bytes" and frames.max() > 0
    if counts and spikes.max() > frames.max():
        raise CheckFailed(
            f"a voxel counts {spikes.max():g} spikes, but covers at most {frames.max():g} spike frames, each of which "
            "adds at most one: the streams are read in a wrong format. See the check 'spike format'."
        )


def _loader(config: SpikeConfig, clips: ClipSet) -> tuple[str, ...]:
    """Load the first batches of an epoch with the planned workers, and measure the speed."""
    source = training_source(clips, config.DATA)
    batch_size = min(config.TRAIN.BATCH_SIZE, len(source))
    workers = plan_for(config, clips, gpus=1, batch=batch_size).workers
    plan = Plan(num_samples=len(source), batch_size=batch_size, seed=config.SEED)
    with Feed(source, plan, FeedConfig(workers=workers.train)) as feed:
        began = time.perf_counter()
        for batch in islice(feed, BATCHES):
            lines = list(_describe(batch))
            _check_voxels(batch, config)
        speed = min(BATCHES, len(feed)) * batch_size / (time.perf_counter() - began)
        return (f"{len(source)} samples, {len(feed)} batches per epoch, {speed:.1f} samples/s at the start", *lines)


def _network(config: SpikeConfig) -> tuple[str, ...]:
    """Build the network, and run it on input of the loader's shape."""
    import torch

    from flatout.spike.model import Clip, DeblurNet

    network = DeblurNet(config.MODEL, channels=config.DATA.channels)
    with torch.inference_mode():
        out = network(Clip(torch.rand(1, 1, 3, 32, 32), torch.rand(1, 1, config.DATA.channels, 16, 16)))
    count = sum(parameter.numel() for parameter in network.parameters())
    return (f"{count / 1e6:.2f} M parameters, {tuple(out.shape)} out; CUDA: {torch.cuda.is_available()}",)
