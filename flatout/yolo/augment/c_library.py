"""A C file of ours, compiled once for this CPU and kept in the cache folder.

There is nothing to install: whoever has a C compiler (`cc`) has it; anybody else gets the same results by NumPy and
OpenCV, later. A library is only ever loaded from a folder of one's own.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

from flatout.feed.store.home import default_folder as store_folder

logger = logging.getLogger(__name__)

FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fwrapv"),
    # Rounded where OpenCV and NumPy round; the others only allow more vector instructions.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
COMPILE_TIMEOUT_S = 60


class NotCompiled(OSError):
    """There is no library, and why."""


def load_library(source: Path, folder: Path | None = None) -> ctypes.CDLL:
    """The library from `folder` (default: in the cache folder), compiled if it is not there. Raises NotCompiled."""
    try:
        return ctypes.CDLL(str(_compiled(source, folder or store_folder().parent / "compiled")))
    except OSError as error:
        raise error if isinstance(error, NotCompiled) else NotCompiled(str(error)) from error


def _compiled(source: Path, folder: Path) -> Path:
    """Path of the library for this source, these flags and this CPU."""
    # -march=native: a library must not be met on another CPU, in a home folder that several machines share.
    key = hashlib.sha256("\0".join((source.read_text(), *FLAGS, _cpu())).encode()).hexdigest()[:20]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _must_be_own(folder)
    path = folder / f"{source.stem}-{key}.so"
    if not path.exists():
        # Workers start together; one of them compiles.
        with FileLock(folder / f"{source.stem}-{key}.lock", timeout=2 * COMPILE_TIMEOUT_S):
            if not path.exists():
                _compile(source, path)
    _must_be_own(path)
    return path


def _compile(source: Path, path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotCompiled("there is no C compiler (cc)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder, path.name)
        command = [compiler, *FLAGS, "-o", str(part), str(source), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise NotCompiled(f"{compiler} did not end within {COMPILE_TIMEOUT_S} s") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise NotCompiled(f"{compiler}: {lines[0]}")
        part.rename(path)
    logger.info("Compiled %s for this CPU: %s", source.name, path)


def _must_be_own(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotCompiled(f"{path} may be written by others")


def _cpu() -> str:
    """What the compiler looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = (line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return "\n".join([platform.machine(), *sorted(set(told))])
