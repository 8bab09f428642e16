"""Names of weights files: where each is downloaded from, and its SHA-256.

A name is looked up in a catalogue file of the user. Downloaded files lie in one folder, in which `--weights NAME` finds
them; NAME.url beside each has the address it came from, so that a name never stands for another file than before.
"""

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

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


def shipped() -> dict[str, Path]:
    """Trained weights that come with flatout, by name: in `weights/` of a checkout, or inside the installed package."""
    package = Path(__file__).parents[1]
    folder = package / "weights" if (package / "weights").is_dir() else package.parent / "weights"
    return {file.stem: file for file in sorted(folder.glob("*.safetensors"))}


def downloaded(name: str | Path) -> Path | None:
    """The downloaded file of that name, with or without its ending; None if there is none."""
    if len(Path(name).parts) != 1:
        return None
    candidates = [cache_folder() / f"{name}{ending}" for ending in ("", *ENDINGS)]
    return next((path for path in candidates if path.suffix in ENDINGS and path.is_file()), None)


def get(
    what: str, *, sha256: str | None = None, file: Path | None = None, out: Path | None = None, force: bool = False
) -> Path:
    """Download weights by name, URL or hf://OWNER/REPO/FILE, unless they are there; returns their path.

    In the cache, a file has the name of the catalogue, or else that of its address. ConfigError if another file has it.
    """
    own = shipped()
    if what in own and out is None:
        return own[what]
    entry = find_entry(what, sha256=sha256, file=file)
    named = PurePosixPath(unquote(urlsplit(entry.url).path)).name
    ending = next((ending for ending in ENDINGS if named.endswith(ending)), None)
    path = out or cache_folder() / (f"{what}{ending or ''}" if "://" not in what else named)
    if out is None:
        if path.suffix not in ENDINGS:
            raise ConfigError(f"{path.name}: weights end in {' or '.join(ENDINGS)}. Name the file with --out FILE.")
        _refuse_other(path, entry, force=force, is_shipped=path.stem in own)
    if path.is_file() and not force and (entry.sha256 is None or sha256_of(path) == entry.sha256):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    _download(entry, path)
    if out is None:
        _source_of(path).write_text(f"{_without_query(entry.url)}\n")
    return path


def _download(entry: Entry, path: Path) -> None:
    if entry.url.startswith("hf://"):
        from flatout.hub.hugging import pull

        pull(entry.url, path, sha256=entry.sha256)
    else:
        from flatout.hub.download import download

        download(entry.url, path, sha256=entry.sha256)


def _refuse_other(path: Path, entry: Entry, *, force: bool, is_shipped: bool) -> None:
    """ConfigError if the name of a file in the cache stands for something else."""
    if is_shipped:
        raise ConfigError(
            f"{path.stem} is the name of weights that come with flatout, and --weights {path.stem} means those. "
            "Give the file another name with --out FILE."
        )
    source = _source_of(path)
    before = source.read_text().strip() if source.is_file() and path.is_file() else ""
    if before and before != _without_query(entry.url) and not force:
        raise ConfigError(
            f"{path} was downloaded from {before}. Give the new file another name with --out FILE, or replace the old "
            "one with --force."
        )


def _source_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.url")


def _without_query(url: str) -> str:
    """The address without what may be a signature, which changes and is secret."""
    return urlsplit(url)._replace(query="", fragment="").geturl()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_entry(what: str, *, sha256: str | None, file: Path | None) -> Entry:
    """The URL and hash of a name or URL; ConfigError if the name is not known."""
    if "://" in what:
        _check_address(what)
        return Entry(what, _checked_hash(sha256, "--sha256"))
    entries = read_catalogue(file)
    if what in entries:
        found = entries[what]
        return found._replace(sha256=_checked_hash(sha256, "--sha256") or found.sha256)
    known = f"Known: {', '.join(entries)}." if entries else "Give its URL, or a catalogue with --catalogue FILE."
    raise ConfigError(f"{what}: no weights of that name in {file or CATALOGUE}. {known}")


def _check_address(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "hf":
        from flatout.hub.hugging import parse_file

        parse_file(url)
    elif parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url}: give an http(s) URL, a name from a catalogue, or hf://OWNER/REPO/FILE.")
    elif parts.username is not None:
        raise ConfigError(f"{parts.hostname}: give the address without a login, which others could read.")


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
        _check_address(url)
        entries[str(name)] = Entry(url, _checked_hash(value.get("sha256"), f"{path}: {name}: sha256"))
    return entries


def listing() -> str:
    """Weights that can be used by name, one line each."""
    cache = cache_folder()
    files = sorted(path for path in cache.glob("*") if path.suffix in ENDINGS) if cache.is_dir() else []
    lines = [_line(path, "comes with flatout") for path in shipped().values()]
    lines += [_line(path, f"in {cache}") for path in files]
    there = {path.stem for path in files}
    others = {name: entry for name, entry in read_catalogue(None).items() if name not in there}
    return "\n".join([*lines, *(f"{name:<28} not downloaded: {entry.url}" for name, entry in others.items())])


def _line(path: Path, where: str) -> str:
    return f"{path.stem:<28} {path.stat().st_size / 1e6:8.1f} MB  sha256 {sha256_of(path)}  {where}"


def _checked_hash(text: object, where: str) -> str | None:
    if text is None:
        return None
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ConfigError(f"{where} {text}: a SHA-256 has 64 hex digits.")
    return text.lower()
