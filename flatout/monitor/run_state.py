"""The state of a run, read from its folder at any time: while files are being written, and after a crash.

Read-only and tolerant: an incomplete last line is ignored until it is complete, a damaged file is treated as missing,
and the content of files never causes an exception (fault F35).
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from flatout.monitor.charts import Row

READY_ENOUGH = 0.9
"""Share of the step time with a batch ready, below which there is a warning about the input."""
LARGEST = 1e300
"""Larger numbers are ignored: sums of them would overflow, and integers may have thousands of digits."""
TAIL_BYTES = 4 << 20
"""Bytes read from the end of a log: enough for tens of thousands of epochs."""
RECORDS = ("run.json", "log.jsonl", "results.csv")
"""Files by which a run folder is recognized."""
MAX_RUNS = 40
"""Runs that the page offers; of more, the newest."""
PROFILE = "profile.html"
IMAGES = {
    "Predictions": ("test_batch*_pred.jpg", "visuals/val_*.png"),
    "Labels of the same images": ("test_batch*_labels.jpg",),
    "Training batches": ("train_batch*.jpg", "examples.png"),
    "Plots": ("confusion_matrix.png", "labels.jpg", "PR_curve.png"),
}
"""Images in a run folder, by what the page calls them; the newest of a kind first."""
IMAGES_OF_A_KIND = 4


def run_state(folder: Path, *, price_per_hour: float | None = None, now_s: float | None = None) -> dict[str, Any]:
    """Everything that the page shows about the run, in values that JSON can hold."""
    now_s = time.time() if now_s is None else now_s
    record = read_json(folder / "run.json")
    holder = read_json(folder / ".lock")
    rows = read_rows(folder / "log.jsonl") or read_csv(folder / "results.csv")
    times_s = _times_s(folder)
    started_s, changed_s = min(times_s, default=None), max(times_s, default=None)
    config = record.get("config", {}) if isinstance(record.get("config"), dict) else {}
    state = state_of(record, holder)
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    return {
        "name": folder.name,
        "state": state,
        "summary": summary_of(state, holder, changed_s, now_s),
        "epoch": int(rows[-1]["epoch"]) + 1 if rows and "epoch" in rows[-1] else 0,
        "epochs": config.get("epochs"),
        "rows": rows,
        "latest": rows[-1] if rows else {},
        "readiness": readiness_of(rows),
        "left_s": seconds_left(rows, config.get("epochs"), seconds) if state == "running" else None,
        "cost": cost_of(seconds, started_s, changed_s, price_per_hour),
        "warnings": [*warnings_of(folder, rows), *input_warnings(rows)],
        "images": images_of(folder),
        "profile": (folder / PROFILE).is_file(),
    }


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run folders at or below the paths, the newest first; empty as long as none has started."""
    found = [path for path in paths if is_run(path)]
    for path in paths:
        if path not in found:
            found += [record.parent for record in path.glob("**/run.json") if record.is_file()]
    return sorted(dict.fromkeys(found), key=lambda run: max(_times_s(run), default=0.0), reverse=True)[:MAX_RUNS]


def without_run(paths: Sequence[Path], runs: Sequence[Path]) -> list[Path]:
    """Paths at or below which none of the runs is."""
    return [path for path in paths if not any(run == path or path in run.parents for run in runs)]


def is_run(folder: Path) -> bool:
    # os.path: Path.is_file() raises an error in a folder that may not be entered.
    return any(os.path.isfile(folder / name) for name in RECORDS)


def images_of(folder: Path) -> dict[str, list[str]]:
    """Names of the images to show, relative to the folder, by kind."""
    found = {
        kind: sorted(
            (path for pattern in patterns for path in folder.glob(pattern) if _is_inside(path, folder)),
            key=lambda path: (-(_mtime_s(path) or 0.0), path.name),
        )
        for kind, patterns in IMAGES.items()
    }
    return {
        kind: [path.relative_to(folder).as_posix() for path in paths[:IMAGES_OF_A_KIND]]
        for kind, paths in found.items()
        if paths
    }


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether this is a file below the folder, also after links were followed."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def state_of(record: Mapping[str, Any], holder: Mapping[str, Any]) -> str:
    """running | finished | stopped; a lock of another host counts as running."""
    if record.get("finished"):
        return "finished"
    if not holder:
        return "stopped"
    is_elsewhere = holder.get("host") != socket.gethostname()
    return "running" if is_elsewhere or _is_alive(holder.get("pid")) else "stopped"


def summary_of(state: str, holder: Mapping[str, Any], changed_s: float | None, now_s: float) -> str:
    """The state in one sentence."""
    ago = f"last file written {_duration(now_s - changed_s)} ago" if changed_s else "nothing was written yet"
    if state == "running":
        return f"running as process {holder.get('pid')} on {holder.get('host')}; {ago}"
    if state == "finished":
        return "finished"
    how = f"process {holder.get('pid')} no longer exists" if holder else "no process is training it"
    return f"unfinished: {how}; {ago}. Run the same command again to continue."


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it is missing or cannot be read."""
    try:
        content = json.loads(path.read_text() or "{}", parse_constant=_null)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_rows(path: Path) -> list[Row]:
    """The objects of a JSON-lines file, numbers only; incomplete lines and other values are left out."""
    rows = []
    for line in whole_lines(path):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            rows.append({str(key): float(value) for key, value in content.items() if _is_number(value)})
    return [row for row in rows if row]


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV table with names in its first line, numbers only."""
    header, *lines = whole_lines(path) or [""]
    names = header.split(",")
    rows = []
    for line in lines:
        cells = line.split(",")
        if len(cells) == len(names):
            rows.append({name: float(cell) for name, cell in zip(names, cells, strict=True) if _is_text_number(cell)})
    return [row for row in rows if row]


def whole_lines(path: Path) -> list[str]:
    """The complete lines of a file; of a very long file only the last ones."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            content = file.read()
    except OSError:
        return []
    lines = content.decode(errors="replace").split("\n")[:-1]
    return lines[1:] if size > TAIL_BYTES else lines


def seconds_left(rows: Sequence[Row], epochs: Any, seconds: Sequence[float]) -> float | None:
    """Remaining time, from the median of the last five epochs; None if it is not known yet."""
    if not rows or not seconds or not isinstance(epochs, int) or "epoch" not in rows[-1]:
        return None
    latest = sorted(seconds[-5:])
    return max(0.0, epochs - rows[-1]["epoch"] - 1) * latest[len(latest) // 2]


def cost_of(
    seconds: Sequence[float], started_s: float | None, changed_s: float | None, price_per_hour: float | None
) -> float | None:
    """Cost of the time between the first and the last written file, or of all epochs if that is longer."""
    if price_per_hour is None:
        return None
    wall_s = changed_s - started_s if started_s and changed_s else 0.0
    return price_per_hour * max(wall_s, sum(seconds)) / 3600


def readiness_of(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Share of the last epoch's time in which steps did not wait for a batch; None if it was not measured."""
    row = rows[-1] if rows else {}
    if not row.get("step_ms") or "wait_ms" not in row:
        return None
    share = min(1.0, max(0.0, 1 - row["wait_ms"] / row["step_ms"]))
    waits = f"a step waits {row['wait_ms']:.1f} of {row['step_ms']:.1f} ms"
    text = f"batches were ready {100 * share:.0f} % of the time: {waits}"
    return {"share": share, "text": text}


def input_warnings(rows: Sequence[Row]) -> list[str]:
    """A warning if steps wait too long for data; from the second epoch on, as the first reads files from the disk."""
    found = readiness_of(rows)
    if found is None or len(rows) < 2 or found["share"] >= READY_ENOUGH:
        return []
    return [f"input is the bottleneck: {found['text']}. `flatout profile` shows why and what would help."]


def warnings_of(folder: Path, rows: Sequence[Row]) -> list[str]:
    """The last warnings: lines of run.log, steps whose loss was not finite, missing rows."""
    found = [line for line in whole_lines(folder / "run.log") if "WARNING" in line or "ERROR" in line][-8:]
    bad = [row for row in rows if row.get("bad_steps")]
    found += [f"epoch {row.get('epoch', 0):.0f}: loss not finite in {row['bad_steps']:.0f} steps" for row in bad[-3:]]
    found += [f"{row['missing']:.0f} rows are missing: the disk was full" for row in rows if "missing" in row][-1:]
    return found


def _times_s(folder: Path) -> list[float]:
    """When each file of the folder was changed last."""
    try:
        return [time_s for path in (*folder.iterdir(), *folder.glob("*/*")) if (time_s := _mtime_s(path))]
    except OSError:
        return []


def _mtime_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _is_alive(pid: Any) -> bool:
    try:
        return isinstance(pid, int) and psutil.pid_exists(pid)
    except OverflowError:
        return False


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < LARGEST  # also False for NaN


def _is_text_number(text: str) -> bool:
    try:
        return _is_number(float(text))
    except ValueError:
        return False


def _null(name: str) -> None:
    """None for NaN and infinities, which are not valid JSON: a browser would show nothing at all."""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
