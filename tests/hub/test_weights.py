"""`flatout weights`: downloads are continued and checked, names find them, and the Hub takes and gives files."""

import base64
import errno
import hashlib
import json
import logging
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import flatout.yolo
from flatout.__main__ import main
from flatout.errors import CheckpointError, ConfigError, DataError, ResourceError
from flatout.hub import catalogue, hugging
from flatout.hub.download import download
from flatout.progress import progress_line
from flatout.yolo.find_file import weights_file

CONTENT = bytes(range(256)) * 4000
COMMIT = "0" * 40
HASH = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT at /w.safetensors, and as much of the Hub's interface as a push and a pull need."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str] = []
        self.cut_after: int | None = None
        self.files: dict[str, bytes] = {}
        self.busy = 0
        """Requests that are answered with 503."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.server.busy:
            self.server.busy -= 1
            self._send(503, b"", {})
            return
        name = self.path.rpartition("/")[2].partition("?")[0]
        content = CONTENT if self.path.partition("?")[0] == "/w.safetensors" else self.server.files.get(name)
        if content is None:
            self._send(404, b"", {})
            return
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        start = 0
        if (asked := self.headers.get("Range")) and self.path == "/w.safetensors":
            self.server.ranges.append(asked)
            if self.headers.get("If-Range") in (None, headers["ETag"]):
                start = int(re.search(r"\d+", asked)[0])  # type: ignore[index]
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if start else 200, content[start:], headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.endswith("/preupload/main"):
            names = [each["path"] for each in json.loads(body)["files"]]
            self._send_json({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
            return
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        here = f"{self.server.address}/o/r"
        commit = {"commitUrl": f"{here}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
        self._send_json({"url": here, "name": "o/r", "id": "o/r"} | commit)

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut, self.server.cut_after = self.server.cut_after, None
            self.wfile.write(body[:cut])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server():
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache/weights"


def test_a_url_is_downloaded_checked_and_found_by_its_name(server, cache):
    assert main(["weights", "get", f"{server.address}/w.safetensors", "--sha256", HASH]) == 0
    assert (cache / "w.safetensors").read_bytes() == CONTENT
    assert weights_file("w") == weights_file("w.safetensors") == cache / "w.safetensors"
    assert sorted(path.name for path in cache.iterdir()) == ["w.safetensors", "w.safetensors.url"]


def test_python_finds_downloaded_weights_by_name(server, cache):
    catalogue.get(f"{server.address}/w.safetensors")
    assert flatout.yolo.load("w").weights == flatout.yolo.load("w.safetensors").weights == cache / "w.safetensors"
    (cache / "w.safetensors").rename(cache / "yolov7.safetensors")
    assert flatout.yolo.load("yolov7").weights == cache / "yolov7.safetensors", "as for --weights"
    assert flatout.yolo.load("yolov7.yaml").config is not None


def test_an_interrupted_download_is_continued_where_it_stopped(server, tmp_path, monkeypatch):
    server.cut_after = 300_000
    download(f"{server.address}/w.safetensors", tmp_path / "w.safetensors", sha256=HASH)
    assert (tmp_path / "w.safetensors").read_bytes() == CONTENT
    assert server.ranges == ["bytes=300000-"]


def test_a_file_that_changed_on_the_server_is_downloaded_from_its_start(server, tmp_path):
    (tmp_path / "w.safetensors.part").write_bytes(b"old" * 1000)
    (tmp_path / "w.safetensors.etag").write_text('"of another file"')
    download(f"{server.address}/w.safetensors", tmp_path / "w.safetensors", sha256=HASH)
    assert (tmp_path / "w.safetensors").read_bytes() == CONTENT


def test_a_file_with_another_hash_is_refused_and_not_kept(server, cache):
    with pytest.raises(DataError, match=f"has the SHA-256 {HASH}, not {'0' * 64}"):
        catalogue.get(f"{server.address}/w.safetensors", sha256="0" * 64)
    assert not list(cache.iterdir())


def test_without_a_stated_hash_the_found_one_is_reported(server, caplog):
    with caplog.at_level(logging.WARNING):
        catalogue.get(f"{server.address}/w.safetensors")
    assert HASH in caplog.text and "not checked" in caplog.text


def test_a_name_in_a_catalogue_has_its_address_and_hash(server, tmp_path, capsys):
    (tmp_path / "weights.yaml").write_text(f"bolts: {{url: {server.address}/w.safetensors, sha256: {HASH}}}\n")
    assert main(["weights", "list"]) == 0
    assert "not downloaded" in capsys.readouterr().out
    assert main(["weights", "get", "bolts"]) == 0
    assert "bolts.safetensors: ready. Use it with --weights bolts" in capsys.readouterr().out
    assert weights_file("bolts").read_bytes() == CONTENT
    with pytest.raises(CheckpointError):
        weights_file("w")
    assert main(["weights", "list"]) == 0
    listed = capsys.readouterr().out
    assert HASH in listed and "not downloaded" not in listed


def test_what_is_there_is_not_downloaded_again(server, cache):
    catalogue.get(f"{server.address}/w.safetensors", sha256=HASH)
    server.shutdown()
    catalogue.get(f"{server.address}/w.safetensors", sha256=HASH)


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("bolts", {}, r"bolts: no weights of that name in weights\.yaml"),
        ("ftp://host/x.pt", {}, "give an http"),
        ("http://127.0.0.1:1/x.txt", {}, "weights end in"),
        ("http://127.0.0.1:1/x.pt", {"sha256": "abc"}, "64 hex digits"),
        ("hf://alone", {}, "hf://OWNER/REPO/FILE"),
        ("hf://o/r", {}, "name the file in the repository"),
        ("http://me:secret@127.0.0.1:1/x.pt", {}, r"^127\.0\.0\.1: give the address without a login"),
    ],
)
def test_mistakes_get_a_sentence(what, options, message):
    with pytest.raises(ConfigError, match=message):
        catalogue.get(what, **options)


def test_a_missing_file_on_the_server_is_reported(server, tmp_path):
    with pytest.raises(ConfigError, match="404"):
        download(f"{server.address}/missing.pt", tmp_path / "missing.pt", sha256=None)


def test_without_a_network_the_message_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    address = "http://127.0.0.1:9/x.pt"  # nobody listens there
    assert main(["weights", "get", address]) == 5
    shown = capsys.readouterr()
    assert f"{address}: there is no answer (Connection refused). Check the address and the network" in shown.err
    assert shown.out.count("trying again in") == 3


def test_a_busy_server_is_asked_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.busy = 2
    download(f"{server.address}/w.safetensors", tmp_path / "w.safetensors", sha256=HASH)
    assert (tmp_path / "w.safetensors").read_bytes() == CONTENT


def test_after_a_lost_connection_the_next_command_asks_for_the_rest_only(server, cache, monkeypatch, capsys):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("flatout.hub.download.TRIES", 1)
    server.cut_after = 300_000
    words = ["weights", "get", f"{server.address}/w.safetensors", "--sha256", HASH]
    assert main(words) == 5
    assert "0.3 MB are kept: run the same command again to continue it." in capsys.readouterr().err
    assert not (cache / "w.safetensors").exists()
    assert main(words) == 0
    assert server.ranges == ["bytes=300000-"] and (cache / "w.safetensors").read_bytes() == CONTENT


def test_a_full_disk_is_not_taken_for_a_lost_connection(server, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ResourceError, match=r"w\.safetensors\.part: No space left on device. Make room"):
        download(f"{server.address}/w.safetensors", tmp_path / "w.safetensors", sha256=HASH)


def test_a_name_never_comes_to_mean_another_file(server, cache):
    address = f"{server.address}/w.safetensors"
    catalogue.get(f"{address}?signature=1")
    catalogue.get(f"{address}?signature=2")
    server.files["w.safetensors"] = b"of somebody else"
    other = f"{server.address}/other/w.safetensors"
    with pytest.raises(ConfigError, match=rf"was downloaded from {address}\. Give the new file another name"):
        catalogue.get(other)
    assert (cache / "w.safetensors").read_bytes() == CONTENT
    catalogue.get(other, out=Path("else.onnx"))
    assert Path("else.onnx").read_bytes() == b"of somebody else"
    catalogue.get(other, force=True)
    assert (cache / "w.safetensors").read_bytes() == b"of somebody else"


def test_weights_that_come_with_flatout_are_listed_and_need_no_download(server, tmp_path, capsys):
    assert main(["weights", "list"]) == 0
    assert re.search(r"^yolov7-tiny +\d+\.\d MB  sha256 \w{64}  comes with flatout$", capsys.readouterr().out, re.M)
    assert main(["weights", "get", "yolov7-tiny"]) == 0
    assert "comes with flatout. Use it with --weights yolov7-tiny" in capsys.readouterr().out
    server.files["yolov7-tiny.pt"] = CONTENT
    with pytest.raises(ConfigError, match="yolov7-tiny is the name of weights that come with flatout"):
        catalogue.get(f"{server.address}/yolov7-tiny.pt")


def test_the_progress_of_a_download_is_in_megabytes():
    line = progress_line("downloading w", 30, 50, 30_000_000, 2.0, unit="MB", begin=10)
    assert line == "downloading w: 30/50 MB, 10 MB/s, 2 s left"


def test_weights_that_are_nowhere_are_not_downloaded(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        weights_file("bolts")


def test_only_files_that_nobody_executes_are_pushed(tmp_path):
    with pytest.raises(ConfigError, match="flatout yolo convert"):
        hugging.push(tmp_path / "best.pt", "hf://o/r")


def test_the_hub_takes_weights_with_their_card_and_gives_them_back(server, tmp_path, monkeypatch, cache):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the server is on this machine
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    (tmp_path / "best.safetensors").write_bytes(CONTENT)
    (tmp_path / "best.card.md").write_text("# best")
    line = hugging.push(Path("best.safetensors"), "hf://o/r")
    assert HASH in line and set(server.files) == {"best.safetensors", "best.card.md"}
    assert main(["weights", "get", "hf://o/r/best.safetensors", "--sha256", HASH.upper()]) == 0
    assert (cache / "best.safetensors").read_bytes() == CONTENT
    with pytest.raises(DataError, match=f"has the SHA-256 {HASH}, not {'0' * 64}"):
        catalogue.get("hf://o/r/best.safetensors", sha256="0" * 64)
    assert weights_file("best") == cache / "best.safetensors"
