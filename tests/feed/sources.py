"""Small sources that misbehave on demand.

A *trouble* is a function without arguments that a worker calls when it reads the sample it belongs to.
All of this is imported by worker processes too, so it lives in a module and can be pickled.
"""

import errno
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from flatout.feed import Field, Out, Rows, SampleSource, Substituted, Unreadable
from flatout.feed.plan import keyed_uniform

Trouble = Callable[[], object]


class Pictures(SampleSource):
    """Noise pictures with 0 to 3 boxes; sample i runs trouble[i] first."""

    fields = {"image": Field((3, 4, 4)), "boxes": Rows(5)}

    def __init__(self, count: int, trouble: Mapping[int, Trouble] | None = None, *, sleep_s: float = 0) -> None:
        self.count = count
        self.trouble = dict(trouble or {})
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return self.count

    def where(self, index: int) -> str:
        return f"pictures/{index:04}.png"

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        if index in self.trouble:
            self.trouble[index]()
        time.sleep(self.sleep_s)
        image = rng.integers(0, 256, (3, 4, 4), np.uint8) ^ np.uint8(index % 256)
        return {"image": image, "boxes": rng.random((index % 4, 5))}


class SilentPictures(Pictures):
    """The same samples from a source that never says which one it is reading."""

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        super().read(indices, draws, Out(out))


class Mosaics:
    """Samples of four items, their own and three others; item i runs trouble[i] first.

    An `ItemSource` as small as one can be.
    """

    fields = {"items": Field((4,), np.int64), "bytes": Field((4,))}

    def __init__(self, count: int, trouble: Mapping[int, Trouble] | None = None) -> None:
        self.num_items = count
        self.trouble = dict(trouble or {})

    def __len__(self) -> int:
        return self.num_items

    def where(self, index: int) -> str:
        return f"mosaic {index}"

    def where_item(self, item: int) -> str:
        return f"pictures/{item:04}.png"

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        others = (keyed_uniform(seed, epoch, positions, 3) * self.num_items).astype(np.int64)
        return {"items": np.concatenate((np.asarray(indices)[:, None], others), 1)}

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        items, is_bad = draws["items"].copy(), unreadable.among(draws["items"])
        items[is_bad] = unreadable.stand_ins(np.nonzero(is_bad)[0], items[is_bad], unreadable.is_bad_N)
        return Substituted(items[:, 0], {"items": items}, is_bad.sum(1))

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out["items"][:] = draws["items"]
        for row, items in enumerate(draws["items"].tolist()):
            for place, item in enumerate(items):
                value = out.fetch(item, partial(self._value, item))
                out["bytes"][row, place] = 0 if value is None else value

    def _value(self, item: int) -> int:
        if item in self.trouble:
            self.trouble[item]()
        return item % 256


class Files(SampleSource):
    """Four bytes of each file."""

    fields = {"bytes": Field((4,))}

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = [str(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, index: int) -> str:
        return self.paths[index]

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        with open(self.paths[index], "rb") as file:
            return {"bytes": np.frombuffer(file.read(4), np.uint8)}


class Crowds(SampleSource):
    """Ordinary samples of 3 rows, except those in `crowds`; every reading leaves a line in `log`."""

    fields = {"rows": Rows(5, expected=3)}

    def __init__(self, count: int, crowds: Mapping[int, int], log: Path) -> None:
        self.count = count
        self.crowds = dict(crowds)
        self.log = log

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        leave_a_line(self.log, str(index))
        return {"rows": self.rows_of(index)}

    def rows_of(self, index: int) -> np.ndarray:
        rows = np.arange(self.crowds.get(index, 3), dtype=np.float32)
        return np.stack([rows, *[np.full_like(rows, index)] * 4], axis=1)


class ImportedModules(SampleSource):
    """Tells whether the process that reads has imported torch."""

    fields = {"torch": Field((), np.bool_), "pid": Field((), np.int64)}

    def __len__(self) -> int:
        return 8

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        return {"torch": np.array("torch" in sys.modules), "pid": np.array(os.getpid())}


class FailsToOpen(Pictures):
    """Can be pickled, but not opened where it arrives."""

    def __init__(self, count: int, text: str) -> None:
        super().__init__(count)
        self.text = text

    def __setstate__(self, state: dict[str, object]) -> None:
        raise RuntimeError(str(state["text"]))


class Stillborn(Pictures):
    """The first worker that asks for the length dies of it, before it has claimed anything."""

    def __init__(self, count: int, marker: Path) -> None:
        super().__init__(count)
        self.marker = marker
        self.owner = os.getpid()

    def __len__(self) -> int:
        if os.getpid() != self.owner and first_time(self.marker):
            die()
        return self.count


class SlowToOpen(Pictures):
    """Takes 30 s to arrive in the process that workers come from, after leaving its process id in `log`."""

    def __init__(self, count: int, log: Path, *, only_once: bool = False) -> None:
        super().__init__(count)
        self.log = log
        self.only_once = only_once

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        if not self.only_once or not self.log.exists():
            leave_a_line(self.log, str(os.getpid()))
            time.sleep(30)


def leave_a_line(log: Path, text: str) -> None:
    """Append a line; what several processes append at once does not mix."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def first_time(marker: Path) -> bool:
    """Whether nobody has asked about `marker` before, in any process."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# Troubles.


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def logged(log: Path, trouble: Trouble) -> None:
    """A trouble that leaves its process id in `log` first."""
    leave_a_line(log, str(os.getpid()))
    trouble()


def only_once(marker: Path, trouble: Trouble) -> None:
    if first_time(marker):
        trouble()


def stop_once(log: Path) -> None:
    """Be stopped, as by `kill -STOP`; the process id is in `log`."""
    if not log.exists():
        logged(log, partial(os.kill, os.getpid(), signal.SIGSTOP))


def stop_with_lock_once(log: Path) -> None:
    """Be stopped with the ring's lock in hand."""
    if not log.exists():
        memory = next(entry for entry in os.scandir("/proc/self/fd") if "flatout-feed" in os.readlink(entry.path))
        fcntl.lockf(int(memory.name), fcntl.LOCK_EX)
        stop_once(log)


def wait_for(marker: Path) -> None:
    while not marker.exists():
        time.sleep(0.005)


def fail(error: type[BaseException], *args: object) -> None:
    raise error(*args)


def fail_the_first(times: int, log: Path) -> None:
    """A disk that fails for a moment."""
    if len(lines_of(log)) < times:
        leave_a_line(log, "failed")
        raise OSError(errno.EIO, "Input/output error")


def take_memory(marker: Path, nbytes: int) -> None:
    """Once, take more memory than there is, as the one that the kernel kills first."""
    if first_time(marker):
        Path("/proc/self/oom_score_adj").write_text("1000")
        np.ones(nbytes, np.uint8)
