"""Arguments that several commands of `flatout spike` share."""

import argparse
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli import value
from flatout.errors import FlatoutError, ResourceError

if TYPE_CHECKING:
    from flatout.spike.view import ViewConfig

VERDICT_FLAGS = {
    r"--workers (\d+).*": r"--set DATALOADER.TRAIN_WORKERS=\1",
    r"--cache-images.*": "--set DATA.USE_RAM_CACHE=true",
    r"--device-augment.*": "--set TRAIN.DEVICE_RESIDENT=true",
    r"flatout: --fast .*": "flatout: --set TRAIN.CUDA_GRAPHS=true",
    r".*--log-every (\d+).*": r"--set LOG.PROGRESS_EVERY_STEPS=\1",
    r".*--notest.*": "--set LOG.VAL_EVERY_STEPS=N, larger than now",
}
"""Advice in a profile (regular expression) -> the corresponding flag of `flatout spike train`."""

CONFIG = (
    value(
        "--config",
        "YAML file that describes the training; docs/spike.md lists its keys",
        required=True,
        metavar="YAML",
    ),
    value(
        "--set",
        "override a key of the YAML file, as in TRAIN.EPOCHS=3; can be given several times",
        action="append",
        default=[],
        metavar="KEY=VALUE",
    ),
)
OTHER_CONFIG = (
    value(
        "--config",
        "YAML file that describes the training; docs/spike.md lists its keys (default: the config stored in the "
        "weights)",
        metavar="YAML",
    ),
    value(
        "--set",
        "override a key of that config, as in TEST.TILE_SIZE=512; can be given several times",
        action="append",
        default=[],
        metavar="KEY=VALUE",
    ),
)
"""The same for commands that read weights."""
DEVICE = value("--device", "cpu, or the number of a GPU (default: a GPU if there is one)", default="")
FLIPS: dict[str, bool | None] = {"auto": None, "yes": True, "no": False}
"""Value of --flip -> whether rows are bottom-up; None: to be decided."""
STREAM = (
    value(
        "--geometry",
        "width and height of spike frames, as in 400x250 (default: from config.yaml or NAME.json beside the "
        "stream, else 640x360)",
        default="",
        metavar="WxH",
    ),
    value(
        "--format",
        ".dat files: 8 pixels per byte, or one (default: %(default)s, decided by content)",
        default="auto",
        choices=("auto", "packed", "uint8"),
    ),
    value(
        "--flip",
        "whether rows are stored bottom-up (default: %(default)s, yes for packed .dat files)",
        default="auto",
        choices=tuple(FLIPS),
    ),
)
"""How a stream is stored."""
RANGE = (
    value("--from", "first spike frame (default: 0)", type=int, default=0, dest="begin", metavar="N"),
    value("--to", "spike frame after the last (default: the end)", type=int, dest="end", metavar="N"),
    value(
        "--window",
        "spike frames behind each image of tfp and tfi (default: %(default)s)",
        type=int,
        default=32,
        metavar="N",
    ),
    value(
        "--every",
        "spike frames between two images (default: a few images, spread over the range)",
        type=int,
        metavar="N",
    ),
    value(
        "--gain",
        "brightness of a pixel that fires in every spike frame; 1 is white (default: the brightest become white)",
        type=float,
        metavar="X",
    ),
    value("--fps", "images per second of a video (default: %(default)s)", type=float, default=25.0, metavar="N"),
)
"""Which part of a stream is shown, and how."""


@contextmanager
def advising_geometry(flags: str) -> Iterator[None]:
    """A stream that does not fit its geometry is reported with the flags of the command."""
    from flatout.spike.data.stream_layout import StreamError

    try:
        yield
    except StreamError as error:
        raise error.advising(
            f"Give the size of spike frames with {flags}, or as spike_h and spike_w in a config.yaml beside the spikes."
        ) from None


@contextmanager
def writing_to(output: Path) -> Iterator[None]:
    """An OSError about the output of a command, or about a full disk, is reported as the user's to fix."""
    try:
        yield
    except FlatoutError:  # some are OSErrors too
        raise
    except OSError as error:
        failed, wanted = Path(os.path.abspath(error.filename or "")), Path(os.path.abspath(output))
        is_output = error.filename and (failed.is_relative_to(wanted) or wanted.is_relative_to(failed))
        if not is_output and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ResourceError(
            f"{error.filename or output}: cannot be written: {error.strerror}. Choose another place, or make room."
        ) from None


def stream_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `open_stream` from the flags of STREAM."""
    return {"geometry": args.geometry, "stored_as": args.format, "flipud": FLIPS[args.flip]}


def view_settings(args: argparse.Namespace) -> "ViewConfig":
    """What to show, from the flags of RANGE."""
    from flatout.spike.view import ViewConfig

    return ViewConfig(**{each.name: getattr(args, each.name) for each in fields(ViewConfig) if each.name in args})
