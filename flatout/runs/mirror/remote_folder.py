"""A folder behind an fsspec URL, with the few operations that a mirror needs.

    s3:// gs:// az:// abfss://   through obstore, which is small and manages its own connections (the extra `cloud`)
    file:// memory:// others     through fsspec itself, which is installed with torch

Credentials come from the environment or the machine, as for the cloud's own tools; never from the URL.
"""

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from flatout.errors import ConfigError, one_line
from flatout.runs.options import check_mirror_url

OBJECT_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "abfs", "abfss": "abfs"}
"""Schemes that obstore supports, and its own name for each."""
RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
"""Retries of one call; background copies are retried later anyway."""
CLIENT = {"connect_timeout": "10s", "timeout": "600s"}
_CHUNK_BYTES = 8 << 20

T = TypeVar("T")


class RemoteError(Exception):
    """An operation on a remote folder failed; the text is one line."""


class RemoteFolder:
    """Objects by key below a URL. Calls wait for the network and raise RemoteError."""

    def __init__(self, url: str, *below: str) -> None:
        """ConfigError if the scheme of the URL is not supported, or if it contains a password."""
        check_mirror_url(url)
        self.url = "/".join((url.rstrip("/"), *below))
        self._fs, root = _open(self.url)
        self._root = root.rstrip("/")

    def keys(self, folder: str) -> list[str]:
        """Names of the objects in a folder; empty if there is no such folder."""
        try:
            self._fs.invalidate_cache()
            found = self._do("list", folder, lambda path: self._fs.ls(path, detail=False))
        except _Missing:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read(self, key: str) -> bytes:
        content: bytes = self._do("read", key, self._fs.cat_file)
        return content

    def write(self, content: bytes, key: str) -> None:
        """Write a small object, atomically if the store supports that."""
        self._do("write", key, lambda path: self._fs.pipe_file(self._in_a_folder(path), content))

    def upload(self, source: Path, key: str) -> None:
        self._do("write", key, lambda path: self._fs.put_file(str(source), self._in_a_folder(path)))

    def download(self, key: str, target: Path) -> str:
        """Download to a new file; returns the SHA-256 of its content."""
        return self._do("read", key, lambda path: self._stream(path, target))

    def remove(self, key: str) -> None:
        try:
            self._do("remove", key, self._fs.rm_file)
        except _Missing:
            return

    def _stream(self, path: str, target: Path) -> str:
        digest = hashlib.sha256()
        with self._fs.open(path, "rb") as source, target.open("xb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
        return digest.hexdigest()

    def _in_a_folder(self, path: str) -> str:
        """The path, after creating its parent folders, which object stores do not need."""
        if "file" in self._fs.protocol:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    def _do(self, what: str, key: str, work: Callable[[str], T]) -> T:
        try:
            return work(f"{self._root}/{key}")
        except FileNotFoundError as error:
            raise _Missing(f"{self.url}: cannot {what} {key}: no such object.") from error
        except Exception as error:  # each store has its own errors, and none of them may end a training
            reason = shorten(one_line(error).partition(" Debug source")[0], 300, placeholder=" ...").removesuffix(".")
            raise RemoteError(f"{self.url}: cannot {what} {key}: {reason}.") from error


class _Missing(RemoteError):
    """There is no such object."""


def _open(url: str) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it."""
    import fsspec  # type: ignore[import-untyped]

    scheme, _, rest = url.partition("://")
    if scheme in OBJECT_STORES and importlib.util.find_spec("obstore") is not None:
        store: Any = importlib.import_module("obstore.fsspec").FsspecStore
        # A private server may be used without encryption if its address says so.
        plain = {"allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")}
        return store(OBJECT_STORES[scheme], retry_config=RETRIES, client_options=CLIENT | plain), rest
    try:
        fs, root = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        advice = "Install its client: pip install obstore" if scheme in OBJECT_STORES else str(error)
        raise ConfigError(f"--mirror {url}: {scheme}:// is not supported here. {advice}") from error
    return fs, str(root)
