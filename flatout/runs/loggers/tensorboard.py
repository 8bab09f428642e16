"""Logger for TensorBoard (pip install tensorboard): scalars, histograms and plots.

Plots go to an event file that is written here: TensorBoard's writer needs a step of Python for the checksum of every
byte, and a run has megabytes of plots (bench/results/fixed_costs_2core-epyc_202611.md).

Dimension key:  K rows of bytes   L bytes of a row   B bits of a sum
"""

import os
import socket
import struct
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from flatout.engine import Callback, End, RunStart, Scores

PLOTS = ("*.png", "*.jpg", "visuals/*.png")


class TensorBoard(Callback):
    """Writes an event file in the run folder, or in the subfolder `within`."""

    def __init__(self, within: str = "") -> None:
        self._within = within
        self._folder = Path()
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        self._folder = run.folder / self._within
        if not run.continues:
            for name, values in run.histograms.items():
                self._open().add_histogram(name, values, 0)

    def validation(self, scores: Scores) -> None:
        writer = self._open()
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all numbers: for every event, training waits for the thread that writes it.
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scores.scalars.items()]
        writer.file_writer.add_summary(Summary(value=values), scores.at)
        writer.flush()

    def end(self, end: End) -> None:
        """Close the event file, and write the plots in the run folder as images to another one."""
        if self._writer is None:
            return
        self._writer.close()
        plots = [path for part in PLOTS for path in sorted(end.folder.glob(part))]
        names = [path.relative_to(end.folder).with_suffix("").as_posix() for path in plots]
        if plots:
            write_events(self._folder, filter(None, map(_summary, names, plots)), end.epoch)

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        return self._writer


def _summary(name: str, path: Path) -> Any:
    """A plot as a summary, without decoding it, as torch's add_image would; None if the file is not an image."""
    from PIL import Image, UnidentifiedImageError
    from tensorboard.compat.proto.summary_pb2 import Summary

    try:
        with Image.open(path) as plot:
            width, height = plot.size
    except UnidentifiedImageError:
        return None
    image = Summary.Image(encoded_image_string=path.read_bytes(), width=width, height=height, colorspace=3)
    return Summary(value=[Summary.Value(tag=name, image=image)])


# Event files

ROW_BITS = 8
"""Rows have less than 2^8 bytes, and at least half as many; they are summed up side by side, then joined in pairs."""


def write_events(folder: Path, summaries: Iterable[Any], step: int) -> None:
    """Write an event file with these summaries; TensorBoard shows all event files of a folder together."""
    from tensorboard.compat.proto.event_pb2 import Event

    now = time.time()
    with (folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}.plots").open("wb") as file:
        file.write(_record(Event(wall_time=now, file_version="brain.Event:2").SerializeToString()))
        for summary in summaries:
            file.write(_record(Event(wall_time=now, step=step, summary=summary).SerializeToString()))


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return b"".join((length, _masked_sum(length), content, _masked_sum(content)))


def _masked_sum(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(content: bytes) -> int:
    """CRC-32C of at least four bytes."""
    num_rows = 1 << max(0, len(content).bit_length() - ROW_BITS)
    # Zeros in front change nothing, because the sum starts with 0: the usual start is in the first four bytes.
    byte_KL = np.zeros((num_rows, -(-len(content) // num_rows)), np.uint8)
    used = byte_KL.reshape(-1)[byte_KL.size - len(content) :]
    used[:] = np.frombuffer(content, np.uint8)
    used[:4] ^= 0xFF
    sum_K = np.zeros(num_rows, np.uint32)
    # What each bit of a sum becomes if a row of zeros follows.
    moved_B = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for byte_K in np.ascontiguousarray(byte_KL.T):
        sum_K = _next_sums(sum_K ^ byte_K)
        moved_B = _next_sums(moved_B)
    while len(sum_K) > 1:
        sum_K = _moved(sum_K[0::2], moved_B) ^ sum_K[1::2]
        moved_B = _moved(moved_B, moved_B)
    return int(sum_K[0]) ^ 0xFFFFFFFF


@cache
def _table() -> np.ndarray:
    """The sum of each byte, uint32 [256]."""
    sums: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        # The polynomial of CRC-32C, with its bits reversed.
        sums = sums >> 1 ^ (sums & 1) * np.uint32(0x82F63B78)
    return sums


def _next_sums(sum_K: np.ndarray) -> np.ndarray:
    return np.asarray(_table()[sum_K & 0xFF] ^ sum_K >> 8)


def _moved(sum_K: np.ndarray, moved_B: np.ndarray) -> np.ndarray:
    """Sums after as many zeros as `moved_B` stands for."""
    is_set_KB = sum_K[:, None] >> np.arange(32, dtype=np.uint32) & 1
    return np.asarray(np.bitwise_xor.reduce(is_set_KB * moved_B, axis=1))
