"""Read every file of a folder, in a process whose audit hook allows nothing but opening that file.

python -m tests.yolo.weights.hostile_child FOLDER REAL_FILE < names     one JSON line per name, then one of totals
"""

import faulthandler
import json
import os
import pickle
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flatout.errors import CheckpointError
from flatout.yolo.weights import Weights, read_weights
from tests.yolo.weights.hostile_gadgets import gadget_for_python

HANGS_AFTER_S = 60
"""Wall clock, generous: other programs may be running. The test limits the CPU time of each file."""
MAX_MORE_ADDRESS_SPACE = 1 << 30

HARMLESS = {"object.__getattr__"}


class Watch:
    """An audit hook: while it is active, every event except harmless ones is recorded and made to fail."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.noted: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.path is None or event in HARMLESS or (event == "open" and self._is_reading(arguments)):
            return
        self.noted.append(f"{event} {arguments!r:.200}")
        raise RuntimeError(f"the audit hook stops {event}")

    def _is_reading(self, arguments: tuple[Any, ...]) -> bool:
        path, _, flags = arguments
        # Opening the descriptor of an open file is allowed.
        return (isinstance(path, int) or Path(path) == self.path) and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)


def control(watch: Watch) -> list[str]:
    """Attempts that the hook missed: Python's own unpickler on a gadget, code evaluated or imported, files opened."""
    attempts = {
        "pickle": lambda: pickle.loads(gadget_for_python()),
        "eval": lambda: eval("1 + 1"),
        "import": lambda: __import__("antigravity"),
        "system": lambda: os.system("touch ran"),
        "write": lambda: Path("ran").write_text(""),
        "other file": lambda: Path("/etc/passwd").read_text(),
    }
    missed = []
    for name, attempt in attempts.items():
        watch.path, watch.noted = Path("control"), []
        try:
            attempt()
        except RuntimeError:
            pass
        finally:
            watch.path = None
        if not watch.noted:
            missed.append(name)
    return missed


def outcome(path: Path, watch: Watch) -> dict[str, Any]:
    """Result of reading one file."""
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    watch.noted = []
    start = time.process_time()
    try:
        watch.path = path
        weights = read_weights(path)
        result = "read" if isinstance(weights, Weights) else f"returned {type(weights)}"
    except CheckpointError as error:
        result = f"refused: {error}"
    except BaseException as error:  # Whatever a hostile file causes is a result to report.
        watch.path = None
        result = f"failed: {type(error).__name__}: {error}"
    finally:
        watch.path = None
    seconds = time.process_time() - start
    faulthandler.cancel_dump_traceback_later()
    return {"file": path.name, "result": result, "seconds": seconds, "noted": watch.noted}


def peak_bytes() -> int:
    """Peak resident memory of this process; getrusage would include that of the parent when it forked."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def main(folder: Path, real: Path, names: Iterable[str]) -> None:
    # Everything that is imported on first use is imported now; any later import is an attack.
    read_weights(real)
    watch = Watch()
    sys.addaudithook(watch)
    missed = control(watch)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MAX_MORE_ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.chdir(folder)
    for name in names:
        print(json.dumps(outcome(folder / name, watch)), flush=True)
    print(json.dumps({"peak_bytes": peak_bytes(), "missed": missed, "ran": Path("ran").exists()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.stdin.read().split("\n"))
