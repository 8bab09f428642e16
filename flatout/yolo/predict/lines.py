"""What is told about results: a line for each, and the account at the end."""

from collections.abc import Sequence
from pathlib import Path

from flatout.errors import counted
from flatout.yolo.predict.frames import Origin, Unreadable
from flatout.yolo.predict.result import Result

MOST_LISTED = 10
"""Unreadable files that are told by name; the rest is counted."""


def result_line(result: Result) -> str:
    """'image 3/12 pictures/c.jpg: 2 bolts, 1 nut, 12.3 ms'."""
    height, width = result.image.shape[:2]
    return f"{_place(result.origin)}: {width}x{height}, {result.summary()}, {result.ms:.1f} ms"


def unreadable_lines(unreadable: Sequence[Unreadable]) -> list[str]:
    """How many, which, and why."""
    if not unreadable:
        return []
    lines = [f"{counted(len(unreadable), 'source')} could not be read, or not to the end:"]
    lines += [f"  {shown(each.path)}: {each.reason}" for each in unreadable[:MOST_LISTED]]
    if len(unreadable) > MOST_LISTED:
        lines.append(f"  ... and {len(unreadable) - MOST_LISTED} more")
    return lines


def closing_lines(
    *,
    frames: int,
    detections: int,
    seconds: float,
    folder: Path,
    wrote: Sequence[str],
    unreadable: Sequence[Unreadable],
) -> list[str]:
    """The last lines of a detection."""
    rate = frames / max(seconds, 1e-9)
    seen = f"{counted(frames, 'picture')}, {counted(detections, 'detection')}"
    done = f"Done. {seen} in {seconds:.1f} s: {rate:.1f} img/s, reading and all"
    saved = [f"Results saved to {folder}"] if wrote else []
    return [*unreadable_lines(unreadable), done, *wrote, *saved]


def nothing_read(source: str, unreadable: Sequence[Unreadable]) -> str:
    """The error where not one frame was to be had; each file has got its line before."""
    first = unreadable[0]
    reason = f"{shown(first.path)}: {first.reason}"
    if len(unreadable) == 1:
        return f"--source {source}: nothing of it could be read: {reason}. Mend or replace it."
    return (
        f"--source {source}: none of its {len(unreadable)} files could be read, the first because of {reason}. "
        "Mend or replace them."
    )


def shown(path: str) -> str:
    """A path that can be printed on one line, whatever its name holds."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in path)


def _place(origin: Origin) -> str:
    place = f"{origin.kind} {origin.number + 1}/{origin.total}"
    if origin.kind == "video":
        place += f" ({origin.frame}/{origin.num_frames or '?'})"
    elif origin.kind == "stream":
        place += f" ({origin.frame})"
    return f"{place} {shown(origin.path)}"
