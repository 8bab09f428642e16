"""Facts and findings about OpenCV and JPEG decoding.

Decoding is the largest CPU cost of training from files, so its speed is measured, in well under half a second.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.clock import machine
from flatout.findings import Finding

WIDTH_PX, HEIGHT_PX = 640, 480
MEASURE_S = 0.15
OLDEST_OPENCV = (4, 10)


@dataclass(frozen=True)
class DecoderFacts:
    """Versions (None: absent) and decoding speeds of one core in megapixels per second (None: not measured)."""

    opencv: str | None = None
    opencv_error: str | None = None
    """Why OpenCV cannot be imported, although it may be installed."""
    opencv_jpeg: str | None = None
    """The JPEG library that OpenCV was built with."""
    opencv_mpx_s: float | None = None
    simplejpeg: str | None = None
    simplejpeg_mpx_s: float | None = None


def decoder_facts() -> DecoderFacts:
    """Import the decoders, and time both on one image."""
    try:
        import cv2
    except Exception as error:  # broad: a missing system library or an incompatible numpy may raise anything
        return DecoderFacts(
            opencv_error=str(error).splitlines()[0][:200], simplejpeg=machine.package_version("simplejpeg")
        )
    jpeg = make_test_jpeg(cv2)
    return DecoderFacts(
        opencv=cv2.__version__,
        opencv_jpeg=jpeg_library(cv2.getBuildInformation()),
        opencv_mpx_s=megapixels_per_s(lambda: cv2.imdecode(jpeg, cv2.IMREAD_COLOR)),
        simplejpeg=machine.package_version("simplejpeg"),
        simplejpeg_mpx_s=_simplejpeg_speed(jpeg.tobytes()),
    )


def make_test_jpeg(cv2: Any) -> Any:
    """A 640x480 JPEG (quality 90) about as large as a photograph, uint8 [bytes]: smooth shapes with some noise."""
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = cv2.resize(rng.integers(0, 256, (24, 32, 3), np.uint8), (WIDTH_PX, HEIGHT_PX))
    grain = rng.integers(0, 24, shapes.shape, np.uint8)
    return cv2.imencode(".jpg", cv2.add(shapes, grain), [cv2.IMWRITE_JPEG_QUALITY, 90])[1].ravel()


def megapixels_per_s(decode: Callable[[], object]) -> float:
    """Speed of `decode` on the image of `make_test_jpeg`, over MEASURE_S after one warm-up call."""
    decode()
    start, count = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - start) < MEASURE_S:
        decode()
        count += 1
    return count * WIDTH_PX * HEIGHT_PX / 1e6 / elapsed_s


def jpeg_library(build_information: str) -> str | None:
    """The JPEG library in OpenCV's build information, or None."""
    found = re.search(r"^\s*JPEG:\s*(.+?)\s*$", build_information, re.MULTILINE)
    return found[1] if found else None


def check_opencv(facts: DecoderFacts) -> Finding:
    """Finding about OpenCV: flatout is tested with 4.x from 4.10 on, and pinned to 4.14."""
    if facts.opencv is None:
        advice = "needed to read image files: python -m pip install opencv-python-headless==4.14.*"
        return Finding("opencv", f"not usable: {facts.opencv_error}", "warn", advice)
    major, minor = (int(part) for part in facts.opencv.split(".")[:2])
    if (major, minor) < OLDEST_OPENCV:
        advice = "older than the tested versions: python -m pip install opencv-python-headless==4.14.*"
        return Finding("opencv", facts.opencv, "warn", advice)
    if major >= 5:
        advice = "works, but warps take 1.6x as long as in 4.14, and some pixels differ by one grey level"
        return Finding("opencv", facts.opencv, "note", advice)
    return Finding("opencv", facts.opencv, "ok", "4.x (pinned: 4.14) has faster warps than 5.x")


def check_jpeg(facts: DecoderFacts) -> Finding:
    """Finding about JPEG decoding: images per second of one core, and whether a faster decoder is missing."""
    speeds = {"OpenCV": facts.opencv_mpx_s, "simplejpeg": facts.simplejpeg_mpx_s}
    measured = {name: speed for name, speed in speeds.items() if speed is not None}
    if not measured:
        return Finding("jpeg", "not measured", "warn", "fix OpenCV first (see above)")
    best = max(measured.values())
    rate = f"about {best * 1e6 / (WIDTH_PX * HEIGHT_PX):,.0f} images of {WIDTH_PX}x{HEIGHT_PX} per second and core"
    value = ", ".join(f"{name} {speed:.0f} Mpx/s" for name, speed in measured.items()) + " on one core"
    if "simplejpeg" not in measured:
        return Finding("jpeg", value, "note", f"{rate}; for a faster decoder: python -m pip install simplejpeg")
    if "turbo" not in (facts.opencv_jpeg or ""):
        return Finding("jpeg", value, "note", f"{rate}; OpenCV decodes with {facts.opencv_jpeg}, not libjpeg-turbo")
    return Finding("jpeg", value, "ok", rate)


def _simplejpeg_speed(jpeg: bytes) -> float | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    return megapixels_per_s(lambda: simplejpeg.decode_jpeg(jpeg, colorspace="BGR"))
