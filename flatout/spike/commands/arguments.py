"""Arguments that several commands of `flatout spike` share."""

import argparse

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
