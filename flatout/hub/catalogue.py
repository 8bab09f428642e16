"""Names of weights files: where each is downloaded from, and its SHA-256.

A name is looked up in a catalogue file of the user. Downloaded files lie in one folder, in which `--weights NAME` finds
them.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

from flatout.errors import ConfigError
from flatout.yaml_strict import load_yaml

CATALOGUE = Path("weights.yaml")
ENDINGS = (".safetensors", ".pt")
"""Endings of weights files, in the order in which a name is looked up."""


class Entry(NamedTuple):
    """A file that can be downloaded."""

    url: str
    sha256: str | None
    """Lower-case hex digits; None: nobody stated it."""


def cache_folder() -> Path:
    """The folder of downloaded weights; it need not exist."""
    home = os.environ.get("FLATOUT_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "flatout")
    return Path(home) / "weights"


def downloaded(name: str | Path) -> Path | None:
    """The downloaded file of that name, with or without its ending; None if there is none."""
    if len(Path(name).parts) != 1:
        return None
    candidates = [cache_folder() / f"{name}{ending}" for ending in ("", *ENDINGS)]
    return next((path for path in candidates if path.suffix in ENDINGS and path.is_file()), None)


def get(
    what: str, *, sha256: str | None = None, file: Path | None = None, out: Path | None = None, force: bool = False
) -> Path:
    """Download weights by name, URL or hf://OWNER/REPO/FILE, unless they are there; returns their path."""
    if what.startswith("hf://"):
        from flatout.hub.hugging import pull

        return pull(what, out or cache_folder(), sha256=sha256)
    from flatout.hub.download import download, sha256_of

    entry = find_entry(what, sha256=sha256, file=file)
    path = out or cache_folder() / PurePosixPath(urlsplit(entry.url).path).name
    if path.suffix not in ENDINGS:
        raise ConfigError(f"{path.name}: weights end in {' or '.join(ENDINGS)}. Name the file with --out FILE.")
    if path.is_file() and not force and (entry.sha256 is None or sha256_of(path) == entry.sha256):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    download(entry.url, path, sha256=entry.sha256)
    return path


def find_entry(what: str, *, sha256: str | None, file: Path | None) -> Entry:
    """The URL and hash of a name or URL; ConfigError if the name is not known."""
    if "://" in what:
        if urlsplit(what).scheme not in ("http", "https"):
            raise ConfigError(f"{what}: give an http(s) URL, a name from a catalogue, or hf://OWNER/REPO/FILE.")
        return Entry(what, _checked_hash(sha256, "--sha256"))
    entries = read_catalogue(file)
    if what in entries:
        found = entries[what]
        return found._replace(sha256=_checked_hash(sha256, "--sha256") or found.sha256)
    known = f"Known: {', '.join(entries)}." if entries else "Give its URL, or a catalogue with --catalogue FILE."
    raise ConfigError(f"{what}: no weights of that name in {file or CATALOGUE}. {known}")


def read_catalogue(file: Path | None) -> dict[str, Entry]:
    """The entries of a catalogue file; empty if none was named and there is none here."""
    if file is None and not CATALOGUE.is_file():
        return {}
    path = file or CATALOGUE
    content = load_yaml(path)
    entries = {}
    for name, value in content.items() if isinstance(content, dict) else [("the file", None)]:
        url = value.get("url") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(url, str) or set(value) - {"url", "sha256"}:
            raise ConfigError(f"{path}: {name}: write each entry as NAME: {{url: https://..., sha256: ...}}.")
        entries[str(name)] = Entry(url, _checked_hash(value.get("sha256"), f"{path}: {name}: sha256"))
    return entries


def listing() -> str:
    """Weights that can be used by name, one line each."""
    from flatout.hub.download import sha256_of

    cache = cache_folder()
    files = sorted(path for path in cache.glob("*") if path.suffix in ENDINGS) if cache.is_dir() else []
    lines = [f"{path.stem:<28} {path.stat().st_size / 1e6:8.1f} MB  sha256 {sha256_of(path)}" for path in files]
    lines += [f"{name:<28} not downloaded: {entry.url}" for name, entry in read_catalogue(None).items()]
    return "\n".join(lines) or f"Nothing was downloaded to {cache} yet. `flatout weights get` downloads by name or URL."


def _checked_hash(text: object, where: str) -> str | None:
    if text is None:
        return None
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ConfigError(f"{where} {text}: a SHA-256 has 64 hex digits.")
    return text.lower()
