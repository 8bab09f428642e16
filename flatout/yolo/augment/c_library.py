"""C files of this package, compiled once for this CPU, kept in the cache folder and loaded from there.

Nothing has to be installed but a C compiler (`cc`); without one, NumPy and OpenCV give the same results more slowly. A
library is only loaded from a folder that other users cannot change, and only if it is intact: its size and SHA-256 are
stored beside it. A damaged library is compiled again.
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
from flatout.safefiles import sync_folder

logger = logging.getLogger(__name__)

FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fwrapv"),
    # Round where OpenCV and NumPy round; the other two only allow more vector instructions.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
COMPILE_TIMEOUT_S = 60


class NotCompiled(OSError):
    """A library cannot be compiled or loaded; the message says why."""


def load_library(source: Path, folder: Path | None = None) -> ctypes.CDLL:
    """Load a library from `folder` (default: in the cache folder), compiling it first if needed. Raises NotCompiled."""
    try:
        return ctypes.CDLL(str(_compiled(source, folder or store_folder().parent / "compiled")))
    except OSError as error:
        raise error if isinstance(error, NotCompiled) else NotCompiled(str(error)) from error


def _compiled(source: Path, wanted_folder: Path) -> Path:
    """Path of the library for this source, these flags and this CPU."""
    # -march=native: in a home folder shared by several machines, other CPUs must not find this library.
    key = hashlib.sha256("\0".join((source.read_text(), *FLAGS, _cpu())).encode()).hexdigest()[:20]
    folder, why_elsewhere = _private_folder(wanted_folder)
    path = folder / f"{source.stem}-{key}.so"
    if not _is_intact(path):
        # Workers start at the same time; one of them compiles.
        with FileLock(folder / f"{source.stem}-{key}.lock", timeout=2 * COMPILE_TIMEOUT_S):
            if not _is_intact(path):
                if path.exists() and _checksum_path(path).exists():  # without one, an earlier version left it
                    logger.warning("%s is damaged: compiling it again.", path)
                if why_elsewhere:
                    logger.warning("Keeping compiled code in %s: %s.", folder, why_elsewhere)
                _compile(source, path)
    if why := _why_writable_by_others(path):
        raise NotCompiled(why)
    return path


def _private_folder(wanted: Path) -> tuple[Path, str]:
    """A folder that other users cannot change: `wanted`, or one for temporary files and why `wanted` is not used."""
    reasons = []
    for folder in (wanted, Path(tempfile.gettempdir(), f"flatout-compiled-{os.geteuid()}")):
        try:
            # One by one: with parents=True new folders might be writable by the group, depending on the umask.
            for above in reversed(folder.parents):
                above.mkdir(exist_ok=True, mode=0o755)
            folder.mkdir(exist_ok=True, mode=0o700)
            # Without symbolic links, which other users might redirect later.
            folder = folder.resolve(strict=True)
        except OSError as error:
            reasons.append(f"{folder} cannot be created ({error.strerror})")
            continue
        whys = (_why_writable_by_others(folder), *(_why_replaceable_by_others(above) for above in folder.parents))
        if not (why := next(filter(None, whys), "")):
            return folder, "; ".join(reasons)
        reasons.append(why)
    raise NotCompiled("; ".join(reasons))


def _why_writable_by_others(path: Path) -> str:
    """Why other users can change a file or the content of a folder; "" if they cannot."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} is writable by other users (to fix it: chmod go-w)"
    return ""


def _why_replaceable_by_others(folder: Path) -> str:
    """Why other users can replace a folder inside of `folder`; "" if they cannot.

    In a sticky folder such as /tmp, only the owner of an entry can replace it.
    """
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        return f"{folder} is writable by other users (to fix it: chmod go-w)"
    return ""


def _is_intact(path: Path) -> bool:
    """Whether a library is as the compiler left it: loading a truncated one would kill the process."""
    try:
        return _checksum_path(path).read_text() == _checksum_line(path.read_bytes())
    except (OSError, UnicodeDecodeError):
        return False


def _checksum_line(library: bytes) -> str:
    return f"{len(library)} {hashlib.sha256(library).hexdigest()}\n"


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _compile(source: Path, path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotCompiled("no C compiler (cc) found")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder, path.name)
        command = [compiler, *FLAGS, "-o", str(part), str(source), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise NotCompiled(f"{compiler} took longer than {COMPILE_TIMEOUT_S} s") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise NotCompiled(f"{compiler}: {lines[0]}")
        checksum = Path(folder, _checksum_path(path).name)
        checksum.write_text(_checksum_line(part.read_bytes()))
        # Synced before they get their names, so that a crash cannot leave a name without content.
        for made, name in ((part, path), (checksum, _checksum_path(path))):
            made.chmod(0o600)  # regardless of the umask
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.rename(name)
        sync_folder(path.parent)
    logger.info("Compiled %s for this CPU: %s", source.name, path)


def _cpu() -> str:
    """The properties of this CPU that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    relevant = (line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return "\n".join([platform.machine(), *sorted(set(relevant))])
