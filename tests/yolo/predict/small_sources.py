"""Small sources: images, videos, a server of streams, and a network that finds something in them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

from flatout.yolo.model.network import Network
from flatout.yolo.weights import save_weights
from tests.yolo.model.test_network import narrow
from tests.yolo.test_load import weights_of

NAMES = ["bolt", "nut"]
SIZES_WH = ((120, 60), (60, 120), (96, 96), (120, 64), (50, 110))
"""Sizes of images: at 64 px they give several input shapes, some of which are equal."""


@torch.no_grad()
def confident_network(seed: int = 0) -> Network:
    """An untrained network that finds several small boxes of both classes, different ones in every image."""
    network = narrow("yolov7-tiny", nc=len(NAMES), seed=seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
    # Batch-norm statistics of images like those of the tests, so that its maps depend on the image.
    images_B3HW = np.stack([make_image(number, (64, 64)) for number in range(8)]).transpose(0, 3, 1, 2)
    network.train()
    network(torch.from_numpy(images_B3HW).float() / 255)
    level: Any
    for level in list(network.head.m)[:2]:
        weight, bias = (each.view(3, 5 + len(NAMES), -1) for each in (level.weight, level.bias))
        weight[:, 4:] *= 4
        bias[:] = 0
        bias[:, 4] = -1
    network.names = list(NAMES)
    return network.eval()


def weights_file(path: Path, seed: int = 0) -> Path:
    save_weights(path, weights_of(confident_network(seed)))
    return path


def make_image(seed: int, size_wh: tuple[int, int]) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return cv2.resize(noise, size_wh, interpolation=cv2.INTER_CUBIC)


def write_images(folder: Path, count: int = 10, suffix: str = "png") -> list[Path]:
    """Write 00.png, 01.png, ... in several sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:02}.{suffix}" for number in range(count)]
    for number, path in enumerate(paths):
        cv2.imwrite(str(path), make_image(number, SIZES_WH[number % len(SIZES_WH)]))
    return paths


def write_video(path: Path, num_frames: int = 6, *, size_wh: tuple[int, int] = (96, 64), fps: float = 12.0) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, size_wh)
    for number in range(num_frames):
        writer.write(make_image(number, size_wh))
    writer.release()
    return path


def frames_in(path: Path) -> list[np.ndarray]:
    capture, frames = cv2.VideoCapture(str(path)), []
    while (read := capture.read())[0]:
        frames.append(read[1])
    capture.release()
    return frames


class Server(ThreadingHTTPServer):
    """/live: an MJPEG stream that breaks off after some frames; /clip.mp4: a file."""

    daemon_threads = True

    def __init__(
        self, *, connections: int = 1, frames: int = 24, stays: bool = False, clip: Path | None = None
    ) -> None:
        """Serve this many `connections` to /live, refuse later ones; `stays` keeps them open after the last frame."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.connections, self.frames, self.clip = connections, frames, clip
        self.requests = 0
        self.stays = stays
        self.over = threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        if self.path == "/live" and self.server.requests < self.server.connections:
            self.server.requests += 1
            self._stream()
        elif self.path == "/clip.mp4" and self.server.clip is not None:
            content = self.server.clip.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        else:
            self.send_error(404)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        for number in range(self.server.frames):
            content = cv2.imencode(".jpg", make_image(number, (96, 64)))[1].tobytes()
            head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(content)}\r\n\r\n"
            self.wfile.write(head.encode() + content + b"\r\n")
        if self.server.stays:
            self.wfile.flush()
            self.server.over.wait()


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
