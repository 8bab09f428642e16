"""A C file of ours, compiled once for this CPU and kept in the cache folder.

There is nothing to install: whoever has a C compiler (`cc`) has it; anybody else gets the same results by NumPy and
OpenCV, later. A library is only ever loaded from a folder that nobody else can change, and only if it is whole: its
size and digest stand beside it. A damaged one is compiled again.
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

from flatout.feed import default_folder as store_folder

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


def _compiled(source: Path, wanted_folder: Path) -> Path:
    """Path of the library for this source, these flags and this CPU."""
    # -march=native: a library must not be met on another CPU, in a home folder that several machines share.
    key = hashlib.sha256("\0".join((source.read_text(), *FLAGS, _cpu())).encode()).hexdigest()[:20]
    folder, why_not_wanted = _private_folder(wanted_folder)
    path = folder / f"{source.stem}-{key}.so"
    if not _is_whole(path):
        # Workers start together; one of them compiles.
        with FileLock(folder / f"{source.stem}-{key}.lock", timeout=2 * COMPILE_TIMEOUT_S):
            if not _is_whole(path):
                if path.exists() and _seal_path(path).exists():  # without: left by an earlier version
                    logger.warning("%s is damaged: it is compiled again.", path)
                if why_not_wanted:
                    logger.warning("%s: compiled code is kept in %s instead.", why_not_wanted, folder)
                _compile(source, path)
    if why := _changed_by_others(path):
        raise NotCompiled(why)
    return path


def _private_folder(wanted: Path) -> tuple[Path, str]:
    """`wanted`, or one in the folder for temporary files and why, where others could put a library into `wanted`."""
    reasons = []
    for folder in (wanted, Path(tempfile.gettempdir(), f"flatout-compiled-{os.geteuid()}")):
        try:
            # Step by step: parents=True would let the group write into those that are new, where the umask does.
            for above in reversed(folder.parents):
                above.mkdir(exist_ok=True, mode=0o755)
            folder.mkdir(exist_ok=True, mode=0o700)
            # Without links, which somebody might turn elsewhere afterwards.
            folder = folder.resolve(strict=True)
        except OSError as error:
            reasons.append(f"{folder} cannot be made ({error.strerror})")
            continue
        whys = (_changed_by_others(folder), *(_renamed_by_others(above) for above in folder.parents))
        if not (why := next(filter(None, whys), "")):
            return folder, "; ".join(reasons)
        reasons.append(why)
    raise NotCompiled("; ".join(reasons))


def _changed_by_others(path: Path) -> str:
    """Why somebody else could change what is in a file or folder; "" if nobody can."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} may be written by others (chmod go-w helps)"
    return ""


def _renamed_by_others(folder: Path) -> str:
    """Why somebody else could put another folder in the place of one in `folder`; "" if nobody can.

    In a sticky one, such as /tmp, only the owner of what is in it can.
    """
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        return f"{folder} may be written by others (chmod go-w helps)"
    return ""


def _is_whole(path: Path) -> bool:
    """Whether a library is as its compiler left it: mapping a shorter one would end the process."""
    try:
        return _seal_path(path).read_text() == _seal(path.read_bytes())
    except (OSError, UnicodeDecodeError):
        return False


def _seal(library: bytes) -> str:
    return f"{len(library)} {hashlib.sha256(library).hexdigest()}\n"


def _seal_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


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
        seal = Path(folder, _seal_path(path).name)
        seal.write_text(_seal(part.read_bytes()))
        # On the disk before they can be met under their names: a crash must not leave names without content.
        for made, name in ((part, path), (seal, _seal_path(path))):
            made.chmod(0o600)  # whatever the umask
            _sync(made)
            made.rename(name)
        _sync(path.parent)
    logger.info("Compiled %s for this CPU: %s", source.name, path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cpu() -> str:
    """What the compiler looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = (line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return "\n".join([platform.machine(), *sorted(set(told))])
