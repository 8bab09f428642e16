"""A file from a URL: continued after an interruption, checked, complete or not there at all.

    URL --Range--> NAME.part, beside the file --SHA-256--> renamed to NAME

The part stays when the download is interrupted; the same command continues it, if the server can and the file there is
still the same (ETag). A file with another hash than the stated one is never put into place.
"""

import errno
import http.client
import logging
import math
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from flatout.errors import ConfigError, DataError, ResourceError
from flatout.hub.catalogue import sha256_of
from flatout.progress import progress

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30
TRIES = 4
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""Errors of the disk, which another try does not cure."""
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Answers of a server that may be another one later."""


def download(url: str, path: Path, *, sha256: str | None) -> None:
    """Download to `path`; DataError if the hash is another one, ResourceError if the server does not answer."""
    part, tag = path.with_name(f"{path.name}.part"), _tag_of(path)
    for number in range(TRIES):
        try:
            _fetch(url, part, tag)
            break
        except ValueError as error:
            raise ConfigError(f"{url}: {error}. Check the address.") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code not in BUSY:
                raise ConfigError(f"{url}: {error}. Check the address.") from error
            if isinstance(error, OSError) and error.errno in FULL:
                raise ResourceError(f"{part}: {error.strerror}. Make room, then run the same command again.") from error
            if number == TRIES - 1:
                raise ResourceError(_given_up(url, part, error)) from error
            logger.warning("%s: %s; trying again in %d s", url, _reason(error), 2**number)
            time.sleep(2**number)
    put_in_place(part, path, url=url, sha256=sha256)


def put_in_place(part: Path, path: Path, *, url: str, sha256: str | None) -> None:
    """Check the hash of a complete download and give it its name; DataError, and no file, if it is another one."""
    found = sha256_of(part)
    if sha256 is None:
        unchecked = "%s has the SHA-256 %s. It was not checked, because none was stated (--sha256)."
        logger.warning(unchecked, path.name, found)
    elif sha256 != found:
        part.unlink()
        _tag_of(path).unlink(missing_ok=True)
        raise DataError(f"{url}: the file has the SHA-256 {found}, not {sha256}. It was not kept: do not use it.")
    os.replace(part, path)
    _tag_of(path).unlink(missing_ok=True)


def _tag_of(path: Path) -> Path:
    """Where the ETag of an unfinished download is kept."""
    return path.with_name(f"{path.name}.etag")


def _given_up(url: str, part: Path, error: Exception) -> str:
    if part.is_file():
        return (
            f"{url}: the download was interrupted ({_reason(error)}). {part.stat().st_size / 1e6:.1f} MB are kept: run "
            "the same command again to continue it."
        )
    return f"{url}: there is no answer ({_reason(error)}). Check the address and the network, then try again."


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None)
    error = inner if isinstance(inner, OSError) else error
    return getattr(error, "strerror", None) or str(error)


def _fetch(url: str, part: Path, tag: Path) -> None:
    """Append what is missing to the part; start over if the file on the server has changed."""
    have = part.stat().st_size if part.is_file() and tag.is_file() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "flatout"})
    if have:
        # If-Range: the whole file again, instead of the rest of another one.
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", tag.read_text())
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # the part is complete
            return
        raise
    with answer:
        if answer.status != 206:
            have = 0
        total = have + int(answer.headers.get("Content-Length") or 0)
        tag.write_text(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "none")
        shown = progress(f"downloading {part.stem}", math.ceil(total / 1e6), unit="MB", begin=round(have / 1e6))
        with part.open("ab" if have else "wb") as file, shown as advance:
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                advance(round(file.tell() / 1e6), file.tell())
        if total and part.stat().st_size != total:
            raise OSError(f"{part.stat().st_size:,} of {total:,} bytes arrived")
