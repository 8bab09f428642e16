"""Which OpenCV and JPEG decoder are here, and how fast does one core decode?

Files -> pixels is the largest CPU cost of training from files, so the speed is measured, in well under half a second.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.doctor.host import installed
from flatout.findings import Finding

WIDTH_PX, HEIGHT_PX = 640, 480
MEASURE_S = 0.15
OLDEST_OPENCV = (4, 10)


@dataclass(frozen=True)
class DecoderFacts:
    """Versions (None: absent) and decoding speed of one core, megapixels per second (None: not measured)."""

    opencv: str | None = None
    opencv_error: str | None = None
    """Why it does not import, although it may be installed."""
    opencv_jpeg: str | None = None
    """The JPEG library OpenCV was built with."""
    opencv_mpx_s: float | None = None
    simplejpeg: str | None = None
    simplejpeg_mpx_s: float | None = None


def decoder_facts() -> DecoderFacts:
    """Import the decoders and time both on one picture."""
    try:
        import cv2
    except Exception as error:  # a missing system library or a foreign numpy raises anything
        return DecoderFacts(opencv_error=str(error).splitlines()[0][:200], simplejpeg=installed("simplejpeg"))
    jpeg = make_test_jpeg(cv2)
    return DecoderFacts(
        opencv=cv2.__version__,
        opencv_jpeg=jpeg_library(cv2.getBuildInformation()),
        opencv_mpx_s=megapixels_per_s(lambda: cv2.imdecode(jpeg, cv2.IMREAD_COLOR)),
        simplejpeg=installed("simplejpeg"),
        simplejpeg_mpx_s=_simplejpeg_speed(jpeg.tobytes()),
    )


def make_test_jpeg(cv2: Any) -> Any:
    """A 640x480 JPEG (quality 90) as dense as a photograph, uint8 [bytes]: smooth shapes with some grain."""
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = cv2.resize(rng.integers(0, 256, (24, 32, 3), np.uint8), (WIDTH_PX, HEIGHT_PX))
    grain = rng.integers(0, 24, shapes.shape, np.uint8)
    return cv2.imencode(".jpg", cv2.add(shapes, grain), [cv2.IMWRITE_JPEG_QUALITY, 90])[1].ravel()


def megapixels_per_s(decode: Callable[[], object]) -> float:
    """Speed of `decode` on the picture of `make_test_jpeg`, over MEASURE_S after one warm-up call."""
    decode()
    start, count = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - start) < MEASURE_S:
        decode()
        count += 1
    return count * WIDTH_PX * HEIGHT_PX / 1e6 / elapsed_s


def jpeg_library(build_information: str) -> str | None:
    """The JPEG library named in OpenCV's build information."""
    found = re.search(r"^\s*JPEG:\s*(.+?)\s*$", build_information, re.MULTILINE)
    return found[1] if found else None


def check_decoders(facts: DecoderFacts) -> list[Finding]:
    """One finding on OpenCV, one on JPEG decoding."""
    return [check_opencv(facts), check_jpeg(facts)]


def check_opencv(facts: DecoderFacts) -> Finding:
    """The 4.x family from 4.10 on is what flatout is tested and pinned to (4.14)."""
    if facts.opencv is None:
        advice = "reading image files needs it: python -m pip install opencv-python-headless==4.14.*"
        return Finding("opencv", f"not usable: {facts.opencv_error}", "warn", advice)
    major, minor = (int(part) for part in facts.opencv.split(".")[:2])
    if (major, minor) < OLDEST_OPENCV:
        advice = "older than tested: python -m pip install opencv-python-headless==4.14.*"
        return Finding("opencv", facts.opencv, "warn", advice)
    if major >= 5:
        advice = "works; its warps are slower than 4.14's (1.6x) and differ by one grey level here and there"
        return Finding("opencv", facts.opencv, "note", advice)
    return Finding("opencv", facts.opencv, "ok", "the 4.x family (4.14 is the pinned one) has the faster warps")


def check_jpeg(facts: DecoderFacts) -> Finding:
    """How many pictures one core decodes, and whether a faster decoder is missing."""
    speeds = {"OpenCV": facts.opencv_mpx_s, "simplejpeg": facts.simplejpeg_mpx_s}
    measured = {name: speed for name, speed in speeds.items() if speed is not None}
    if not measured:
        return Finding("jpeg", "not measured", "warn", "mend OpenCV first (above)")
    best = max(measured.values())
    ceiling = f"about {best * 1e6 / (WIDTH_PX * HEIGHT_PX):,.0f} pictures of {WIDTH_PX}x{HEIGHT_PX} a second and core"
    value = ", ".join(f"{name} {speed:.0f} Mpx/s" for name, speed in measured.items()) + " on one core"
    if "simplejpeg" not in measured:
        return Finding("jpeg", value, "note", f"{ceiling}; a faster one: python -m pip install simplejpeg")
    if "turbo" not in (facts.opencv_jpeg or ""):
        return Finding("jpeg", value, "note", f"{ceiling}; OpenCV's own decoder is {facts.opencv_jpeg}, not turbo")
    return Finding("jpeg", value, "ok", ceiling)


def _simplejpeg_speed(jpeg: bytes) -> float | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    return megapixels_per_s(lambda: simplejpeg.decode_jpeg(jpeg, colorspace="BGR"))
