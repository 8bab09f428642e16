"""flatout spike prepare: arrange the files of a data set as training expects them."""

from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli import parser_of, show_log, switch, value
from flatout.errors import ConfigError
from flatout.spike.commands.arguments import FLIPS, advising_geometry, writing_to

if TYPE_CHECKING:
    from flatout.spike.data.prepare import PrepareConfig, Prepared

DESCRIPTION = """\
Write a data set in the layout that training expects: for every sequence the folders blur, sharp and spike side by side,
as copies or links. Reads the layouts of GoPro-Spike (train/<seq>/blur, sharp), of its regrouped form
(train_GT_blurred/<seq>, train_GT/<seq>), of S-SDM's GOPRO (train/blur_data/<seq>, sharp_data, spike_data) and of
X4K1000FPS-Spike (train_blurry_33, train_fullRGB, train_spike_2xds), whose streams are cut into one file per frame; and
of Spike-Zoo (train/gt, train/spike), where the blurry frame is the mean of the stream. It can safely be run again.
"""
EPILOG = """\
examples:
  flatout spike prepare --use_symlinks
  flatout spike prepare --spike_root spikes --blur_root GOPRO_Large --output unified --use_symlinks --check
  flatout spike prepare --spike_root X4K --blur_root X4K --output x4k --splits train val --exposure 33
  flatout spike prepare --spike_root reds_base --blur_root reds_base --output reds --geometry 400x250

Exit code: 0, 2 wrong arguments, 3 a root is missing, no sequence was found, or --check found a stream that does not
match its frame, 5 the output cannot be written.
"""
RAW = "data/raw/gopro_spike"
FLAGS = (
    value(
        "--spike_root",
        "root of the spike files (default: %(default)s)",
        type=Path,
        default=Path(f"{RAW}/GOPRO_Large_spike_seq"),
        metavar="DIR",
    ),
    value(
        "--blur_root",
        "root of the blurry and sharp frames (default: %(default)s)",
        type=Path,
        default=Path(f"{RAW}/GOPRO_Large"),
        metavar="DIR",
    ),
    value(
        "--output",
        "folder to write to (default: %(default)s)",
        type=Path,
        default=Path("data/processed/gopro_spike_unified"),
        metavar="DIR",
    ),
    switch("--use_symlinks", "link folders instead of copying them"),
    value(
        "--blur_dir",
        "GoPro-Spike: folder of the blurry frames; published numbers use blur (default: %(default)s)",
        default="blur",
        choices=("blur", "blur_gamma"),
    ),
    value("--splits", "splits to prepare (default: train test)", nargs="+", default=["train", "test"], metavar="SPLIT"),
    value(
        "--exposure",
        "X4K1000FPS-Spike: spike frames per blurry frame, 33 or 65 (default: %(default)s)",
        type=int,
        default=33,
        metavar="N",
    ),
    switch("--check", "compare one stream of every sequence with its frame"),
    value(
        "--geometry",
        "width and height of spike frames, as in 400x250, written beside every sequence (default: from "
        "config.yaml beside the spikes, else 640x360)",
        default="",
        metavar="WxH",
    ),
    value("--spike_hw", "the same as --geometry WxH", type=int, nargs=2, metavar=("H", "W")),
    value(
        "--flip",
        "whether rows of streams are stored bottom-up, for --check and for blurry frames that are made of streams; "
        "train with the same SPIKE_FLIPUD (default: %(default)s, yes for packed .dat files)",
        default="auto",
        choices=tuple(FLIPS),
    ),
    value(
        "--val_ratio",
        "also make a split val from this share of the training sequences, as links",
        type=float,
        metavar="R",
    ),
    value("--seed", "seed of the choice by --val_ratio (default: %(default)s)", type=int, default=42, metavar="N"),
)


def main(argv: list[str]) -> int:
    """Prepare; returns the exit code."""
    args = parser_of("flatout spike prepare", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    if args.val_ratio is not None and not 0 < args.val_ratio < 1:
        raise ConfigError(f"--val_ratio {args.val_ratio}: it must be between 0 and 1.")
    if args.spike_hw is not None and min(args.spike_hw) < 1:
        raise ConfigError(f"--spike_hw {' '.join(map(str, args.spike_hw))}: both must be 1 or more.")
    if args.spike_hw is not None and args.geometry:
        raise ConfigError("--geometry and --spike_hw mean the same: give only one.")
    show_log()
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.spike.data.geometry import parse_geometry
    from flatout.spike.data.prepare import PrepareConfig, make_validation, prepare

    spike_hw = parse_geometry(args.geometry) if args.geometry else args.spike_hw and tuple(args.spike_hw)
    keys = ("spike_root", "blur_root", "output", "use_symlinks", "blur_dir", "exposure")
    given = {key: getattr(args, key) for key in keys}
    config = PrepareConfig(**given, splits=tuple(args.splits), spike_hw=spike_hw, flipud=FLIPS[args.flip])
    with writing_to(config.output):
        done = prepare(config)
    for split, sequences in done.created.items():
        for name, frames in sequences.items():
            print(f"{split}/{name}: {frames.frames} frames, {frames.usable} usable")
    if args.val_ratio is not None:
        print(f"val: {', '.join(make_validation(args.output, ratio=args.val_ratio, seed=args.seed))}")
    if not done.created:
        print("No usable sequence was found: check --spike_root, --blur_root and --splits.")
        return 3
    return _check(config, done) if args.check else 0


def _check(config: "PrepareConfig", done: "Prepared") -> int:
    """Compare one stream of every sequence with its frame; returns the exit code."""
    from flatout.spike.check import orientation_of
    from flatout.spike.config import DataConfig
    from flatout.spike.data.clip_set import open_clips

    height, width = config.spike_hw or (None, None)
    data = DataConfig(ROOT=str(config.output), CLIP_LEN=1, SPIKE_H=height, SPIKE_W=width, SPIKE_FLIPUD=config.flipud)
    bad = 0
    for split in done.created:
        with advising_geometry("--geometry WxH (or --spike_hw H W)"):
            clips = open_clips(data, split, scored=True)
        for number, facts in enumerate(clips.sequences):
            frame = next(index for index, each in enumerate(clips.frames) if each.sequence == number)
            # A blurry frame that is made of the stream always fits it.
            found = orientation_of(clips, frame, part="sharp" if done.gain else "blur")
            problem = found.problem_of_prepare
            bad += bool(problem)
            text = problem or f"fits its frame (correlation {found.correlation['identity']:.2f}, gain {found.gain:.2f})"
            print(f"{split}/{facts.name}: {text}")
    return 3 if bad else 0
