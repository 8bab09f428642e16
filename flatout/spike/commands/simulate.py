"""flatout spike simulate: make a training set from your own video."""

from pathlib import Path

from flatout.cli import parser_of, show_log, value
from flatout.errors import ConfigError, counted
from flatout.spike.commands.arguments import writing_to

DESCRIPTION = """\
Make a training set from a video, a folder of frames, or a folder of videos or of folders of frames: blurry frames by
averaging, sharp frames, and the spikes of a simulated camera at half the size. Also writes train.yaml, with which to
train on it. The same command continues an interrupted simulation; the same seed gives the same files.
"""
EPILOG = """\
examples:
  flatout spike simulate walk.mp4 walk                                    30 fps: each frame is one exposure
  flatout spike simulate slow-motion.mp4 set --exposure 11 --hold 1       240 fps: 11 frames, 88 spike frames
  flatout spike simulate videos set --size 640x360 --noise 0.1 --mismatch 0.02
  flatout spike train --config set/train.yaml

A blurry frame is the mean of EXPOSURE x INTERPOLATE sub-frames around a sharp frame; its stream has HOLD spike frames
for each of them.

Exit code: 0, 2 wrong arguments or a folder with other files, 3 unusable video, 5 the output cannot be written.
"""
FLAGS = (
    value("source", "a video, a folder of frames, or a folder of either", type=Path, metavar="VIDEO|FOLDER"),
    value("output", "folder to write the training set to", type=Path, metavar="OUT"),
    value("--exposure", "frames of the video per exposure (default: %(default)s)", type=int, default=1, metavar="N"),
    value(
        "--stride",
        "frames of the video from one exposure to the next (default: EXPOSURE, without a pause)",
        type=int,
        metavar="N",
    ),
    value(
        "--interpolate",
        "sub-frames per frame of the video; 1: no interpolation (default: %(default)s)",
        type=int,
        default=8,
        metavar="N",
    ),
    value(
        "--interpolation",
        "how sub-frames are made: by optical flow, or by blending (default: %(default)s)",
        default="flow",
        choices=("flow", "blend"),
    ),
    value("--hold", "spike frames per sub-frame (default: %(default)s)", type=int, default=7, metavar="N"),
    value(
        "--threshold",
        "light that makes a pixel fire, in full scale per spike frame: white fires at a rate of 1 / X "
        "(default: %(default)s)",
        type=float,
        default=2.0,
        metavar="X",
    ),
    value(
        "--reset",
        "what firing does to the charge of a pixel: subtract the threshold, or set it to zero (default: %(default)s)",
        default="subtract",
        choices=("subtract", "zero"),
    ),
    value(
        "--noise",
        "shot noise: relative deviation of the light of one spike, 1 / sqrt(photons) (default: %(default)s)",
        type=float,
        default=0.0,
        metavar="X",
    ),
    value(
        "--mismatch",
        "fixed-pattern noise: relative deviation of the threshold between pixels (default: %(default)s)",
        type=float,
        default=0.0,
        metavar="X",
    ),
    value(
        "--dark",
        "dark current: light that a pixel sees in the dark, in full scale (default: %(default)s)",
        type=float,
        default=0.0,
        metavar="X",
    ),
    value(
        "--gamma",
        "light = stored value ** X, for blur and spikes; 2.2 averages linear light (default: %(default)s, as in "
        "GoPro's folder blur)",
        type=float,
        default=1.0,
        metavar="X",
    ),
    value(
        "--size",
        "size of frames, like 640x360 (default: as in the video, cropped to whole bytes of spikes)",
        default="",
        metavar="WxH",
    ),
    value(
        "--spike-scale",
        "pixels of a frame per spike pixel, along each axis (default: %(default)s)",
        type=int,
        default=2,
        metavar="N",
    ),
    value("--sequence-length", "most frames per sequence (default: %(default)s)", type=int, default=100, metavar="N"),
    value(
        "--test-share",
        "share of the videos that is the split test, or of the end of each if they are few (default: %(default)s)",
        type=float,
        default=0.2,
        metavar="R",
    ),
    value("--max-frames", "frames to read of each video (default: all)", type=int, metavar="N"),
    value("--seed", "seed of the simulation (default: %(default)s)", type=int, default=0, metavar="N"),
    value("--workers", "processes that share the sequences (default: one per core)", type=int, metavar="N"),
)


def main(argv: list[str]) -> int:
    """Simulate a training set; returns the exit code."""
    args = parser_of("flatout spike simulate", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"--workers {args.workers}: it must be 1 or more.")
    show_log()
    # Imported here so that help and argument errors do not load NumPy.
    import os
    import shlex
    import time
    from dataclasses import fields

    from flatout.spike.sensor import SensorConfig
    from flatout.spike.simulate import SimulateConfig, simulate_set

    sensor = SensorConfig(**{each.name: getattr(args, each.name) for each in fields(SensorConfig)})
    keys = [each.name for each in fields(SimulateConfig) if each.name != "sensor"]
    config = SimulateConfig(sensor=sensor, **{key: getattr(args, key) for key in keys})
    start = time.perf_counter()
    with writing_to(args.output):
        done = simulate_set(args.source, args.output, config, workers=args.workers or len(os.sched_getaffinity(0)))
    speed = f", {done.written / (time.perf_counter() - start):.1f} frames/s" if done.written else " (already complete)"
    frames = f"{counted(done.frames, 'frame')} of {config.spike_frames} spike frames"
    counts = ", ".join(f"{count} {split}" for split, count in done.sequences.items())
    print(f"{done.folder}: {frames}, sequences: {counts}{speed}")
    print(f"Train on it: flatout spike train --config {shlex.quote(str(done.yaml))}")
    return 0
