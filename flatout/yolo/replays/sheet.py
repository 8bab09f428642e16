"""Picture sheets of a replayed step, or of one of its samples with its source images; and all its files.

Dimension key:  B images   C H W channels, height and width   n boxes of one image
"""

import io
import json
import math
from dataclasses import asdict
from pathlib import Path

import cv2
import numpy as np

from flatout.charts import INK, MUTED, PAPER, plot_batch, plot_boxes, shortened_file, write, write_image
from flatout.errors import ResourceError
from flatout.feed import DecodeError
from flatout.images import read_image, read_large
from flatout.safefiles import csv_text, write_file
from flatout.yolo.data.letterbox import fit, letterbox
from flatout.yolo.replays.losses import Match
from flatout.yolo.replays.step import PASTED, Replayed, Sample, ShownFile, Window, where_in

MOST_SAMPLES = 64
"""Samples on a sheet, at most; batch.npz has all of them."""
LARGE_PX, CELL_PX, CAPTION_PX, GAP_PX = 768, 184, 18, 8
MAX_SOURCES = 24
CELL_COLOUR, CELL_BORDER = (255, 255, 255), (40, 40, 40)


def save(replayed: Replayed, folder: Path, *, sample: int | None = None) -> list[Path]:
    """Write everything about a replayed step; returns the paths. ResourceError if something cannot be written."""
    one = None if sample is None else replayed.sample_of(sample)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [_write_sheet(replayed, folder / "sheet.jpg", one)]
    except OSError as error:
        raise ResourceError(f"{folder}: cannot be written: {error.strerror}. Choose another folder: --out") from None
    arrays = io.BytesIO()
    np.savez(arrays, images=replayed.images, targets=replayed.targets, epoch=replayed.epoch, step=replayed.step)
    about = {
        "run": str(replayed.run),
        "epoch": replayed.epoch,
        "step": replayed.step,
        "input": {"identical": replayed.identical, "text": replayed.comparison.text},
        "samples": [asdict(each) | {"files": [file._asdict() for file in each.files]} for each in replayed.samples],
    }
    contents = {"batch.npz": arrays.getvalue(), "samples.json": _json(about)}
    if replayed.losses is not None:
        table = csv_text([Match._fields, *replayed.losses.matches])
        contents |= {"matches.csv": table.encode(), "losses.json": _json(replayed.losses.as_json())}
    else:
        for name in ("matches.csv", "losses.json"):  # of an earlier replay, with losses, into this folder
            (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        write_file(folder / name, content)
        written.append(folder / name)
    return written


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _write_sheet(replayed: Replayed, path: Path, sample: Sample | None) -> Path:
    if sample is not None:
        return write_image(path, sample_sheet(replayed, sample))
    images = replayed.images_uint8()
    # With --quad an image shows several samples.
    paths = [f"{each.number}  {Path(each.path).name}{where_in(each.files[0].window)}" for each in replayed.samples]
    shown = paths if len(paths) == len(images) else []
    return plot_batch(images, replayed.targets, shown, replayed.names, path, most=MOST_SAMPLES)


# One sample


def sample_sheet(replayed: Replayed, sample: Sample) -> np.ndarray:
    """A sample, large, with its boxes and the cells they were assigned to; beside it its source images. BGR."""
    per_image = len(replayed.samples) // len(replayed.images)  # with --quad, four samples
    row = min(sample.number // max(1, per_image), len(replayed.images) - 1)
    large = _large(replayed, row)
    files = [file for file in sample.files if file.role != PASTED or file.visible][:MAX_SOURCES]
    step_h = CELL_PX + 2 * CAPTION_PX
    rows = max(1, (large.shape[0] + GAP_PX) // step_h)
    columns = math.ceil(len(files) / rows)
    height = max(large.shape[0], min(rows, len(files)) * step_h) + 2 * GAP_PX
    sheet = np.full((height, large.shape[1] + (columns + 1) * GAP_PX + columns * CELL_PX + GAP_PX, 3), PAPER, np.uint8)
    sheet[GAP_PX : GAP_PX + large.shape[0], GAP_PX : GAP_PX + large.shape[1]] = large
    for number, file in enumerate(files):
        left = large.shape[1] + 2 * GAP_PX + number // rows * (CELL_PX + GAP_PX)
        top = GAP_PX + number % rows * step_h
        _plot_source(sheet, file, left, top)
    return sheet


def _large(replayed: Replayed, row: int) -> np.ndarray:
    image = np.ascontiguousarray(replayed.images_uint8()[row][::-1].transpose(1, 2, 0))
    zoom = LARGE_PX / max(image.shape[:2])
    height, width = (round(side * zoom) for side in image.shape[:2])
    large = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if zoom < 1 else cv2.INTER_NEAREST)
    own = replayed.targets[replayed.targets[:, 0] == row]
    centre, half = own[:, 2:4] * (width, height), own[:, 4:6] * (width, height) / 2
    for match in replayed.losses.matches if replayed.losses is not None else ():
        if match.sample == row and match.output == "lead":
            x, y = (round((at + 0.5) * match.stride_px * zoom) for at in (match.column, match.row))
            radius = max(2, round(match.stride_px * zoom / 6))
            for colour, thickness in ((CELL_BORDER, 3), (CELL_COLOUR, 1)):
                cv2.circle(large, (x, y), radius, colour, thickness, cv2.LINE_AA)
    plot_boxes(large, np.concatenate((centre - half, centre + half), 1), own[:, 1], replayed.names, letters_px=8)
    return np.asarray(large)


def _plot_source(sheet: np.ndarray, file: ShownFile, left: int, top: int) -> None:
    """A source image; below it its role, with the place of a tile, and its name."""
    cell = sheet[top : top + CELL_PX, left : left + CELL_PX]
    try:
        image = read_image(file.path) if file.window is None else _read_part(file.path, file.window)
        cell[:] = letterbox(image, fit((image.shape[0], image.shape[1]), (CELL_PX, CELL_PX)))
    except (OSError, DecodeError) as error:
        write(cell, str(error)[:28], 4, CELL_PX // 2, 7, INK)
    role = file.role + where_in(file.window) + ("" if file.visible else ", not visible")
    write(sheet, role, left, top + CELL_PX + CAPTION_PX - 5, 7, MUTED)
    name = shortened_file(Path(file.path).name, CELL_PX // 8)
    write(sheet, name, left, top + CELL_PX + 2 * CAPTION_PX - 7, 8, INK)


def _read_part(path: str, window: Window) -> np.ndarray:
    left, top, right, bottom = window
    return np.ascontiguousarray(read_large(path)[top:bottom, left:right])
