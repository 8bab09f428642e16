"""The folder that `resize` and `convert-data` write a data set to: what is refused, its settings, its lock, its files.

    OUT/<command>.json   how the folder was made; written first, and completed last

Every file is written atomically, and what is there and up to date is not made again: the same command continues after
an interruption. torch is never imported.
"""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.errors import ConfigError, FlatoutError, Interrupted, ResourceError
from flatout.runs import Locked, RunLock


@dataclass(frozen=True)
class OutputFolder:
    """The output folder of a command that makes a data set from another one."""

    path: Path
    command: str
    """Such as `resize`."""
    record: Path
    """The file with the settings."""
    by_flag: str = ""
    """Such as ` with --out`, if the folder is given by a flag."""

    @classmethod
    def of(cls, out: str | Path, command: str, record: str, *, by_flag: str = "") -> "OutputFolder":
        # The data YAML contains the name of its folder, so a link must be resolved.
        path = Path(os.path.realpath(out) if os.path.islink(out) else os.path.abspath(out))
        return cls(path, command, path / record, by_flag)

    def check_place(self, source_folders: Iterable[str]) -> None:
        """ConfigError if files in this place would harm the source, or if YOLO labels would not be found there."""
        if "/images/" in f"{self.path}/":
            raise ConfigError(
                f"{self.path} is inside a folder named `images`, so labels would be expected in "
                f"{f'{self.path}/'.replace('/images/', '/labels/', 1)}. Choose another folder{self.by_flag}."
            )
        place = f"{os.path.realpath(self.path)}{os.sep}"
        for folder in source_folders:
            if place.startswith(os.path.realpath(folder) + os.sep):
                raise ConfigError(
                    f"{self.path} is inside {folder}, a folder of the source. Choose one outside{self.by_flag}."
                )

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """ConfigError if the folder contains other files, or was made with other settings."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file. Give a folder{self.by_flag}.")
        try:
            recorded = json.loads(self.record.read_text())
            changed = [
                f"{key} was {recorded.get(key)}, now {value}"
                for key, value in settings.items()
                if recorded.get(key) != value
            ]
        except FileNotFoundError:
            if foreign := sorted(path.name for path in self.path.iterdir() if path.name != ".lock"):
                raise ConfigError(
                    f"{self.path} contains other files, such as {foreign[0]}. They were not touched. Choose a new or "
                    f"empty folder{self.by_flag}."
                ) from None
            return
        except (OSError, ValueError, AttributeError):
            raise ConfigError(f"{self.record} cannot be read. Choose another folder{self.by_flag}.") from None
        if changed:
            raise ConfigError(
                f"{self.path} was made with other settings: {'; '.join(changed)}. Choose another "
                f"folder{self.by_flag}, or delete it."
            )

    def write_settings(self, settings: Mapping[str, Any], *, complete: bool, **results: object) -> None:
        """Write how the data set is made and, at the end, what is in it."""
        made_by = {"made_by": f"flatout yolo {self.command}", "flatout": __version__}
        record = {**made_by, **settings, "complete": complete, **results}
        write_atomically(self.record, (json.dumps(record, indent=2) + "\n").encode())

    def check_room(self, needed: int, message: str) -> None:
        """ResourceError with this message if the disk has less room than needed; it may name {needed} and {free}."""
        free = shutil.disk_usage(self.path).free
        if needed > free:
            sizes = {"needed": f"{needed / 1e9:.2f} GB", "free": f"{free / 1e9:.2f} GB"}
            raise ResourceError(f"{self.path}: {message.format(**sizes)}")

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Create the folder if necessary and hold its lock; errors of the block say that the same command continues."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._lock():
                yield
        except KeyboardInterrupt:
            raise Interrupted.by("SIGINT") from None
        except FlatoutError:
            raise
        except OSError as error:
            raise ResourceError(
                f"{error.filename or self.path}: {error.strerror or error}. Free the disk or correct the permissions, "
                "then run the same command again: it continues."
            ) from None

    def _lock(self) -> RunLock:
        try:
            # Files are written atomically, so a lock that another host left behind can safely be broken.
            return RunLock(self.path, break_lock=True)
        except Locked:
            raise ConfigError(
                f"{self.path}: another `flatout yolo {self.command}` is writing to it. Wait until it is done, or "
                f"choose another folder{self.by_flag}."
            ) from None
        except ResourceError:
            raise ResourceError(
                f"{self.path}: cannot write to this folder. Choose another one{self.by_flag}."
            ) from None


def yaml_text(heading: str, values: Mapping[str, object]) -> str:
    """A data YAML. Values are written as JSON, a subset of YAML, so that a class named 1 or no stays text."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
    return (
        f"# {heading}\n# Paths start from the working directory, or else from this folder. If you rename the folder, "
        "change the paths too.\n\n" + "".join(lines)
    )


@contextlib.contextmanager
def temporary_for(path: str | Path) -> Iterator[str]:
    """A temporary name beside `path`, for a file that replaces it at the end; the last writer wins.

    Unlike files of flatout.safefiles, nothing is synced: there are many, and each can be made again.
    """
    part = os.path.join(os.path.dirname(path), f".{os.getpid()}.{threading.get_ident()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:  # after KeyboardInterrupt too: no partial file may stay
        with contextlib.suppress(OSError):
            os.unlink(part)


def write_atomically(path: str | Path, content: bytes, *, time_ns: int | None = None) -> None:
    """Write a file by renaming a finished temporary one, with the time of its source."""
    with temporary_for(path) as part:
        Path(part).write_bytes(content)
        if time_ns is not None:
            os.utime(part, ns=(time_ns, time_ns))
