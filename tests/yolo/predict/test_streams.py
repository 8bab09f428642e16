"""Cameras and streams: read in parallel to the network, reconnected, and ended with a message."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.errors import DataError
from flatout.yolo.predict import streams
from flatout.yolo.predict.detect import DetectResult, detect
from flatout.yolo.predict.files import Frame, Unreadable, without_password
from flatout.yolo.predict.options import DetectOptions
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.streams import EVERY, TIMEOUT_MS, LiveFrames, Stream
from tests.feed.injections import wait_until
from tests.yolo.predict.small_sources import Server, frames_in, make_image, serving

QUICK_S = (0.02, 0.02)
"""Waits between attempts to reconnect."""


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(streams, "RETRY_S", QUICK_S)
    monkeypatch.setattr(LiveFrames.__init__, "__defaults__", (QUICK_S,))


def run(place: Path, source: str, **changed: Any) -> DetectResult:
    settings: dict[str, Any] = {"weights": (str(place / "a.pt"),), "img_size": 64, "device": "cpu", "conf_thres": 0.3}
    return detect(DetectOptions(**settings | {"source": source} | changed))


def test_every_fourth_frame_of_a_live_stream_is_used_in_order():
    with serving(Server(frames=24)) as server, LiveFrames([server.url("/live")]) as frames:
        seen = [read() for read in frames]
    numbers = [each.origin.frame for each in seen if isinstance(each, Frame)]
    # Frames that were not taken in time are replaced: there may be fewer, never more.
    assert numbers == list(range(len(numbers))) and 1 <= len(numbers) <= 24 // EVERY


def test_a_late_reader_gets_the_newest_frame_not_the_next(monkeypatch):
    taken, published, publish = threading.Event(), [], Stream._publish

    def recorded(stream: Stream, image: np.ndarray) -> None:
        if published:
            taken.wait(30)  # however slow this test is, the first frame is taken first
        publish(stream, image)
        published.append(image)

    monkeypatch.setattr(Stream, "_publish", recorded)
    with serving(Server(frames=40, stays=True)) as server, LiveFrames([server.url("/live")]) as frames:
        reads = iter(frames)
        first = next(reads)()
        taken.set()
        wait_until(lambda: len(published) >= 3, 30)
        second = next(reads)()
    assert isinstance(first, Frame) and isinstance(second, Frame)
    assert sent_as(second.image, 40) > sent_as(first.image, 40) + EVERY


def sent_as(image_HWC: np.ndarray, num_frames: int) -> int:
    """The number of a frame in the stream, recognised by its pixels."""
    apart = [np.abs(make_image(number, (96, 64)).astype(int) - image_HWC).mean() for number in range(num_frames)]
    return int(np.argmin(apart))


def test_a_stream_that_breaks_off_is_reconnected(caplog):
    caplog.set_level(logging.INFO, "flatout")
    with serving(Server(frames=16, connections=3)) as server, LiveFrames([server.url("/live")]) as frames:
        seen = [read() for read in frames]
    assert server.requests == 3 and caplog.text.count(": reconnected.") == 2
    assert isinstance(seen[-1], Unreadable)
    assert seen[-1].reason == "the stream was lost, and 2 attempts to reconnect failed"


def test_a_lost_stream_is_reported_and_its_results_are_kept(place):
    with serving(Server(frames=24)) as server:
        result = run(place, server.url("/live"), save_txt=True)
    assert result.frames >= 1 and result.interrupted is None
    assert "the stream was lost" in str(result)
    (video,) = result.folder.glob("*.mp4")
    assert video.name == f"127.0.0.1_{server.server_port}_live.mp4"
    assert len(frames_in(video)) == result.frames


def test_a_file_behind_a_url_is_read_to_its_end_without_an_error(place):
    with serving(Server(clip=place / "clip.mp4")) as server:
        result = run(place, server.url("/clip.mp4"))
    assert result.frames == 6 and not result.unreadable


def test_streams_of_a_list_are_read_in_parallel_and_not_written(place, tmp_path):
    with serving(Server(clip=place / "clip.mp4")) as server:
        (tmp_path / "streams.txt").write_text(f"{server.url('/clip.mp4')}\n{server.url('/clip.mp4?again')}\n")
        server.clip = place / "clip.mp4"
        with pytest.raises(DataError, match="the stream cannot be opened"):
            run(place, "streams.txt")  # the second address is unknown
        (tmp_path / "streams.txt").write_text(f"{server.url('/clip.mp4')}\n" * 2)
        result = run(place, "streams.txt", save_txt=True)
    assert result.frames == 12 and [path.name for path in result.folder.iterdir()] == ["labels"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flatout-")]


def test_a_silent_stream_does_not_delay_the_end(place):
    """The server sends nothing more and keeps the connection open: the reading thread waits."""
    with serving(Server(frames=24, stays=True)) as server:
        seen: list[Result] = []
        asked_s: list[float] = []

        def leave(result: Result) -> None:
            if not seen:  # a second signal would end it at once
                asked_s.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)
            seen.append(result)

        options = DetectOptions(weights=(str(place / "a.pt"),), source=server.url("/live"), img_size=64, device="cpu")
        result = detect(options, each=leave)
        assert time.monotonic() - asked_s[0] < 0.8 * TIMEOUT_MS / 1e3
    # A signal is the only way to end a stream.
    assert result.frames == len(seen) and result.interrupted is None
    assert len(frames_in(next(result.folder.glob("*.mp4")))) == len(seen)


def test_passwords_are_removed_from_messages_and_file_names():
    assert without_password("rtsp://me:secret@camera/1") == "rtsp://camera/1"
    assert without_password("http://host/a@b") == "http://host/a@b"
