"""Which devices does `--device` mean? `cpu`, one GPU (`0`), several (`0,1`), or all there are (nothing)."""

import logging

import torch

from flatout.errors import ConfigError, ResourceError

logger = logging.getLogger(__name__)


def choose_devices(text: str) -> list[torch.device]:
    """The devices in the order of their numbers as written; the CPU alone where there is no GPU and none was named."""
    wanted = text.strip().lower()
    if wanted == "cpu":
        return [torch.device("cpu")]
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not wanted:
        return [torch.device("cuda", number) for number in range(present)] or [torch.device("cpu")]
    numbers = [_number(part, text) for part in wanted.split(",")]
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"--device {text}: a GPU is named twice.")
    if missing := [number for number in numbers if number >= present]:
        there = f"this machine has {present}, numbered from 0" if present else "torch sees no GPU here"
        raise ResourceError(
            f"--device {text}: there is no GPU {missing[0]}: {there}. Use --device cpu, or see: flatout doctor"
        )
    return [torch.device("cuda", number) for number in numbers]


def choose_device(text: str) -> torch.device:
    """The first of them, for work that one device does."""
    first, *others = choose_devices(text)
    if others and text.strip():
        logger.info("An evaluation runs on one GPU: of --device %s only %s is used.", text, first)
    return first


def make_current(device: torch.device) -> None:
    """Let this process mean `device` where none is named: events, streams and kernels of Triton would else be those of
    GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _number(part: str, text: str) -> int:
    digits = part.strip().removeprefix("cuda:")
    if not digits.isdecimal():
        raise ConfigError(f"--device {text}: use cpu, the number of a GPU (0), or several (0,1).")
    return int(digits)
