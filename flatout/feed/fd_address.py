"""How another process of this machine gets at an open file of ours that may have no name.

It opens /proc/<pid>/fd/<n>, as long as the process that holds the file lives. An address can outlive its process, so
it says which process is meant: number, start time and boot.
"""

import os
import stat
from pathlib import Path
from typing import NamedTuple


class FdAddress(NamedTuple):
    """An open file of a certain process. Plain values: it can be pickled, or written down as JSON."""

    boot: str
    pid: int
    start: int
    """When the process started, in clock ticks since the boot."""
    fd: int

    @classmethod
    def of(cls, fd: int) -> "FdAddress":
        """The address of a descriptor of this process."""
        pid = os.getpid()
        return cls(_boot(), pid, _start_of(pid), fd)

    def open(self, flags: int = os.O_RDONLY) -> int:
        """Another descriptor of the same file; OSError if that process or its file is gone, or not ours to see."""
        if self.boot != _boot() or self.start != _start_of(self.pid):
            raise ProcessLookupError(f"process {self.pid} is gone")
        path = f"/proc/{self.pid}/fd/{self.fd}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a terminal or a pipe would not be harmless
            raise FileNotFoundError(f"process {self.pid} has closed the file")
        return os.open(path, flags | os.O_CLOEXEC)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_of(pid: int) -> int:
    # The name before it may contain anything, brackets and blanks included.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
