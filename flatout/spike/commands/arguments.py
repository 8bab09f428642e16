"""What the commands of `flatout spike` ask for alike."""

import argparse

VERDICT_FLAGS = {
    r"--workers (\d+).*": r"--set DATALOADER.TRAIN_WORKERS=\1",
    r"--cache-images.*": "--set DATA.USE_RAM_CACHE=true",
    r"--device-augment": "--set TRAIN.DEVICE_RESIDENT=true",
    r"flatout: --fast .*": "flatout: --set TRAIN.CUDA_GRAPHS=true",
    r"--log-every (\d+)": r"--set LOG.PROGRESS_EVERY_STEPS=\1",
    r".*--notest.*": "--set LOG.VAL_EVERY_STEPS=N, larger than now",
}
"""What a profile advises -> the key or flag of a spike training for it."""


def parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Of `flatout spike <name>`."""
    return argparse.ArgumentParser(
        prog=f"flatout spike {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_config(to: argparse.ArgumentParser, *, required: bool = True) -> None:
    """--config and --set."""
    to.add_argument("--config", metavar="YAML", required=required, help="docs/spike.md lists its keys")
    to.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="overrule a key of the YAML: TRAIN.EPOCHS=3"
    )


def add_device(to: argparse.ArgumentParser) -> None:
    to.add_argument("--device", default="", help="cpu, or the number of a GPU (default: a GPU if there is one)")
