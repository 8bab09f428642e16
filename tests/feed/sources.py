"""Small sources that misbehave on demand.

A *fault* is a function without arguments that a worker calls when it reads the sample it belongs to.
Worker processes import this too, so everything here is at module level and can be pickled.
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

Fault = Callable[[], object]


class Images(SampleSource):
    """Noise images with 0 to 3 boxes; sample i calls faults[i] first."""

    fields = {"image": Field((3, 4, 4)), "boxes": Rows(5)}

    def __init__(self, count: int, faults: Mapping[int, Fault] | None = None, *, sleep_s: float = 0) -> None:
        self.count = count
        self.faults = dict(faults or {})
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return self.count

    def where(self, index: int) -> str:
        return f"images/{index:04}.png"

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        if index in self.faults:
            self.faults[index]()
        time.sleep(self.sleep_s)
        image = rng.integers(0, 256, (3, 4, 4), np.uint8) ^ np.uint8(index % 256)
        return {"image": image, "boxes": rng.random((index % 4, 5))}


class SilentImages(Images):
    """The same samples from a source that does not report which one it is reading."""

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        super().read(indices, draws, Out(out))


class Mosaics:
    """Samples of four items, their own and three others; item i calls faults[i] first.

    A minimal `ItemSource`.
    """

    fields = {"items": Field((4,), np.int64), "bytes": Field((4,))}

    def __init__(self, count: int, faults: Mapping[int, Fault] | None = None) -> None:
        self.num_items = count
        self.faults = dict(faults or {})

    def __len__(self) -> int:
        return self.num_items

    def where(self, index: int) -> str:
        return f"mosaic {index}"

    def where_item(self, item: int) -> str:
        return f"images/{item:04}.png"

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        others = (keyed_uniform(seed, epoch, positions, 3) * self.num_items).astype(np.int64)
        return {"items": np.concatenate((np.asarray(indices)[:, None], others), 1)}

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        items, is_bad = draws["items"].copy(), unreadable.among(draws["items"])
        items[is_bad] = unreadable.substitutes(np.nonzero(is_bad)[0], items[is_bad], unreadable.is_bad_N)
        return Substituted(items[:, 0], {"items": items}, is_bad.sum(1))

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out["items"][:] = draws["items"]
        for row, items in enumerate(draws["items"].tolist()):
            for place, item in enumerate(items):
                value = out.fetch(item, partial(self._value, item))
                out["bytes"][row, place] = 0 if value is None else value

    def _value(self, item: int) -> int:
        if item in self.faults:
            self.faults[item]()
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
    """Ordinary samples of 3 rows, except those in `crowds`; every read appends a line to `log`."""

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
    """Reports whether the process that reads has imported torch."""

    fields = {"torch": Field((), np.bool_), "pid": Field((), np.int64)}

    def __len__(self) -> int:
        return 8

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        return {"torch": np.array("torch" in sys.modules), "pid": np.array(os.getpid())}


class FailsToOpen(Images):
    """Can be pickled, but not unpickled."""

    def __init__(self, count: int, text: str) -> None:
        super().__init__(count)
        self.text = text

    def __setstate__(self, state: dict[str, object]) -> None:
        raise RuntimeError(str(state["text"]))


class DiesAtStart(Images):
    """The first worker that calls len() dies, before it has claimed a task."""

    def __init__(self, count: int, marker: Path) -> None:
        super().__init__(count)
        self.marker = marker
        self.owner = os.getpid()

    def __len__(self) -> int:
        if os.getpid() != self.owner and first_time(self.marker):
            die()
        return self.count


class SlowToOpen(Images):
    """Takes 30 s to unpickle in the forkserver, after writing its process id to `log`."""

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
    """Append a line atomically, so that lines of several processes do not mix."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def first_time(marker: Path) -> bool:
    """Whether this is the first call with `marker` in any process."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# Faults


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def logged(log: Path, fault: Fault) -> None:
    """A fault that writes its process id to `log` first."""
    leave_a_line(log, str(os.getpid()))
    fault()


def only_once(marker: Path, fault: Fault) -> None:
    if first_time(marker):
        fault()


def stop_once(log: Path) -> None:
    """Stop this process once, as by `kill -STOP`; its id is written to `log`."""
    if not log.exists():
        logged(log, partial(os.kill, os.getpid(), signal.SIGSTOP))


def stop_with_lock_once(log: Path) -> None:
    """Stop this process once while it holds the ring's lock."""
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
    """A transient disk error."""
    if len(lines_of(log)) < times:
        leave_a_line(log, "failed")
        raise OSError(errno.EIO, "Input/output error")


def take_memory(marker: Path, nbytes: int) -> None:
    """Once, allocate more memory than there is, as the process that the kernel kills first."""
    if first_time(marker):
        Path("/proc/self/oom_score_adj").write_text("1000")
        np.ones(nbytes, np.uint8)
