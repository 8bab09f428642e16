"""Sources in Python: whatever holds an image gives the same result, and what does not is refused in one sentence."""

import io
import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cv2
import numpy as np
import pytest
import torch

import flatout.yolo
from flatout.__main__ import main
from flatout.errors import ConfigError, DataError
from tests.yolo.predict.small_sources import Server, make_image, serving
from tests.yolo.predict.test_detector import OPTIONS, same


@pytest.fixture(scope="module")
def model(place):
    return flatout.yolo.load(place / "a.pt", device="cpu")


@pytest.fixture
def pil():
    return pytest.importorskip("PIL.Image", reason="needs Pillow")


@pytest.fixture(scope="module")
def path(place):
    return place / "images/02.png"


@pytest.fixture(scope="module")
def image(path):
    return cv2.imread(str(path))


@pytest.fixture(scope="module")
def expected(model, path):
    (result,) = model(path, **OPTIONS)
    assert len(result)
    return result


def rgb_CHW(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1)))


# Everything that may be given


def test_an_image_in_any_form_gives_the_same(model, path, image, expected, pil):
    content = path.read_bytes()
    forms = {
        "path": path,
        "text": str(path),
        "pattern": f"{path.parent}/*2.png",
        "array 0": image,
        "image 0": pil.open(path),
        "bytes 0": content,
        "bytearray": bytearray(content),
        "memoryview": memoryview(content),
        "file in memory": io.BytesIO(content),
        "open file": path.open("rb"),
        "pattern with ?": f"{path.parent}/?2.p[n]g",
        "tensor 0": rgb_CHW(image),
        "float": rgb_CHW(image).float() / 255,
        "half": rgb_CHW(image).double() / 255,
        "tensor 0-0": rgb_CHW(image)[None],
    }
    for name, source in forms.items():
        (result,) = model(source, **OPTIONS)
        assert same(result, expected), name
        assert (result.image == expected.image).all(), name
        assert " 0" not in name or result.path == name


def test_a_list_may_mix_all_of_them(model, path, image, expected, pil):
    mixed = [path, image, pil.open(path), path.read_bytes(), rgb_CHW(image), f"{path.parent}/*2.png"]
    results = model.predict(mixed, **OPTIONS)
    assert len(results) == 6 and all(same(result, expected) for result in results)
    assert len(model.predict((each for each in mixed), **OPTIONS)) == 6


def test_a_batch_gives_a_result_per_image(model, place):
    images = [make_image(number, (96, 64)) for number in range(3)]
    batch_BCHW = torch.stack([rgb_CHW(image) for image in images])
    results = model(batch_BCHW, **OPTIONS)
    assert [result.path for result in results] == ["tensor 0-0", "tensor 0-1", "tensor 0-2"]
    assert all(map(same, results, model(images, **OPTIONS)))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_pil_images_of_other_modes_become_rgb(model, path, pil, mode):
    converted = pil.open(path).convert(mode)
    (result,) = model(converted, **OPTIONS)
    assert (result.image[..., ::-1] == np.asarray(converted.convert("RGB"))).all()


def test_bytes_are_turned_upright_like_files(model, pil, image, tmp_path):
    exif = pil.Exif()
    exif[0x0112] = 6
    turned = io.BytesIO()
    pil.fromarray(np.ascontiguousarray(image[..., ::-1])).save(turned, "jpeg", exif=exif, quality=95)
    (tmp_path / "a.jpg").write_bytes(turned.getvalue())
    from_file, from_bytes = model(tmp_path / "a.jpg", **OPTIONS)[0], model(turned.getvalue(), **OPTIONS)[0]
    assert (from_file.image == from_bytes.image).all() and from_file.image.shape != image.shape[:2]


# What is refused


@pytest.mark.parametrize("nothing", [None, 3.5, True, {"a": 1}, {1, 2}, -1, object()])
def test_the_error_about_anything_else_lists_what_may_be_given(model, nothing):
    text = (
        r"is no source of images: give a path, folder or pattern, an array \(uint8 \[height, width, 3\], BGR\), a PIL "
        r"image, a tensor \(RGB, .*\), the bytes of an image file or the open file, the number of a camera, or a list "
        r"of these\.$"
    )
    with pytest.raises(ConfigError, match=text):
        model.predict(nothing)
    with pytest.raises(ConfigError, match=rf"^item 1: .*{text}"):
        model.predict(["missing.png", nothing])


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros(4, 4), r"torch.float32 \[4, 4\] is not an image"),
        (torch.zeros(4, 4, 3), r"torch.float32 \[4, 4, 3\] is not an image"),
        (torch.zeros(0, 3, 4, 4), "is not an image"),
        (torch.full((3, 4, 4), 2.0), r"has values outside 0 to 1 \(divide by 255\?\)"),
        (torch.full((3, 4, 4), torch.nan), "has values outside 0 to 1"),
        (torch.zeros(3, 4, 4, dtype=torch.int32), "has the wrong type"),
    ],
)
def test_a_tensor_that_is_no_image_is_refused(model, tensor, problem):
    with pytest.raises(ConfigError, match=rf"tensor 0: .*{problem}.* Give \[3, height, width\] .* in RGB order"):
        model.predict(tensor)


@pytest.mark.parametrize(("dtype", "mode"), [(np.float32, "F"), (np.uint16, "I;16")])
def test_a_pil_image_with_more_bits_is_refused_and_not_to_be_converted_without_scaling(model, pil, dtype, mode):
    image = pil.fromarray(np.full((8, 8), 300, dtype))
    assert np.asarray(image.convert("RGB")).min() == 255  # cut off
    with pytest.raises(ConfigError, match=f"mode '{mode}' does not have 8 bits per channel. Scale its values to 0 to"):
        model.predict(image)


def test_bytes_that_are_no_image_are_unreadable(model):
    with pytest.raises(DataError, match="bytes 0: "):
        model.predict(b"no image")
    assert model.predict([b"", b"text"], on_error="skip") == []


def test_a_file_that_was_opened_as_text_is_refused(model, path):
    with path.open() as file, pytest.raises(ConfigError, match=r'opened as text: open it with mode "rb"\.$'):
        model.predict(file)
    with path.open() as file, pytest.raises(ConfigError, match=r"^item 0: .*opened as text"):
        model.predict([file])


def test_an_open_video_is_refused_with_what_to_give(model, place):
    capture = cv2.VideoCapture(str(place / "clip.mp4"))
    with pytest.raises(DataError, match=r"VideoCapture\.read\(\) gives a tuple, .*; for a video, give its path"):
        model.predict(capture)
    capture.release()


def test_messages_in_python_do_not_speak_of_flags(model):
    with pytest.raises(ConfigError, match=r"^missing\.png: no such file or folder"):
        model.predict("missing.png")
    with pytest.raises(ConfigError, match=r"^'': no such file or folder"):
        model.predict("")
    with pytest.raises(DataError, match=r"^63: camera 63 cannot be opened"):
        model.predict(63)


def test_an_endless_iterator_is_read_as_far_as_needed(model, image, expected):
    asked = []

    def frames():
        for number in itertools.count():
            asked.append(number)
            yield image

    stream = model.stream(frames(), **OPTIONS)
    assert same(next(stream), expected)
    stream.close()
    assert len(asked) < 100


def test_one_frame_of_a_live_stream_is_a_result_and_every_frame_of_a_file(model, place):
    with serving(Server(frames=40, stays=True, clip=place / "clip.mp4")) as server:
        (result,) = model.predict(server.url("/live"), **OPTIONS)
        assert result.origin.kind == "stream" and result.image.shape == (64, 96, 3)
        assert len(model.predict(server.url("/clip.mp4"), **OPTIONS)) == len(
            model.predict(place / "clip.mp4", **OPTIONS)
        )


def test_an_option_that_is_almost_another_name_is_suggested(model, image):
    with pytest.raises(ConfigError, match=r"^predict\(\): cnf: unknown key \(0\.5\) - did you mean 'conf'\?$"):
        model(image, cnf=0.5)
    with pytest.raises(ConfigError, match=r"img_sise: unknown key \(64\) - did you mean 'img_size'"):
        model(image, img_sise=64)


class _Camera:
    """A camera that always shows the same; as OpenCV's, it does not know how many frames there will be."""

    def __init__(self, image: np.ndarray) -> None:
        self._image = image

    def isOpened(self) -> bool:
        return True

    def get(self, what: int) -> float:
        return 0.0

    def grab(self) -> bool:
        return True

    def retrieve(self) -> tuple[bool, np.ndarray]:
        return True, self._image.copy()

    def release(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("number", [0, "0", np.int64(0)])
def test_a_camera_is_looked_at_once_or_followed(model, image, expected, monkeypatch, number):
    opened = []
    monkeypatch.setattr(
        "flatout.yolo.predict.streams.open_capture", lambda address: opened.append(address) or _Camera(image)
    )
    (result,) = model(number, **OPTIONS)
    assert same(result, expected) and result.path == "0" and opened == ["0"]
    stream = model.stream(number, **OPTIONS)
    frames = [next(stream).origin.frame for _ in range(3)]
    stream.close()
    assert frames == [0, 1, 2]


def test_a_camera_is_a_number_alone(model):
    with pytest.raises(DataError, match="camera 63 cannot be opened"):
        next(model.stream(63))
    with pytest.raises(ConfigError, match="0: a camera or stream cannot be part of a list"):
        model.predict([0])


# Addresses


class _Images(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content, self.over = content, threading.Event()
        self.asked: list[tuple[str, str | None]] = []

    def url(self, path: str, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: _Images

    def log_message(self, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname" if "file" in self.path else "/a.png")
            self.end_headers()
        elif self.path.startswith("/a.png"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.content)
        else:
            self.send_error(404)


@pytest.fixture
def server(path):
    with serving(_Images(path.read_bytes())) as running:
        yield running


def test_the_address_of_an_image_is_downloaded_only_if_that_is_allowed(model, server, expected, tmp_path):
    for source in (server.url("/a.png"), [server.url("/a.png")]):
        with pytest.raises(ConfigError, match=r"only if you allow it. Add --allow-urls; in Python: allow_urls=True"):
            model.predict(source, **OPTIONS)
    assert server.asked == []
    listed = tmp_path / "list.txt"
    listed.write_text(f"{server.url('/a.png')}\n")
    for source in (server.url("/a.png?size=1"), [server.url("/moved.png")], listed):
        (result,) = model.predict(source, allow_urls=True, **OPTIONS)
        assert same(result, expected)


def test_a_password_is_sent_but_never_shown(model, server):
    (result,) = model.predict(server.url("/a.png", "me:s%40cret@"), allow_urls=True, **OPTIONS)
    assert result.path == server.url("/a.png") and server.asked == [("/a.png", "Basic bWU6c0BjcmV0")]
    with pytest.raises(DataError) as caught:
        model.predict(server.url("/none.png", "me:s%40cret@"), allow_urls=True)
    assert "404" in str(caught.value) and "cret" not in str(caught.value)


def test_an_address_does_not_lead_to_local_files(model, server):
    with pytest.raises(DataError, match="cannot be read"):
        model.predict(server.url("/moved-file.png"), allow_urls=True)


def test_the_command_needs_the_flag(place, server, capsys):
    words = ["yolo", "detect", "--weights", str(place / "a.pt"), "--img", "64", "--conf", "0.3", "--device", "cpu"]
    assert main([*words, "--source", server.url("/a.png")]) == 2
    assert "--allow-urls" in capsys.readouterr().err
    assert main([*words, "--source", server.url("/a.png"), "--allow-urls", "--exist-ok"]) == 0
    assert cv2.imread("runs/detect/exp/a.png").shape == (96, 96, 3)
