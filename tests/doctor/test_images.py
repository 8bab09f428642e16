"""OpenCV and JPEG decoding: versions that matter, and speed in images per second."""

import pytest

from flatout.doctor import images
from flatout.findings import Finding


@pytest.mark.parametrize(
    ("version", "level", "words"),
    [
        ("4.14.0", "ok", "4.14"),
        ("5.0.0", "note", "1.6x as long"),
        ("4.8.1", "warn", "pip install"),
        (None, "warn", "pip install"),
    ],
)
def test_opencv_versions(version: str | None, level: str, words: str):
    finding = images.check_opencv(images.DecoderFacts(opencv=version, opencv_error="libGL.so.1: not found"))
    assert finding.level == level
    assert words in finding.advice


def test_jpeg_speed_is_given_in_images_and_a_missing_fast_decoder_is_named():
    turbo = images.DecoderFacts("4.14.0", None, "libjpeg-turbo", 123.0, "1.9.0", 153.6)
    assert images.check_jpeg(turbo) == Finding(
        "jpeg",
        "OpenCV 123 Mpx/s, simplejpeg 154 Mpx/s on one core",
        "ok",
        "about 500 images of 640x480 per second and core",
    )
    without = images.check_jpeg(images.DecoderFacts("4.14.0", None, "libjpeg-turbo", 123.0))
    assert without.level == "note"
    assert "pip install simplejpeg" in without.advice
    assert images.check_jpeg(images.DecoderFacts(opencv_error="absent")).level == "warn"


def test_the_jpeg_library_is_found_in_opencvs_build_information():
    assert images.jpeg_library("  Media I/O:\n    JPEG:   build-libjpeg-turbo (ver 3.1.2-70)\n") == (
        "build-libjpeg-turbo (ver 3.1.2-70)"
    )
    assert images.jpeg_library("nothing") is None


def test_both_decoders_are_timed_on_the_real_machine():
    facts = images.decoder_facts()
    assert facts.opencv_mpx_s is not None
    assert facts.opencv_mpx_s > 5
    assert (facts.simplejpeg is None) == (facts.simplejpeg_mpx_s is None)
