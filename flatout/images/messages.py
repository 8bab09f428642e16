"""What decoders print: libjpeg, libpng, libtiff and OpenCV write to file descriptor 2, whoever listens there."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

MOST_BYTES = 1 << 16
"""Most bytes that are kept of what is printed."""

_OPENCV_PREFIX = re.compile(r"^\[ *[A-Z]+:\d+@[\d.]+\] (?:global )?(?:\S+:\d+ )?")


@contextmanager
def decoder_messages() -> Iterator[list[str]]:
    """Keep what decoders print off the terminal while the block runs; the list has its lines afterwards.

    The whole process is silent meanwhile, so this is for the few lines around a decoder, in a process of one thread.
    """
    lines: list[str] = []
    try:
        real = os.dup(2)
    except OSError:  # closed: nobody listens
        yield lines
        return
    kept = os.memfd_create("decoder messages", os.MFD_CLOEXEC)
    try:
        os.dup2(kept, 2)
        yield lines
    finally:
        os.dup2(real, 2)
        os.close(real)
        text = os.pread(kept, MOST_BYTES, 0).decode(errors="replace")
        os.close(kept)
        # A bar that another thread draws meanwhile is no message.
        lines += [_OPENCV_PREFIX.sub("", line).strip() for line in text.splitlines() if line.isprintable()]
        lines[:] = filter(None, lines)
