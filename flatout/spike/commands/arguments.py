"""Arguments that several commands of `flatout spike` share."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.spike.view import ViewConfig

VERDICT_FLAGS = {
    r"--workers (\d+).*": r"--set DATALOADER.TRAIN_WORKERS=\1",
    r"--cache-images.*": "--set DATA.USE_RAM_CACHE=true",
    r"--device-augment": "--set TRAIN.DEVICE_RESIDENT=true",
    r"flatout: --fast .*": "flatout: --set TRAIN.CUDA_GRAPHS=true",
    r"--log-every (\d+)": r"--set LOG.PROGRESS_EVERY_STEPS=\1",
    r".*--notest.*": "--set LOG.VAL_EVERY_STEPS=N, larger than now",
}
"""Advice in a profile (regular expression) -> the corresponding flag of `flatout spike train`."""


def make_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of `flatout spike <name>`."""
    return argparse.ArgumentParser(
        prog=f"flatout spike {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --config and --set."""
    otherwise = "" if required else " (default: the config stored in the weights)"
    parser.add_argument(
        "--config", metavar="YAML", required=required,
        help=f"YAML file that describes the training; docs/spike.md lists its keys{otherwise}",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help=f"override a key of {'the YAML file' if required else 'that config'}, as in "
        f"{'TRAIN.EPOCHS=3' if required else 'TEST.TILE_SIZE=512'}; can be given several times",
    )  # fmt: skip


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="", help="cpu, or the number of a GPU (default: a GPU if there is one)")


def add_stream(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how a stream is stored."""
    parser.add_argument(
        "--geometry", default="", metavar="WxH",
        help="width and height of spike frames, as in 400x250 (default: from config.yaml or NAME.json beside the "
        "stream, else 640x360)",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("auto", "packed", "uint8"), default="auto",
        help=".dat files: 8 pixels per byte, or one (default: %(default)s, decided by content)",
    )  # fmt: skip
    parser.add_argument(
        "--flip", choices=("auto", "yes", "no"), default="auto",
        help="whether rows are stored bottom-up (default: %(default)s, yes for packed .dat files)",
    )  # fmt: skip


def stream_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `open_stream` from the flags of `add_stream`."""
    flipud = None if args.flip == "auto" else args.flip == "yes"
    return {"geometry": args.geometry, "stored_as": args.format, "flipud": flipud}


def add_range(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which part of a stream is shown, and how."""
    parser.add_argument("--from", dest="begin", type=int, default=0, metavar="N", help="first spike frame (default: 0)")
    parser.add_argument("--to", dest="end", type=int, metavar="N", help="spike frame after the last (default: the end)")
    parser.add_argument(
        "--window", type=int, default=32, metavar="N",
        help="spike frames behind each image of tfp and tfi (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=int, metavar="N",
        help="spike frames between two images (default: a few images, spread over the range)",
    )  # fmt: skip
    parser.add_argument(
        "--gain", type=float, metavar="X",
        help="brightness of a pixel that fires in every spike frame; 1 is white (default: the brightest become white)",
    )  # fmt: skip
    parser.add_argument(
        "--fps", type=float, default=25.0, metavar="N", help="images per second of a video (default: %(default)s)"
    )


def view_settings(args: argparse.Namespace) -> "ViewConfig":
    """What to show, from the flags of `add_range`."""
    from flatout.spike.view import ViewConfig

    keys = ("show", "begin", "end", "window", "every", "gain", "fps", "bins")
    return ViewConfig(**{key: getattr(args, key) for key in keys if hasattr(args, key)})
