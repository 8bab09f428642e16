"""What a run folder says about its run, at any moment: while files are being written, and after a crash.

Pure reading: half a line at the end of a file is left for the next look, a file that is missing or damaged is reported
as missing, and nothing here raises for what it finds (fault F35).
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, float]
READY_ENOUGH = 0.9
"""Below this share of steps' time with a batch at hand, the input is worth a word."""
LARGEST = 1e300
"""Numbers beyond this are none: sums of them, and integers of thousands of digits, would not be."""
TAIL_BYTES = 4 << 20
"""Of a log: enough for tens of thousands of epochs."""


def run_state(folder: Path, *, price_per_hour: float | None = None, now_s: float | None = None) -> dict[str, Any]:
    """Everything the page shows about the run, in values that JSON knows."""
    now_s = time.time() if now_s is None else now_s
    record = read_json(folder / "run.json")
    holder = read_json(folder / ".lock")
    rows = read_rows(folder / "log.jsonl") or read_csv(folder / "results.csv")
    changed_s = last_change_s(folder)
    config = record.get("config", {}) if isinstance(record.get("config"), dict) else {}
    state = state_of(record, holder)
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    started_s = _started_s(folder)
    return {
        "name": folder.name,
        "state": state,
        "told": told_about(state, holder, changed_s, now_s),
        "epoch": int(rows[-1]["epoch"]) + 1 if rows and "epoch" in rows[-1] else 0,
        "epochs": config.get("epochs"),
        "rows": rows,
        "series": series_of(rows),
        "readiness": readiness_of(rows),
        "left_s": seconds_left(rows, config.get("epochs"), seconds) if state == "running" else None,
        "cost": cost_of(seconds, started_s, changed_s, price_per_hour),
        "warnings": [*warnings_of(folder, rows), *input_warnings(rows)],
        "config": {key: value for key, value in config.items() if value not in (None, "", False)},
    }


def state_of(record: Mapping[str, Any], holder: Mapping[str, Any]) -> str:
    """running | finished | stopped; a lock of another host is believed."""
    if record.get("finished"):
        return "finished"
    if not holder:
        return "stopped"
    if holder.get("host") != socket.gethostname():
        return "running"
    return "running" if _is_alive(holder.get("pid")) else "stopped"


def told_about(state: str, holder: Mapping[str, Any], changed_s: float | None, now_s: float) -> str:
    """One sentence for a tired person."""
    ago = f"last sign of life {_duration(now_s - changed_s)} ago" if changed_s else "nothing was written yet"
    if state == "running":
        return f"running as process {holder.get('pid')} on {holder.get('host')}; {ago}"
    if state == "finished":
        return "finished"
    how = f"process {holder.get('pid')} is gone" if holder else "no process holds it"
    return f"stopped before its end: {how}; {ago}. The same command continues it."


def read_json(path: Path) -> dict[str, Any]:
    """An object, empty if there is none that can be read."""
    try:
        content = json.loads(path.read_text() or "{}", parse_constant=_no_number)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_rows(path: Path) -> list[Row]:
    """Objects of a JSON-lines file, numbers only; lines that are half written or no object are left out."""
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
    """Rows of a table with names in its first line."""
    header, *lines = whole_lines(path) or [""]
    names = header.split(",")
    rows = []
    for line in lines:
        cells = line.split(",")
        if len(cells) == len(names):
            rows.append({name: float(cell) for name, cell in zip(names, cells, strict=True) if _is_text_number(cell)})
    return [row for row in rows if row]


def whole_lines(path: Path) -> list[str]:
    """Lines that end; of a very long file the last ones."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            content = file.read()
    except OSError:
        return []
    lines = content.decode(errors="replace").split("\n")[:-1]
    return lines[1:] if size > TAIL_BYTES else lines


def series_of(rows: Sequence[Row]) -> dict[str, list[list[float]]]:
    """Name -> points [epoch, value], in order of first appearance; what never changes its place is left out."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: [[row.get("epoch", number), row[name]] for number, row in enumerate(rows) if name in row]
        for name in names
        if name != "epoch"
    }


def seconds_left(rows: Sequence[Row], epochs: Any, seconds: Sequence[float]) -> float | None:
    """From the last epochs' length; None if nothing is known yet."""
    if not rows or not seconds or not isinstance(epochs, int) or "epoch" not in rows[-1]:
        return None
    latest = sorted(seconds[-5:])
    return max(0.0, epochs - rows[-1]["epoch"] - 1) * latest[len(latest) // 2]


def cost_of(
    seconds: Sequence[float], started_s: float | None, changed_s: float | None, price_per_hour: float | None
) -> float | None:
    """Price of the time from the first to the last file, or of the epochs where that is longer."""
    if price_per_hour is None:
        return None
    wall_s = changed_s - started_s if started_s and changed_s else 0.0
    return price_per_hour * max(wall_s, sum(seconds)) / 3600


def readiness_of(rows: Sequence[Row]) -> dict[str, Any] | None:
    """How much of the last epoch's time a batch was ready when the step wanted one; None if nobody measured it."""
    row = rows[-1] if rows else {}
    if not row.get("step_ms") or "wait_ms" not in row:
        return None
    share = min(1.0, max(0.0, 1 - row["wait_ms"] / row["step_ms"]))
    waits = f"a step waits {row['wait_ms']:.1f} of {row['step_ms']:.1f} ms"
    said = f"batches were ready {100 * share:.0f} % of the time: {waits}"
    return {"share": share, "said": said}


def input_warnings(rows: Sequence[Row]) -> list[str]:
    """From the second epoch on (in the first, files come from the disk): a step that waits too long for data."""
    found = readiness_of(rows)
    if found is None or len(rows) < 2 or found["share"] >= READY_ENOUGH:
        return []
    return [f"input is the bottleneck: {found['said']}. `flatout profile` says why and what would help."]


def warnings_of(folder: Path, rows: Sequence[Row]) -> list[str]:
    """The last warnings: lines of run.log if there is one, gaps, steps whose loss was not finite."""
    found = [line for line in whole_lines(folder / "run.log") if "WARNING" in line or "ERROR" in line][-8:]
    bad = [row for row in rows if row.get("bad_steps")]
    found += [f"epoch {row.get('epoch', 0):.0f}: loss not finite in {row['bad_steps']:.0f} steps" for row in bad[-3:]]
    found += [f"{row['missing']:.0f} rows are missing: the disk was full" for row in rows if "missing" in row][-1:]
    return found


def last_change_s(folder: Path) -> float | None:
    """When anything in the folder was written last."""
    times = [_mtime_s(path) for path in _files(folder)]
    return max((time_s for time_s in times if time_s), default=None)


def _started_s(folder: Path) -> float | None:
    times = [_mtime_s(path) for path in _files(folder)]
    return min((time_s for time_s in times if time_s), default=None)


def _files(folder: Path) -> list[Path]:
    try:
        return [*folder.iterdir(), *folder.glob("*/*")]
    except OSError:
        return []


def _mtime_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0:  # 0 and below are groups of processes, this one among them
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < LARGEST  # false for NaN, too


def _is_text_number(text: str) -> bool:
    try:
        return _is_number(float(text))
    except ValueError:
        return False


def _no_number(name: str) -> None:
    """NaN and infinities, which JSON does not know: a page that is sent one shows nothing at all."""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
