"""Writes frames: images, images side by side, sheets, videos, and pages with a slider. Does not import torch.

Dimension key:  H W frame
"""

import base64
import errno
import json
import logging
from collections.abc import Iterable, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flatout.safefiles import write_file

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

VIDEO_EXTS = {".mp4": "mp4v", ".avi": "MJPG", ".gif": ""}
"""Endings of videos -> codec. None needs anything beside OpenCV's wheel; browsers show only .gif files."""
LABEL_PX = 18
"""Height of the label above a frame of a sheet."""


def as_bytes(frame_3HW: "Tensor") -> np.ndarray:
    """Convert a frame with values in 0..1 to uint8 RGB [H, W, 3]. Waits for the device."""
    return (frame_3HW.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()


def write_image(path: Path, rgb_HW3: np.ndarray) -> None:
    """Write an image in the format that the file name implies, such as PNG."""
    import cv2

    path.parent.mkdir(parents=True, exist_ok=True)
    if not cv2.imwrite(str(path), cv2.cvtColor(np.ascontiguousarray(rgb_HW3), cv2.COLOR_RGB2BGR)):
        raise OSError(errno.EIO, "OpenCV cannot write it", str(path))


def side_by_side(frames_HW3: Sequence[np.ndarray], gap_px: int = 4) -> np.ndarray:
    """Frames in a row, separated by white gaps."""
    gap = np.full((frames_HW3[0].shape[0], gap_px, 3), 255, np.uint8)
    parts = [part for frame in frames_HW3 for part in (gap, frame)][1:]
    return np.concatenate(parts, axis=1)


def sheet(frames_HW3: Sequence[np.ndarray], labels: Sequence[str], *, columns: int = 4, gap_px: int = 4) -> np.ndarray:
    """Frames of equal size in rows, each with its label above it, uint8 RGB."""
    import cv2

    height, width = frames_HW3[0].shape[:2]
    columns = min(columns, len(frames_HW3))
    rows = -(-len(frames_HW3) // columns)
    page = np.full((rows * (height + LABEL_PX + gap_px), columns * (width + gap_px) - gap_px, 3), 255, np.uint8)
    for number, (frame, label) in enumerate(zip(frames_HW3, labels, strict=True)):
        row, column = divmod(number, columns)
        top, left = row * (height + LABEL_PX + gap_px), column * (width + gap_px)
        cv2.putText(page, label, (left + 2, top + 13), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (0, 0, 0), 1, cv2.LINE_AA)
        page[top + LABEL_PX : top + LABEL_PX + height, left : left + width] = frame
    return page


def write_video(path: Path, frames_HW3: Iterable[np.ndarray], fps: float = 12.0) -> bool:
    """Write a video in the format of its ending (VIDEO_EXTS); False, with a warning, if OpenCV cannot write it.

    Frames may come from a generator: only those of a .gif file are kept in memory.
    """
    import cv2

    frames = (cv2.cvtColor(np.ascontiguousarray(frame), cv2.COLOR_RGB2BGR) for frame in frames_HW3)
    if path.suffix.lower() == ".gif":
        return _write_gif(path, list(frames), fps)
    first = next(frames)
    # MPEG-4 has no odd sizes: OpenCV would cut off a row or column.
    down, right = (0, 0) if path.suffix.lower() == ".avi" else (first.shape[0] % 2, first.shape[1] % 2)
    size = (first.shape[1] + right, first.shape[0] + down)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*VIDEO_EXTS[path.suffix.lower()]), fps, size)
    if not writer.isOpened():
        logger.warning("%s: OpenCV cannot write such videos on this machine. Images always work.", path)
        return False
    for frame in chain((first,), frames):
        writer.write(cv2.copyMakeBorder(frame, 0, down, 0, right, cv2.BORDER_REPLICATE))
    writer.release()
    return True


def _write_gif(path: Path, frames_HW3: list[np.ndarray], fps: float) -> bool:
    import cv2

    if not hasattr(cv2, "Animation"):
        logger.warning("%s: this OpenCV cannot write .gif files; 4.11 and newer can. Use .mp4 or .avi.", path)
        return False
    animation = cv2.Animation()
    animation.frames = frames_HW3
    animation.durations = [round(1000 / fps)] * len(frames_HW3)
    return bool(cv2.imwriteanimation(str(path), animation))


class BeforeAfter(NamedTuple):
    """A frame of a slider page: two image files of the same size."""

    name: str
    before: Path
    after: Path


MAX_PAGE_FRAMES, MAX_PAGE_PX, JPEG_QUALITY = 60, 960, 90
"""Frames of a slider page, their longest side and their quality: a page has some ten megabytes at most."""
PAGE_INTERVAL_MS = 125
"""Time between two frames when a slider page plays."""


def write_slider_page(path: Path, frames: Sequence[BeforeAfter], *, title: str) -> int:
    """Write one HTML file with a slider between both images of each frame; returns how many frames are in it.

    The images are inside, so it works offline and can be sent. Of many frames, some at equal distances are shown.
    """
    shown = [frames[int(number)] for number in np.unique(np.linspace(0, len(frames) - 1, MAX_PAGE_FRAMES).round())]
    links = [[each.name, _link(each.before), _link(each.after)] for each in shown]
    some = f"{len(shown)} of {len(frames)} frames. " if len(shown) < len(frames) else ""
    template = Template(Path(__file__).with_name("slider.html").read_text(encoding="utf-8"))
    text = f"{some}Move over the image, or use the sliders below it."
    # "<" inside a script could end it.
    script = json.dumps(links).replace("<", "\\u003c")
    page = template.substitute(title=escape(title), text=text, frames=script, interval=PAGE_INTERVAL_MS)
    write_file(path, page.encode())
    return len(shown)


def _link(path: Path) -> str:
    """An image file as a link that contains it, as a JPEG of at most MAX_PAGE_PX."""
    import cv2

    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if image is None:
        raise OSError(f"{path} could not be read.")
    scale = MAX_PAGE_PX / max(image.shape[:2])
    if scale < 1:
        image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    content = cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY))[1].tobytes()
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
