"""Pictures and videos in files, one frame after the other."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from flatout.feed import DecodeError
from flatout.images import read_picture
from flatout.yolo.predict.frames import Frame, Origin, ReadFrame, Unreadable, given
from flatout.yolo.predict.sources import Files

ENOUGH = 0.9
"""Of the frames that a video's header announces: headers estimate, and a video with fewer was cut off."""


def frames_of(files: Files) -> Iterator[ReadFrame]:
    """A call per frame. Pictures are decoded by the calls, side by side; videos while they are asked for, in order."""
    total = len(files)
    for number, path in enumerate(files.pictures):
        yield partial(read_frame, Origin(path, "image", number, total))
    for number, path in enumerate(files.videos, start=len(files.pictures)):
        yield from video_frames(Origin(path, "video", number, total))


def read_frame(origin: Origin) -> Frame | Unreadable:
    """The picture of a file."""
    try:
        return Frame(read_picture(origin.path), origin)
    except (OSError, DecodeError) as error:
        return Unreadable(origin.path, getattr(error, "strerror", None) or str(error))


def video_frames(origin: Origin) -> Iterator[ReadFrame]:
    """Every frame of a video; one that cannot be opened or that ends early is an `Unreadable` at the end."""
    if not _can_be_named(origin.path):
        yield partial(given, Unreadable(origin.path, "OpenCV opens no video whose name is not UTF-8"))
        return
    capture = _open(origin.path)
    seen = 0
    num_frames, fps = num_frames_of(capture), fps_of(capture)
    try:
        while (image := _next_image(capture)) is not None:
            seen += 1
            frame = Frame(image, origin._replace(frame=seen, num_frames=num_frames, fps=fps))
            yield partial(given, frame)
    finally:
        capture.release()
    if not seen:
        yield partial(given, Unreadable(origin.path, "not a video that can be decoded: damaged, or cut off"))
    elif seen < ENOUGH * num_frames:
        yield partial(given, Unreadable(origin.path, f"ends after {seen} of {num_frames} frames", partly=True))


def count_frames(files: Files) -> int:
    """Of all files together, as the headers of the videos say; pictures count as one."""
    count = len(files.pictures)
    for path in filter(_can_be_named, files.videos):
        capture = _open(path)
        count += max(1, num_frames_of(capture))
        capture.release()
    return count


def num_frames_of(capture: Any) -> int:
    """As the header says; 0 for what has no end."""
    import cv2

    return max(0, int(capture.get(cv2.CAP_PROP_FRAME_COUNT)))


def fps_of(capture: Any) -> float:
    """Frames per second; 0 where the header says nothing sensible."""
    import cv2

    rate = float(capture.get(cv2.CAP_PROP_FPS))
    return rate if 0 < rate < 1000 else 0.0


def _can_be_named(path: str) -> bool:
    """OpenCV takes the process down if it is given another name."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open(path: str) -> Any:
    import cv2

    return cv2.VideoCapture(path)


def _next_image(capture: Any) -> Any:
    """uint8 [H, W, 3], BGR, an array of its own; None at the end."""
    there, image = capture.read()
    return image if there else None
